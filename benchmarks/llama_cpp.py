"""``freight bench offload`` beside llama.cpp's ``llama-batched-bench``, in turn, on equal rows.

    python benchmarks/llama_cpp.py --shape 128:16 --rows 64 --types bf16,f16,f32 [--turns 3]

The program is looked for on the PATH; with ``--llama-python`` that Python's llama-cpp-python does
what it would do (``batched_bench.py``). Both have random weights of one configuration, of a Llama
or of a Qwen3 with experts; llama.cpp has them in a GGUF file of each of the types (needs
``pip install gguf``), kept for the next time. The first turn tries all types: later turns run the
fastest alone. With ``--same-file`` Freight reads that of the first type, too. What follows ``--``
goes to ``freight bench offload``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freight.model.config import ModelConfig, read_config

HERE = Path(__file__).parent
PROGRAM = "llama-batched-bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=HERE / "llama-1.1b", help="with a config.json"
    )
    parser.add_argument("--shape", default="128:16", help="prompt and new tokens of every row")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--types", default="bf16,f16,f32", help="of llama.cpp's weights")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--same-file", action="store_true", help="one GGUF file for both")
    parser.add_argument("--work-dir", type=Path, default=Path("freight-bench"))
    parser.add_argument("own", nargs="*", help="flags of freight bench offload, after --")
    arguments = parser.parse_args()
    if arguments.llama_python is None and shutil.which(PROGRAM) is None:
        sys.exit(
            f"{PROGRAM} is not on the PATH. It is part of llama.cpp: build it, add its folder."
        )
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    config = read_config(arguments.model)
    files = {name: provide(config, name, arguments.work_dir) for name in arguments.types.split(",")}
    if arguments.same_file:
        arguments.model = next(iter(files.values()))
    peers: dict[str, list[dict[str, float]]] = {name: [] for name in files}
    own: list[dict[str, Any]] = []

    def mean_s(name: str) -> float:
        return statistics.fmean(run["s"] for run in peers[name])

    for turn in range(arguments.turns):
        own.append(run_own(arguments))
        for name in peers if turn == 0 else [min(peers, key=mean_s)]:
            peers[name].append(run_peer(files[name], arguments))
    report(own, peers)


def provide(config: ModelConfig, type_name: str, directory: Path) -> Path:
    """A GGUF file with random weights of the configuration."""
    import gguf

    own = config.experts
    kind_of_model = "llama" if own is None else "qwen3moe"
    inner = config.intermediate_size if own is None else own.intermediate_size
    size = f"{config.num_layers}-{config.hidden_size}-{inner}"
    path = directory / f"{kind_of_model}-{size}-{config.vocab_size}-{type_name}.gguf"
    if path.exists():
        return path
    written = path.with_suffix(".part")
    writer = gguf.GGUFWriter(written, kind_of_model, use_temp_file=True)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if own is not None:
        writer.add_expert_count(own.num_experts)
        writer.add_expert_used_count(own.per_token)
        writer.add_expert_feed_forward_length(own.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    draw = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            # What routes stays as it is, as llama.cpp leaves it.
            own_kind = gguf.GGMLQuantizationType.F32 if "gate_inp" in name else kind
            values = draw.standard_normal(shape, np.float32) * np.float32(0.02)
            writer.add_tensor(name, gguf.quantize(values, own_kind), raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written.rename(path)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of llama.cpp's plain Llama, or of its Qwen3 with experts: gains, and matrices as rows
    by columns."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, groups = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    layer = {
        "attn_norm": (width,),
        "attn_q": (heads, width),
        "attn_k": (groups, width),
        "attn_v": (groups, width),
        "attn_output": (width, heads),
        "ffn_norm": (width,),
    }
    if (own := config.experts) is None:
        layer |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    else:
        count, inner = own.num_experts, own.intermediate_size
        layer |= {
            "attn_q_norm": (config.head_dim,),
            "attn_k_norm": (config.head_dim,),
            "ffn_gate_inp": (count, width),
            "ffn_gate_exps": (count, inner, width),
            "ffn_up_exps": (count, inner, width),
            "ffn_down_exps": (count, width, inner),
        }
    ends = {
        "token_embd": (config.vocab_size, width),
        "output_norm": (width,),
        "output": (config.vocab_size, width),
    }
    layers = {
        f"blk.{index}.{name}.weight": shape
        for index in range(config.num_layers)
        for name, shape in layer.items()
    }
    return {**layers, **{f"{name}.weight": shape for name, shape in ends.items()}}


def run_peer(file: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One run of all rows at once: seconds for prompts, for new tokens, for both."""
    prompt, new = map(int, arguments.shape.split(":"))
    rows, threads = arguments.rows, str(arguments.threads)
    if arguments.llama_python is not None:
        script = str(HERE / "batched_bench.py")
        sizes = [str(own) for own in (rows, prompt, new)]
        return read_peer([arguments.llama_python, "-I", script, str(file), *sizes, threads], file)
    command = [
        PROGRAM,
        "-m",
        str(file),
        "-c",
        str(rows * (prompt + new)),
        "-b",
        "2048",
        "-ub",
        "512",
    ]
    command += ["-t", threads, "-tb", threads, "-npp", str(prompt), "-ntg", str(new)]
    command += ["-npl", str(rows), "--output-format", "jsonl"]
    return read_peer(command, file)


def read_peer(command: Sequence[str], file: Path) -> dict[str, float]:
    """What the command says on its last line of JSON."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} gave no figures:\n{done.stderr[-2000:]}")
    told = json.loads(lines[-1])
    result = {"prefill_s": told["t_pp"], "decode_s": told["t_tg"], "s": told["t"]}
    print(f"llama.cpp, {file.stem}: {written(result)}", flush=True)
    return result


def run_own(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of Freight: its own record of it."""
    command = [sys.executable, "-m", "freight", "bench", "offload", "--repeats", "1"]
    command += ["--model", str(arguments.model), "--shape", arguments.shape]
    command += ["--rows", str(arguments.rows), "--work-dir", str(arguments.work_dir)]
    done = subprocess.run([*command, *arguments.own], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}.")
    record = json.loads(done.stdout.splitlines()[-1])
    run = record["systems"]["freight"]["runs"][0]
    result = {"prefill_s": run["prefill_s"], "decode_s": run["decode_s"], "s": run["generate_s"]}
    result["share_of_ceiling"] = record["share_of_ceiling"]
    print(
        f"freight: {written(result)}, {record['share_of_ceiling']:.3f} of the ceiling", flush=True
    )
    return result


def written(run: dict[str, Any]) -> str:
    return (
        f"prompts {run['prefill_s']:.2f} s, decoding {run['decode_s']:.2f} s, all {run['s']:.2f} s"
    )


def report(own: Sequence[dict[str, Any]], peers: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and how many times as long llama.cpp took."""

    def median(runs: Sequence[dict[str, Any]], key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    medians = {
        name: {key: median(runs, key) for key in ("prefill_s", "decode_s", "s")}
        for name, runs in {"freight": own, **peers}.items()
    }
    best = min(peers, key=lambda name: medians[name]["s"])
    for name, times in medians.items():
        print(f"{name}: {written(times)} (median of {len(peers.get(name, own))})")
    times_peer = medians[best]["s"] / medians["freight"]["s"]
    print(f"llama.cpp ({best}) takes {times_peer:.3f} times as long")
    print(json.dumps({"medians": medians, "best": best, "times_peer": times_peer}))


if __name__ == "__main__":
    main()
