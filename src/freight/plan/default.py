"""A plain policy that fits, where flags leave the choice open; and refusal where nothing fits.

Block sizes are tried from a short list, weights fill what memory is left, fastest tier first, and
the candidates are compared by nominal rates. A planner that measures the machine does better; this
one needs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from freight.model.config import DTYPE_BYTES, ModelConfig
from freight.model.programme import Programme
from freight.model.sources import TensorSource
from freight.model.weight import Weight
from freight.plan.forms import BLOCK, Forms, find_forms
from freight.plan.geometry import SHAPES_BYTES, Geometry, measure
from freight.plan.kept_pages import may_forget_kv
from freight.plan.layout import WeightLayout, lay_out
from freight.plan.model_limits import settle_wishes
from freight.plan.page_sizes import fitting_page_tokens
from freight.plan.policy import Admission, Policy, Split, Tier
from freight.plan.recomputation import check_recomputation
from freight.plan.refusal import refusal
from freight.plan.ring import choose_piece_bytes, staging_pieces
from freight.plan.windows import counted_tokens
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload

__all__ = ["Plan", "Planner"]

_DISK_BYTES_PER_S: Final = 2e9
_LINK_BYTES_PER_S: Final = 12e9
_FLOPS: Final[Mapping[Tier, float]] = {"cpu": 5e11, "gpu": 5e13}
_MEMORY_BYTES_PER_S: Final[Mapping[Tier, float]] = {"cpu": 1e10, "gpu": 3e11}
_CONTENTION: Final = 0.25
_BATCH_OVERHEAD_S: Final = 2e-3
_CHUNKS: Final = (2048, 512)
_LEAST_PROMPT_TOKENS: Final = 256
"""Of prompts that enter beside rows that decode: fewer make poor products of matrices."""
_REFILL_PACE: Final = 2.0
"""Answers of many lengths spread by themselves: rows may enter faster than those of one length
should, and the block is full sooner."""
_SMALL_SCRATCH: Final = 0.03
_CHUNK_COST_TOKENS: Final = 100
"""A product of n rows takes as long as one of n + this at full rate: weights are packed first."""
_MOST_BATCH_ROWS: Final = 256
_MOST_BATCH_TOKENS: Final = 16384
_MOST_MICRO_BATCHES: Final = 256
_COARSE_STEPS: Final = 6
_FINE_STEPS: Final = 12
"""Halvings of a share: candidates are compared with few, for then they share their layouts; the
best one is filled to the end."""

_ON_DISK: Final = Split(disk=1.0)

_Placed = Literal["weights", "embedding"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A policy with what follows from it."""

    policy: Policy
    layout: WeightLayout
    geometry: Geometry
    workload: Workload

    def with_sources(
        self, config: ModelConfig, sources: Mapping[str, TensorSource], dtype: str
    ) -> Plan:
        """The same plan for weights that lie elsewhere."""
        own, tied = self.layout.programme, config.tied_embeddings
        layout = lay_out(own, sources, self.policy, dtype=dtype, tied_embeddings=tied)
        geometry = measure(config, layout, self.policy, self.workload, self.geometry.shapes_bytes)
        return replace(self, layout=layout, geometry=geometry)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Plans one model and workload for one machine. ``room`` is what may be taken of each tier;
    ``taken`` of their budgets is what the process and the device's context have. KV goes to
    disk only where ``has_disk_dir`` or the user says so. ``layouts`` are those made so far: of a
    policy they depend on the splits alone, and all else that is ``sized`` on the rest. ``elements``
    are those of all experts, and before them those of all else. Libraries keep ``shapes_bytes`` for
    sweeps of many numbers of tokens."""

    config: ModelConfig
    programme: Programme
    sources: Mapping[str, TensorSource]
    dtype: str
    workload: Workload
    compute_tier: Tier
    room: Mapping[Tier, int]
    taken: Mapping[Tier, int]
    has_disk_dir: bool
    wishes: Wishes
    blocks_in_flight: int = 1
    shapes_bytes: int = SHAPES_BYTES
    layouts: dict[tuple[Split, Split | None], WeightLayout] = field(default_factory=dict)
    sized: dict[Policy, Geometry] = field(default_factory=dict, init=False)
    elements: tuple[int, int] = field(init=False)
    forms: Forms = field(init=False)
    piece_bytes: int = field(init=False)
    staging_pieces: int = field(init=False)

    def __post_init__(self) -> None:
        check_recomputation(self.config, self.programme, self.wishes.recomputed)
        settled = settle_wishes(self.config, self.compute_tier, self.wishes)
        object.__setattr__(self, "wishes", settled.within(self.workload.num_rows))
        units = self.programme.units[1:]
        expert = sum(unit.num_elements for unit in units if unit.expert is not None)
        object.__setattr__(self, "elements", (sum(u.num_elements for u in units) - expert, expert))
        object.__setattr__(self, "forms", find_forms(self.programme, self.sources))
        largest = self._largest_unit()
        piece = choose_piece_bytes(self.compute_tier, largest)
        object.__setattr__(self, "piece_bytes", piece)
        staged = staging_pieces(self.room.get("cpu", 0), piece, largest)
        object.__setattr__(self, "staging_pieces", staged)

    def plan(self) -> Plan:
        """The candidate with the shortest nominal time per row; BudgetError if none fits."""
        best: Plan | None = None
        best_s = float("inf")
        nearest: Plan | None = None
        for policy in self._candidates():
            plan = self._fill(policy, _COARSE_STEPS)
            if not self._excess(plan):
                seconds = self._seconds_per_row(plan)
                if seconds < best_s:
                    best, best_s = plan, seconds
            elif nearest is None or self._missing(plan) < self._missing(nearest):
                nearest = plan
        if best is not None:
            return self._fill(best.policy, _FINE_STEPS)
        assert nearest is not None
        needs = {tier: self._need(nearest, tier) for tier in self._excess(nearest)}
        usage, own = nearest.geometry.usage, self.wishes
        kept = self.has_disk_dir
        raise refusal(usage, needs, self.room, self.taken, own, has_disk_dir=kept)

    def _candidates(self) -> Iterator[Policy]:
        wishes = self.wishes
        splits = [Split(gpu=1.0), Split(cpu=1.0), Split(disk=1.0)]
        near = splits if self.compute_tier == "gpu" else splits[1:]
        open_kvs = near if self.has_disk_dir else near[:-1]
        kvs = [wishes.kv] if wishes.kv else open_kvs[: 1 if self.forgets_kv else None]
        for kv in kvs:
            for shares in self.sharing(kv):
                for size, count in self._block_shapes():
                    shape = self.shape(size, count, shares=shares)
                    yield from self.with_chunks(replace(shape, kv=kv))

    def sharing(self, kv: Split | None = None) -> tuple[bool, ...]:
        """Whether policies should share what prompts begin with: it takes memory of the compute
        tier, so where it can be done both are worth a look."""
        kv, wish = kv or self.wishes.kv, self.wishes.shares_prefixes
        if not wish or self.workload.beginnings is None:
            return (wish,)
        can_share = kv is None or kv.share(self.compute_tier) == 1 or self.shares_anywhere
        return (True, False) if can_share else (False,)

    @property
    def shares_anywhere(self) -> bool:
        """Whether rows elsewhere can share it: not if attention needs all keys, or is delegated."""
        return self.config.attended_share == 1 and not self.wishes.cpu_attention

    def with_chunks(self, policy: Policy) -> Iterator[Policy]:
        """With large chunks, and with small ones where scratch memory is worth saving."""
        large, small = (
            replace(policy, chunk_tokens=min(tokens, max(1, policy.max_batch_tokens)))
            for tokens in _CHUNKS
        )
        yield large
        if small == large:
            return
        plan = self.derive(large)
        scratch = plan.geometry.workspace_bytes
        if self._excess(plan) or scratch > _SMALL_SCRATCH * self.room[self.compute_tier]:
            yield small

    def shape(
        self,
        size: int,
        count: int,
        admission: Admission | None = None,
        *,
        shares: bool | None = None,
    ) -> Policy:
        """A block of ``count`` micro-batches of ``size`` rows: what the user fixed is as wished,
        rows are where the arithmetic is and weights are on disk. Unless it ``shares`` what prompts
        begin with each row brings its whole prompt."""
        wishes, own = self.wishes, self.workload
        page_tokens = fitting_page_tokens(
            self.config, own.max_total_tokens, DTYPE_BYTES[self.dtype]
        )
        admission = admission or wishes.admission or "zigzag"
        shares = self.sharing()[0] if shares is None else shares
        near = Split(gpu=1.0) if self.compute_tier == "gpu" else Split(cpu=1.0)
        return Policy(
            compute_tier=self.compute_tier,
            weights=wishes.weights or Split(disk=1.0),
            kv=wishes.kv or near,
            activations=wishes.activations or near,
            micro_batch_size=size,
            num_micro_batches=count,
            max_batch_tokens=self._batch_tokens(size, admission, page_tokens * shares),
            page_tokens=page_tokens,
            piece_bytes=self.piece_bytes,
            staging_pieces=self.staging_pieces,
            cpu_attention=wishes.cpu_attention or 0.0,
            recomputed=wishes.recomputed or 0.0,
            admission=admission,
            entry_pace=_REFILL_PACE if admission == "refill" and own.has_many_lengths else 1.0,
            row_tokens=self._row_tokens(admission, page_tokens, page_tokens * shares),
            shares_prefixes=shares,
            blocks_in_flight=self.blocks_in_flight,
            **wishes.settled,
        )

    def _batch_tokens(self, size: int, admission: Admission, shared_page: int) -> int:
        """The most tokens that a micro-batch brings to a sweep: all of its prompts, or where rows
        enter at any time twice as many of them as do on average."""
        own = self.workload
        made = size * (1 + self.wishes.draft_tokens)
        longest, held = own.own_prompt_tokens(shared_page), own.most_begun(size, shared_page)
        whole = max(made, own.max_prompts(size) * longest + held)
        if self.wishes.batch_tokens is not None:
            return max(size, min(whole, self.wishes.batch_tokens))
        if admission == "zigzag":
            return whole
        entering = size / own.mean_new_tokens * own.mean_computed_tokens(shared_page)
        return min(whole, made + max(_LEAST_PROMPT_TOKENS, math.ceil(2 * entering)))

    def _row_tokens(self, admission: Admission, page_tokens: int, shared_page: int) -> int:
        """Tokens of KV per row of a block that is never full of its longest; 0 where it may be."""
        own = self.workload
        if admission == "zigzag":
            return 0
        held = own.held_tokens(page_tokens, shared_page)
        if admission == "diagonal":  # as if all answers were as long as they may be
            held = own.mean_row_prompt_tokens - own.mean_shared_tokens(shared_page)
            held += (own.max_new_tokens + page_tokens) / 2
        return counted_tokens(self.config, self.programme, self.wishes, page_tokens, held)

    def realise(self, policy: Policy) -> Plan | None:
        """The policy with as much of the weights in memory as fits, fastest tier first, or None."""
        plan = self._fill(policy, _FINE_STEPS)
        return None if self._excess(plan) else plan

    def _block_shapes(self) -> Iterator[tuple[int, int]]:
        """(rows per micro-batch, micro-batches), no larger than the dataset."""
        rows, prompt = self.workload.num_rows, self.workload.max_prompt_tokens
        prompts = max(1, _MOST_BATCH_TOKENS // prompt) * self.workload.min_samples
        most = max(1, min(rows, _MOST_BATCH_ROWS, prompts))
        sizes = sorted({max(1, -(-most // 2**halving)) for halving in range(9)}, reverse=True)
        samples = self.workload.max_samples  # whole families leave no row of a batch empty
        sizes = [size - size % samples if size > samples else size for size in sizes]
        if self.wishes.micro_batch_size:
            sizes = [self.wishes.micro_batch_size]
        for size in sizes:
            for count in self.counts(size, (1, 2, 4, 8)):
                yield size, count

    @property
    def forgets_kv(self) -> bool:
        """Whether rows are best held where the arithmetic is, in each sweep others, as asked."""
        wishes, near = self.wishes, self.compute_tier
        is_free = wishes.kv is None or wishes.kv.share(near) == 1
        is_whole = wishes.admission in (None, "zigzag") and wishes.batch_tokens is None
        return wishes.forgets_keys and may_forget_kv(self.workload) and is_free and is_whole

    def counts(self, size: int, usual: Sequence[int]) -> list[int]:
        """How many micro-batches of ``size`` rows a block may have, no more than there are rows
        for. Rows that leave no keys behind take little: then up to all that there are."""
        if self.wishes.num_micro_batches:
            return [self.wishes.num_micro_batches]
        most = -(-self.workload.num_rows // size)
        counts = {min(count, most) for count in usual}
        if self.forgets_kv:
            largest = min(most, _MOST_MICRO_BATCHES)
            counts |= {largest >> halving for halving in range(largest.bit_length())}
        return sorted(counts)

    def _largest_unit(self) -> int:
        """Its bytes: pieces are no larger, for small models would stream through a ring of air."""

        def num_bytes(weight: Weight) -> int:
            own = self.sources[weight.name]
            return own.num_bytes * weight.num_rows // own.shape[0] + 2 * BLOCK

        return max(sum(map(num_bytes, unit.weights)) for unit in self.forms[0])

    # -- filling memory with weights -----------------------------------------------------------

    def _fill(self, policy: Policy, num_steps: int) -> Plan:
        """Place as much of the weights as fits, fastest tier first, unless the user did; then of
        the embedding's table, of which a sweep needs few rows: it lies as the user's weights do
        where there is room."""
        if self.wishes.weights is not None:
            plan = self.derive(policy)
            other = self.derive(replace(policy, embedding=_ON_DISK))
            if not self._excess(plan) or self._excess(other):
                return plan
            return self._raise_share(other, "embedding", num_steps)
        plan = self.derive(replace(policy, weights=_ON_DISK, embedding=_ON_DISK))
        if self._excess(plan):
            return plan
        plan = self._raise_share(plan, "weights", num_steps)
        if plan.policy.weights.disk:
            return plan
        return self._raise_share(plan, "embedding", num_steps)

    def _raise_share(self, plan: Plan, name: _Placed, num_steps: int) -> Plan:
        """The most of one kind of tensor that fits, fastest tier first; so far all is on disk."""
        tiers: list[Tier] = ["gpu", "cpu"] if self.compute_tier == "gpu" else ["cpu"]
        shares: dict[Tier, float] = {"gpu": 0.0, "cpu": 0.0}
        for tier in tiers:
            most, best = 1 - sum(shares.values()), plan
            # What a tier needs rises nearly in a straight line: the border is there, or next to it.
            low, high = 0, 2**num_steps + 1
            over = {0: self._most_over(plan)}
            step = high - 1
            while low < high - 1:
                split = Split.rest_on_disk({**shares, tier: most * step / 2**num_steps})
                policy = replace(plan.policy, **{name: split})  # type: ignore[arg-type]
                candidate = self.derive(policy, plan.geometry)
                over[step] = self._most_over(candidate)
                if over[step] <= 0:
                    low, best = step, candidate
                else:
                    high = step
                guess = step + 1 if low == step else step - 1
                if len(over) == 2 and high < 2**num_steps + 1:
                    guess = int(high * over[0] / (over[0] - over[high]))
                elif len(over) > 3:
                    guess = (low + high) // 2
                step = min(high - 1, max(low + 1, guess))
            shares[tier] = most * low / 2**num_steps
            plan = best
        return plan

    def _most_over(self, plan: Plan) -> int:
        """Bytes over the room of the tier that has too little of it, or least to spare."""
        return max(self._need(plan, tier) - room for tier, room in self.room.items())

    def derive(self, policy: Policy, like: Geometry | None = None) -> Plan:
        """What follows from a policy, or is ``like`` that of one whose weights alone lie elsewhere.
        It may not fit."""
        splits = policy.weights, policy.embedding
        if splits not in self.layouts:
            self.layouts[splits] = lay_out(
                self.programme,
                self.sources,
                policy,
                dtype=self.dtype,
                tied_embeddings=self.config.tied_embeddings,
                found=self.forms,
            )
        layout = self.layouts[splits]
        about = self.config, layout, policy, self.workload, self.shapes_bytes
        if like is None:
            rows = replace(policy, weights=_ON_DISK, embedding=None)
            geometry = self.sized[rows] = measure(*about, self.sized.get(rows))
        else:
            geometry = measure(*about, like)
        return Plan(policy=policy, layout=layout, geometry=geometry, workload=self.workload)

    def _excess(self, plan: Plan) -> dict[Tier, int]:
        """Bytes over the room of each tier that has too little."""
        excess = {tier: self._need(plan, tier) - room for tier, room in self.room.items()}
        return {tier: over for tier, over in excess.items() if over > 0}

    def _missing(self, plan: Plan) -> int:
        return sum(self._excess(plan).values())

    def _need(self, plan: Plan, tier: Tier) -> int:
        """Bytes of a tier: its buffer, and where the arithmetic or the rows are, their indices."""
        beside = plan.geometry.index_bytes if tier in ("cpu", self.compute_tier) else 0
        return plan.geometry.total(tier) + beside

    def _seconds_per_row(self, plan: Plan) -> float:
        policy, layout = plan.policy, plan.layout
        rows = min(policy.block_rows, self.workload.num_rows)
        disk_s = (disk_bytes := self._needed_bytes(layout, "disk", rows)) / _DISK_BYTES_PER_S
        link_bytes = self._needed_bytes(layout, "cpu", rows)
        own = self.workload.own_total_tokens(plan.geometry.shared_page)
        pages = rows * own // policy.page_tokens
        kv_bytes = plan.geometry.far_bytes(self.config, rows, pages)
        if self.compute_tier == "gpu":
            link_bytes += disk_bytes
            link_bytes += round((1 - policy.kv.gpu) * kv_bytes)
        disk_s += policy.kv.disk * kv_bytes / _DISK_BYTES_PER_S
        io_s = max(disk_s, link_bytes / _LINK_BYTES_PER_S)
        if self.forgets_kv:
            return self._seconds_of_sweeps(plan, io_s) / self.workload.num_rows
        prompts = policy.num_micro_batches * self.workload.max_prompts(policy.micro_batch_size)
        num_tokens = min(rows, prompts) * self._own_tokens(plan)
        prefill_s = _together(io_s, self._compute_s(plan, num_tokens))
        decode_s = _together(io_s, self._compute_s(plan, rows))
        return (prefill_s + max(0, self.workload.max_new_tokens - 1) * decode_s) / rows

    def _seconds_of_sweeps(self, plan: Plan, io_s: float) -> float:
        """All blocks, of which each is one sweep: how many there are is what counts."""
        policy, rows = plan.policy, self.workload.num_rows
        num_tokens = rows * self._own_tokens(plan)
        compute_s = self._compute_s(plan, num_tokens, -(-rows // policy.micro_batch_size))
        return _together(-(-rows // policy.block_rows) * io_s, compute_s)

    def _own_tokens(self, plan: Plan) -> int:
        """Of the longest prompt, those that no other row computes."""
        return self.workload.own_prompt_tokens(plan.geometry.shared_page)

    def _compute_s(self, plan: Plan, num_tokens: int, count: int | None = None) -> float:
        """Arithmetic of a sweep, or of ``count`` micro-batches of several; every micro-batch also
        reads all weights from memory."""
        plain, expert = self.elements
        used = plain + expert * self._share_of_tokens(True)
        read = plain + expert * self._share_of_sweeps(True, num_tokens)
        slowed = 1 + _CHUNK_COST_TOKENS / plan.policy.chunk_tokens
        arithmetic_s = 2 * used * num_tokens * slowed / _FLOPS[self.compute_tier]
        read_s = read * plan.layout.element_bytes / _MEMORY_BYTES_PER_S[self.compute_tier]
        count = count or plan.policy.num_micro_batches
        return max(arithmetic_s, count * read_s) + count * _BATCH_OVERHEAD_S

    def _needed_bytes(self, layout: WeightLayout, tier: Tier, num_tokens: int) -> int:
        """Bytes from a tier that a sweep of so many tokens is expected to bring."""
        needed = 0.0
        for own, count in layout.counted():
            size = count * own.streamed_bytes(tier)[1]
            needed += size * self._share_of_sweeps(own.unit.expert is not None, num_tokens)
        return round(needed)

    def _share_of_tokens(self, is_expert: bool) -> float:
        experts = self.config.experts
        if not is_expert or experts is None:
            return 1.0
        return experts.per_token / experts.num_experts

    def _share_of_sweeps(self, is_expert: bool, num_tokens: int) -> float:
        """How likely any of the tokens is to need a unit."""
        return self.config.expert_likelihood(num_tokens) if is_expert else 1.0


def _together(first_s: float, second_s: float) -> float:
    """Two things side by side: the longer hides the shorter, but they share memory and cores."""
    return max(first_s, second_s) + _CONTENTION * min(first_s, second_s)
