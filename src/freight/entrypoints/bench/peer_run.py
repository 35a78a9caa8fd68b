"""One run of a peer, in a process of its own: transformers in memory, or Accelerate's disk offload.

Loads the same weights as their users do, generates greedily for the same rows in batches, and makes
exactly as many new tokens. What Accelerate may keep in memory is what the budget leaves it beside
the process, the batch's keys and values, its logits and scratch, and a layer that comes and goes.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList

from freight.entrypoints.bench.work import Work, make_rows
from freight.memory.process import process_bytes
from freight.model.config import DTYPE_BYTES, ModelConfig, read_config
from freight.model.decoder import build_programme
from freight.model.dummy import dummy_rows

__all__ = ["resident_bytes", "run_peer"]

_LAYERS_AT_ONCE: Final = 2


class _Clock:
    """Stops rows that have made as many tokens as they are to; notes when the first token of a
    batch was there."""

    def __init__(self, num_new: Sequence[int], prompt_tokens: int) -> None:
        self.first_s: float | None = None
        self._ends = prompt_tokens + torch.tensor(num_new)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any
    ) -> torch.Tensor:  # whether a row is to stop
        if self.first_s is None:
            self.first_s = time.perf_counter()
        return (self._ends <= input_ids.shape[1]).to(input_ids.device)


def run_peer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run; ``system`` is "accelerate" or "transformers"."""
    work = Work(**job["work"])
    config = read_config(Path(job["model"])).for_rows(work.total_tokens)
    started_s = time.perf_counter()
    device = torch.device("cuda", 0) if job["on_cuda"] else torch.device("cpu")
    if job["on_cuda"]:
        _cap(device, job["gpu_budget_bytes"])
    memory = None
    if job["system"] == "accelerate":
        memory = _memory_for_weights(job, config, work)
    model = _load(job, memory)
    load_s = time.perf_counter() - started_s
    rows, lengths = make_rows(work, config.vocab_size), work.lengths()
    if job["system"] == "transformers" or job["on_cuda"]:
        _generate(model, rows[:1], [min(2, work.new_tokens)], device)
    prefill_s, first_tokens = 0.0, [0] * len(rows)
    # Prompts of like lengths together, the longest first, so that little is padded.
    order = sorted(range(len(rows)), key=lambda row: -lengths[row][0])
    started_s = time.perf_counter()
    for begin in range(0, len(rows), job["batch_size"]):
        own = order[begin : begin + job["batch_size"]]
        answers = [lengths[row][1] for row in own]
        first, first_s = _generate(model, [rows[row] for row in own], answers, device)
        prefill_s += first_s
        for row, token in zip(own, first, strict=True):
            first_tokens[row] = token
    generate_s = time.perf_counter() - started_s
    return {
        "batch_size": job["batch_size"],
        "resident_bytes": None if memory is None else memory[0 if job["on_cuda"] else "cpu"],
        "load_s": load_s,
        "generate_s": generate_s,
        "prefill_s": prefill_s,
        "decode_s": generate_s - prefill_s,
        "new_tokens": work.total_new_tokens,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_tokens": first_tokens,
    }


def resident_bytes(
    config: ModelConfig, work: Work, batch_size: int, dtype: str, room_bytes: int
) -> int:
    """Weights that fit beside a batch: never less than one byte, for 0 would mean no limit."""
    size, rows = DTYPE_BYTES[dtype], min(batch_size, work.num_rows)
    kv = rows * work.total_tokens * config.kv_bytes_per_token(size)
    kv += rows * config.state_bytes_per_row(size)
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
    if job.get("unwritten"):
        return _ready(_make(job, memory, settings["dtype"]))
    if memory is not None:
        settings |= {
            "device_map": "auto",
            "max_memory": dict(memory),
            "offload_folder": job["offload_dir"],
        }
    elif job["on_cuda"]:
        settings["device_map"] = {"": 0}
    return _ready(AutoModelForCausalLM.from_pretrained(job["model"], **settings))


def _make(
    job: Mapping[str, Any], memory: Mapping[int | str, int] | None, dtype: torch.dtype
) -> Any:
    """The model with random weights that no file has, placed as a loaded one would be."""
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(job["model"])
    where = torch.device("cuda", 0) if job["on_cuda"] and memory is None else torch.device("cpu")
    classes: Any = AutoModelForCausalLM
    with torch.device(where), no_init_weights():
        model = classes.from_config(config, dtype=dtype)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        rows = parameter.data.view(len(parameter), -1)
        host = torch.empty(rows.shape, dtype=dtype) if rows.is_cuda else rows
        dummy_rows(name, 0, 0, host)
        rows.copy_(host)
    if memory is None:
        return model
    accelerate = importlib.import_module("accelerate")
    whole = model._no_split_modules
    places = accelerate.infer_auto_device_map(model, dict(memory), no_split_module_classes=whole)
    return accelerate.dispatch_model(model, places, offload_dir=job["offload_dir"])


def _ready(model: Any) -> Any:
    model.eval()
    model.generation_config.eos_token_id = None  # every row makes all its tokens
    model.generation_config.pad_token_id = 0
    return model


def _generate(
    model: Any, rows: Sequence[Sequence[int]], num_new: Sequence[int], device: torch.device
) -> tuple[list[int], float]:
    """The first new token of each row, and the seconds until they were there. Shorter prompts are
    padded on the left; rows end when they have made so many tokens, the batch with its last."""
    longest = max(len(row) for row in rows)
    padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
    )
    clock = _Clock(num_new, longest)
    started_s = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=max(num_new),
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    assert clock.first_s is not None
    made = out.shape[1] - longest
    assert made == max(num_new), f"{made} new tokens a row instead of {max(num_new)}"
    return out[:, longest].tolist(), clock.first_s - started_s
