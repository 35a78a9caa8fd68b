"""The best policy for a workload on a machine: a linear programme inside an enumeration.

Block shapes are enumerated; for each a linear programme says which shares of weights, KV cache and
activations belong on which tier. The most promising are made whole, as the run time would realise
them, and priced by the forecast; what that finds best is chosen. Knows rates and sizes, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from freight.errors import BudgetError
from freight.hardware.machine import Machine, TensorKind
from freight.plan.cost import Cost
from freight.plan.default import Plan, Planner
from freight.plan.forecast import Forecast, forecast
from freight.plan.linear import (
    DELEGATED,
    LinearProblem,
    Phase,
    Placed,
    solve,
)
from freight.plan.policy import TIERS, Policy, Split, Tier
from freight.plan.rollout import WorkSizes, make_sweep, rows_of_block
from freight.plan.scoreboard import RING_SLOTS

__all__ = ["Choice", "Search"]

_MOST_ROWS: Final = 512
_MOST_TOKENS: Final = 16384
_COUNTS: Final = (1, 2, 4, 8, 16)
_FRICTION: Final = 0.1
_FINALISTS: Final = 6
_MOST_PRICED: Final = 32
"""Micro-batches of all finalists together: pricing takes as long as there are operations."""
_REQUEST_BYTES: Final = float(4 << 20)
_FIXED: Final = ("workspace", "logits", "scores", "embedding rows", "weight staging")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan with what it will take."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class _Solution:
    """A block shape with the best shares that a linear programme finds for it: seconds of a block,
    and of the whole workload."""

    policy: Policy
    block_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """``planner`` knows the model, the workload and the budgets, and makes policies whole.

    ``max_block_s`` bounds the time of a block, from its prompts to its last token. Without
    ``uses_disk`` nothing may be there after loading.
    """

    planner: Planner
    machine: Machine
    max_block_s: float = math.inf
    uses_disk: bool = True

    def best(self) -> Choice:
        """The plan with the shortest forecast; BudgetError, with all reasons, if none fits."""
        plans = [self.planner.plan(), *self.finalists()]  # raises where nothing fits
        finalists = [self.price(plan, is_rough=True) for plan in plans if self._may_be(plan)]
        fitting = [choice for choice in finalists if choice.forecast.block_s <= self.max_block_s]
        for choice in sorted(fitting, key=lambda choice: choice.forecast.seconds):
            best = self.price(choice.plan)
            if best.forecast.block_s <= self.max_block_s:
                return best
        raise self._refusal()

    def finalists(self) -> Iterator[Plan]:
        """The few best of the linear programmes that can be realised, one for each block shape."""
        within = (own for own in self._solutions() if own.block_s <= self.max_block_s)
        return self._realised(sorted(within, key=lambda own: own.seconds))

    def frontier(self, count: int) -> list[Choice]:
        """Choices of which each is faster than those with shorter blocks, up to ``count``; of block
        shapes that the linear programmes find so."""
        kept: list[_Solution] = []
        for own in sorted(self._solutions(), key=lambda own: (own.block_s, own.seconds)):
            if own.block_s <= self.max_block_s and (not kept or own.seconds < kept[-1].seconds):
                kept.append(own)
        step = max(1.0, (len(kept) - 1) / max(1, count - 1))
        some = {round(number * step) for number in range(count)}
        plans = self._realised([own for n, own in enumerate(kept) if n in some], most=math.inf)
        priced = (self.price(plan, is_rough=True) for plan in plans)
        return sorted(priced, key=lambda choice: choice.forecast.block_s)

    def price(self, plan: Plan, *, is_rough: bool = False) -> Choice:
        """The plan with its forecast."""
        own = self.planner
        told = forecast(plan, self.machine, own.config, own.programme, own.dtype, is_rough=is_rough)
        return Choice(plan=plan, forecast=told)

    def _realised(
        self, ranked: Iterable[_Solution], *, most: float = _MOST_PRICED
    ) -> Iterator[Plan]:
        shapes: set[tuple[int, int]] = set()
        for own in ranked:
            shape = own.policy.micro_batch_size, own.policy.num_micro_batches
            if shape in shapes:
                continue
            plan = self.planner.realise(own.policy)
            if plan is not None and self._may_be(plan):
                shapes.add(shape)
                most -= own.policy.num_micro_batches
                yield plan
            if most <= 0 or (len(shapes) == _FINALISTS and most < math.inf):
                return

    def _may_be(self, plan: Plan) -> bool:
        return self.uses_disk or not (
            plan.layout.tier_bytes()["disk"] or sum(plan.geometry.usage["disk"].values())
        )

    def _refusal(self) -> BudgetError:
        """Nothing keeps to the bound, or does without the disk."""
        if not self.uses_disk:
            return BudgetError(
                "A plan was to do without the disk.",
                "The model and a row do not fit into memory.",
                "Let it use the disk, or raise the budgets.",
            )
        solutions = sorted(self._solutions(), key=lambda own: own.block_s)
        plans = (self.planner.realise(own.policy) for own in solutions[:_FINALISTS])
        least = min(
            (self.price(plan, is_rough=True) for plan in plans if plan is not None),
            key=lambda choice: choice.forecast.block_s,
        )
        policy, block_s = least.plan.policy, least.forecast.block_s
        return BudgetError(
            f"A block was to take at most {self.max_block_s:g} s, from prompts to last tokens.",
            f"The least that was found is {block_s:.4g} s, for {policy.num_micro_batches} x "
            f"{policy.micro_batch_size} rows.",
            f"Raise --max-latency to {math.ceil(block_s)}, shorten the rows, or take a faster "
            "machine.",
        )

    def _solutions(self) -> Iterator[_Solution]:
        """Block shapes with the best shares that a linear programme finds for them."""
        for policy in self._shapes():
            terms = _Terms.of(self.planner, self.machine, policy, uses_disk=self.uses_disk)
            solution = solve(terms.problem())
            if solution is None:
                continue
            blocks = self.planner.workload.num_rows / policy.block_rows
            chosen = replace(
                policy,
                kv=_in_rows(solution.split("kv"), policy.micro_batch_size),
                activations=solution.split("activations"),
                cpu_attention=solution.cpu_attention(),
            )
            yield _Solution(
                policy=chosen,
                block_s=solution.seconds,
                seconds=max(1.0, blocks) * solution.seconds,
            )

    def _shapes(self) -> Iterator[Policy]:
        own = self.planner
        wishes, workload = own.wishes, own.workload
        rows = min(workload.num_rows, _MOST_ROWS)
        prompts = max(1, _MOST_TOKENS // workload.max_prompt_tokens)
        most = min(rows, prompts * workload.min_samples)
        sizes = {most, *(2**power for power in range(10) if 2**power < most)}
        if workload.max_samples > 1:
            sizes = {size - size % workload.max_samples or size for size in sizes}
        if wishes.micro_batch_size:
            sizes = {wishes.micro_batch_size}
        for size in sorted(sizes):
            counts = {min(count, -(-workload.num_rows // size)) for count in _COUNTS}
            if wishes.num_micro_batches:
                counts = {wishes.num_micro_batches}
            for count in sorted(counts):
                yield from own.with_chunks(own.shape(size, count))


def _in_rows(split: Split, rows: int) -> Split:
    """The nearest split that whole rows of a micro-batch can have."""
    cut = split.cut(rows)
    gpu, cpu = cut["gpu"] / rows, cut["cpu"] / rows
    return Split(gpu=gpu, cpu=cpu, disk=max(0.0, 1.0 - gpu - cpu))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Terms:
    """Bytes and seconds of one block shape, as the linear programme wants them."""

    planner: Planner
    machine: Machine
    policy: Policy
    base: Plan
    weight_bytes: float
    ring_bytes: float
    kv_bytes: float
    kv_slot_bytes: float
    page_bytes_per_sweep: float
    rows: int
    prompt: float
    new: float
    uses_disk: bool

    @classmethod
    def of(cls, planner: Planner, machine: Machine, policy: Policy, *, uses_disk: bool) -> _Terms:
        workload = planner.workload
        base = planner.derive(policy)
        config = planner.config
        sizes = [sum(part.num_bytes for part in form.parts) for form in base.layout.forms]
        units = [sizes[form] for form in base.layout.form_of]
        threes = [sum(three) for three in zip(units, units[1:], units[2:], strict=False)]
        row_pages = -(-workload.max_total_tokens // policy.page_tokens)
        layer_pages = row_pages * base.geometry.page_bytes
        rows = min(policy.block_rows, workload.num_rows)
        return cls(
            planner=planner,
            machine=machine,
            policy=policy,
            base=base,
            weight_bytes=float(sum(units)),
            ring_bytes=float(max(threes, default=sum(units))),
            kv_bytes=float(policy.block_rows * layer_pages * config.num_layers),
            kv_slot_bytes=float(policy.micro_batch_size * layer_pages),
            page_bytes_per_sweep=float(rows * base.geometry.page_bytes * config.num_layers),
            rows=rows,
            prompt=workload.total_prompt_tokens / workload.num_rows,
            new=max(1.0, workload.total_new_tokens / workload.num_rows),
            uses_disk=uses_disk,
        )

    def problem(self) -> LinearProblem:
        return LinearProblem(
            phases=(self._prefill(), self._decode()),
            sizes=self._sizes(),
            rooms=self._rooms(),
            bounds=dict(self._bounds()),
            ties=tuple(self._ties()),
            overlap=self.policy.overlap,
            friction=_FRICTION if self.policy.overlap else 0.0,
        )

    # -- memory --------------------------------------------------------------------------------

    @property
    def near(self) -> Tier:
        return self.policy.compute_tier

    def _rooms(self) -> dict[Tier, float]:
        """What is left beside scratch, logits and the like."""
        g = self.base.geometry
        rooms: dict[Tier, float] = {}
        for tier, room in self.planner.room.items():
            beside = g.index_bytes if tier in ("cpu", self.near) else 0
            fixed = sum(g.usage[tier].get(purpose, 0) for purpose in _FIXED)
            rooms[tier] = float(room - fixed - beside)
        return rooms

    def _sizes(self) -> dict[Placed, dict[Tier, float]]:
        near, slots = self.near, self.kv_slot_bytes
        tokens = self.policy.max_batch_tokens * self.base.layout.stream_columns
        stream = float(tokens * self.base.layout.element_bytes)
        block = self.policy.num_micro_batches
        sizes: dict[Placed, dict[Tier, float]] = {
            ("weights", near): {near: self.weight_bytes},
            ("kv", near): {near: self.kv_bytes},
            ("activations", near): {near: block * stream},
            ("weights", "disk"): {near: self.ring_bytes},
            ("kv", "disk"): {near: RING_SLOTS["kv slot"] * slots, "disk": self.kv_bytes},
            ("activations", "disk"): {near: RING_SLOTS["activation slot"] * stream},
        }
        if near == "gpu":
            in_ram = RING_SLOTS["delegated kv"] * slots
            sizes[DELEGATED, "cpu"] = {near: RING_SLOTS["kv slot"] * slots, "cpu": self.kv_bytes}
            sizes[DELEGATED, "disk"] = {
                near: RING_SLOTS["kv slot"] * slots,
                "cpu": in_ram,
                "disk": self.kv_bytes,
            }
            staged = RING_SLOTS["kv in"] + RING_SLOTS["kv out"]
            sizes["kv", "disk"]["cpu"] = staged * slots
            sizes["activations", "disk"]["cpu"] = 4 * stream
            sizes["weights", "cpu"] = {near: self.ring_bytes, "cpu": self.weight_bytes}
            sizes["kv", "cpu"] = {near: RING_SLOTS["kv slot"] * slots, "cpu": self.kv_bytes}
            sizes["activations", "cpu"] = {
                near: RING_SLOTS["activation slot"] * stream,
                "cpu": block * stream,
            }
        return sizes

    def _bounds(self) -> Iterator[tuple[Placed, tuple[float, float]]]:
        wishes = self.planner.wishes
        fixed = {"weights": wishes.weights, "kv": wishes.kv, "activations": wishes.activations}
        for kind, wish in fixed.items():
            for tier in TIERS:
                if tier == "gpu" and self.near == "cpu":
                    continue
                if tier == "disk" and not self.uses_disk:
                    continue
                if wish is not None:
                    yield (kind, tier), (wish.share(tier), wish.share(tier))
                elif tier != "disk" or kind == "weights" or self.planner.has_disk_dir:
                    yield (kind, tier), (0.0, 1.0)
        for tier in self._delegated_tiers():
            most = 1.0 if wishes.kv is None else wishes.kv.share(tier)
            yield (DELEGATED, tier), (0.0, most)
            if wishes.kv is not None:
                yield ("kv", tier), (0.0, most)

    def _delegated_tiers(self) -> tuple[Tier, ...]:
        """Where rows may be that the CPU attends."""
        wishes = self.planner.wishes
        if self.near == "cpu" or wishes.cpu_attention == 0.0:
            return ()
        on_disk = self.planner.has_disk_dir if wishes.kv is None else wishes.kv.disk > 0
        on_disk = on_disk and self.uses_disk
        return ("cpu", "disk") if on_disk else ("cpu",)

    def _ties(self) -> Iterator[tuple[Mapping[Placed, float], float]]:
        wishes = self.planner.wishes
        for tier in self._delegated_tiers():
            shipped, delegated = ("kv", tier), (DELEGATED, tier)
            if wishes.kv is not None:
                yield {shipped: 1.0, delegated: 1.0}, wishes.kv.share(tier)
            if wishes.cpu_attention is not None:
                share = wishes.cpu_attention
                yield {shipped: share, delegated: share - 1.0}, 0.0

    # -- seconds -------------------------------------------------------------------------------

    def _prefill(self) -> Phase:
        """Prompts are attended where all is computed, wherever their keys will be."""
        token = self.planner.config.kv_bytes_per_token(self.base.layout.element_bytes)
        prompts = self.rows * self.prompt
        total_s, _ = self._compute_s(0)
        seconds = self._link_s(kv_in=0.0, kv_out=prompts * token, tokens=prompts)
        for lane in seconds.values():
            for tier in TIERS[1:]:
                lane[DELEGATED, tier] = lane.get(("kv", tier), 0.0)
        return Phase(count=1.0, fixed_s={"compute": total_s}, seconds=seconds)

    def _decode(self) -> Phase:
        config, size = self.planner.config, self.base.layout.element_bytes
        token = config.kv_bytes_per_token(size)
        kv_in = self.rows * (self.prompt + self.new / 2) * token
        total_s, keys_s = self._compute_s(max(1, round(self.new / 2)))
        seconds = self._link_s(kv_in=kv_in, kv_out=self.rows * token, tokens=self.rows)
        seconds["compute"] = {("kv", tier): keys_s for tier in TIERS}
        if self.near == "gpu":
            keys = kv_in / token * config.num_layers * config.kv_bytes_per_token_per_layer(size)
            is_plain = config.kv_format is None
            attended_s = self.machine.units["cpu"].attended_s(
                keys * is_plain,
                keys / size * (not is_plain),
                config.num_heads / config.num_kv_heads,
            )
            answers = self.rows * config.num_layers * config.attended_bytes_per_token(size)
            of_rows = {
                "cpu attention": attended_s,
                "host to device": self._s("host to device", answers, "activations"),
                "device to host": self._s(
                    "device to host", answers + self.rows * token, "activations"
                ),
            }
            if self.machine.share_beside("compute", frozenset({"cpu attention"}), 1.0) < 1:
                of_rows["compute"] = attended_s  # the same cores
            for lane, own_s in of_rows.items():
                for tier in TIERS[1:]:
                    seconds.setdefault(lane, {})[DELEGATED, tier] = own_s
            for lane in ("disk read", "disk write"):
                seconds[lane][DELEGATED, "disk"] = seconds[lane]["kv", "disk"]
        return Phase(count=self.new - 1, fixed_s={"compute": total_s - keys_s}, seconds=seconds)

    def _link_s(
        self, *, kv_in: float, kv_out: float, tokens: float
    ) -> dict[str, dict[Placed, float]]:
        """Seconds of each link for all of a kind on a tier, in one sweep."""
        crossings = sum(unit.kind != "head" for unit in self.planner.programme.units)
        stream = self.base.layout.stream_columns * self.base.layout.element_bytes
        moved = tokens * stream * crossings
        seconds: dict[str, dict[Placed, float]] = {
            "disk read": {
                ("weights", "disk"): self._s("disk read", self.weight_bytes, "weights"),
                ("kv", "disk"): self._s("disk read", kv_in, "kv"),
                ("activations", "disk"): self._s("disk read", moved, "activations"),
            },
            "disk write": {
                ("kv", "disk"): self._s("disk write", kv_out, "kv"),
                ("activations", "disk"): self._s("disk write", moved, "activations"),
            },
        }
        if self.near == "gpu":
            # Of a row in RAM or on disk the whole page in progress comes back.
            back = max(kv_out, self.page_bytes_per_sweep)
            inward, outward = "host to device", "device to host"
            seconds[inward] = {
                (kind, tier): self._s(inward, size, kind)
                for kind, size in self._kinds(self.weight_bytes, kv_in, moved)
                for tier in TIERS[1:]
            }
            seconds[outward] = {
                (kind, tier): self._s(outward, size, kind)
                for kind, size in self._kinds(0.0, back, moved)
                for tier in TIERS[1:]
            }
        return seconds

    @staticmethod
    def _kinds(weights: float, kv: float, moved: float) -> tuple[tuple[TensorKind, float], ...]:
        return ("weights", weights), ("kv", kv), ("activations", moved)

    def _s(self, link: str, num_bytes: float, kind: TensorKind) -> float:
        return self.machine.links[link].seconds(num_bytes, kind, _REQUEST_BYTES)

    def _compute_s(self, step: int) -> tuple[float, float]:
        """Computing a sweep, and the part of it that attending to keys takes."""
        own = self.planner
        cost = Cost(
            machine=self.machine,
            config=own.config,
            programme=own.programme,
            layout=self.base.layout,
            policy=self.policy,
            dtype=own.dtype,
            units=tuple(range(len(own.programme.units))),
        )
        sizes = WorkSizes.of(own.config, self.base.layout, self.policy, self.base.geometry)
        lengths = [(max(1, round(self.prompt)), round(self.new) + 1)] * self.rows
        sweep = make_sweep(0, rows_of_block(lengths, self.policy), step, sizes)
        return cost.sweep_s(sweep), cost.attention_s(sweep)
