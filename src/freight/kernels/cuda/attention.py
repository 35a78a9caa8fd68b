"""Attention of single queries over keys and values in their pages, on a CUDA device.

A program attends, for one row and one head of keys, all queries that share the head, over all keys
that the row has or over a part of them: where rows are few, parts give all multiprocessors work,
and are merged by their log-sum-exp (flash-decoding). Sums run with a moving maximum, so no scores
are kept. Plain pages are multiplied as they lie. Compressed ones are multiplied as codes, exactly,
each group by itself: its scale and minimum come to the scores, or to the weights, afterwards.
"""

from __future__ import annotations

from math import gcd
from typing import Any, Final

import torch
import triton
import triton.language as tl

from freight.kernels.cuda.launch import dot_type, multiprocessors, power_of_two
from freight.kernels.pages import Pages
from freight.model.workspace import Workspace

__all__ = ["attend"]

_LEAST_QUERIES: Final = 16
"""The fewest rows of a tensor core's operand: queries that share keys are as many, with zeros."""
_KEY_BYTES: Final = 16 << 10
"""Plain keys of a program at once: they and as many values leave room in shared memory for the next
ones, which are under way, and for another program."""
_MOST_PLAIN: Final = 64
_MOST_CODES: Final = 32
"""Keys at once. The halves of compressed ones' bytes are taken apart in registers, of which heads
of 128 in one group then need all."""
_LEAST_STEP: Final = 16
"""The shortest sum of a tensor core."""
_LEAST_KEYS: Final = 256
"""Keys that are worth a program: its part must be merged."""
_MOST_PARTS: Final = 64
_PROGRAMS: Final = 2
"""For each multiprocessor."""
_MOST_ALIGNED: Final = 16
_FOREVER: Final = 2**31 - 1


