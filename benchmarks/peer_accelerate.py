"""Accelerate's disk offload on the same weights and rows: the peer of ``offload.py``.

Loads a checkpoint as transformers and Accelerate do with ``device_map="auto"``: whole layers stay
in RAM up to ``--resident-mib``, the rest is read from the checkpoint at every use. Generates
greedily for all rows in batches of ``--batch-size``. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def load(model_dir: Path, resident_mib: int) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": resident_mib << 20},
        offload_folder=str(model_dir / "accelerate-offload"),
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON list of lists of token ids")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--resident-mib", type=int, required=True)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    rows = torch.tensor(json.loads(arguments.rows.read_text()))
    model = load(arguments.model, arguments.resident_mib)
    loaded_s = time.perf_counter()
    new_tokens = 0
    with torch.inference_mode():
        for batch in rows.split(arguments.batch_size):
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=arguments.new_tokens,
                min_new_tokens=arguments.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            new_tokens += out.numel() - batch.numel()
    ended_s = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "system": "accelerate",
                "batch_size": arguments.batch_size,
                "load_s": loaded_s - started_s,
                "generate_s": ended_s - loaded_s,
                "new_tokens": new_tokens,
                "peak_bytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
