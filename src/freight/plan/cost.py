"""Operations in seconds: what each takes on a machine when nothing else works.

Products by the rate at their number of rows, attention by queries and keys, everything else by the
bytes that it passes over; links by bytes and request size. Knows a machine's rates and a model's
programme, no order of operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from freight.hardware.curve import Curve
from freight.hardware.machine import ComputeUnit, Machine, TensorKind
from freight.model.batch import LEAST_SHARERS, MicroBatch, RowSpan, chunk_rows
from freight.model.number_format import Compressed
from freight.model.programme import Attend, Programme, Unit, picking_unit
from freight.model.switches import ModelConfig
from freight.model.tiles import TOKENS_OF_A_LAUNCH
from freight.plan.attended_pairs import Part, own_parts, pairs_of, seen_keys
from freight.plan.chunk_cost import chunk_s
from freight.plan.kept_pages import lie_in_extents
from freight.plan.layout import WeightLayout
from freight.plan.operation import Kind, Lane, Operation
from freight.plan.page_sizes import page_size, state_size
from freight.plan.policy import Policy
from freight.plan.ring import size_ring
from freight.plan.simulate import Demand
from freight.plan.state_cost import states_s
from freight.quantities import MIB

__all__ = ["Cost"]

_PASSES_OF_NEW_KEYS: Final = 4.0
_PASSES_OF_NEW_CODES: Final = 20.0

_KINDS: Final[Mapping[Kind, TensorKind]] = {
    Kind.READ_KV: "kv",
    Kind.COPY_KV: "kv",
    Kind.COPY_BACK_KV: "kv",
    Kind.WRITE_KV: "kv",
    Kind.READ_DELEGATED: "kv",
    Kind.WRITE_DELEGATED: "kv",
    Kind.COPY_QUERIES: "activations",
    Kind.COPY_ATTENDED: "activations",
    Kind.READ_HIDDEN: "activations",
    Kind.COPY_HIDDEN: "activations",
    Kind.COPY_BACK_HIDDEN: "activations",
    Kind.WRITE_HIDDEN: "activations",
}
_KV_ON_DISK: Final = (Kind.READ_KV, Kind.WRITE_KV, Kind.READ_DELEGATED, Kind.WRITE_DELEGATED)
_KV_MOVES: Final = frozenset(kind for kind, moved in _KINDS.items() if moved == "kv")
_COMPUTED: Final = frozenset((Kind.COMPUTE, Kind.BEGIN_ATTENTION, Kind.FINISH_ATTENTION))
_REQUEST_BYTES: Final = 8 * MIB
_LOGIT_PASSES: Final = 3.0
_CALLS_OF_A_GROUP: Final = 3.0
"""That several experts take by one computation, which sorts tokens and adds up what each has."""

_Kept = Literal["keys", "states", "window"]
_Key = tuple[Kind, int, int, int, int, bool, bool, bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What operations take for a model laid out in one way. Times are kept: units of one form take
    equally long for the same rows, moves of as many bytes too."""

    machine: Machine
    config: ModelConfig
    programme: Programme
    layout: WeightLayout
    policy: Policy
    dtype: str
    units: tuple[int, ...]
    """For each unit of the schedule, its number in the programme."""
    window_pages: int = 0
    """Of a row in layers that keep the last window of keys; 0: all are kept everywhere."""
    kept: dict[_Key, Demand] = field(default_factory=dict)
    chunks: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds of a unit, by its identity, for a number of tokens, but for the call."""
    moves: dict[tuple[Kind, int, int, _Kept], Demand] = field(default_factory=dict)
    slowing: dict[tuple[Lane, frozenset[Lane]], tuple[Curve, ...]] = field(default_factory=dict)
    keys: dict[int, Unit | None] = field(default_factory=dict)
    """Of an attention unit, by its identity, what makes its keys."""
    compressed: Mapping[str, Compressed] = field(init=False)
    """How weights are compressed that are, by their names in one unit of each form."""
    may_stay: bool = False
    """Whether there is room for all weights where they are computed, which the layout need not
    use."""
    most_together: float = field(init=False)
    """How many experts come together: any number where all of them are there, or may be."""
    picks_at: int = field(init=False)
    """The unit of the schedule from which on only those tokens are computed that the head needs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressed", self.layout.compressed)
        experts = [form for form in self.layout.forms if form.unit.expert is not None]
        stay = self.may_stay or not any(form.streamed for form in experts)
        own = size_ring(self.layout, self.policy.piece_bytes).most_together
        object.__setattr__(self, "most_together", math.inf if stay else own)
        kinds = [self.programme.units[number].kind for number in self.units]
        picks_at = picking_unit(kinds, needs_all=self.programme.needs_all)
        object.__setattr__(self, "picks_at", picks_at)

    @property
    def forms(self) -> tuple[int, ...]:
        """For each unit of the programme, a number that units of one form share."""
        return self.programme.forms

    @property
    def unit(self) -> ComputeUnit:
        return self.machine.units[self.policy.compute_tier]

    @property
    def size(self) -> int:
        return self.layout.element_bytes

    def demand(self, operation: Operation) -> Demand:
        """Seconds of an operation alone."""
        if operation.kind in _COMPUTED:
            return self._computation(operation)
        key = operation.kind, operation.num_bytes, len(operation.others), self._kept(operation)
        if (known := self.moves.get(key)) is not None:
            return known
        if operation.kind is Kind.ATTEND:
            return self._attention(operation)
        if operation.kind is Kind.DECODE_WEIGHTS:
            decoded = self.layout.form(self.units[operation.unit]).decoded_bytes
            return Demand(seconds=2.5 * decoded / self.unit.memory_bytes_per_s)
        self.moves[key] = self._move(operation)
        return self.moves[key]

    def _move(self, operation: Operation) -> Demand:
        request = float(min(operation.num_bytes / (1 + len(operation.others)), _REQUEST_BYTES))
        if operation.kind is Kind.READ_EMBEDDING:
            widest = max(self.config.embedding_size, self.config.input_columns)
            request = float(widest * self.size)
        elif (kept := self._kept(operation)) == "states":
            request = min(request, float(state_size(self.config, self.size)))
        elif operation.kind in _KV_ON_DISK and self.policy.is_continuous:
            request = min(request, self._kv_request(operation.kind, kept))
        kind = _KINDS.get(operation.kind, "weights")
        link = self.machine.links[operation.lane.value]
        alone = operation.kind is Kind.READ_WEIGHTS and not self.policy.overlap
        seconds = link.seconds(operation.num_bytes, kind, max(request, 1.0), one_by_one=alone)
        return Demand(seconds=seconds, size=request)

    def _kept(self, operation: Operation) -> _Kept:
        """What of a row it moves: what is kept in a layer without keys, the pages that a window
        reaches, or all keys."""
        if operation.kind not in _KV_MOVES:
            return "keys"
        unit = self.programme.units[self.units[operation.unit]]
        if unit.kind == "recurrence":
            return "states"
        return "window" if self.window_pages and unit.has_window else "keys"

    def _kv_request(self, kind: Kind, kept: _Kept) -> float:
        """Bytes of keys and values that lie together on disk where rows enter at any time: one
        page, or of a row that has an extent all that it is expected to have."""
        page_bytes = page_size(self.config, self.policy.page_tokens, self.size)
        is_read = kind in (Kind.READ_KV, Kind.READ_DELEGATED)
        if is_read and kept == "window":
            return float(self.window_pages * page_bytes)
        if not is_read or not lie_in_extents(self.policy, page_bytes):
            return float(page_bytes)
        return max(1.0, self.policy.row_tokens / self.policy.page_tokens) * page_bytes

    def batch_s(self, batch: MicroBatch) -> float:
        """A micro-batch in a whole sweep, waiting for nothing; of experts those that are likely."""
        seconds = self._finish_s(batch)
        for unit, is_picked, count in self.programme.counted:
            rows = self._rows_of(unit, batch, is_picked=is_picked)
            if unit.expert is not None:
                seconds += self._likely_s(unit, count, rows, batch.num_tokens)
            else:
                seconds += count * self._unit_s(unit, batch, _attending(unit, batch), rows)
        return seconds

    def attention_s(self, batch: MicroBatch) -> float:
        """The part of ``batch_s`` that goes by the number of keys."""
        return sum(
            count * self._keys_s(step, _attending(unit, batch))
            for unit, _, count in self.programme.counted
            for step in unit.steps
            if isinstance(step, Attend)
        )

    def tokens_s(self, num_tokens: int) -> float:
        """All units but the head for so many tokens of a micro-batch, attending nothing; of experts
        those that are likely."""
        seconds = 0.0
        for unit, _, count in self.programme.counted:
            rows = self._chunks(unit, num_tokens)
            if unit.expert is not None:
                seconds += self._likely_s(unit, count, rows, num_tokens)
            elif unit.kind != "head":
                seconds += count * self._chunks_s(unit, rows)
        return seconds

    def share(self, lane: Lane, others: frozenset[Lane], size: float) -> float:
        """The share of its speed that a lane keeps beside others."""
        key = lane, others
        if key not in self.slowing:
            self.slowing[key] = self.machine.shares_beside(lane, others)
        kept = 1.0
        for curve in self.slowing[key]:
            kept *= curve.at(size)
        return kept

    # -- computation ---------------------------------------------------------------------------

    def _computation(self, operation: Operation) -> Demand:
        assert operation.batch is not None
        number = self.units[operation.unit]
        form, is_picked = self.forms[number], operation.unit >= self.picks_at
        kind, batch = operation.kind, operation.batch
        is_again = operation.num_recomputed > 0
        count = operation.num_chosen
        key = (
            kind,
            form,
            count,
            operation.sweep,
            batch.index,
            is_picked,
            operation.is_last,
            is_again,
        )
        if key not in self.kept:
            unit = self.programme.kinds[form]  # units of one form take equally long
            rows = self._rows_of(unit, batch, is_picked=is_picked)
            spans = _attending(unit, batch)
            if kind is not Kind.COMPUTE:
                unit = unit.halves()[kind is Kind.FINISH_ATTENTION]
                spans = spans[: len(spans) - operation.num_delegated]
            if unit.expert is None:
                seconds = self._unit_s(unit, batch, spans, rows)
            else:
                seconds = self._experts_s(unit, rows, count, 1)
            seconds += self._keys_again_s(unit, operation.num_recomputed)
            if operation.is_last:
                seconds += self._finish_s(operation.batch)
            size = float(max(1, min(rows)))
            if self._waits(number):
                seconds /= self.machine.share_beside("compute", frozenset({"wait"}), size)
            self.kept[key] = Demand(seconds=seconds, size=size)
        return self.kept[key]

    def _waits(self, number: int) -> bool:
        """Whether the CPU's threads sleep before each computation of a unit, for its weights."""
        if self.policy.overlap or self.policy.compute_tier != "cpu":
            return False
        return self.layout.form(number).streamed_bytes("disk")[0] > 0

    def _attention(self, operation: Operation) -> Demand:
        assert operation.batch is not None
        form = self.forms[self.units[operation.unit]]
        key = operation.kind, form, 0, operation.sweep, operation.batch.index, False, False, False
        if key not in self.kept:
            self.kept[key] = Demand(seconds=self._attend_on_cpu_s(operation))
        return self.kept[key]

    def _rows_of(self, unit: Unit, batch: MicroBatch, *, is_picked: bool) -> list[int]:
        """Tokens of each chunk of a micro-batch in a unit, which may work on picked ones alone."""
        if unit.kind in ("attention", "recurrence"):
            ranges = chunk_rows(batch.rows, self.policy.chunk_tokens)
            return [batch.rows[last - 1].end - batch.rows[first].start for first, last in ranges]
        return self._chunks(unit, batch.num_picked if is_picked else batch.num_tokens)

    def _chunks(self, unit: Unit, total: int) -> list[int]:
        """So many tokens, cut."""
        if unit.expert is not None and self.config.experts is not None:
            share = self.config.experts.per_token / self.config.experts.num_experts
            total = max(1, round(total * share))
        chunk = total if unit.kind == "head" else self.policy.chunk_tokens
        whole, rest = divmod(total, max(1, chunk))
        return [chunk] * whole + [rest] * bool(rest) or [1]

    def _unit_s(
        self, unit: Unit, batch: MicroBatch, spans: Sequence[RowSpan], rows: Sequence[int]
    ) -> float:
        """A unit, or half of one, with chunks of so many ``rows``, in which the keys of some rows
        are attended."""
        seconds = self._chunks_s(unit, rows)
        seconds += states_s(unit, spans, self.unit, self.dtype, self.size)
        return seconds + sum(
            self._keys_s(step, spans) + self._new_keys_s(step, batch)
            for step in unit.steps
            if isinstance(step, Attend)
        )

    def _chunks_s(self, unit: Unit, rows: Sequence[int]) -> float:
        """Chunks of so many ``rows``."""
        chunks = Counter(rows).items()
        return sum(count * self._chunk_s(unit, tokens) for tokens, count in chunks)

    def _likely_s(self, unit: Unit, count: int, rows: Sequence[int], num_tokens: int) -> float:
        """Of so many experts in all layers those that a micro-batch is likely to choose, each with
        chunks of so many ``rows``, in as many groups as come in a block's sweep."""
        assert self.config.experts is not None
        num_experts, likely = self.config.experts.num_experts, self.config.expert_likelihood
        block = num_tokens * self.policy.num_micro_batches
        groups = max(1, round(num_experts * likely(block)) / self.most_together)
        chosen = num_experts * likely(num_tokens)
        layers = count / num_experts
        return layers * self._experts_s(unit, rows, chosen, min(groups, max(1.0, chosen)))

    def _experts_s(self, unit: Unit, rows: Sequence[int], chosen: float, groups: float) -> float:
        """Experts of a layer, each with chunks of so many ``rows``, in so many groups: several by
        few calls, as far as a chunk has room, if there is a way to take them at once."""
        own_s = chosen * sum(self._own_chunk_s(unit, tokens) for tokens in rows)
        calls = chosen * len(rows)
        if self._go_together(unit, sum(rows)):
            turns = max(groups, chosen * sum(rows) / self.policy.chunk_tokens)
            calls = min(calls, _CALLS_OF_A_GROUP * turns)
        return self._called_s(own_s, max(groups, calls))

    def _go_together(self, unit: Unit, num_tokens: int) -> bool:
        """Whether several experts' products take no call each, with so many tokens of each."""
        if self.policy.compute_tier == "cpu":
            return True
        are_plain = not any(weight.name in self.compressed for weight in unit.weights)
        return are_plain and num_tokens <= TOKENS_OF_A_LAUNCH

    def keys_again_s(self, num_tokens: float) -> float:
        """Making keys and values of so many tokens again in those layers that do not keep them."""
        kinds = [self.programme.kinds[form] for form in self.forms]
        layers = [unit for unit in kinds if unit.kind == "attention"]
        pages = round(num_tokens / self.policy.page_tokens)
        return sum(
            self._keys_again_s(unit, pages)
            for unit, is_again in zip(layers, self.policy.recomputes(len(layers)), strict=True)
            if is_again
        )

    def _keys_again_s(self, unit: Unit, num_pages: int) -> float:
        """Making keys and values of so many pages of what came into attention."""
        if not num_pages or (own := self._keys_of(unit)) is None:
            return 0.0
        tokens = num_pages * self.policy.page_tokens
        chunk = max(self.policy.chunk_tokens, self.policy.page_tokens)
        whole, rest = divmod(tokens, chunk)
        kept = sum(self._put_bytes(step, tokens) for step in unit.steps if isinstance(step, Attend))
        passed = _PASSES_OF_NEW_KEYS * kept / self.unit.memory_bytes_per_s
        seconds = whole * self._chunk_s(own, chunk) if whole else 0.0
        return passed + seconds + (self._chunk_s(own, rest) if rest else 0.0)

    def _keys_of(self, unit: Unit) -> Unit | None:
        if id(unit) not in self.keys:
            self.keys[id(unit)] = unit.keys()
        return self.keys[id(unit)]

    def _chunk_s(self, unit: Unit, num_tokens: int) -> float:
        return self._called_s(self._own_chunk_s(unit, num_tokens), 1.0)

    def _called_s(self, own_s: float, calls: float) -> float:
        """Work that is asked for by so many calls. A device works while it is asked for more,
        unless that is done by whoever asks."""
        call_s = calls * self.unit.call_s
        if self.policy.compute_tier == "gpu" and not self.unit.is_inline:
            return max(own_s, call_s)
        return own_s + call_s

    def _own_chunk_s(self, unit: Unit, num_tokens: int) -> float:
        """But for the call."""
        key = (id(unit), num_tokens)
        if key not in self.chunks:
            own = self.unit, self.dtype, self.size, self.compressed
            on_cpu = self.policy.compute_tier == "cpu"
            self.chunks[key] = chunk_s(unit, num_tokens, *own, on_cpu=on_cpu)
        return self.chunks[key]

    def _new_keys_s(self, step: Attend, batch: MicroBatch) -> float:
        if step.k is None:
            return 0.0
        new = self._put_bytes(step, batch.num_tokens)
        passes = _PASSES_OF_NEW_KEYS if step.kv_format is None else _PASSES_OF_NEW_CODES
        return passes * new / self.unit.memory_bytes_per_s

    def _attend_on_cpu_s(self, operation: Operation) -> float:
        unit = self.programme.units[self.units[operation.unit]]
        assert operation.batch is not None
        spans = operation.batch.rows[-operation.num_delegated :]
        steps = [step for step in unit.steps if isinstance(step, Attend)]
        cpu = self.machine.units["cpu"]
        return cpu.call_s + sum(self._single_queries_s(step, spans, cpu) for step in steps)

    def _single_queries_s(
        self, step: Attend, spans: Sequence[RowSpan] | Sequence[Part], unit: ComputeUnit
    ) -> float:
        num_rows = sum(span.num_new == 1 for span in spans)
        return self.queries_s(step, seen_keys(step, spans), num_rows, unit)

    def queries_s(self, step: Attend, num_keys: float, num_rows: int, unit: ComputeUnit) -> float:
        """One query of each of so many rows, by the keys and values that they read."""
        sharing = step.num_heads / step.num_kv_heads
        # All keys are scored; the values of those that some query chose are read.
        share = (1 + min(1.0, sharing * step.share)) / 2
        read = share * self._kv_bytes(step, num_keys)
        plain, codes = (read, 0.0) if step.kv_format is None else (0.0, read / self.size)
        heads = step.num_kv_heads * num_rows
        return unit.attended_s(plain, codes, sharing) + heads * unit.attended_head_s

    def _kv_bytes(self, step: Attend, num_tokens: float) -> float:
        """Of plain keys and values; a key that is its value is read twice."""
        return 2 * step.num_kv_heads * step.head_dim * self.size * num_tokens

    def _put_bytes(self, step: Attend, num_tokens: float) -> float:
        """Likewise, as they are put in their place, where such a key has one."""
        return self._kv_bytes(step, num_tokens) / (1 + (step.k == step.v))

    def _keys_s(self, step: Attend, spans: Sequence[RowSpan]) -> float:
        """Prompts by arithmetic, single queries by the keys and values they read; what rows share
        and attend together by arithmetic too."""
        least = LEAST_SHARERS[self.policy.compute_tier]
        if step.window is not None and self.window_pages:  # rows have windows of their own
            least = len(spans) + 1
        own, pairs = own_parts(step, spans, least)
        pairs += sum(pairs_of(part, step.window) for part in own if part.num_new > 1)
        flops = 4 * step.num_heads * step.head_dim * pairs
        prompts_s = flops / self.unit.attention_flops[self.unit.nearest_dtype(self.dtype)]
        return prompts_s + self._single_queries_s(step, own, self.unit)

    def _finish_s(self, batch: MicroBatch) -> float:
        """Tokens are chosen from the logits, in float32."""
        logits = 4 * self.config.head_size * batch.num_picked
        return self.unit.sweep_s + _LOGIT_PASSES * logits / self.unit.memory_bytes_per_s


def _attending(unit: Unit, batch: MicroBatch) -> Sequence[RowSpan]:
    """The tokens that attend in a unit: all, or those that the head needs."""
    return batch.picked_spans() if unit.kind == "queries" else batch.rows
