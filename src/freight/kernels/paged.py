"""Keys and values appended to pages, attended there, and taken out of them: what attention calls.

Compiled loops on the CPU and Triton kernels on CUDA where they can be had, torch for the rest.
Tokens are named by page and place in it, [page, head] rows by their number: page * 2 heads + head,
values after all keys, also where these are their values and nothing is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.cuda.choice import kernels_of
from freight.kernels.grouped import CompressedRows, dequantise, quantise
from freight.kernels.pages import Pages
from freight.kernels.sharing import share, share_alike
from freight.kernels.threads import Loops, as_numbers, find_loops, has_words
from freight.model.number_format import Grouped
from freight.model.workspace import Workspace

__all__ = [
    "append_rows",
    "attend_queries",
    "attend_single_queries",
    "attends_any_rows",
    "gather_plain",
    "loop_takes_queries",
    "loops_attend",
]

_WIDTH: Final = 16
_LEAST_TOKENS: Final = 256
"""Keys of a head, or new ones of all heads, that are worth another thread."""
_LEAST_OF_PAIRS: Final = 4096
"""Likewise of keys that pairs of queries are multiplied by, many of them in the time that another
thread takes to come."""
_NO_HALVES: Final = np.zeros(1, np.uint16)
_NO_SUMS: Final = np.zeros(0, np.float32)


def append_rows(
    pages: Pages,
    token_pages: torch.Tensor,
    token_places: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Keys and values k, v [T, K, H] into the pages, each token into its page and place there; keys
    alone where they are the values."""
    rows, v = pages.rows, k if pages.keys_alone else v
    if pages.number_format is None:
        append_plain = kernels_of(pages.raw.device).append_plain
        if append_plain is not None and append_plain(pages, token_pages, token_places, k, v):
            return
        for part, new in enumerate((k, v)[: pages.num_parts]):
            rows[:, part].transpose(1, 2)[token_pages, token_places] = new
        return
    if (append := kernels_of(pages.raw.device).append) is not None:
        append(pages, token_pages, token_places, k, v)
        return
    loops = find_loops() if pages.raw.device.type == "cpu" else None
    if loops is not None:
        _append_compiled(loops, pages, token_pages, token_places, k, v)
        return
    for place, new in enumerate((k, v)[: pages.num_parts]):
        codes = quantise(new.reshape(-1, pages.width), pages.number_format)
        target = rows[:, place].transpose(1, 2)
        target[token_pages, token_places] = codes.view(*new.shape[:2], -1)


