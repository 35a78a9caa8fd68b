"""The sweeps of a block without running it: rows by their lengths alone, and what each sweep moves.

Stands in for the scheduler and the preparer of micro-batches, for forecasts: rows of a zig-zag
block enter together, bring their prompts, then one token a sweep each, and leave when they have
made all their tokens. Knows no token ids and no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from freight.model.batch import MicroBatch, RowKey, RowSpan, first_page
from freight.model.passing import handed_columns
from freight.model.switches import ModelConfig
from freight.plan.default import Plan
from freight.plan.forms import BLOCK
from freight.plan.layout import WeightLayout
from freight.plan.policy import Policy, Tier
from freight.plan.sweep import BatchWork, Delegated, Moved, Passed, Sweep
from freight.plan.windows import NO_WINDOWS, Windows
from freight.plan.workload import RowLength, evenly
from freight.quantities import align_up

__all__ = [
    "BlockRow",
    "Brought",
    "WorkSizes",
    "batch_of",
    "make_sweep",
    "row_of",
    "rows_of_block",
    "work_of",
]


class BlockRow(NamedTuple):
    """A row of a block: its lengths, the tier of its keys and values, whether the CPU attends them
    there, how many first tokens of its prompt are those of the ``beginning`` with that number,
    which it may be the one that ``computes``, and how many of its last ones are scored. A sibling
    has the whole prompt of the row before it: its keys are copied as they are made, and it is taken
    to bring one token of it, the least that a row may."""

    number: int
    prompt_tokens: int
    new_tokens: int
    home: Tier
    is_delegated: bool = False
    shared_tokens: int = 0
    scored_tokens: int = 0
    is_sibling: bool = False
    beginning: int = 0
    computes: bool = False

    @property
    def computed_tokens(self) -> int:
        """Of the prompt: what follows its last token is of interest only where one is made."""
        return self.prompt_tokens if self.new_tokens else max(1, self.prompt_tokens - 1)

    def at(self, step: int) -> Brought:
        """What it brings to the sweep in which it makes its token ``step``."""
        before = 0 if self.computes else self.shared_tokens
        before = self.computed_tokens - 1 if self.is_sibling else before
        return Brought(
            row=self,
            kv_len=self.prompt_tokens + step - 1 if step else before,
            num_new=1 if step else self.computed_tokens - before,
            makes_token=self.new_tokens > 0,
        )


class Brought(NamedTuple):
    """What a row brings to a sweep: ``num_new`` tokens behind ``kv_len`` keys. ``seat`` orders the
    rows of a micro-batch."""

    row: BlockRow
    kv_len: int
    num_new: int
    makes_token: bool
    seat: int = 0

    @property
    def is_single(self) -> bool:
        return self.num_new == 1 and self.kv_len > 0

    @property
    def scored(self) -> range:
        """Those of its tokens whose following one is scored."""
        if not self.row.scored_tokens:
            return range(0)
        last = self.row.prompt_tokens - 1 - self.kv_len
        first = last - self.row.scored_tokens
        return range(max(0, first), min(self.num_new, max(0, last)))

    @property
    def is_attended(self) -> bool:
        """Whether the CPU attends it where its keys are."""
        return self.row.is_delegated and self.is_single


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSizes:
    """What turns rows and tokens into bytes. ``tables`` says of each that rows are looked up in
    what part is not on the compute tier, and the bytes of a row; tokens are taken to be spread
    evenly over it. ``query_bytes`` and ``attended_bytes`` are of one row and layer,
    ``departing_bytes`` of a token that goes on to the next stage. Of a prompt's tokens behind those
    that it shares ``scored_share`` are scored. ``samples`` rows have one prompt."""

    policy: Policy
    page_bytes: int
    input_page_bytes: int
    state_bytes: int
    stream_bytes: int
    tables: tuple[tuple[float, int], ...]
    query_bytes: int
    attended_bytes: int
    scored_share: float = 0.0
    departing_bytes: int = 0
    samples: int = 1
    windows: Windows = NO_WINDOWS

    def is_sibling(self, number: int) -> bool:
        return number % self.samples > 0

    def scored_tokens(self, prompt_tokens: int, shared_tokens: int) -> int:
        return round(self.scored_share * max(0, prompt_tokens - shared_tokens))

    @classmethod
    def of(cls, plan: Plan, config: ModelConfig) -> WorkSizes:
        layout, policy, geometry = plan.layout, plan.policy, plan.geometry
        workload = plan.workload
        programme = layout.programme
        received = (1.0, handed_columns(config) * layout.element_bytes)
        handed_on = handed_columns(config) if programme.sends else 0
        return cls(
            policy=policy,
            page_bytes=geometry.page_bytes,
            input_page_bytes=geometry.input_page_bytes,
            state_bytes=geometry.state_bytes,
            windows=geometry.windows,
            stream_bytes=layout.stream_columns * layout.element_bytes,
            tables=(received,) if programme.receives else tuple(_far_rows(layout)),
            departing_bytes=handed_on * layout.element_bytes,
            query_bytes=config.attended_bytes_per_token(layout.element_bytes)
            + config.kv_bytes_per_token_per_layer(layout.element_bytes),
            attended_bytes=config.attended_bytes_per_token(layout.element_bytes),
            scored_share=workload.scored_share(workload.mean_shared_tokens(geometry.shared_page)),
            samples=workload.samples,
        )


def _far_rows(layout: WeightLayout) -> Iterator[tuple[float, int]]:
    """Of each table the part that is elsewhere than the arithmetic, and the bytes of a row."""
    for table in layout.tables:
        near = sum(part.num_rows for part in table.parts if part.tier == layout.compute_tier)
        row_bytes = table.weight.num_columns * layout.element_bytes
        yield 1 - near / table.weight.num_rows, row_bytes


def rows_of_block(lengths: Sequence[RowLength], sizes: WorkSizes) -> list[list[BlockRow]]:
    """Micro-batches of rows; homes as admission gives them out."""
    policy, size = sizes.policy, sizes.policy.micro_batch_size
    block = []
    for first in range(0, len(lengths), size):
        own = lengths[first : first + size]
        homes = [
            (tier, is_delegated)
            for tier, is_delegated, count in policy.homes(len(own))
            for _ in range(count)
        ]
        block.append(
            [
                row_of(first + i, length, home, is_delegated, sizes)
                for i, (length, (home, is_delegated)) in enumerate(zip(own, homes, strict=True))
            ]
        )
    return block


def row_of(
    number: int, length: RowLength, home: Tier, is_delegated: bool, sizes: WorkSizes
) -> BlockRow:
    """A row of such lengths, with its keys and values on a tier."""
    return BlockRow(
        number=number,
        prompt_tokens=length.prompt,
        new_tokens=length.new,
        home=home,
        is_delegated=is_delegated,
        shared_tokens=length.shared,
        scored_tokens=sizes.scored_tokens(length.prompt, length.shared),
        is_sibling=sizes.is_sibling(number),
        beginning=length.beginning,
        computes=length.computes,
    )


def make_sweep(
    index: int, block: Sequence[Sequence[BlockRow]], step: int, sizes: WorkSizes
) -> Sweep:
    """The sweep in which rows make their token ``step`` (0: with their prompts)."""
    works = []
    for k, rows in enumerate(block):
        left = [row.at(step) for row in rows if row.new_tokens > step or step == 0]
        if left:
            works.append(work_of(k, left, sizes))
    return Sweep(index=index, works=tuple(works))


def batch_of(
    length: RowLength, num_rows: int, begun: int, step: int, sizes: WorkSizes
) -> MicroBatch:
    """Rows of one length, of which so many compute a beginning, as they make their token ``step``.
    Where they have nothing in common they are all alike."""
    if length.shared or sizes.samples > 1:
        rows = rows_of_block([*evenly(length, num_rows, begun, range(num_rows))], sizes)
        return make_sweep(0, rows, step, sizes).works[0].batch
    own = row_of(0, length, sizes.policy.compute_tier, False, sizes).at(step)
    places = (own.num_new - 1,) if own.makes_token else ()
    spans = (
        RowSpan(RowKey(i), i * own.num_new, own.num_new, own.kv_len, places, own.scored)
        for i in range(num_rows)
    )
    return MicroBatch(index=0, rows=tuple(spans), token_ids=range(num_rows * own.num_new))


def work_of(k: int, brought: Sequence[Brought], sizes: WorkSizes) -> BatchWork:
    """Micro-batch ``k`` in a sweep to which rows bring this, with what it moves."""
    brought = sorted(brought, key=lambda own: (own.is_attended, own.seat, not own.is_single))
    spans = list(_spans(brought))
    num_tokens = spans[-1].end
    batch = MicroBatch(index=k, rows=tuple(spans), token_ids=range(num_tokens))
    policy = sizes.policy
    pairs = [(own.row, span) for own, span in zip(brought, spans, strict=True)]
    delegated = pairs[len(pairs) - sum(own.is_attended for own in brought) :]
    num_whole = len(pairs) - len(delegated)
    passed = _pages_passed(
        [
            (row.home, *_kept(row, span, row.shared_tokens))
            for row, span in pairs[:num_whole]
            if row.home != policy.compute_tier
        ],
        policy.page_tokens,
    )
    cut = policy.activations.cut(num_tokens)
    on_cpu = cut["cpu"] if policy.compute_tier == "gpu" else 0
    host = on_cpu * sizes.stream_bytes
    disk = align_up(cut["disk"] * sizes.stream_bytes, BLOCK)
    return BatchWork(
        batch=batch,
        continues=any(own.kv_len + own.num_new > own.row.prompt_tokens for own in brought),
        embedding_bytes=sum(round(num_tokens * share) * size for share, size in sizes.tables),
        kv=passed.times(sizes.page_bytes),
        inputs=passed.times(sizes.input_page_bytes),
        states=_states(pairs, sizes) if sizes.state_bytes else Passed(),
        windows=_windows(pairs[:num_whole], sizes),
        activations=Moved(cpu=host, disk=disk),
        activation_slot_bytes=align_up(host, BLOCK) + disk,
        delegated=_delegated(delegated, sizes) if delegated else None,
        delegates_later=any(row.is_delegated for row, _ in pairs[:num_whole]),
        departing_bytes=num_tokens * sizes.departing_bytes,
    )


def _delegated(pairs: Sequence[tuple[BlockRow, RowSpan]], sizes: WorkSizes) -> Delegated:
    page = sizes.policy.page_tokens
    on_disk = [(row.home, *_kept(row, span)) for row, span in pairs if row.home == "disk"]
    return Delegated(
        num_rows=len(pairs),
        query_bytes=len(pairs) * sizes.query_bytes,
        attended_bytes=len(pairs) * sizes.attended_bytes,
        kv=_pages_passed(on_disk, page).times(sizes.page_bytes),
        windows=_windows([pair for pair in pairs if pair[0].home == "disk"], sizes),
    )


def _spans(brought: Sequence[Brought]) -> Iterator[RowSpan]:
    start = 0
    for own in brought:
        shared = own.row.shared_tokens if own.kv_len >= own.row.shared_tokens else 0
        yield RowSpan(
            RowKey(own.row.number),
            start,
            own.num_new,
            own.kv_len,
            (own.num_new - 1,) if own.makes_token else (),
            own.scored,
            prefix=RowKey(-1 - own.row.beginning) if shared else None,
            shared_len=shared,
        )
        start += own.num_new


def _is_copied(row: BlockRow, span: RowSpan) -> bool:
    """Whether what it had before is another row's."""
    return row.is_sibling and span.kv_len < row.prompt_tokens


