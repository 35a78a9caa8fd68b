"""Convolutions, the gated delta rule and scans over rows that keep a state: a torch reference, and
loops of the CPU.

A state is used where it lies, and is what it has become when a call returns. Rows of any lengths
come together. All is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.cuda.choice import kernels_of
from freight.kernels.row_states import Places, RowStates
from freight.kernels.sharing import share
from freight.kernels.state_heads import StateHeads
from freight.kernels.threads import as_numbers, find_loops, has_words
from freight.model.batch import STATE_BLOCK, STATE_BYTES, STATE_PAIRS

__all__ = ["convolve", "recur"]

_EPS: Final = 1e-6
_MOST_TAPS: Final = 4
_LOOP_ROWS, _LOOP_COLUMNS = 16, 32
"""Of a matrix, that the loop takes at once."""
_LEAST_SHARED: Final = 1 << 16
"""Numbers that are worth another thread."""


# -- the convolution -------------------------------------------------------------------------------


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    rows: RowStates,
) -> None:
    """x [T, C] = bias [C] + sum over j of weight [C, taps][:, j] times the token so many before,
    taps - 1 - j, in place; ``columns`` [seats, taps - 1, C] are each row's last tokens, in x's
    type."""
    kernel = kernels_of(x.device).convolve
    if kernel is not None and kernel(x, weight, bias, columns, rows):
        return
    taps, num_columns = weight.shape[1], x.shape[1]
    loops = find_loops() if has_words(x) and taps <= _MOST_TAPS else None
    if loops is None:
        _convolve_by_torch(x, weight.float(), bias, columns, rows)
        return
    factors = weight.float().t().contiguous().view(-1).numpy()
    added = np.empty(0, np.float32) if bias is None else bias.float().numpy()
    numbers, pitch = as_numbers(x), x.stride(0)
    kept, seat_pitch = as_numbers(columns.flatten(1)), columns.stride(0)

    def work(first: int, last: int) -> None:
        loops.recurrence.convolve(
            first,
            last,
            rows.starts,
            rows.counts,
            rows.seats,
            rows.is_new,
            numbers,
            pitch,
            num_columns,
            factors,
            added,
            taps,
            kept,
            seat_pitch,
        )

    share(rows.counts, work, -(-_LEAST_SHARED // num_columns))


def _convolve_by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    rows: RowStates,
) -> None:
    taps = weight.shape[1]
    for block in _blocks(rows, x, columns[0].numel()):
        before = columns[block.seats].float()
        before[block.is_new] = 0
        seen = torch.cat((before, x[block.tokens].float()), dim=1)
        width = block.tokens.shape[1]
        out = sum(weight[:, j] * seen[:, j : j + width] for j in range(taps))
        assert isinstance(out, torch.Tensor)
        if bias is not None:
            out = out + bias.float()
        x[block.tokens[block.is_there]] = out[block.is_there].to(x.dtype)
        last = block.counts[:, None] + torch.arange(taps - 1, device=x.device)
        kept = seen.gather(1, last[..., None].expand(-1, -1, x.shape[1]))
        columns[block.seats] = kept.to(columns.dtype)


# -- the gated delta rule, and scans -------------------------------------------------------------


def recur(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    decay: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor | None,
    memory: torch.Tensor,
    out: torch.Tensor,
    *,
    heads: StateHeads,
    rows: RowStates,
) -> None:
    """out [T, N U] = what tokens read, each after it has decayed and changed its row's matrices
    ``memory`` [seats, N, W, U], float32: by the gated delta rule, or without ``b`` by a scan, which
    has a ``skip`` [N] (see ``model.recurrent_steps``, also for how x is laid out). a and b [T, N]
    with ``decay`` and ``bias`` [N], float32, say how much; of matrices that decay by row a is
    [T, N W] and ``bias`` [N W].
    """
    kernel = kernels_of(x.device).recur
    if kernel is not None and kernel(
        x, a, b, decay, bias, skip, memory, out, heads=heads, rows=rows
    ):
        return
    assert (b is None) != (skip is None)
    loops = find_loops() if all(map(has_words, (x, a, a if b is None else b, out))) else None
    if loops is None or heads.value_width % _LOOP_COLUMNS or heads.key_width % _LOOP_ROWS:
        _recur_by_torch(x, a, b, decay, bias, skip, memory, out, heads, rows)
        return
    numbers, found = as_numbers(x), as_numbers(out)
    rates, strengths = as_numbers(a), as_numbers(a if b is None else b)
    skips = np.empty(0, np.float32) if skip is None else skip.numpy()
    places = heads.places(is_delta=b is not None)
    held = as_numbers(memory.flatten(1))
    decays, biases = decay.numpy(), bias.numpy()
    each = heads.num_key_heads
    tasks = np.repeat(rows.counts + 1, each)

    def work(first: int, last: int) -> None:
        loops.recurrence.recur(
            first,
            last,
            rows.starts,
            rows.counts,
            rows.seats,
            rows.is_new,
            numbers,
            x.stride(0),
            rates,
            a.stride(0),
            strengths,
            (a if b is None else b).stride(0),
            decays,
            biases,
            skips,
            *places,
            held,
            memory.stride(0),
            found,
            out.stride(0),
            each,
            heads.num_heads // each,
            heads.key_width,
            heads.value_width,
            heads.strength,
            heads.by_row,
            heads.bound or 0.0,
        )

    per_task = heads.num_heads // each * heads.key_width * heads.value_width
    share(tasks, work, max(1, -(-_LEAST_SHARED // per_task)))


def _recur_by_torch(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    decay: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor | None,
    memory: torch.Tensor,
    out: torch.Tensor,
    heads: StateHeads,
    rows: RowStates,
) -> None:
    """Some tokens of each row at once (Yang et al., 2406.06484, section 3, and 2412.06464, section
    3.3): what each corrects is what a triangular system of all of them says. Tokens that are not
    there decay and change nothing. What decays by row is fewer at once, for each pair of tokens has
    its own of each row: e to what lies between them, which is never above one."""
    query, key, value = heads.places(is_delta=b is not None)
    K, N, W, U = heads.num_key_heads, heads.num_heads, heads.key_width, heads.value_width
    most = STATE_PAIRS if heads.by_row else STATE_BLOCK
    pairs = most * most * N * W if heads.by_row else 0
    for block in _blocks(rows, x, max(memory[0].numel(), pairs), most):
        num_rows, width = block.tokens.shape
        own = x[block.tokens].float()
        q, k = (
            own[..., place : place + K * W].reshape(num_rows, width, K, W) for place in (query, key)
        )
        if b is not None:
            q, k = _unit_heads(q) * W**-0.5, _unit_heads(k)
        q, k = (part.repeat_interleave(N // K, dim=2).transpose(1, 2) for part in (q, k))
        v = own[..., value : value + N * U].reshape(num_rows, width, N, U).transpose(1, 2)
        is_there = block.is_there[..., None]
        given = a[block.tokens].float() + bias
        rate = torch.nn.functional.softplus(given)
        # [R, N, B, W], or of all rows as one.
        logs = (given if heads.bound else rate).view(num_rows, width, N, -1).transpose(1, 2)
        logs = decay.exp()[:, None, None] * logs
        logs = (logs.sigmoid() * -heads.bound if heads.bound else -logs) * is_there[:, None]
        much = rate if b is None else b[block.tokens].float().sigmoid() * heads.strength
        strength = (much * is_there).transpose(1, 2)[..., None]
        held = memory[block.seats]
        held[block.is_new] = 0
        grown = logs.cumsum(-2).exp()
        left = _left(logs)
        if b is None:
            corrections = strength * v
        else:
            system = (strength * _products(k, k, left)).tril(-1)
            system += torch.eye(width, device=x.device)
            wanted = strength * (v - (grown * k) @ held)
            corrections = torch.linalg.solve_triangular(system, wanted, upper=False)
        read = (grown * q) @ held + _products(q, k, left) @ corrections
        if skip is not None:
            read = read + skip[:, None, None] * v
        read = read.transpose(1, 2).reshape(num_rows, width, N * U)
        out[block.tokens[block.is_there]] = read[block.is_there].to(out.dtype)
        to_end = k * left[..., -1, :, :]
        held = grown[..., -1, :, None] * held + to_end.transpose(-1, -2) @ corrections
        memory[block.seats] = held


def _left(logs: torch.Tensor) -> torch.Tensor:
    """[R, N, B, B, W]: what is left of token j's correction at token i, by sums of what lies
    between: differences of sums from the first token on would have the errors of all before."""
    pairs = torch.ones(logs.shape[-2], logs.shape[-2], dtype=torch.bool, device=logs.device)
    between = torch.where(pairs.tril(-1)[..., None], logs[..., :, None, :], 0.0).cumsum_(-3)
    return between.exp_().mul_(pairs.tril()[..., None])


def _products(x: torch.Tensor, k: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """[R, N, B, B]: of tokens i and keys j, of what is left of these."""
    if left.shape[-1] == 1:
        return (x @ k.transpose(-1, -2)) * left[..., 0]
    return (left * x[..., :, None, :]).mul_(k[..., None, :, :]).sum(-1)


def _unit_heads(part: torch.Tensor) -> torch.Tensor:
    """[R, B, K, W], each of length one."""
    return part * (part.square().sum(-1, keepdim=True) + _EPS).rsqrt()


# -- rows, some tokens at a time -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """The next tokens [R, B] of some rows, ``counts`` [R] of which are there; the others are of
    no matter. ``seats`` and ``is_new`` [R] as in :class:`RowStates`."""

    tokens: torch.Tensor
    is_there: torch.Tensor
    counts: torch.Tensor
    seats: torch.Tensor
    is_new: torch.Tensor


def _blocks(
    rows: RowStates, x: torch.Tensor, state: int, longest: int = STATE_BLOCK
) -> Iterator[_Block]:
    """All tokens of all rows, ``longest`` of each at once, in order; rows of similar lengths
    together. A row has so many numbers of ``state``."""
    order = np.argsort(-rows.counts, kind="stable")
    begin = 0
    while begin < len(order):
        width = min(longest, int(rows.counts[order[begin]]))
        most = max(1, STATE_BYTES // (4 * max(width * x.shape[1], state)))
        group = order[begin : begin + most]
        begin += most
        for first in range(0, int(rows.counts[group[0]]), longest):
            some = group[rows.counts[group] > first]
            yield _block(rows, some, first, longest, x.device)


def _block(rows: RowStates, some: Places, first: int, longest: int, device: torch.device) -> _Block:
    counts = np.minimum(rows.counts[some] - first, longest)
    steps = np.arange(counts.max())
    places = np.minimum(steps, counts[:, None] - 1)

    def put(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return _Block(
        tokens=put(rows.starts[some][:, None] + first + places),
        is_there=put(steps < counts[:, None]),
        counts=put(counts),
        seats=put(rows.seats[some]),
        is_new=put((rows.is_new[some] != 0) & (first == 0)),
    )
