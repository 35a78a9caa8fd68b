"""Stages of one pipeline, each planned for its own process: their layers, and what they must share.

Every stage plans its own memory. Of blocks all must be alike: who is in one is decided on each
stage, from the same tokens, so rows, their order and the pages that they want have to be the same.
Each stage proposes what is best for it. Where the rates of all machines are known, these are found
by search, all stages say what each takes them, and the one with which the whole pipeline is fastest
is chosen; otherwise the smallest that all can follow. Knows ranks and plans, no messages and no
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import torch

from freight.distributed.pipeline.engine import StageEngine
from freight.distributed.pipeline.forecasts import StageForecaster
from freight.distributed.pipeline.wires import Wires
from freight.distributed.ranks import Ranks
from freight.errors import FreightError, InputError, RankError
from freight.hardware.machine import Machine
from freight.plan.balance import Capacity, balance_layers
from freight.plan.default import Plan
from freight.plan.forecast import Forecast
from freight.plan.pipeline import Hop
from freight.plan.policy import Policy
from freight.plan.shares import part_of
from freight.plan.stages import StageModel, stage_model
from freight.plan.workload import Workload
from freight.runtime.device import product_flops, room_on_cpu
from freight.runtime.engine import OpenedModel, open_model
from freight.runtime.options import EngineOptions
from freight.runtime.planning import plan_run

__all__ = ["build_stage_engine"]

_MOST_TOKENS: Final = 256
"""Of a sweep, where stages are balanced: larger ones hide what they read behind products."""
_READ_BYTES_PER_S: Final = 2e9
"""Of a disk that was not measured."""
_PIECE_BYTES: Final = 4 << 20
_ROUNDS: Final = (1, 2)
"""Blocks in flight, over stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """What all stages' policies have alike. ``kv`` are the shares of rows whose keys are where the
    arithmetic is, in RAM beside a device, and on disk."""

    micro_batch_size: int
    num_micro_batches: int
    max_batch_tokens: int
    kv: tuple[float, float, float]
    cpu_attention: float
    recomputed: float
    admission: str
    page_tokens: int
    row_tokens: int
    entry_pace: float
    shares_prefixes: bool
    rolls_windows: bool
    moves_rows: bool
    draft_tokens: int
    blocks_in_flight: int

    @classmethod
    def of(cls, policy: Policy) -> Self:
        kv = policy.kv
        near = policy.compute_tier == "gpu"
        return cls(
            micro_batch_size=policy.micro_batch_size,
            num_micro_batches=policy.num_micro_batches,
            max_batch_tokens=policy.max_batch_tokens,
            kv=(kv.gpu, kv.cpu, kv.disk) if near else (kv.cpu, 0.0, kv.disk),
            cpu_attention=policy.cpu_attention,
            recomputed=policy.recomputed,
            admission=policy.admission,
            page_tokens=policy.page_tokens,
            row_tokens=policy.row_tokens,
            entry_pace=policy.entry_pace,
            shares_prefixes=policy.shares_prefixes,
            rolls_windows=policy.rolls_windows,
            moves_rows=policy.moves_rows,
            draft_tokens=policy.draft_tokens,
            blocks_in_flight=policy.blocks_in_flight,
        )

    def fixed(self, options: EngineOptions, *, on_device: bool) -> EngineOptions:
        """The options of a stage that follows this block."""
        near, ram, disk = (100 * share for share in self.kv)
        if not on_device and ram:
            raise InputError(
                f"Keys of {ram:.4g} % of the rows were to be in RAM beside a device.",
                "This stage computes on the CPU, whose own memory that is.",
                "Give --kv with no such share, or devices to all stages.",
            )
        return replace(
            options,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            batch_tokens=self.max_batch_tokens,
            kv_percent=(near, ram, disk) if on_device else (0.0, near, disk),
            cpu_attention_percent=100 * self.cpu_attention if on_device else None,
            recompute_percent=100 * self.recomputed,
            admission=self.admission,
            share_prefixes=options.share_prefixes and self.shares_prefixes,
            roll_windows=self.rolls_windows,
            move_rows=self.moves_rows,
            draft_tokens=self.draft_tokens,
        )


