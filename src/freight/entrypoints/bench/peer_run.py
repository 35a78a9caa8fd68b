"""One run of a peer, in a process of its own: transformers in memory, or Accelerate's disk offload.

Loads the same weights as their users do, generates greedily for the same rows in batches, and makes
exactly as many new tokens. What Accelerate may keep in memory is what the budget leaves it beside
the process, the batch's keys and values, its logits and scratch, and a layer that comes and goes.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from freight.entrypoints.bench.work import Work, make_rows
from freight.memory.tier import process_bytes
from freight.model.config import DTYPE_BYTES, ModelConfig, read_config
from freight.model.decoder import build_programme

__all__ = ["resident_bytes", "run_peer"]

_LAYERS_AT_ONCE: Final = 2


class _Clock:
    """Never stops; notes when the first token of a batch was there."""

    def __init__(self) -> None:
        self.first_s: float | None = None

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any
    ) -> torch.Tensor:  # whether a row is to stop
        if self.first_s is None:
            self.first_s = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run_peer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run; ``system`` is "accelerate" or "transformers"."""
    work = Work(**job["work"])
    config = read_config(Path(job["model"]))
    started_s = time.perf_counter()
    device = torch.device("cuda", 0) if job["on_cuda"] else torch.device("cpu")
    if job["on_cuda"]:
        _cap(device, job["gpu_budget_bytes"])
    memory = None
    if job["system"] == "accelerate":
        memory = _memory_for_weights(job, config, work)
    model = _load(job, memory)
    load_s = time.perf_counter() - started_s
    rows = torch.tensor(make_rows(work, config.vocab_size), device=device)
    if job["system"] == "transformers" or job["on_cuda"]:
        _generate(model, rows[:1], min(2, work.new_tokens))
    prefill_s, new_tokens, first_tokens = 0.0, 0, []
    started_s = time.perf_counter()
    for begin in range(0, len(rows), job["batch_size"]):
        batch = rows[begin : begin + job["batch_size"]]
        out, first_s = _generate(model, batch, work.new_tokens)
        prefill_s += first_s
        new_tokens += out.numel()
        first_tokens += out[:, 0].tolist()
    generate_s = time.perf_counter() - started_s
    return {
        "batch_size": job["batch_size"],
        "resident_bytes": None if memory is None else memory[0 if job["on_cuda"] else "cpu"],
        "load_s": load_s,
        "generate_s": generate_s,
        "prefill_s": prefill_s,
        "decode_s": generate_s - prefill_s,
        "new_tokens": new_tokens,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_tokens": first_tokens,
    }


def resident_bytes(
    config: ModelConfig, work: Work, batch_size: int, dtype: str, room_bytes: int
) -> int:
    """Weights that fit beside a batch: never less than one byte, for 0 would mean no limit."""
    size, rows = DTYPE_BYTES[dtype], min(batch_size, work.num_rows)
    kv = rows * work.total_tokens * config.kv_bytes_per_token(size)
    logits = 2 * rows * config.vocab_size * 4
    widths = 4 * config.hidden_size + 3 * config.intermediate_size
    scratch = rows * work.prompt_tokens * widths * size
    largest: int = max(unit.num_elements for unit in build_programme(config).units) * size
    return max(1, room_bytes - kv - logits - scratch - _LAYERS_AT_ONCE * largest)


def _cap(device: torch.device, num_bytes: int) -> None:
    """Let the process take no more of the device than this, beside the device's own context."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def _memory_for_weights(
    job: Mapping[str, Any], config: ModelConfig, work: Work
) -> dict[int | str, int]:
    """Bytes of weights that may stay, by device: on the computing one beside a batch."""
    on_cpu = job["budget_bytes"] - process_bytes()
    room = job["gpu_budget_bytes"] if job["on_cuda"] else on_cpu
    resident = job["resident_bytes"] or resident_bytes(
        config, work, job["batch_size"], job["dtype"], room
    )
    return {0: resident, "cpu": max(1, on_cpu)} if job["on_cuda"] else {"cpu": resident}


def _load(job: Mapping[str, Any], memory: Mapping[int | str, int] | None) -> Any:
    """On Accelerate, whole layers stay up to the bytes of ``memory``; others are read at every use,
    from the checkpoint itself."""
    settings: dict[str, Any] = {"dtype": getattr(torch, job["dtype"])}
    if memory is not None:
        settings |= {
            "device_map": "auto",
            "max_memory": dict(memory),
            "offload_folder": job["offload_dir"],
        }
    elif job["on_cuda"]:
        settings["device_map"] = {"": 0}
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], **settings)
    model.eval()
    model.generation_config.eos_token_id = None  # every row makes all its tokens
    model.generation_config.pad_token_id = 0
    return model


def _generate(model: Any, batch: torch.Tensor, num_new: int) -> tuple[torch.Tensor, float]:
    """New tokens [rows, num_new], and the seconds until the first of them were there."""
    clock = _Clock()
    started_s = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    assert clock.first_s is not None
    new: torch.Tensor = out[:, batch.shape[1] :]
    assert new.shape[1] == num_new, f"{new.shape[1]} new tokens a row instead of {num_new}"
    return new, clock.first_s - started_s