def _kept(row: BlockRow, span: RowSpan, num_shared: int = 0) -> tuple[int, int]:
    """Of a row's keys those in pages of its own, before and after: of its prompt a sibling gets all
    as they are made."""
    held = 0 if _is_copied(row, span) else span.kv_len
    return max(0, held - num_shared), max(0, span.total_len - num_shared)


def _loaded(home: Tier, held: int, page: int) -> Moved:
    """Pages that come: on disk the full ones, the one in progress is in RAM."""
    if home != "disk":
        return Moved(cpu=-(-held // page))
    return Moved(disk=held // page, tails=int(held % page > 0))


def _stored(home: Tier, held: int, total: int, page: int) -> Moved:
    """Pages that new tokens touch."""
    first, last = held // page, total // page
    if home != "disk":
        return Moved(cpu=-(-total // page) - first)
    return Moved(disk=last - first, tails=int(total % page > 0))


def _pages_passed(far: Iterable[tuple[Tier, int, int]], page: int) -> Passed:
    """In pages, of rows with a home each and keys before and after: many are alike."""
    alike = Counter(far).items()
    loaded = [_loaded(home, held, page).times(n) for (home, held, _), n in alike]
    stored = [_stored(*own, page).times(n) for own, n in alike]
    return Passed(
        load=_sum(loaded),
        store=_sum(stored),
        slot_bytes=sum(n * -(-total // page) for (_, _, total), n in alike),
        num_loaded=sum(own.cpu + own.disk + own.tails for own in loaded),
    )


def _states(pairs: Sequence[tuple[BlockRow, RowSpan]], sizes: WorkSizes) -> Passed:
    """What rows elsewhere keep in a layer without keys: all of it comes, and goes."""
    far = [(row, span) for row, span in pairs if row.home != sizes.policy.compute_tier]
    old = [row for row, span in far if span.kv_len > span.shared_len and not _is_copied(row, span)]

    def moved(rows: Sequence[BlockRow]) -> Moved:
        counts = Counter(row.home for row in rows)
        return Moved(cpu=counts["cpu"] * sizes.state_bytes, disk=counts["disk"] * sizes.state_bytes)

    return Passed(
        load=moved(old),
        store=moved([row for row, _ in far]),
        slot_bytes=len(far) * sizes.state_bytes,
        num_loaded=len(old),
    )


def _windows(pairs: Sequence[tuple[BlockRow, RowSpan]], sizes: WorkSizes) -> Passed:
    """What the window reaches of rows elsewhere comes, and what new tokens touch, as far as it is
    kept, goes; of a beginning that is another row's all of that goes with the first tokens."""
    page, own = sizes.policy.page_tokens, sizes.windows
    if not own.pages:
        return Passed()
    loaded, stored, slot_pages = [], [], 0
    for row, span in pairs:
        if row.home == sizes.policy.compute_tier:
            continue
        is_copied = _is_copied(row, span)
        is_new = is_copied or (span.prefix is not None and span.kv_len == span.shared_len)
        held = span.shared_len if is_copied else span.kv_len
        first, last = first_page(held, page, own.tokens), -(-span.total_len // page)
        slot_pages += last - first
        touched = max(first if is_new else held // page, last - own.pages)
        if row.home == "disk":
            full, rest = divmod(span.total_len, page)
            stored.append(Moved(disk=full - touched, tails=int(rest > 0)))
            full, rest = divmod(held, page)
            come = Moved(disk=full - first, tails=int(rest > 0))
        else:
            stored.append(Moved(cpu=last - touched))
            come = Moved(cpu=-(-held // page) - first)
        if not is_new:
            loaded.append(come)
    return Passed(
        load=_sum(loaded).times(sizes.page_bytes),
        store=_sum(stored).times(sizes.page_bytes),
        slot_bytes=slot_pages * sizes.page_bytes,
        num_loaded=sum(own.cpu + own.disk + own.tails for own in loaded),
    )


def _sum(parts: Sequence[Moved]) -> Moved:
    return Moved(
        cpu=sum(own.cpu for own in parts),
        disk=sum(own.disk for own in parts),
        tails=sum(own.tails for own in parts),
    )