def build_stage_engine(
    model_dir: Path,
    *,
    options: EngineOptions,
    workload: Workload,
    ranks: Ranks,
    say: Callable[[str], None] = lambda _: None,
) -> StageEngine:
    """This rank's stage, once all ranks have planned theirs, and hold them. Called on all ranks at
    once; what one of them refuses is raised on all."""
    is_structured = workload.is_structured

    def open_own() -> OpenedModel:
        return open_model(model_dir, options=options, say=say, is_structured=is_structured)

    model = ranks.share("opened", open_own).for_rows(workload.max_total_tokens)
    _refuse_several("types to compute in", ranks.exchange("dtype", model.dtype), "--dtype")
    if len(set(ranks.exchange("tier", model.device.tier))) > 1:
        # Rows that a CPU attends beside one stage's device stay, and would move on another stage.
        model = replace(model, options=replace(model.options, move_rows=False))
    layers = _cut(model, workload, ranks)
    if len({any(map(model.config.has_window, own)) for own in layers}) > 1:
        # Where a row finds no room among windows, stages without any would have let it in.
        model = replace(model, options=replace(model.options, roll_windows=False))
    stage = stage_model(model.config, layers[ranks.rank])
    own = replace(model, config=stage.config, sources=stage.sources(model.sources))
    wires = Wires(ranks)
    plan, told = _best(model, own, stage, workload, layers[ranks.rank], ranks, wires)
    return ranks.share(
        "built",
        lambda: StageEngine(
            own, stage=stage, all_layers=layers, plan=plan, told=told, ranks=ranks, wires=wires
        ),
    )