def _append_compiled(
    loops: Loops,
    pages: Pages,
    token_pages: torch.Tensor,
    token_places: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    number_format = pages.number_format
    assert number_format is not None
    raw, halves = _flat_bytes(pages)
    head_bytes = pages.page_tokens * pages.token_bytes
    places = token_pages * pages.raw.stride(0) + token_places * pages.token_bytes
    for start, new in ((0, k), (pages.num_heads * head_bytes, v))[: pages.num_parts]:
        numbers = new.to(torch.float32, memory_format=torch.contiguous_format, copy=True).numpy()
        firsts = (places + start).numpy()

        def work(first: int, last: int, numbers: Any = numbers, firsts: Any = firsts) -> None:
            loops.append.append_tokens(
                first,
                last,
                numbers,
                firsts,
                head_bytes,
                raw,
                halves,
                number_format.levels,
                number_format.code_bits,
                number_format.group_size,
            )

        share(np.full(len(firsts), pages.num_heads), work, _LEAST_TOKENS)


def _flat_bytes(pages: Pages) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    raw = pages.raw.view(-1).numpy()
    return raw, raw.view(np.uint16)


def gather_plain(pages: Pages, rows: torch.Tensor, out: torch.Tensor, raw: torch.Tensor) -> None:
    """out [n, tokens * H] = the plain numbers of n [page, head] rows; ``raw`` is scratch for them
    as they are kept, where they are compressed: uint8 [n, tokens, bytes]."""
    both, kept = 2 * pages.num_heads, pages.rows.flatten(1, 2)
    if pages.keys_alone:
        rows = rows // both * pages.num_heads + rows % pages.num_heads
        both = pages.num_heads
    if pages.number_format is None and kept.is_contiguous():
        torch.index_select(kept.view(-1, out.shape[1]), 0, rows, out=out)
        return
    if pages.number_format is None:
        own = out.view(len(rows), *kept.shape[2:])
        torch.ops.aten.index.Tensor_out(kept, [rows // both, rows % both], out=own)
        return
    torch.ops.aten.index.Tensor_out(kept, [rows // both, rows % both], out=raw)
    grouped = CompressedRows(
        raw=raw.view(-1, pages.token_bytes),
        columns=pages.width,
        number_format=pages.number_format,
    )
    dequantise(grouped, out.view(-1, pages.width))


def attends_any_rows(device: torch.device, share_of_keys: float) -> bool:
    """Whether single queries on this device are always attended in place, needing no memory for
    their rows' keys: then any number of rows can be attended at once."""
    return kernels_of(device).attend is not None and share_of_keys == 1


def loops_attend(
    device: torch.device, width: int, dtype: torch.dtype, number_format: Grouped | None
) -> bool:
    """Whether loops attend keys [.., width] of this type, kept so, where they lie."""
    is_here = device.type == "cpu" and find_loops() is not None
    return is_here and _suits_loops(width, dtype, number_format)


def attend_single_queries(
    q: torch.Tensor,
    pages: Pages,
    key_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    share_of_keys: float,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> bool:
    """out [R, N, H] = attention of one query per row, q [R, N, H], over its keys up to its own,
    which are appended already; lse [R, N] where asked for. False where there is no loop for it.

    key_rows [R * K * pages] are numbers of [page, head] rows, kv_lens [R] counts earlier keys.
    On a device few rows are attended in parts, for which ``workspace`` has room.
    """
    if attends_any_rows(q.device, share_of_keys):
        attend = kernels_of(q.device).attend
        assert attend is not None
        attend(
            q,
            pages,
            key_rows,
            kv_lens,
            out,
            scale=scale,
            softcap=softcap,
            window=window,
            lse=lse,
            workspace=workspace,
        )
        return True
    loops = find_loops() if q.device.type == "cpu" else None
    if loops is None or not _has_loop(pages):
        return False
    num_rows, num_heads, width = q.shape
    of_pairs = _loop_of_pairs(loops, q, pages) if share_of_keys == 1 else None
    padded = width if of_pairs else -(-width // (2 * _WIDTH)) * 2 * _WIDTH
    # Loops over vectors add to what is there.
    make = torch.empty if of_pairs else torch.zeros
    found = make(num_rows, num_heads, padded)
    logs = torch.empty(num_rows, num_heads)
    ends = kv_lens.numpy() + 1
    starts = np.maximum(ends - window, 0) if window is not None else np.zeros_like(ends)
    raw, halves, shape = _flat_pages(loops, pages, padded)
    table = key_rows.view(num_rows, pages.num_heads, -1).numpy().view(np.uint64)
    sums, lses = found.view(-1).numpy(), logs.view(-1).numpy()
    limit = np.float32(softcap or 0.0)
    if of_pairs:
        pairs = as_numbers(q.contiguous().flatten(1)).view(np.uint32)
        rest: tuple[Any, ...] = (raw, shape, table, starts, ends)
        rest += (pairs, np.float32(scale), limit, sums, lses)
        own = of_pairs
    else:
        queries = torch.zeros_like(found)
        queries[..., :width].copy_(q).mul_(scale)
        numbers = queries.view(-1).numpy()
        rest = (raw, halves, shape, table, starts, ends, numbers, sums, lses, limit, share_of_keys)
        own = loops.attention

    def work(first: int, last: int) -> None:
        own.attend_heads(first, last, *rest)

    def in_team(threads: int, *turns: npt.NDArray[np.int64]) -> None:
        own.heads_together(threads, *turns, *rest)

    least = _LEAST_OF_PAIRS if of_pairs else _LEAST_TOKENS
    share(np.repeat(ends - starts, pages.num_heads), work, least, in_team)
    out.copy_(found[..., :width])
    if lse is not None:
        lse.copy_(logs)
    return True


def loop_takes_queries(q: torch.Tensor, pages: Pages) -> bool:
    """Whether ``attend_queries`` has a loop for queries q [.., N, H] of this type."""
    loops = find_loops() if q.device.type == "cpu" else None
    if loops is None or not _has_loop(pages) or pages.width > loops.query_blocks.MOST_COLUMNS:
        return False
    return q.dtype in (torch.float32, torch.bfloat16)


def attend_queries(
    q: torch.Tensor,
    pages: Pages,
    key_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    lse: torch.Tensor | None = None,
    num_new: torch.Tensor | None = None,
) -> bool:
    """out [T, N, H] = attention of the queries of R rows, q [T, N, H], each over the row's earlier
    keys and the new ones up to its own, all of which are appended already; lse [T, N], float32,
    where asked for. ``num_new`` [R] are the queries of each row, in order, which all have equally
    many unless they are told. Otherwise as ``attend_single_queries``."""
    loops = find_loops() if loop_takes_queries(q, pages) else None
    if loops is None:
        return False
    flat_q, flat_out = q.flatten(1), out.flatten(1)
    is_copied = flat_out.data_ptr() != out.data_ptr()
    if is_copied or not has_words(flat_q) or not has_words(flat_out):
        return False
    num_rows, num_heads, width = len(kv_lens), *q.shape[1:]
    blocks = _query_blocks(loops, q.dtype)
    raw, halves, shape = _flat_pages(loops, pages, -(-width // blocks.COLUMNS) * blocks.COLUMNS)
    table = key_rows.view(num_rows, pages.num_heads, -1).numpy().view(np.uint64)
    group = num_heads // pages.num_heads
    counts = np.full(num_rows, len(q) // num_rows) if num_new is None else num_new.numpy()
    parts = -(-counts * group // blocks.PART_ROWS) * pages.num_heads
    rows = blocks.Rows(kv_lens.numpy(), _summed_up(counts), _summed_up(parts))
    rule = blocks.Rule(
        group=np.uintp(group),
        scale=np.float32(scale),
        limit=np.float32(softcap or 0.0),
        window=np.uintp(window or 0),
    )
    queries, target = (_tokens(loops, x) for x in (flat_q, flat_out))
    sums = blocks.Tokens(_NO_SUMS, np.uintp(0)) if lse is None else _tokens(loops, lse)

    rest = raw, halves, shape, table, rows, rule, queries, target, sums

    def work(first: int, last: int) -> None:
        blocks.attend_queries(first, last, *rest)

    def in_team(threads: int, *turns: npt.NDArray[np.int64]) -> None:
        blocks.queries_together(threads, *turns, *rest)

    share_alike(int(parts.sum()), work, 1, in_turns=True, team=in_team)
    return True


def _summed_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many come before each, and of all."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _loop_of_pairs(loops: Loops, q: torch.Tensor, pages: Pages) -> Any:
    """The loop over pairs that takes keys which are kept so, and as many queries of a head."""
    if not q.dtype is pages.dtype is torch.bfloat16 or pages.page_tokens % _WIDTH:
        return None
    kept, own, of_codes = pages.number_format, loops.pair_queries, loops.code_queries
    if own is None:
        return None
    if kept is None:
        is_worth_it = q.shape[1] >= own.LEAST_QUERIES * pages.num_heads
        return own if is_worth_it and pages.width % own.COLUMNS == 0 else None
    is_whole = pages.width % kept.group_size == 0 and kept.group_size % of_codes.LEAST_GROUP == 0
    return of_codes if is_whole and kept.code_bits == 4 and loops.tiles is None else None


def _query_blocks(loops: Loops, dtype: torch.dtype) -> Any:
    """The loop that attends several queries of a row of a type fastest."""
    by_pairs = dtype is torch.bfloat16 and loops.pair_attention is not None
    return loops.pair_attention if by_pairs else loops.query_blocks


def _tokens(loops: Loops, x: torch.Tensor) -> Any:
    """x [tokens, numbers] as the loop takes tokens."""
    return loops.query_blocks.Tokens(as_numbers(x), np.uintp(x.stride(0)))


def _has_loop(pages: Pages) -> bool:
    return _suits_loops(pages.width, pages.dtype, pages.number_format)


def _suits_loops(width: int, dtype: torch.dtype, number_format: Grouped | None) -> bool:
    """Whether rows are long enough for whole vectors."""
    if number_format is None:
        return width >= _WIDTH and dtype in (torch.float32, torch.bfloat16)
    # Of 4 bits each half of a group is loaded by itself.
    return number_format.group_size * number_format.code_bits // 8 >= _WIDTH


def _flat_pages(loops: Loops, pages: Pages, padded: int) -> tuple[Any, Any, Any]:
    """The pool as a flat array, the same as uint16 where it has scales, and how it lies."""
    number_format = pages.number_format
    if number_format is not None:
        raw, halves = _flat_bytes(pages)
        size = 1
    else:
        flat, halves, size = pages.raw.view(-1), _NO_HALVES, pages.dtype.itemsize
        wide = pages.dtype is torch.float32
        raw = flat.view(torch.float32).numpy() if wide else flat.numpy().view(np.uint16)
    token_stride = pages.token_bytes // size
    shape = _shape(
        loops.attention.PageShape,
        pages.raw.stride(0) // size,
        pages.page_tokens * token_stride,
        token_stride,
        pages.num_heads,
        pages.heads_to_values,
        pages.page_tokens,
        pages.width,
        padded,
        number_format.code_bits if number_format else 0,
        number_format.group_size if number_format else 1,
    )
    return raw, halves, shape


@cache
def _shape(kind: Callable[..., Any], *numbers: int) -> Any:
    """A shape as loops take it, page stride, head stride and token stride first: few of them are
    asked for again and again."""
    return kind(*map(np.uintp, numbers))
