"""About how long each sweep of a run takes, from what its rows bring and have.

Each part of the machine is taken to work at its rate, all side by side. That tells sweeps apart
well, so a few on the clock can stand for all; how long they take the clock says. Knows no
operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from freight.hardware.machine import Machine
from freight.model.batch import LEAST_SHARERS
from freight.model.programme import Attend
from freight.plan.continuous import Census, RolledSweep
from freight.plan.cost import Cost
from freight.plan.default import Plan
from freight.plan.policy import TIERS, Policy, Tier

__all__ = ["sweep_loads"]

_REQUEST_BYTES: Final = float(4 << 20)
_FRICTION: Final = 0.1
"""Of the work of all, what the part that works longest does not hide."""

_STEPS: Final = 32
"""Up to twice a number of tokens: between them all take as long each."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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
    rows = _Rows.of([own.census for own in rolled], plan.policy)
    return [*_Loads(plan, machine, cost, steps, shared).of(rows)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Those that bring tokens to any sweep, sweep by sweep: the number of the ``sweep`` and that of
    the micro-``batch``, over all sweeps, beside what a census says of them."""

    num_sweeps: int
    sweep: Ints
    batch: Ints
    seat: Ints
    numbers: Ints
    kv_lens: Ints
    brought: Ints

    @classmethod
    def of(cls, censuses: Sequence[Census], policy: Policy) -> _Rows:
        def joined(name: str) -> Ints:
            return np.concatenate([getattr(own, name) for own in censuses])

        sweep = np.repeat(np.arange(len(censuses)), [len(own.seats) for own in censuses])
        batch, seat = np.divmod(joined("seats"), len(policy.seats()))
        return cls(
            num_sweeps=len(censuses),
            sweep=sweep,
            batch=batch + sweep * policy.num_micro_batches,
            seat=seat,
            numbers=joined("numbers"),
            kv_lens=joined("kv_lens"),
            brought=joined("brought"),
        )

    def num_batches(self, policy: Policy) -> list[int]:
        """Of each sweep, those with any row."""
        return self._counted(np.flatnonzero(np.bincount(self.batch)) // policy.num_micro_batches)

    def summed(self, values: npt.NDArray[Any], some: Bools | None = None) -> list[float]:
        """Over each sweep's rows, or ``some`` of them."""
        sweep = self.sweep if some is None else self.sweep[some]
        weights = values if some is None else values[some]
        found: list[float] = np.bincount(sweep, weights, self.num_sweeps).tolist()
        return found

    def count(self, some: Bools) -> list[int]:
        return self._counted(self.sweep[some])

    def _counted(self, sweeps: Ints) -> list[int]:
        found: list[int] = np.bincount(sweeps, minlength=self.num_sweeps).tolist()
        return found


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

    def of(self, rows: _Rows) -> Iterator[float]:
        policy = self.plan.policy
        seats = policy.seats()
        tier = np.array([TIERS.index(tier) for tier, _ in seats])[rows.seat]
        shared = self._attended_together(rows)
        kept = rows.kv_lens - shared
        is_single = (rows.brought == 1) & (rows.kv_lens > 0)
        delegated = is_single & np.array([own for _, own in seats])[rows.seat]
        is_far = ~delegated & (tier != TIERS.index(policy.compute_tier))
        means = np.where(is_single, shared, rows.kv_lens + (rows.brought + 1) / 2)

        counts, num_tokens = rows.num_batches(policy), rows.summed(rows.brought)
        pairs, num_delegated = rows.summed(rows.brought * means), rows.count(delegated)
        totals, tier_here = kept + rows.brought, policy.compute_tier
        single_s = self._single_queries_s(rows, totals, is_single & ~delegated, tier_here)
        attended_s = self._single_queries_s(rows, totals, delegated, "cpu")
        read = self._rows_bytes(rows, kept, tier == TIERS.index("disk"))
        come = self._rows_bytes(rows, kept, is_far)
        again = rows.summed(kept, is_far)

        on_disk, in_ram = self._streamed("disk"), self._streamed("cpu")
        for i, count in enumerate(counts):
            brought = round(num_tokens[i])
            compute_s = count * self._tokens_s(-(-brought // count)) + single_s[i]
            compute_s += self._pairs_s(pairs[i])
            if policy.recomputed:
                compute_s += self.cost.keys_again_s(again[i])
            cpu_s = attended_s[i]
            if num_delegated[i] and policy.num_micro_batches == 1:  # nothing is beside it
                compute_s, cpu_s = compute_s + cpu_s, 0.0
            share = self.cost.config.expert_likelihood(brought)
            read_weights = on_disk[0] + share * on_disk[1]
            lanes = [compute_s, cpu_s, self._link_s("disk read", read_weights, read[i])]
            if policy.compute_tier == "gpu":
                come_weights = read_weights + in_ram[0] + share * in_ram[1]
                lanes.append(self._link_s("host to device", come_weights, come[i]))
            yield max(lanes) + _FRICTION * sum(lanes) if policy.overlap else sum(lanes)

    def _tokens_s(self, num_tokens: int) -> float:
        """Of nearly as many."""
        step = max(1, num_tokens // _STEPS)
        near = round(num_tokens / step) * step
        if near not in self.known:
            self.known[near] = self.cost.tokens_s(near) / near
        return num_tokens * self.known[near]

    def _attended_together(self, rows: _Rows) -> Ints:
        """Of each row's keys, those that enough rows of its micro-batch share."""
        shared = self.shared[rows.numbers]
        is_sharer = (shared > 0) & (rows.kv_lens >= shared)
        counts = np.bincount(rows.batch, weights=is_sharer)
        enough = counts[rows.batch] >= LEAST_SHARERS[self.plan.policy.compute_tier]
        return np.where(is_sharer & enough, shared, 0)

    def _single_queries_s(self, rows: _Rows, lengths: Ints, some: Bools, tier: Tier) -> list[float]:
        """Of each sweep: attending to so many keys each, for some rows with one query each."""
        unit, seconds = self.machine.units[tier], [0.0] * rows.num_sweeps
        num_rows = rows.count(some)
        for step, count in self.steps:
            seen = lengths if step.window is None else np.minimum(lengths, step.window)
            for i, num_keys in enumerate(rows.summed(seen, some)):
                if num_rows[i]:
                    seconds[i] += count * self.cost.queries_s(step, num_keys, num_rows[i], unit)
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

    def _rows_bytes(self, rows: _Rows, kv_lens: Ints, some: Bools) -> list[float]:
        """Of each sweep, what some rows have off the compute tier."""
        geometry, page = self.plan.geometry, self.plan.policy.page_tokens
        return [
            geometry.far_bytes(self.cost.config, count, tokens / page)
            for count, tokens in zip(rows.count(some), rows.summed(kv_lens, some), strict=True)
        ]

    def _link_s(self, name: str, weights: float, kv: float) -> float:
        link = self.machine.links[name]
        return link.seconds(weights, "weights", _REQUEST_BYTES) + link.seconds(
            kv, "kv", _REQUEST_BYTES
        )