def _cut(model: OpenedModel, workload: Workload, ranks: Ranks) -> list[range]:
    """The layers of each stage; machines that can do less get fewer."""
    num_layers = model.config.num_layers
    if ranks.size > num_layers:
        raise InputError(
            f"{ranks.size} ranks were started.",
            f"The model has {num_layers} layers, and each rank runs one at least.",
            f"Start at most {num_layers}.",
        )
    own = [source for name, source in model.sources.items() if name.startswith("layers.")]
    measured = ranks.share("measured", lambda: _measure(model))
    processor = (model.device.kind, torch.get_num_threads())
    processors = zip(ranks.hosts, ranks.exchange("processor", processor), strict=True)
    capacities = _alike(ranks.exchange("capacity", measured), [*processors])
    tokens = min(_MOST_TOKENS, -(-workload.num_rows // ranks.size))
    return balance_layers(
        num_layers,
        capacities,
        layer_bytes=sum(source.num_bytes for source in own) // num_layers,
        layer_flops=2.0 * tokens * sum(math.prod(source.shape) for source in own) / num_layers,
    )


def _alike(capacities: Sequence[Capacity], processors: Sequence[object]) -> list[Capacity]:
    """Processors of one kind are equally fast, though processes beside each other find them not."""
    fastest: dict[object, float] = {}
    for kind, own in zip(processors, capacities, strict=True):
        fastest[kind] = max(own.flops_per_s, fastest.get(kind, 0.0))
    return [
        replace(own, flops_per_s=fastest[kind])
        for kind, own in zip(processors, capacities, strict=True)
    ]


def _measure(model: OpenedModel) -> Capacity:
    """What this process may take, on all its tiers but the disk, and how fast it multiplies."""
    flops_per_s, on_device = product_flops(model.dtype, model.device), 0
    if model.device.tier == "gpu":  # asked first: a CUDA device's context takes RAM
        budget = model.options.gpu_memory_bytes
        on_device = model.device.room_bytes(budget, model.config.hidden_size)
    return Capacity(
        flops_per_s=flops_per_s,
        memory_bytes=on_device + room_on_cpu(model.options.cpu_memory_bytes)[0],
        read_bytes_per_s=_read_bytes_per_s(model.options.machine),
    )


def _read_bytes_per_s(machine: Machine | None) -> float:
    if machine is None:
        return _READ_BYTES_PER_S
    return machine.links["disk read"].bytes_per_s.at(_PIECE_BYTES)


def _refuse_several(what: str, told: list[str], flag: str) -> None:
    others = [rank for rank, own in enumerate(told) if own != told[0]]
    if others:
        raise RankError(
            f"{len(told)} ranks were to work together.",
            f"They chose different {what}: the first {told[0]}, rank {others[0]} "
            f"{told[others[0]]}.",
            f"Give {flag} to all of them.",
        )


def _best(
    whole: OpenedModel,
    model: OpenedModel,
    stage: StageModel,
    workload: Workload,
    layers: range,
    ranks: Ranks,
    wires: Wires,
) -> tuple[Plan, Forecast | None]:
    """The plan of this stage of the ``whole`` model. As many blocks are in flight as there are
    stages, or twice as many, where that can be told to be faster: the pipeline then fills sooner,
    and weights are brought more often."""
    found: list[tuple[Plan, Forecast | None]] = []
    refusal: FreightError | None = None
    hops: list[Hop] = []
    for count in sorted({min(workload.num_rows, times * ranks.size) for times in _ROUNDS}):
        forecaster = StageForecaster(
            model=whole,
            layers=layers,
            workload=part_of(workload, count),
            blocks_in_flight=count,
            hops=hops,
        )
        rated = all(ranks.exchange(f"rated {count}", forecaster.knows_rates))
        if rated:
            hops = hops or wires.measure_hops()
            forecaster = replace(forecaster, hops=hops)
        try:
            found.append(_agree(model, stage, forecaster, ranks, rated=rated))
        except RankError:
            raise
        except FreightError as error:  # by all of them
            refusal = error
        if not rated:
            break
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda own: 0.0 if own[1] is None else own[1].seconds)


def _agree(
    model: OpenedModel,
    stage: StageModel,
    forecaster: StageForecaster,
    ranks: Ranks,
    *,
    rated: bool,
) -> tuple[Plan, Forecast | None]:
    """The plan for the best block that any stage has proposed and all can follow, and what the
    pipeline takes with it where that can be told."""
    workload, options, count = forecaster.workload, model.options, forecaster.blocks_in_flight

    def plan(options: EngineOptions) -> Plan:
        return plan_run(
            model.config,
            model.sources,
            model.dtype,
            model.device,
            replace(options, machine=None),
            workload,
            programme=stage.programme,
            blocks_in_flight=count,
        )[0]

    def propose() -> list[_Block]:
        found = [plan(options).policy]
        if rated:
            found.append(forecaster.search(options).policy)
        return [*map(_Block.of, found)]

    proposed = ranks.exchange(f"block {count}", ranks.share(f"planned {count}", propose))
    refusal: FreightError | None = None
    best: tuple[Plan, Forecast] | None = None
    on_device = model.device.tier == "gpu"
    candidates = sorted({block for blocks in proposed for block in blocks}, key=_size)
    for turn, block in enumerate(candidates):
        try:
            following = ranks.share(
                f"following {count}.{turn}",
                lambda block=block: plan(block.fixed(options, on_device=on_device)),  # type: ignore[misc]
            )
        except RankError:
            raise
        except FreightError as error:
            refusal = error
            continue
        told = ranks.exchange(f"followed {count}.{turn}", _Block.of(following.policy))
        if len({own.shares_prefixes for own in told}) > 1:
            # What prompts begin with pays on some stages only: on all it is done on none.
            candidates.insert(turn + 1, replace(block, shares_prefixes=False))
            continue
        _refuse_several("blocks", [str(own) for own in told], "the same policy")
        rolls = following.geometry.rolls
        if len(set(ranks.exchange(f"rolls {count}.{turn}", rolls))) > 1:
            # Where a row finds no room among windows all stages must know.
            candidates.insert(turn + 1, replace(block, rolls_windows=False))
            continue
        if not rated:
            return following, None
        alone = forecaster.tell(following.policy)
        taken = ranks.exchange(f"taken {count}.{turn}", alone.sweeps)
        forecast = forecaster.of_pipeline(alone, taken)
        if best is None or forecast.seconds < best[1].seconds:
            best = following, forecast
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _size(block: _Block) -> tuple[int, int, str]:
    return block.micro_batch_size * block.num_micro_batches, block.micro_batch_size, str(block)
