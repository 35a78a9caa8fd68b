"""Bytes and seconds of one block shape, as the linear programme wants them.

What each share of a kind of tensor on a tier takes of memory, and of each lane in the prompts'
sweep and in later ones; where rows enter at any time, in sweeps that hold both. Knows rates and
sizes, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from freight.hardware.machine import Machine, TensorKind
from freight.model.batch import MicroBatch
from freight.plan.cost import Cost
from freight.plan.default import Plan, Planner
from freight.plan.kept_pages import held_beginnings, held_pages, keeps_kv, own_pages, pages_together
from freight.plan.linear import DELEGATED, LinearProblem, Phase, Placed
from freight.plan.policy import TIERS, Policy, Tier
from freight.plan.rollout import WorkSizes, batch_of
from freight.plan.scoreboard import RING_SLOTS
from freight.plan.workload import RowLength

__all__ = ["Terms"]

_K = TypeVar("_K")

_FRICTION: Final = 0.1
_REQUEST_BYTES: Final = float(4 << 20)
_FIXED: Final = (
    "workspace",
    "logits",
    "scores",
    "embedding rows",
    "weight staging",
    "window scratch",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Bytes and seconds of one block shape, as the linear programme wants them."""

    planner: Planner
    machine: Machine
    policy: Policy
    base: Plan
    weight_bytes: float
    ring_bytes: float
    kv_bytes: float
    kv_slot_bytes: float
    state_bytes: float
    state_slot_bytes: float
    page_bytes_per_sweep: float
    rows: int
    prompt: float
    new: float
    uses_disk: bool
    timed: dict[tuple[int, ...], tuple[float, float]]

    @classmethod
    def of(
        cls,
        planner: Planner,
        machine: Machine,
        policy: Policy,
        *,
        uses_disk: bool,
        timed: dict[tuple[int, ...], tuple[float, float]],
    ) -> Terms:
        """``timed`` are seconds of computing a micro-batch that are known, and become so."""
        workload = planner.workload
        base = planner.derive(policy)
        config = planner.config
        sizes = [sum(part.num_bytes for part in form.parts) for form in base.layout.forms]
        units = [sizes[form] for form in base.layout.form_of]
        threes = [sum(three) for three in zip(units, units[1:], units[2:], strict=False)]
        layer_pages = own_pages(policy, workload) * base.geometry.page_bytes
        held = float(layer_pages)
        if policy.is_continuous:
            held = policy.row_tokens / policy.page_tokens * base.geometry.page_bytes
        rows = min(policy.block_rows, workload.num_rows)
        windows, kept_rows = base.geometry.windows, policy.block_rows
        if not keeps_kv(policy, workload):  # one micro-batch of one layer at a time
            kept_rows = policy.micro_batch_size
        kept_layers = sum(base.geometry.kv_page_bytes) / base.geometry.page_bytes
        return cls(
            planner=planner,
            machine=machine,
            policy=policy,
            base=base,
            weight_bytes=float(sum(units)),
            ring_bytes=float(max(threes, default=sum(units))),
            kv_bytes=policy.blocks_in_flight
            * kept_rows
            * (kept_layers * held + windows.pages * sum(base.geometry.window_page_bytes)),
            kv_slot_bytes=float(
                base.geometry.page_bytes
                * max(
                    bool(kept_layers) * pages_together(policy, workload, policy.micro_batch_size),
                    windows.most_slot_pages,
                )
            ),
            state_bytes=float(
                base.geometry.state_layers
                * base.geometry.state_bytes
                * (
                    policy.blocks_in_flight
                    if keeps_kv(policy, workload)
                    else 1 + (policy.shares_prefixes and workload.is_brought)
                )
                * kept_rows
            ),
            state_slot_bytes=float(policy.micro_batch_size * base.geometry.state_bytes),
            page_bytes_per_sweep=float(
                rows * base.geometry.page_bytes * config.num_attention_layers
            ),
            rows=rows,
            prompt=workload.mean_row_prompt_tokens,
            new=max(1.0, workload.expected_new_tokens / workload.num_rows),
            uses_disk=uses_disk,
            timed=timed,
        )

    def problem(self) -> LinearProblem:
        phases = self._prefill(), self._decode()
        return LinearProblem(
            phases=(self._mixed(*phases),) if self.policy.is_continuous else phases,
            sizes=self._sizes(),
            rooms=self._rooms(),
            bounds=dict(self._bounds()),
            ties=tuple(self._ties()),
            overlap=self.policy.overlap,
            friction=_FRICTION if self.policy.overlap else 0.0,
        )

    def narrowed(self, problem: LinearProblem, planner: Planner) -> LinearProblem:
        """The problem for a planner with other wishes of where keys are, and of who attends."""
        own = replace(self, planner=planner)
        return replace(problem, bounds=dict(own._bounds()), ties=tuple(own._ties()))

    # -- memory --------------------------------------------------------------------------------

    @property
    def near(self) -> Tier:
        return self.policy.compute_tier

    def _rooms(self) -> dict[Tier, float]:
        """What is left beside scratch, logits, beginnings that prompts share, and the like."""
        g, policy = self.base.geometry, self.policy
        pages = policy.blocks_in_flight * held_pages(policy, self.planner.workload)
        beginnings = pages * sum(g.kv_page_bytes)
        held = policy.blocks_in_flight * held_beginnings(policy, self.planner.workload)
        beginnings += held * g.state_layers * g.state_bytes
        beginnings += held * g.windows.pages * sum(g.window_page_bytes)
        rooms: dict[Tier, float] = {}
        for tier, room in self.planner.room.items():
            beside = g.index_bytes if tier in ("cpu", self.near) else 0
            fixed = sum(g.usage[tier].get(purpose, 0) for purpose in _FIXED)
            fixed += beginnings if tier == self.near else 0
            rooms[tier] = float(room - fixed - beside)
        return rooms

    def _sizes(self) -> dict[Placed, dict[Tier, float]]:
        near, slots, tails = self.near, self.kv_slot_bytes, self._tail_bytes()
        tokens = self.policy.max_batch_tokens * self.base.layout.stream_columns
        stream = float(tokens * self.base.layout.element_bytes)
        block = self.policy.num_micro_batches
        states = self.state_bytes
        near_bytes, far_bytes = self.kv_bytes + states, self.far_share * self.kv_bytes + states
        passed = max(slots, self.state_slot_bytes)
        passing = RING_SLOTS["kv slot"] * passed
        if self.policy.recomputed:
            passing += slots
        sizes: dict[Placed, dict[Tier, float]] = {
            ("weights", near): {near: self.weight_bytes},
            ("kv", near): {near: near_bytes},
            ("activations", near): {near: block * stream},
            ("weights", "disk"): {near: self.ring_bytes},
            ("kv", "disk"): {near: passing, "disk": far_bytes},
            ("activations", "disk"): {near: RING_SLOTS["activation slot"] * stream},
        }
        if near == "gpu":
            in_ram = RING_SLOTS["delegated kv"] * slots
            staged = RING_SLOTS["kv in"] + RING_SLOTS["kv out"]
            sizes[DELEGATED, "cpu"] = {near: passing, "cpu": near_bytes}
            sizes[DELEGATED, "disk"] = {
                near: passing,
                "cpu": in_ram + tails + staged * self.state_slot_bytes,
                "disk": near_bytes,
            }
            sizes["kv", "disk"]["cpu"] = staged * passed + tails
            sizes["activations", "disk"]["cpu"] = 4 * stream
            sizes["weights", "cpu"] = {near: self.ring_bytes, "cpu": self.weight_bytes}
            sizes["kv", "cpu"] = {near: passing, "cpu": far_bytes}
            sizes["activations", "cpu"] = {
                near: RING_SLOTS["activation slot"] * stream,
                "cpu": block * stream,
            }
        else:
            sizes["kv", "disk"]["cpu"] += tails
        return sizes

    def _tail_bytes(self) -> float:
        """The page in progress of each row on disk, which is in RAM."""
        rows = self.policy.blocks_in_flight * self.policy.block_rows
        return float(rows * sum(self.base.geometry.far_page_bytes))

    @property
    def far_share(self) -> float:
        """Of the bytes of keys and values, what rows off the compute tier keep of all layers."""
        geometry = self.base.geometry
        far = geometry.far_page_bytes
        return sum(far) / (max(1, sum(map(bool, far))) * geometry.page_bytes)

    def _bounds(self) -> Iterator[tuple[Placed, tuple[float, float]]]:
        wishes = self.planner.wishes
        fixed = {"weights": wishes.weights, "kv": wishes.kv, "activations": wishes.activations}
        for kind, wish in fixed.items():
            for tier in TIERS:
                if tier == "gpu" and self.near == "cpu":
                    continue
                if tier == "disk" and not self.uses_disk:
                    continue
                if kind == "kv" and tier != self.near and self.keeps_kv_near:
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

    @property
    def keeps_kv_near(self) -> bool:
        """Whether keys are where the arithmetic is: those that are soon forgotten, or that are
        shared in a way that goes nowhere else."""
        shares = self.base.geometry.shared_page > 0
        return self.planner.forgets_kv or (shares and not self.planner.shares_anywhere)

    def _delegated_tiers(self) -> tuple[Tier, ...]:
        """Where rows may be that the CPU attends."""
        wishes = self.planner.wishes
        if self.near == "cpu" or wishes.cpu_attention == 0.0 or self.keeps_kv_near:
            return ()
        if self.policy.recomputed or self.base.geometry.shared_page:
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
        config, windows = self.planner.config, self.base.geometry.windows
        token = config.kept_bytes_per_token_per_layer(self.base.layout.element_bytes)
        workload, page = self.planner.workload, self.base.geometry.shared_page
        own = (config.num_attention_layers - windows.layers) * (self.prompt - self._shared_tokens)
        own += windows.layers * min(self.prompt, windows.pages * self.policy.page_tokens)
        computed = self.rows * workload.mean_computed_tokens(page)
        total_s, _ = self._compute_s(0)
        out = self.far_share * self.rows * own * token
        seconds = self._link_s(kv_in=0.0, kv_out=out, states_in=0.0, tokens=computed)
        for lane in seconds.values():
            for tier in TIERS[1:]:
                lane[DELEGATED, tier] = lane.get(("kv", tier), 0.0)
        return Phase(count=1.0, fixed_s={"compute": total_s}, seconds=seconds)

    @property
    def _shared_tokens(self) -> float:
        """Of a row, the tokens whose keys are those of its beginning."""
        return self.planner.workload.mean_shared_tokens(self.base.geometry.shared_page)

    def _decode(self) -> Phase:
        config, size = self.planner.config, self.base.layout.element_bytes
        token = config.kv_bytes_per_token(size)
        own = self.prompt - self._shared_tokens
        held = self.rows * (own + self.new / 2)
        windows, layers = self.base.geometry.windows, config.num_attention_layers
        whole = held * (layers - windows.layers)
        passed = whole + self.rows * windows.layers * windows.reached(self.prompt + self.new / 2)
        kv_in = passed * config.kept_bytes_per_token_per_layer(size)
        total_s, keys_s = self._compute_s(max(1, round(self.new / 2)))
        far_in, far_out = self.far_share * kv_in, self.far_share * self.rows * token
        states = self.states_per_sweep
        seconds = self._link_s(kv_in=far_in, kv_out=far_out, states_in=states, tokens=self.rows)
        seconds["compute"] = {("kv", tier): keys_s for tier in TIERS}
        if self.policy.recomputed:
            again_s = self._cost().keys_again_s(held)
            for tier in set(TIERS) - {self.near}:
                seconds["compute"]["kv", tier] += again_s
        if self.near == "gpu":
            # What is a value, too, is met twice.
            keys = passed * 2 / config.num_key_parts * config.kv_bytes_per_token_per_layer(size)
            is_plain = config.kv_format is None
            attended_s = self.machine.units["cpu"].attended_s(
                keys * is_plain,
                keys / size * (not is_plain),
                config.queries_per_key,
            )
            answers = self.rows * layers * config.attended_bytes_per_token(size)
            of_rows = {
                "cpu attention": attended_s,
                "host to device": self._s("host to device", answers + states, "activations"),
                "device to host": self._s(
                    "device to host", answers + states + self.rows * token, "activations"
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

    def _mixed(self, prefill: Phase, decode: Phase) -> Phase:
        """The sweeps of rows of all ages: in each, one in so many brings its prompt, and what both
        kinds of rows need is needed beside one another."""
        first = 1 / self.new

        def mix(one: Mapping[_K, float], other: Mapping[_K, float]) -> dict[_K, float]:
            return {
                key: first * one.get(key, 0.0) + (1 - first) * other.get(key, 0.0)
                for key in {**one, **other}
            }

        nothing: Mapping[Placed, float] = {}
        return Phase(
            count=self.new,
            fixed_s=mix(prefill.fixed_s, decode.fixed_s),
            seconds={
                lane: mix(prefill.seconds.get(lane, nothing), decode.seconds.get(lane, nothing))
                for lane in {**prefill.seconds, **decode.seconds}
            },
        )

    @property
    def states_per_sweep(self) -> float:
        """What all rows keep in layers without keys."""
        geometry = self.base.geometry
        layers = self.planner.config.num_recurrent_layers
        return float(self.rows * layers * geometry.state_bytes)

    def _link_s(
        self, *, kv_in: float, kv_out: float, states_in: float, tokens: float
    ) -> dict[str, dict[Placed, float]]:
        """Seconds of each link for all of a kind on a tier, in one sweep."""
        states_out = self.states_per_sweep
        # Of a row in RAM or on disk the whole page in progress comes back.
        back = max(kv_out, self.far_share * self.page_bytes_per_sweep) + states_out
        kv_in, kv_out = kv_in + states_in, kv_out + states_out
        stream = self.base.layout.stream_columns * self.base.layout.element_bytes
        moved = tokens * stream * self.planner.programme.picks_at
        unlikely = 1.0 - self.planner.config.expert_likelihood(tokens)
        weights = self.weight_bytes - unlikely * self.base.layout.expert_bytes
        seconds: dict[str, dict[Placed, float]] = {
            "disk read": {
                ("weights", "disk"): self._s("disk read", weights, "weights"),
                ("kv", "disk"): self._s("disk read", kv_in, "kv"),
                ("activations", "disk"): self._s("disk read", moved, "activations"),
            },
            "disk write": {
                ("kv", "disk"): self._s("disk write", kv_out, "kv"),
                ("activations", "disk"): self._s("disk write", moved, "activations"),
            },
        }
        if self.near == "gpu":
            inward, outward = "host to device", "device to host"
            seconds[inward] = {
                (kind, tier): self._s(inward, size, kind)
                for kind, size in self._kinds(weights, kv_in, moved)
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
        alone = kind == "weights" and not self.policy.overlap
        return self.machine.links[link].seconds(num_bytes, kind, _REQUEST_BYTES, one_by_one=alone)

    def _compute_s(self, step: int) -> tuple[float, float]:
        """Computing a sweep, and the part of it that attending to keys takes."""
        full, rest = divmod(self.rows, self.policy.micro_batch_size)
        total_s = keys_s = 0.0
        for count, rows in ((full, self.policy.micro_batch_size), (1, rest)):
            if count and rows:
                # All that it depends on, of what differs between block shapes.
                geometry, chunk = self.base.geometry, self.policy.chunk_tokens
                key = rows, step, chunk, geometry.windows.pages, geometry.shared_page
                if key not in self.timed:
                    self.timed[key] = self._batch_s(rows, step)
                total_s += count * self.timed[key][0]
                keys_s += count * self.timed[key][1]
        return total_s, keys_s

    def _batch_s(self, rows: int, step: int) -> tuple[float, float]:
        """The same of a micro-batch: the others of its block do not matter to it."""
        batch, cost = self._batch(rows, step), self._cost()
        return cost.batch_s(batch), cost.attention_s(batch)

    def _batch(self, rows: int, step: int) -> MicroBatch:
        """So many rows of the mean length."""
        workload = self.planner.workload
        sizes = WorkSizes.of(self.base, self.planner.config)
        prompt = max(1, round(self.prompt))
        shared = min(round(self._shared_tokens), prompt - 1)
        length = RowLength(prompt, round(self.new) + 1, shared)
        begun = workload.begun(rows) if shared else 0
        return batch_of(length, rows, begun, step, sizes)

    def _cost(self) -> Cost:
        own = self.planner
        return Cost(
            machine=self.machine,
            config=own.config,
            programme=own.programme,
            layout=self.base.layout,
            policy=self.policy,
            dtype=own.dtype,
            units=tuple(range(len(own.programme.units))),
            window_pages=self.base.geometry.windows.pages,
            may_stay=self.weight_bytes <= own.room[self.near],
        )
