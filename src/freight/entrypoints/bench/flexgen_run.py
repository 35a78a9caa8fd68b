"""One run of FlexGen, in a process of its own, by a policy that is written as its own flags.

Its weights are its dummies, all ones, which take as long as others: it reads no checkpoint of ours.
Rows are answered a block at a time, as many as its policy holds, greedily and to their last token.
Which policies there are to try is known here too; FlexGen is imported where a run begins.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.bench.work import Work, make_rows
from freight.errors import InputError
from freight.model.config import read_config
from freight.model.switches import ModelConfig

__all__ = ["can_be_flexgens", "flexgen_policies", "run_flexgen"]

_DUMMY: Final = "_DUMMY_"
_PUBLISHED: Final[Mapping[int, Sequence[str]]] = {
    4096: ("--percent 100 0 100 0 100 0 --gpu-batch-size 2",),
    7168: ("--percent 20 80 0 100 0 100 --gpu-batch-size 48 --num-gpu-batches 3",),
    12288: ("--percent 0 50 0 0 0 100 --gpu-batch-size 32 --num-gpu-batches 8",),
}
"""By the model's width, for prompts of 512 tokens on a GPU of 16 GB, as the paper has them."""
_WARM_UP_TOKENS: Final = 32


def can_be_flexgens(config: ModelConfig) -> bool:
    """Whether the model is one that FlexGen computes: OPT with norms before the blocks."""
    return (
        config.learned_positions
        and config.position_offset == 2
        and (config.norm, config.norm_place, config.final_norm) == ("layer", "before", True)
        and (config.activation, config.gated_mlp) == ("relu", False)
        and config.experts is None
        and config.embedding_size == config.hidden_size
        and config.num_kv_heads == config.num_heads
        and config.tied_embeddings
    )


def flexgen_policies(given: Sequence[str], hidden_size: int) -> tuple[str, ...]:
    """Those that were given; else the one published for a model of this width, with and without
    attention on the CPU. InputError where there is none."""
    published = _PUBLISHED.get(hidden_size, ())
    if not given and not published:
        raise InputError(
            "--peer flexgen was given.",
            f"No policy was published for a model of width {hidden_size}, and it finds none.",
            "Name one with --flexgen '--percent 20 80 0 100 0 100 --gpu-batch-size 48'.",
        )
    more = [f"{flags} --cpu-cache-compute" for flags in published if "100 0 100 0" not in flags]
    return tuple(given) or (*published, *more)


def run_flexgen(job: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run by the policy of ``job``."""
    import torch

    work = Work(**job["work"])
    config = read_config(Path(job["model"]))
    flexgen = importlib.import_module("flexgen.flex_opt")
    flags = _read_flags(flexgen, job["policy"])
    block = flags.gpu_batch_size * flags.num_gpu_batches
    if work.num_rows % block:
        raise InputError(
            f"--flexgen '{job['policy']}' was given for {work.num_rows} rows.",
            f"Its block has {block} rows, and it computes whole blocks only.",
            f"Give a multiple of {block} with --rows, or another policy.",
        )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, job["gpu_budget_bytes"] / total), 0)
    started_s = time.perf_counter()
    environment = _environment(flexgen, job["offload_dir"])
    try:
        model = flexgen.OptLM(
            _model_config(flexgen, config), environment, _DUMMY, _policy(flexgen, flags)
        )
        load_s = time.perf_counter() - started_s
        rows = make_rows(work, config.vocab_size)
        warm_up = [row[:_WARM_UP_TOKENS] for row in rows[:block]]
        model.generate(warm_up, max_new_tokens=1)
        result = _generate(flexgen, model, rows, block, work.new_tokens)
    finally:
        environment.close_copy_threads()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told = {"policy": job["policy"], "load_s": load_s, "new_tokens": work.total_new_tokens}
    return {**told, **result, "peak_bytes": peak}


def _generate(
    flexgen: Any, model: Any, rows: Sequence[Sequence[int]], block: int, new_tokens: int
) -> dict[str, float]:
    """All rows, and the seconds of sweeps with prompts and of those without, as it counts them:
    without the memory that it takes for each block's keys and values."""
    prefill_s = generate_s = 0.0
    timer = flexgen.timers("generate")
    for begin in range(0, len(rows), block):
        timer.reset()
        out = model.generate(rows[begin : begin + block], max_new_tokens=new_tokens)
        assert out.shape == (block, len(rows[0]) + new_tokens)
        prefill_s += timer.costs[0]
        generate_s += sum(timer.costs)
    return {
        "generate_s": generate_s,
        "prefill_s": prefill_s,
        "decode_s": generate_s - prefill_s,
    }


def _read_flags(flexgen: Any, text: str) -> argparse.Namespace:
    """By FlexGen's own parser; what it cannot read is told as it tells it."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    flexgen.add_parser_arguments(parser)
    try:
        flags, unknown = parser.parse_known_args(shlex.split(text))
        reason = f"FlexGen does not know {' '.join(unknown)}." if unknown else ""
        if not unknown and len(flags.percent) != 6:
            reason = f"--percent takes six numbers, not {len(flags.percent)}."
    except (argparse.ArgumentError, ValueError) as error:
        reason = f"{error}."
    if reason:
        raise InputError(
            f"--flexgen '{text}' was given.",
            reason,
            "Give flags of flexgen.flex_opt that choose a policy.",
        )
    return flags


def _environment(flexgen: Any, offload_dir: str) -> Any:
    gpu, cpu = flexgen.TorchDevice("cuda:0"), flexgen.TorchDevice("cpu")
    disk = flexgen.TorchDisk(offload_dir)
    mixed = flexgen.TorchMixedDevice([gpu, cpu, disk])
    return flexgen.ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=mixed)


def _policy(flexgen: Any, flags: argparse.Namespace) -> Any:
    """As its command line makes one: 4 bits in groups of 64 where anything is compressed."""

    def groups(dim: int) -> Any:
        return flexgen.CompressionConfig(num_bits=4, group_size=64, group_dim=dim, symmetric=False)

    return flexgen.Policy(
        flags.gpu_batch_size,
        flags.num_gpu_batches,
        *flags.percent,
        flags.overlap,
        flags.sep_layer,
        flags.pin_weight,
        flags.cpu_cache_compute,
        flags.attn_sparsity,
        flags.compress_weight,
        groups(0),
        flags.compress_cache,
        groups(2),
    )


def _model_config(flexgen: Any, config: ModelConfig) -> Any:
    return flexgen.OptConfig(
        name="opt",
        num_hidden_layers=config.num_layers,
        max_seq_len=config.max_positions,
        hidden_size=config.hidden_size,
        n_head=config.num_heads,
        input_dim=config.hidden_size,
        ffn_embed_dim=config.intermediate_size,
        vocab_size=config.vocab_size,
    )
