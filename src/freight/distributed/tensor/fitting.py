"""What ranks hold of a model that is cut in chosen ways, for so many rows and tokens in a call, and
where some of its layers lie on their disks, which share of these takes how long.

Every rank comes to the same numbers. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from freight.distributed.tensor.ahead import gathers_weights
from freight.distributed.tensor.blueprint import Blueprint
from freight.distributed.tensor.footprint import Footprint, WeightSizes, footprint, weight_sizes
from freight.distributed.tensor.offloading import Pace, spreads, sweep_lengths
from freight.distributed.tensor.packed import PackedWeights, mean_bytes, mlp_group
from freight.distributed.tensor.rates import Rates, predicted_s
from freight.distributed.tensor.ways import Way, Ways
from freight.model.config import ModelConfig
from freight.model.sources import TensorSource
from freight.partition.cost import Step
from freight.partition.efficiency import Phase
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.padding import pad
from freight.plan.workload import Workload
from freight.quantities import align_up

__all__ = ["STORED", "Chosen", "Fits", "Planned", "TensorOptions", "layers_s"]

STORED = Cut(width="", inner="x")
"""How schemes keep weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorOptions:
    """``memory_bytes`` is what each rank may hold of weights, keys and what a call takes.
    ``sources`` are the model's tensors where some are kept as integers; None: its own numbers.
    ``pin`` names the layout that all calls are computed in: their sums are made in one order.
    ``rows`` are computed together, of which up to ``batch_tokens`` are in a call; None: as many as
    there is memory for. ``cache_dir`` keeps what calibration has measured, of ranks connected by
    ``network``. ``dummy_seed`` asks for random weights. ``compiles``: with ``torch.compile``.
    Layers may lie in ``disk_dir``; None: all are in memory."""

    memory_bytes: int
    sources: Mapping[str, TensorSource] | None = None
    pin: str | None = None
    rows: int | None = None
    batch_tokens: int | None = None
    batches: int = 1
    cache_dir: Path | None = None
    network: str = ""
    dummy_seed: int | None = None
    compiles: bool = False
    disk_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A mesh, and the ways of prompts and of single tokens on it."""

    mesh: Mesh
    prefill: Way
    decode: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(dict.fromkeys((self.decode, self.prefill)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A mesh of all ranks, how prompts and how single tokens are computed on it, how many rows
    together, and the most tokens of a call. ``footprint`` is what a rank then holds. Of a stage's
    layers ``kept`` are in memory (None: all), others come through ``slots``, and a sweep has up to
    ``sweep_tokens``."""

    mesh: Mesh
    prefill: Way
    decode: Way
    rows: int
    call_tokens: int
    footprint: Footprint
    kept: int | None = None
    slots: int = 0
    sweep_tokens: int | None = None

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(dict.fromkeys((self.decode, self.prefill)))


@dataclass(frozen=True, slots=True)
class _Laid:
    ways: Ways
    packed: PackedWeights
    sizes: WeightSizes

    @property
    def slots(self) -> int:
        """One layer is computed with while another is read; where weights are gathered ahead the
        next one is in use too."""
        ways = self.ways
        programmes = (
            ways.programmes(way, ways.row_parts, ways.token_parts(way)) for way in ways.ways
        )
        return 2 + any(gathers_weights(own) for each in programmes for own in each.layers.values())


