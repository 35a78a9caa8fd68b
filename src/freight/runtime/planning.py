"""From what the user asked and what the machine has to a plan: budgets and wishes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import torch

from freight.hardware.machine import Machine
from freight.kernels.pairs import pairs_are_always_better
from freight.model.config import ModelConfig
from freight.model.decoder import build_programme
from freight.model.programme import Programme
from freight.model.rope import is_same_up_to
from freight.model.sources import TensorSource
from freight.plan.default import Plan, Planner
from freight.plan.forecast import Forecast
from freight.plan.geometry import SHAPES_BYTES
from freight.plan.policy import Split, Tier
from freight.plan.search import Search
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.quantities import MIB
from freight.runtime.device import ComputeDevice, room_on_cpu
from freight.runtime.loaders import bounce_bytes
from freight.runtime.options import EngineOptions, Shares

__all__ = ["plan_run"]

_SHAPES_OF_LOOPS_BYTES: Final = 32 * MIB
"""What is kept for sweeps of many numbers of tokens where loops of ours make all products: results
of as many sizes."""


def plan_run(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    dtype: str,
    device: ComputeDevice,
    options: EngineOptions,
    workload: Workload,
    *,
    programme: Programme | None = None,
    blocks_in_flight: int = 1,
    held_bytes: int = 0,
) -> tuple[Plan, Forecast | None]:
    """The plan, and where the machine's rates are known what it will take: the best that a search
    finds then, but what the user has fixed stays. A stage of a pipeline has a ``programme`` of its
    own, and several blocks of such a workload in flight. ``held_bytes`` of the process's memory are
    weights of an earlier run, in whose place this one's may be."""
    programme = programme or build_programme(config)
    # Before memory is measured: loops that were not tried yet are, which takes some.
    shapes_bytes = _shapes_bytes(device, programme, sources, dtype)
    # Keys can be shared where the lengths of the prompts do not change how they are rotated.
    shares_prefixes = options.share_prefixes and all(
        is_same_up_to(rope, workload.max_prompt_tokens, config.max_positions)
        for rope in config.rotations
    )
    workload = workload.as_shared() if shares_prefixes else workload.as_alone()
    if options.machine is not None and (device.tier == "gpu" or options.disk_dir is not None):
        import highspy  # noqa: F401  before the process is measured: it stays in memory
    room: dict[Tier, int] = {}
    if device.tier == "gpu":
        # Before the host is measured: asking a CUDA device makes its context, which takes RAM.
        room["gpu"] = device.room_bytes(options.gpu_memory_bytes, config.hidden_size)
    room_bytes, own_bytes = room_on_cpu(options.cpu_memory_bytes, held_bytes)
    room["cpu"] = room_bytes - bounce_bytes(sources)
    planner = Planner(
        config=config,
        programme=programme,
        sources=sources,
        dtype=dtype,
        workload=workload,
        compute_tier=device.tier,
        room=room,
        taken={"cpu": own_bytes + bounce_bytes(sources), **_context(device, options, room)},
        has_disk_dir=options.disk_dir is not None,
        wishes=Wishes(
            weights=_split(options.weights_percent),
            kv=_split(options.kv_percent),
            activations=_split(options.activations_percent),
            micro_batch_size=options.micro_batch_size,
            num_micro_batches=1 if options.admission == "row" else options.num_micro_batches,
            admission=options.rule,
            batch_tokens=options.batch_tokens,
            draft_tokens=options.draft_tokens,
            shares_prefixes=shares_prefixes,
            rolls_windows=options.roll_windows,
            moves_rows=options.move_rows,
            cpu_attention=_share(options.cpu_attention_percent),
            recomputed=_share(options.recompute_percent),
            overlap=options.overlap,
        ),
        blocks_in_flight=blocks_in_flight,
        shapes_bytes=shapes_bytes,
    )
    machine = None if options.machine is None else rates_for(options, device)
    if machine is None or dtype not in machine.compute_unit.products:
        return planner.plan(), None
    search = Search(planner=planner, machine=machine)
    choice = search.price(planner.plan()) if _is_fixed(options, device) else search.best()
    return choice.plan, choice.forecast


def _shapes_bytes(
    device: ComputeDevice, programme: Programme, sources: Mapping[str, TensorSource], dtype: str
) -> int:
    """What torch keeps for products of many numbers of tokens, where it makes any: not of plain
    rows that are pairs."""
    if device.tier != "cpu" or dtype != "bfloat16":
        return SHAPES_BYTES
    weights = [weight for unit in programme.kinds for weight in unit.weights if weight.is_matrix]
    is_plain = all(sources[weight.name].dtype == dtype for weight in weights)
    is_ours = is_plain and pairs_are_always_better({weight.num_columns for weight in weights})
    return _SHAPES_OF_LOOPS_BYTES if is_ours else SHAPES_BYTES


def _is_fixed(options: EngineOptions, device: ComputeDevice) -> bool:
    """Whether the user has left nothing to search for that matters."""
    asked = (options.weights_percent, options.kv_percent, options.micro_batch_size)
    if options.kv_percent is None or None in asked:
        return False
    is_near = device.tier == "cpu" or options.kv_percent[0] == 100
    return is_near or options.cpu_attention_percent is not None


def _context(
    device: ComputeDevice, options: EngineOptions, room: Mapping[Tier, int]
) -> dict[Tier, int]:
    """What the device's context takes of a budget that was given for it."""
    if device.tier != "gpu" or options.gpu_memory_bytes is None:
        return {}
    return {"gpu": options.gpu_memory_bytes - room["gpu"]}


def rates_for(options: EngineOptions, device: ComputeDevice) -> Machine | None:
    """The machine's rates with the device that computes: a simulated one is the CPU once more."""
    machine = options.machine
    if machine is not None and device.kind == "sim":
        room = device.room_bytes(options.gpu_memory_bytes)
        shares_cores = 2 * torch.get_num_threads() > len(os.sched_getaffinity(0))
        return machine.with_simulated_device(
            room, options.sim_bytes_per_s, shares_cores=shares_cores
        )
    return machine


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _split(shares: Shares | None) -> Split | None:
    return None if shares is None else Split.of_percent(*shares)
