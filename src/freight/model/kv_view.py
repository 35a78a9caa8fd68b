"""Where the new tokens and the keys of a micro-batch's rows lie in a pool of pages, indexed once.

Rows of different lengths share a batch where they bring equally many tokens. Where the pages are
(which tier, or a slot they were copied to) is not known here: tables of page ids come in. Attention
over a view is another file's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from freight.kernels.paged import attends_any_rows
from freight.model.batch import GROUP_BYTES, LOOP_BYTES, PROMPT_BYTES, QUERY_BLOCK, RowSpan
from freight.quantities import align_up

__all__ = ["KVCopy", "KVView", "Prompts", "RowGroup", "Stem", "index_rows", "index_stem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """R rows that bring Q new tokens each, attended together.

    ``start`` is the first token of the group in its view, ``key_rows`` and ``value_rows`` index
    the pool's [page, head] rows (R·K·pages of them), ``kv_lens`` [R] counts earlier keys. A fresh
    group has none. Of the keys of ``is_made`` ones, which follow the prompts, a share may count.
    Where scores are held, so many ``rows_at_once`` are attended.
    """

    start: int
    num_rows: int
    num_queries: int
    num_keys: int
    num_pages: int
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    kv_lens: torch.Tensor
    is_ragged: bool
    is_fresh: bool
    is_made: bool = True
    rows_at_once: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_queries

    def parts(self) -> Iterator[RowGroup]:
        """The group, some rows at a time if need be."""
        size = self.rows_at_once or self.num_rows
        if size >= self.num_rows:
            yield self
            return
        for first in range(0, self.num_rows, size):
            last = min(first + size, self.num_rows)
            key_rows, value_rows = (
                own.view(self.num_rows, -1)[first:last].flatten()
                for own in (self.key_rows, self.value_rows)
            )
            yield replace(
                self,
                start=self.start + first * self.num_queries,
                num_rows=last - first,
                key_rows=key_rows,
                value_rows=value_rows,
                kv_lens=self.kv_lens[first:last],
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Groups of a view that follow each other, from number ``first`` on up to ``last``, whose rows
    bring several tokens each: as one, for a loop that takes rows of different lengths.

    Tokens are those from ``start`` on, ``num_new`` [R] of each row; ``key_rows`` and ``kv_lens`` as
    a group has them, with what no row asks for where one has fewer pages than another.
    """

    first: int
    last: int
    start: int
    num_tokens: int
    num_new: torch.Tensor
    key_rows: torch.Tensor
    kv_lens: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCopy:
    """A further row that gets the keys of tokens ``start`` on: page and place of each, [T]."""

    start: int
    token_pages: torch.Tensor
    token_places: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Stem:
    """What R rows begin with: S keys that all their new tokens see, but for a window.

    ``tokens`` [T] are the places of these tokens in q, ``positions`` [T] those in their rows, of
    which none is above ``last_position``. ``key_rows`` and ``value_rows`` index the pool's [page,
    head] rows (K·pages of them).
    """

    num_rows: int
    num_keys: int
    tokens: torch.Tensor
    positions: torch.Tensor
    last_position: int
    key_rows: torch.Tensor
    value_rows: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KVView:
    """How some consecutive rows' tokens and keys lie in a pool of pages.

    ``token_pages`` and ``token_places`` [T]: page and place in it of each new token; ``start`` is
    the first of these tokens in the flat tokens that q, k and v hold. Some groups may be attended
    as one: ``prompts``. ``copies`` are rows that get keys and values of tokens which another row
    has brought; nothing attends over them here. ``stems`` in this pool are attended by tokens of
    this view or of others, whose groups are then indexed without them.
    """

    start: int
    num_tokens: int
    token_pages: torch.Tensor
    token_places: torch.Tensor
    groups: tuple[RowGroup, ...]
    prompts: tuple[Prompts, ...] = ()
    copies: tuple[KVCopy, ...] = ()
    stems: tuple[Stem, ...] = ()