@dataclass(frozen=True, slots=True)
class Fits:
    """Of a model and a workload, in numbers of ``dtype``."""

    config: ModelConfig
    workload: Workload
    dtype: torch.dtype
    options: TensorOptions
    _known: dict[Chosen, _Laid] = field(default_factory=dict)

    def whole(self, chosen: Chosen, rows: int, call_tokens: int) -> Planned:
        """With all layers in memory, whether there is so much or not. InputError where a dim does
        not divide by what is to cut it."""
        laid = self._laid(chosen)
        held = footprint(
            laid.ways,
            laid.packed,
            laid.sizes,
            rows=rows,
            longest=self.workload.max_total_tokens,
            call_tokens=call_tokens,
            prompt=self.workload.max_prompt_tokens,
            dtype_bytes=self.dtype.itemsize,
            has_scores=self.workload.max_scored_tokens > 0,
        )
        return Planned(
            mesh=chosen.mesh,
            prefill=chosen.prefill,
            decode=chosen.decode,
            rows=rows,
            call_tokens=call_tokens,
            footprint=replace(held, keys=held.keys * self.options.batches),
        )

    def spread(
        self,
        chosen: Chosen,
        rows: int,
        call_tokens: int,
        steps: Mapping[Phase, Step],
        rates: Rates,
        disk_bytes_per_s: float,
    ) -> Iterator[tuple[float, Planned]]:
        """What fits with some layers on the disk, or none, each with the seconds that a row
        takes; ``steps`` are a prefill and a step of decoding."""
        laid, whole = self._laid(chosen), self.whole(chosen, rows, call_tokens)
        prefill, decode = steps["prefill"], steps["decode"]
        weight_bytes = mean_bytes(self.options.sources or {}, self.dtype.itemsize)

        def seconds(way: Way, step: Step) -> float:
            return layers_s(laid.ways, way, step, rates, weight_bytes, self.dtype.itemsize)

        pace = Pace(
            prompt_token_s=seconds(chosen.prefill, prefill) / (prefill.rows * prefill.new_tokens),
            decode_s=seconds(chosen.decode, decode),
            disk_bytes_per_s=disk_bytes_per_s,
        )
        for own in spreads(
            whole.footprint,
            laid.sizes,
            pace,
            rows=rows,
            slots=laid.slots,
            call_tokens=call_tokens,
            sweep_tokens=self.options.batch_tokens,
            memory_bytes=self.options.memory_bytes,
            workload=self.workload,
        ):
            if own.tokens is None:
                yield own.row_s, whole
                continue
            yield (
                own.row_s,
                replace(
                    whole,
                    footprint=own.footprint,
                    kept=own.kept,
                    slots=laid.slots,
                    sweep_tokens=own.tokens,
                ),
            )

    def least(self, chosen: Chosen, rows: int, call_tokens: int) -> Footprint:
        """What a rank has to hold: where layers may lie on the disk, none of them."""
        held, laid = self.whole(chosen, rows, call_tokens).footprint, self._laid(chosen)
        if self.options.disk_dir is None:
            return held
        tokens = sweep_lengths(rows, call_tokens, self.options.batch_tokens, self.workload)[0]
        return held.offloaded(laid.sizes, kept=0, slots=laid.slots, tokens=tokens)

    def _laid(self, chosen: Chosen) -> _Laid:
        if chosen not in self._known:
            first = chosen.decode if isinstance(chosen.decode, Cut) else STORED
            sources = self.options.sources or {}
            padded = pad(self.config, chosen.mesh, first, group=mlp_group(sources)).config
            ways = Ways(padded, chosen.mesh, chosen.ways)
            packed = PackedWeights(Blueprint(self.config, padded), ways, sources)
            sizes = weight_sizes(ways, packed, self.dtype.itemsize)
            self._known[chosen] = _Laid(ways, packed, sizes)
        return self._known[chosen]


def layers_s(
    ways: Ways, way: Way, step: Step, rates: Rates, weight_bytes: float, value_bytes: float
) -> float:
    """Seconds of all layers by the planner's counts; weights are gathered ahead."""
    count = align_up(step.rows, ways.row_parts)
    width = align_up(step.new_tokens, ways.token_parts(way))
    kinds = {
        kind: predicted_s(
            own, rates, weight_bytes=weight_bytes, value_bytes=value_bytes, ahead=True
        )
        for kind, own in ways.programmes(way, count, width).layers.items()
    }
    return sum(kinds[ways.config.has_experts(layer)] for layer in range(ways.config.num_layers))
