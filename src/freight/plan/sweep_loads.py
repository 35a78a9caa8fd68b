"""About how long each sweep of a run takes, from what its rows bring and have.

Each part of the machine is taken to work at its rate, all side by side. That tells sweeps apart
well, so a few on the clock can stand for all; how long they take the clock says. Knows no
operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from freight.hardware.machine import Machine
from freight.model.batch import LEAST_SHARERS
from freight.model.programme import Attend
from freight.plan.continuous import Census, RolledSweep
from freight.plan.cost import Cost
from freight.plan.default import Plan
from freight.plan.policy import TIERS, Tier

__all__ = ["sweep_loads"]

_REQUEST_BYTES: Final = float(4 << 20)
_FRICTION: Final = 0.1
"""Of the work of all, what the part that works longest does not hide."""

Ints = npt.NDArray[np.int64]
_STEPS: Final = 32
"""Up to twice a number of tokens: between them all take as long each."""


def sweep_loads(
    rolled: Sequence[RolledSweep], plan: Plan, machine: Machine, cost: Cost
) -> list[float]:
    """Seconds of each sweep, about; ``cost`` is of all units."""
    steps = tuple(
        (step, count)
        for unit, _, count in cost.programme.counted
        for step in unit.steps
        if isinstance(step, Attend)
    )
    # The beginning that a row has in common with others is near, and attended together.
    shared = np.array([length.shared for length in rolled[0].lengths])
    return [*_Loads(plan, machine, cost, steps, shared).of(own.census for own in rolled)]


@dataclass(slots=True)
class _Loads:
    plan: Plan
    machine: Machine
    cost: Cost
    steps: tuple[tuple[Attend, int], ...]
    """What attends in one layer of each form, and the number of such layers."""
    shared: Ints
    known: dict[int, float] = field(default_factory=dict)
    """Seconds of one of so many tokens of a micro-batch."""

    def of(self, censuses: Iterator[Census]) -> Iterator[float]:
        policy = self.plan.policy
        seats = policy.seats()
        tiers = np.array([TIERS.index(tier) for tier, _ in seats])
        near_tier, disk = TIERS.index(policy.compute_tier), TIERS.index("disk")
        is_delegated = np.array([delegated for _, delegated in seats])
        on_disk, in_ram = self._streamed("disk"), self._streamed("cpu")
        for own in censuses:
            batches, seat = np.divmod(own.seats, len(seats))
            count, num_tokens = len({*batches.tolist()}), int(own.brought.sum())
            compute_s = count * self._tokens_s(-(-num_tokens // count))
            is_single = (own.brought == 1) & (own.kv_lens > 0)
            delegated = is_single & is_delegated[seat]
            near = is_single & ~delegated
            shared = self._attended_together(own, batches)
            kept = own.kv_lens - shared
            totals = kept + own.brought
            compute_s += self._single_queries_s(totals[near], policy.compute_tier)
            attended_s = self._single_queries_s(totals[delegated], "cpu")
            means = np.where(is_single, shared, own.kv_lens + (own.brought + 1) / 2)
            compute_s += self._pairs_s(float((own.brought * means).sum()))
            is_far = ~delegated & (tiers[seat] != near_tier)
            if policy.recomputed:
                compute_s += self.cost.keys_again_s(float(kept[is_far].sum()))
            if delegated.any() and policy.num_micro_batches == 1:  # nothing is beside it
                compute_s, attended_s = compute_s + attended_s, 0.0
            share = self._share_of_experts(num_tokens)
            read_weights = on_disk[0] + share * on_disk[1]
            read = self._rows_bytes(kept[tiers[seat] == disk])
            lanes = [compute_s, attended_s, self._link_s("disk read", read_weights, read)]
            if policy.compute_tier == "gpu":
                come = self._rows_bytes(kept[is_far])
                come_weights = read_weights + in_ram[0] + share * in_ram[1]
                lanes.append(self._link_s("host to device", come_weights, come))
            yield max(lanes) + _FRICTION * sum(lanes) if policy.overlap else sum(lanes)

    def _tokens_s(self, num_tokens: int) -> float:
        """Of nearly as many."""
        step = max(1, num_tokens // _STEPS)
        near = round(num_tokens / step) * step
        if near not in self.known:
            self.known[near] = self.cost.tokens_s(near) / near
        return num_tokens * self.known[near]

    def _attended_together(self, own: Census, batches: Ints) -> Ints:
        """Of each row's keys, those that enough rows of its micro-batch share."""
        shared = self.shared[own.numbers]
        is_sharer = (shared > 0) & (own.kv_lens >= shared)
        counts = np.bincount(batches, weights=is_sharer)
        enough = counts[batches] >= LEAST_SHARERS[self.plan.policy.compute_tier]
        return np.where(is_sharer & enough, shared, 0)

    def _single_queries_s(self, lengths: Ints, tier: Tier) -> float:
        """Attending to so many keys each, for rows with one query each."""
        if not len(lengths):
            return 0.0
        unit, seconds = self.machine.units[tier], 0.0
        for step, count in self.steps:
            seen = lengths if step.window is None else np.minimum(lengths, step.window)
            seconds += count * self.cost.queries_s(step, float(seen.sum()), len(lengths), unit)
        return seconds

    def _pairs_s(self, num_pairs: float) -> float:
        """Attending so many (query, key) pairs of prompts in each layer."""
        unit = self.cost.unit
        flops = sum(4 * step.num_heads * step.head_dim * count for step, count in self.steps)
        return num_pairs * flops / unit.attention_flops[unit.nearest_dtype(self.cost.dtype)]

    def _streamed(self, tier: Tier) -> tuple[float, float]:
        """Bytes of weights that a sweep brings from a tier: of all units but experts, of these."""
        plain = experts = 0.0
        for form, count in self.plan.layout.counted():
            own = count * form.streamed_bytes(tier)[1]
            if form.unit.expert is None:
                plain += own
            else:
                experts += own
        return plain, experts

    def _share_of_experts(self, num_tokens: int) -> float:
        """How likely any of so many tokens is to need one, were they chosen by chance."""
        own = self.cost.config.experts
        return 1.0 - (1.0 - own.per_token / own.num_experts) ** num_tokens if own else 1.0

    def _rows_bytes(self, kv_lens: Ints) -> float:
        """What rows have off the compute tier."""
        pages = float(kv_lens.sum()) / self.plan.policy.page_tokens
        return self.plan.geometry.far_bytes(self.cost.config, len(kv_lens), pages)

    def _link_s(self, name: str, weights: float, kv: float) -> float:
        link = self.machine.links[name]
        return link.seconds(weights, "weights", _REQUEST_BYTES) + link.seconds(
            kv, "kv", _REQUEST_BYTES
        )