@triton.jit
def _cap(scores, limit):  # type: ignore[no-untyped-def]
    """limit tanh(score / limit)."""
    return limit * (2.0 * tl.sigmoid(2.0 * scores / limit) - 1.0)


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    table,
    position,
    seen,
    heads_of_page,
    page_stride,
    token_stride,
    page_tokens: tl.constexpr,
):
    """Where the numbers of these positions begin, but for the head."""
    row = tl.load(table + position // page_tokens, mask=seen, other=0)
    return row // heads_of_page * page_stride + position % page_tokens * token_stride


@triton.jit
def _weigh(scores, seen, top, total):  # type: ignore[no-untyped-def]
    """Weights of some scores under the new maximum, it, the new sum of weights, and by what sums so
    far are to be multiplied."""
    scores = tl.where(seen[None, :], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    shrunk = tl.exp(top - higher)
    return weights, higher, total * shrunk + tl.sum(weights, 1), shrunk


@triton.jit
def _stretch(kv_lens, row, window, parts, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keys that this program attends: its part, in whole blocks, of those that are seen."""
    end = tl.load(kv_lens + row).to(tl.int32) + 1
    start = tl.maximum(end - window, 0)
    own = tl.cdiv(tl.cdiv(end - start, parts), block) * block
    first = start + tl.program_id(2) * own
    return first, tl.minimum(first + own, end)


@triton.jit(do_not_specialize=["num_pages", "parts"])
def _attend_plain(  # type: ignore[no-untyped-def]
    q,
    raw,
    key_rows,
    kv_lens,
    out,
    lse,
    q_row,
    q_head,
    out_row,
    out_head,
    out_part,
    lse_row,
    lse_part,
    num_pages,
    page_stride,
    head_stride,
    token_stride,
    first_value,
    scale,
    limit,
    window,
    parts,
    sharing: tl.constexpr,
    block_queries: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    page_tokens: tl.constexpr,
    block: tl.constexpr,
    capped: tl.constexpr,
    wants_lse: tl.constexpr,
    dot: tl.constexpr,
):
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    query, column = tl.arange(0, block_queries), tl.arange(0, padded_width)
    is_column = column < width
    is_own = (query < sharing)[:, None] & is_column[None, :]
    first_head = head * sharing
    q_at = q + row * q_row + (first_head + query)[:, None] * q_head + column[None, :]
    queries = tl.load(q_at, mask=is_own, other=0.0).to(dot)
    table = key_rows + (row * num_heads + head) * num_pages
    keys = raw + head * head_stride
    first, last = _stretch(kv_lens, row, window, parts, block)
    top = tl.full([block_queries], -float("inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    sums = tl.zeros([block_queries, padded_width], tl.float32)
    for begin in range(first, last, block):
        position = begin + tl.arange(0, block)
        seen = position < last
        at = _places(table, position, seen, 2 * num_heads, page_stride, token_stride, page_tokens)
        is_key = seen[None, :] & is_column[:, None]
        k = tl.load(keys + at[None, :] + column[:, None], mask=is_key, other=0.0)
        scores = tl.dot(queries, k.to(dot), input_precision="ieee") * scale
        if capped:
            scores = _cap(scores, limit)
        weights, top, total, shrunk = _weigh(scores, seen, top, total)
        is_value = seen[:, None] & is_column[None, :]
        v = tl.load(keys + first_value + at[:, None] + column[None, :], mask=is_value, other=0.0)
        found = tl.dot(weights.to(dot), v.to(dot), input_precision="ieee")
        sums = sums * shrunk[:, None] + found
    # A part without keys has seen nothing: its sums are 0, and its share will be.
    divisor = tl.where(total > 0.0, total, 1.0)
    sums = sums / divisor[:, None]
    out_at = out + row * out_row + tl.program_id(2) * out_part
    out_at += (first_head + query)[:, None] * out_head + column[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_own)
    if wants_lse:
        lse_at = lse + row * lse_row + tl.program_id(2) * lse_part + first_head + query
        tl.store(lse_at, top + tl.log(divisor), mask=query < sharing)


@triton.jit(do_not_specialize=["num_pages", "parts"])
def _attend_codes(  # type: ignore[no-untyped-def]
    q,
    raw,
    halves,
    key_rows,
    kv_lens,
    out,
    lse,
    q_row,
    q_head,
    out_row,
    out_head,
    out_part,
    lse_row,
    lse_part,
    num_pages,
    page_stride,
    head_stride,
    token_stride,
    first_value,
    code_bytes,
    scale,
    limit,
    window,
    parts,
    sharing: tl.constexpr,
    block_queries: tl.constexpr,
    bits: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    padded_step: tl.constexpr,
    groups: tl.constexpr,
    padded_groups: tl.constexpr,
    alignment: tl.constexpr,
    page_tokens: tl.constexpr,
    block: tl.constexpr,
    capped: tl.constexpr,
    wants_lse: tl.constexpr,
    dot: tl.constexpr,
):
    """Blocks are [groups, ...]: products of each group, side by side."""
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    query, byte = tl.arange(0, block_queries), tl.arange(0, padded_step)
    group = tl.arange(0, padded_groups)
    is_group, is_byte, is_query = group < groups, byte < step, query < sharing
    is_own = is_group[:, None, None] & is_query[None, :, None] & is_byte[None, None, :]
    first_head = head * sharing
    own = (first_head + query)[None, :, None]
    column = group[:, None, None] * size + byte[None, None, :]
    q_at = q + row * q_row + own * q_head + column
    low_queries = tl.load(q_at, mask=is_own, other=0.0).to(dot)
    query_sums = tl.sum(low_queries.to(tl.float32), 2)
    low_sums = tl.zeros([padded_groups, block_queries, padded_step], tl.float32)
    if bits == 4:
        high_queries = tl.load(q_at + step, mask=is_own, other=0.0).to(dot)
        query_sums += tl.sum(high_queries.to(tl.float32), 2)
        high_sums = tl.zeros([padded_groups, block_queries, padded_step], tl.float32)
    table = key_rows + (row * num_heads + head) * num_pages
    first, last = _stretch(kv_lens, row, window, parts, block)
    top = tl.full([block_queries], -float("inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    lowest_sums = tl.zeros([padded_groups, block_queries], tl.float32)
    for begin in range(first, last, block):
        position = begin + tl.arange(0, block)
        seen = position < last
        at = head * head_stride + _places(
            table, position, seen, 2 * num_heads, page_stride, token_stride, page_tokens
        )
        at = tl.multiple_of(at, alignment)
        is_factor = is_group[:, None] & seen[None, :]
        is_key = is_factor[:, None, :] & is_byte[None, :, None]
        factors = halves + ((at + code_bytes) // 2)[None, :] + group[:, None]
        steps = tl.load(factors, mask=is_factor, other=0.0).to(tl.float32)
        lowest = tl.load(factors + groups, mask=is_factor, other=0.0).to(tl.float32)
        codes_at = raw + at[None, None, :] + group[:, None, None] * step + byte[None, :, None]
        codes = tl.load(codes_at, mask=is_key, other=0)
        if bits == 4:
            found = tl.dot(low_queries, (codes & 15).to(dot), input_precision="ieee")
            found += tl.dot(high_queries, (codes >> 4).to(dot), input_precision="ieee")
        else:
            found = tl.dot(low_queries, codes.to(dot), input_precision="ieee")
        found = found * steps[:, None, :] + query_sums[:, :, None] * lowest[:, None, :]
        scores = tl.sum(found, 0) * scale
        if capped:
            scores = _cap(scores, limit)
        weights, top, total, shrunk = _weigh(scores, seen, top, total)
        factors += first_value // 2
        steps = tl.load(factors, mask=is_factor, other=0.0).to(tl.float32)
        lowest = tl.load(factors + groups, mask=is_factor, other=0.0).to(tl.float32)
        is_value = is_factor[:, :, None] & is_byte[None, None, :]
        codes_at = raw + first_value + at[None, :, None]
        codes_at += group[:, None, None] * step + byte[None, None, :]
        codes = tl.load(codes_at, mask=is_value, other=0)
        shares = (weights[None, :, :] * steps[:, None, :]).to(dot)
        shrunk = shrunk[None, :]
        own_lowest = tl.sum(weights[None, :, :] * lowest[:, None, :], 2)
        lowest_sums = lowest_sums * shrunk + own_lowest
        if bits == 4:
            found = tl.dot(shares, (codes & 15).to(dot), input_precision="ieee")
            low_sums = low_sums * shrunk[:, :, None] + found
            found = tl.dot(shares, (codes >> 4).to(dot), input_precision="ieee")
            high_sums = high_sums * shrunk[:, :, None] + found
        else:
            found = tl.dot(shares, codes.to(dot), input_precision="ieee")
            low_sums = low_sums * shrunk[:, :, None] + found
    # A part without keys has seen nothing: its sums are 0, and its share will be.
    divisor = tl.where(total > 0.0, total, 1.0)
    out_at = out + row * out_row + tl.program_id(2) * out_part + own * out_head + column
    found = (low_sums + lowest_sums[:, :, None]) / divisor[None, :, None]
    tl.store(out_at, found.to(out.dtype.element_ty), mask=is_own)
    if bits == 4:
        found = (high_sums + lowest_sums[:, :, None]) / divisor[None, :, None]
        tl.store(out_at + step, found.to(out.dtype.element_ty), mask=is_own)
    if wants_lse:
        lse_at = lse + row * lse_row + tl.program_id(2) * lse_part + first_head + query
        tl.store(lse_at, top + tl.log(divisor), mask=is_query)


@triton.jit(do_not_specialize=["parts"])
def _merge(  # type: ignore[no-untyped-def]
    found,
    sums,
    out,
    lse,
    out_row,
    out_head,
    lse_row,
    parts,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    padded_parts: tl.constexpr,
    wants_lse: tl.constexpr,
):
    """One query's parts, found [parts, R, N, width] with their log-sum-exp [parts, R, N]."""
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    part, column = tl.arange(0, padded_parts), tl.arange(0, padded_width)
    is_part, is_column = part < parts, column < width
    own = (part * tl.num_programs(0) + row) * num_heads + head
    sizes = tl.load(sums + own, mask=is_part, other=-float("inf"))
    top = tl.max(sizes, 0)
    shares = tl.exp(sizes - top)
    total = tl.sum(shares, 0)
    inside = is_part[:, None] & is_column[None, :]
    some = tl.load(found + own[:, None] * width + column[None, :], mask=inside, other=0.0)
    merged = tl.sum(some * shares[:, None], 0) / total
    out_at = out + row * out_row + head * out_head + column
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=is_column)
    if wants_lse:
        tl.store(lse + row * lse_row + head, top + tl.log(total))


def attend(
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
    workspace: Workspace | None = None,
) -> None:
    """out [R, N, H] = attention of one query per row, q [R, N, H], over its keys up to its own,
    which are appended already; lse [R, N], float32, where asked for.

    key_rows [R * K * pages] are numbers of [page, head] rows, kv_lens [R] counts earlier keys.
    Parts are kept in ``workspace``; without one, each row and head is one program's.
    """
    num_rows, num_heads, width = q.shape
    num_pages = len(key_rows) // (num_rows * pages.num_heads)
    keys = min(num_pages * pages.page_tokens, window or _FOREVER)
    parts = 1 if workspace is None else _count_parts(num_rows * pages.num_heads, keys, q.device)
    if parts == 1:
        sums = None if lse is None else lse[None]
        _launch(q, pages, key_rows, kv_lens, out[None], sums, scale, softcap, window)
        return
    assert workspace is not None
    with workspace.frame():
        found = workspace.take(parts, num_rows, num_heads, width, dtype=torch.float32)
        sums = workspace.take(parts, num_rows, num_heads, dtype=torch.float32)
        _launch(q, pages, key_rows, kv_lens, found, sums, scale, softcap, window)
        _merge[(num_rows, num_heads)](
            found,
            sums,
            out,
            lse,
            out.stride(0),
            out.stride(1),
            0 if lse is None else lse.stride(0),
            parts,
            width=width,
            padded_width=power_of_two(width),
            padded_parts=power_of_two(parts),
            wants_lse=lse is not None,
            enable_fp_fusion=True,
        )


def _count_parts(programs: int, keys: int, device: torch.device) -> int:
    """Parts of each row's keys, so that all multiprocessors have work where the keys suffice."""
    wanted = _PROGRAMS * multiprocessors(device) // programs
    return max(1, min(wanted, keys // _LEAST_KEYS, _MOST_PARTS))


def _launch(
    q: torch.Tensor,
    pages: Pages,
    key_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> None:
    """Each part to its own of out [parts, R, N, H], and of lse [parts, R, N] where there is one."""
    parts, num_rows, num_heads, _ = out.shape
    own = pages.number_format
    size = pages.dtype.itemsize if own is None else 1
    token = pages.token_bytes // size
    sharing = num_heads // pages.num_heads
    ways: dict[str, Any] = {
        "sharing": sharing,
        "block_queries": max(_LEAST_QUERIES, power_of_two(sharing)),
        "page_tokens": pages.page_tokens,
        "capped": softcap is not None,
        "wants_lse": lse is not None,
        "dot": dot_type(q),
        "block": _block(pages),
        "enable_fp_fusion": True,
    }
    outputs = (
        *(q.stride(0), q.stride(1), out.stride(1), out.stride(2), out.stride(0)),
        *((0, 0) if lse is None else (lse.stride(1), lse.stride(0))),
        len(key_rows) // (num_rows * pages.num_heads),
    )
    places = (
        pages.raw.stride(0) // size,
        pages.page_tokens * token,
        token,
        pages.heads_to_values * pages.page_tokens * token,
    )
    settings = (scale, softcap or 1.0, window or _FOREVER, parts)
    grid = (num_rows, pages.num_heads, parts)
    if own is None:
        raw = pages.raw.view(pages.dtype)
        _attend_plain[grid](
            *(q, raw, key_rows, kv_lens, out, lse, *outputs, *places, *settings),
            width=pages.width,
            padded_width=max(_LEAST_STEP, power_of_two(pages.width)),
            **ways,
        )
        return
    step, groups = own.code_bytes(own.group_size), pages.width // own.group_size
    _attend_codes[grid](
        *(q, pages.raw, pages.raw.view(torch.float16), key_rows, kv_lens, out, lse),
        *(*outputs, *places, own.code_bytes(pages.width), *settings),
        bits=own.code_bits,
        size=own.group_size,
        step=step,
        padded_step=max(_LEAST_STEP, power_of_two(step)),
        groups=groups,
        padded_groups=power_of_two(groups),
        # So many bytes a thread loads at once: where tokens begin, 72 bytes apart for heads of 128
        # in 4 bits, the compiler would not know.
        alignment=gcd(_MOST_ALIGNED, token, pages.raw.stride(0)),
        **ways,
    )


def _block(pages: Pages) -> int:
    """Keys at once."""
    most = _MOST_PLAIN if pages.number_format is None else _MOST_CODES
    return max(16, min(most, _KEY_BYTES // (power_of_two(pages.width) * pages.dtype.itemsize)))