def index_rows(
    rows: Sequence[RowSpan],
    pages: Sequence[Sequence[int]],
    *,
    start: int,
    page_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    device: torch.device,
    copies: Sequence[tuple[int, RowSpan, Sequence[int]]] = (),
    stems: Sequence[Stem] = (),
    share_of_keys: float = 1.0,
    by_loop: bool = False,
    without_scores: bool = False,
) -> KVView:
    """Index ``rows`` whose row i has the pages ``pages[i]``, in order, in one pool.

    ``copies`` are further rows in that pool: the first token they copy, whose, and their pages.
    ``share_of_keys`` is what attention will be asked for. ``by_loop``: queries will be attended
    where their keys are, by loops of the CPU. ``without_scores``: so will whole prompts
    be, where nothing else is asked for.
    """
    places = [
        _index_tokens(span, table, page_tokens) for span, table in zip(rows, pages, strict=True)
    ]
    token_pages = [page for own, _ in places for page in own]
    token_places = [place for _, own in places for place in own]
    copied = [(first, *_index_tokens(span, table, page_tokens)) for first, span, table in copies]

    def ids(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    groups = []
    place = 0
    has_kernel = attends_any_rows(device, share_of_keys)

    def is_prompt(span: RowSpan) -> bool:
        return without_scores and span.num_new > 1 and not span.kv_len

    def share_with_scores(num_new: int, num_keys: int) -> float:
        numbers = max(2 * num_kv_heads * head_dim, num_heads * min(num_new, QUERY_BLOCK))
        return align_up(num_keys, page_tokens) * numbers * element_bytes / GROUP_BYTES

    def row_share(span: RowSpan, num_keys: int) -> float:
        """Of the memory that a group may take."""
        if span.num_new == 1 and has_kernel:
            return 0.0
        if span.num_new == 1 and by_loop:  # queries, and what they find, in float32
            return 2 * 4 * num_heads * head_dim / LOOP_BYTES
        if is_prompt(span):
            numbers = 2 * num_kv_heads * head_dim
            return align_up(num_keys, page_tokens) * numbers * element_bytes / PROMPT_BYTES
        return share_with_scores(span.num_new, num_keys)

    def kind(span: RowSpan) -> tuple[int, bool, bool]:
        return span.num_new, share_of_keys < 1 and span.brings_made, is_prompt(span)

    for first, last in _group_ranges(rows, row_share, kind):
        group = _index_group(
            rows[first:last], pages[first:last], place, page_tokens, num_kv_heads, device
        )
        if is_prompt(rows[first]):
            share = share_with_scores(group.num_queries, group.num_keys)
            group = replace(group, rows_at_once=max(1, int(1 / share)))
        groups.append(group)
        place += group.num_tokens
    return KVView(
        start=start,
        num_tokens=len(token_pages),
        token_pages=ids(token_pages),
        token_places=ids(token_places),
        groups=tuple(groups),
        prompts=tuple(_neighbours(groups, num_kv_heads)) if by_loop else (),
        copies=tuple(
            KVCopy(start=first, token_pages=ids(own), token_places=ids(within))
            for first, own, within in copied
        ),
        stems=tuple(stems),
    )


def index_stem(
    rows: Sequence[RowSpan],
    pages: Sequence[int],
    *,
    start: int,
    page_tokens: int,
    num_kv_heads: int,
    device: torch.device,
) -> Stem:
    """Index what ``rows`` share, which has the pages ``pages``; q begins with token ``start`` of
    the micro-batch."""
    tokens = [place - start for span in rows for place in range(span.start, span.end)]
    positions = [place for span in rows for place in range(span.kv_len, span.total_len)]
    key_rows = _head_rows(torch.tensor(pages)[None], num_kv_heads)
    return Stem(
        num_rows=len(rows),
        num_keys=len(pages) * page_tokens,
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        last_position=max(positions),
        key_rows=key_rows.to(device),
        value_rows=(key_rows + num_kv_heads).to(device),
    )


def _neighbours(groups: Sequence[RowGroup], num_kv_heads: int) -> Iterator[Prompts]:
    """Groups of prompts that have a neighbour, as one with it."""
    first = 0
    for last in range(1, len(groups) + 1):
        if last < len(groups) and groups[first].num_queries > 1 < groups[last].num_queries:
            continue
        if last - first > 1:
            yield _as_one(groups[first:last], first, num_kv_heads)
        first = last


def _as_one(groups: Sequence[RowGroup], first: int, num_kv_heads: int) -> Prompts:
    num_rows, most = sum(own.num_rows for own in groups), max(own.num_pages for own in groups)
    key_rows = torch.zeros(num_rows, num_kv_heads, most, dtype=torch.long)
    row = 0
    for own in groups:
        table = own.key_rows.view(own.num_rows, num_kv_heads, -1)
        key_rows[row : row + own.num_rows, :, : own.num_pages] = table
        row += own.num_rows
    counts = torch.tensor([own.num_queries for own in groups])
    num_new = counts.repeat_interleave(torch.tensor([own.num_rows for own in groups]))
    return Prompts(
        first=first,
        last=first + len(groups),
        start=groups[0].start,
        num_tokens=int(num_new.sum()),
        num_new=num_new,
        key_rows=key_rows.flatten(),
        kv_lens=torch.cat([own.kv_lens for own in groups]),
    )


def _head_rows(table: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The pool's [page, head] rows of the keys in ``table`` [R, pages], by row, head and page."""
    heads = torch.arange(num_kv_heads)
    return (table[:, None, :] * 2 * num_kv_heads + heads[None, :, None]).flatten()


def _index_tokens(
    span: RowSpan, table: Sequence[int], page_tokens: int
) -> tuple[list[int], list[int]]:
    """Page and place in it of each new token of a row that has the pages ``table``."""
    positions = range(span.kv_len, span.total_len)
    pages = [table[position // page_tokens] for position in positions]
    return pages, [position % page_tokens for position in positions]


def _group_ranges(
    rows: Sequence[RowSpan],
    row_share: Callable[[RowSpan, int], float],
    kind: Callable[[RowSpan], tuple[int, bool, bool]],
) -> Iterator[tuple[int, int]]:
    """Ranges of rows of one ``kind``, which have equally many new tokens, bounded by what they
    take: each a ``row_share`` by its new tokens and the longest one's keys."""
    first = 0
    longest = 0
    for place, span in enumerate(rows):
        longest = max(longest, span.total_len)
        fits = (place - first + 1) * row_share(span, longest) <= 1
        if place > first and not (fits and kind(span) == kind(rows[first])):
            yield first, place
            first, longest = place, span.total_len
    if rows:
        yield first, len(rows)


def _index_group(
    rows: Sequence[RowSpan],
    pages: Sequence[Sequence[int]],
    start: int,
    page_tokens: int,
    num_kv_heads: int,
    device: torch.device,
) -> RowGroup:
    num_keys = max(span.total_len for span in rows)
    num_pages = -(-num_keys // page_tokens)
    padded = [
        [*table[: -(-span.total_len // page_tokens)]]
        for span, table in zip(rows, pages, strict=True)
    ]
    # A row with fewer pages reads its last one again; the mask hides it.
    table = torch.tensor([own + own[-1:] * (num_pages - len(own)) for own in padded])
    key_rows = _head_rows(table, num_kv_heads)
    return RowGroup(
        start=start,
        num_rows=len(rows),
        num_queries=rows[0].num_new,
        num_keys=num_keys,
        num_pages=num_pages,
        key_rows=key_rows.to(device),
        value_rows=(key_rows + num_kv_heads).to(device),
        kv_lens=torch.tensor([span.kv_len for span in rows], device=device),
        is_ragged=any(span.total_len != num_keys for span in rows),
        is_fresh=not any(span.kv_len for span in rows),
        is_made=rows[0].brings_made,
    )
