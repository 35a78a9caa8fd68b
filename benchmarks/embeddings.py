"""Embeddings of ragged texts: Freight beside transformers, in turn, each in a process of its own.

    python benchmarks/embeddings.py [--config benchmarks/llama-1.1b] [--rows 48] [--lengths 16-256]
        [--turns 2] [--batch-sizes 8,16] [--work-dir freight-bench] [--cpu-memory 1450MiB]
        [--device cpu]

Random bfloat16 weights of the configuration, written once without a head; rows of token ids whose
lengths are drawn with a seed. transformers has all in memory and pads rows of a batch, which it
gets sorted by length; it is given each batch size, and the best counts. Seconds are those of a
second call: weights that stay in memory are there. The last line is one JSON object; it has the
largest distance of an embedding from transformers', too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def rows_of(count: int, lengths: str, vocab: int) -> list[list[int]]:
    least, _, most = lengths.partition("-")
    draw = np.random.default_rng(0)
    sizes = draw.integers(int(least), int(most or least) + 1, count)
    return [draw.integers(3, vocab, size).tolist() for size in sizes]


def provide(config: Path, work_dir: Path) -> Path:
    """The model's directory, made where it is not there."""
    directory = work_dir / f"embeds-{config.resolve().name}"
    if (directory / "config.json").exists():
        return directory
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(directory / "tokenizer.json"))
    return directory


def by_freight(directory: Path, rows: list[list[int]], arguments: argparse.Namespace) -> Any:
    from freight import LLM

    own = {"cpu_memory": arguments.cpu_memory} if arguments.cpu_memory else {}
    with LLM(directory, dtype="bfloat16", device=arguments.device, **own) as llm:
        list(llm.embed(rows[:1]))
        first_s = time.perf_counter()
        found = np.stack([row.embedding for row in llm.embed(rows)])
        return time.perf_counter() - first_s, found


def by_transformers(directory: Path, rows: list[list[int]], arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModel

    device = "cuda" if arguments.device == "cuda" else "cpu"
    model = AutoModel.from_pretrained(directory, dtype=torch.bfloat16).eval().to(device)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    found = np.empty((len(rows), model.config.hidden_size), dtype=np.float32)
    with torch.inference_mode():
        model(torch.tensor([rows[0]], device=device), use_cache=False)
        first_s = time.perf_counter()
        for start in range(0, len(rows), arguments.batch_size):
            own = order[start : start + arguments.batch_size]
            longest = max(len(rows[index]) for index in own)
            ids = torch.zeros(len(own), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for place, index in enumerate(own):
                ids[place, : len(rows[index])] = torch.tensor(rows[index])
                mask[place, : len(rows[index])] = 1
            made = model(ids.to(device), attention_mask=mask.to(device), use_cache=False)
            last = mask.sum(1).to(device) - 1
            vectors = made.last_hidden_state[torch.arange(len(own), device=device), last].float()
            found[own] = torch.nn.functional.normalize(vectors, dim=1).cpu().numpy()
        return time.perf_counter() - first_s, found


def turn(system: str, arguments: argparse.Namespace, directory: Path, **own: Any) -> float:
    """One run by a process of its own; its embeddings are kept beside the model."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    told = ["--lengths", arguments.lengths, "--rows", str(arguments.rows), "--only", system]
    told += ["--device", arguments.device, "--work-dir", str(directory)]
    done = subprocess.run(
        [sys.executable, __file__, *told, *flags], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "llama-1.1b")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--lengths", default="16-256")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--batch-sizes", default="8,16")
    parser.add_argument("--batch-size", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--work-dir", type=Path, default=Path("freight-bench"))
    parser.add_argument("--cpu-memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        directory = arguments.work_dir
        vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
        rows = rows_of(arguments.rows, arguments.lengths, vocab)
        run = by_freight if arguments.only == "freight" else by_transformers
        seconds, found = run(directory, rows, arguments)
        np.save(directory / f"{arguments.only}.npy", found)
        print(seconds)
        return
    directory = provide(arguments.config, arguments.work_dir)
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    memory = {"cpu_memory": arguments.cpu_memory} if arguments.cpu_memory else {}
    found: dict[str, list[float]] = {}
    for _ in range(arguments.turns):
        found.setdefault("freight", []).append(turn("freight", arguments, directory, **memory))
        for size in sizes:
            own = turn("transformers", arguments, directory, batch_size=size)
            found.setdefault(f"transformers, batches of {size}", []).append(own)
    for name, seconds in found.items():
        print(f"{name:32} {', '.join(f'{own:.1f}' for own in seconds)} s")
    vectors = [np.load(directory / f"{name}.npy") for name in ("freight", "transformers")]
    distance = float(np.linalg.norm(vectors[0] - vectors[1], axis=1).max())
    print(json.dumps({"seconds": found, "distance": distance}))


if __name__ == "__main__":
    main()
