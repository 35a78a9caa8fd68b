"""Attention over keys that are kept as a state of each row, as functions of tensors.

A state's columns are the last keys of a row, that of position p in place p modulo as many as there
are, and behind them the compressed ones in order; its matrices are of each number the highest gate,
the sum of e^(gate - highest), and these times what they weigh, of the key that is being made and of
the one after it. Rows that bring one token are computed together, others a stretch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch

from freight.model.frame import Frame, LayerStates
from freight.model.kept_steps import AttendKept, Compress
from freight.model.rope import inverse_frequencies
from freight.model.rope_config import RopeConfig
from freight.model.tiles import KEPT_BYTES, KEPT_QUERIES, KEPT_TOKENS

__all__ = ["attend_kept"]

_NONE: Final = float("-inf")


def attend_kept(step: AttendKept, frame: Frame) -> None:
    q = frame.values[step.q]
    out = frame.new(step.out, q, q.shape[1])
    for states in frame.states:
        for seat, columns, memory in states.beginnings:
            states.columns[seat].copy_(columns)
            states.memory[seat].copy_(memory)
        own = _Layer(step, frame, states, q, out)
        rows = states.rows
        single = [row for row, count in enumerate(rows.counts) if count == 1]
        for some in own.together(single):
            own.attend_single(some)
        for row, count in enumerate(rows.counts):
            for begin in range(0, int(count) if count > 1 else 0, KEPT_TOKENS):
                own.attend_stretch(row, begin, min(begin + KEPT_TOKENS, int(count)))


class _Layer:
    """One layer's step for the rows of one pool."""

    def __init__(
        self,
        step: AttendKept,
        frame: Frame,
        states: LayerStates,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._step, self._states = step, states
        self._q = q.view(len(q), step.num_heads, step.width)
        self._out = out.view(self._q.shape)
        self._kv = frame.values[step.kv]
        self._sinks = frame.vector(step.sinks).float()
        self._ring = step.window - 1
        self._compress = step.compress
        if (own := step.compress) is not None:
            self._sources, self._gates = frame.values[own.x], frame.values[own.gates]
            self._bias = frame.vector(own.bias).view(own.rate, -1)
            self._gain = frame.vector(own.weight).float()

    def together(self, rows: list[int]) -> Iterator[list[int]]:
        """So many that what is gathered of them is no more than some megabytes."""
        shape = self._states.columns.shape[1:]
        most = max(1, KEPT_BYTES // (4 * (shape.numel() + self._step.num_heads * shape[0])))
        return (rows[first : first + most] for first in range(0, len(rows), most))

    # -- rows that bring one token -----------------------------------------------------------------

    def attend_single(self, rows: list[int]) -> None:
        own, device = self._states.rows, self._kv.device
        tokens, seats, positions = (
            torch.from_numpy(numbers[rows]).to(device)
            for numbers in (own.starts, own.seats, own.lengths)
        )
        lengths = own.lengths[rows]
        count = 0
        if (compress := self._compress) is not None:
            self._add_single(compress, tokens, seats, positions, lengths.tolist())
            count = int(lengths.max() + 1) // compress.rate
        kept = self._states.columns[seats, : self._ring + count]
        keys = torch.cat((kept, self._kv[tokens][:, None]), dim=1)
        places = torch.arange(keys.shape[1], device=device)
        known = places < positions[:, None].clamp(max=self._ring)
        if compress is not None:
            completed = self._ring + (positions[:, None] + 1) // compress.rate
            known |= (places >= self._ring) & (places < completed)
        known[:, -1] = True
        scores = torch.bmm(self._q[tokens], keys.transpose(1, 2)).float().mul_(self._step.scale)
        scores.masked_fill_(~known[:, None], _NONE)
        shares = self._share(scores, self._sinks[None, :, None])
        self._out[tokens] = torch.bmm(shares.to(keys.dtype), keys)
        self._states.columns[seats, positions % self._ring] = self._kv[tokens]

    def _add_single(
        self,
        compress: Compress,
        tokens: torch.Tensor,
        seats: torch.Tensor,
        positions: torch.Tensor,
        lengths: list[int],
    ) -> None:
        """The tokens' part in compressed keys."""
        gates = self._gates[tokens].float() + self._bias[positions % compress.rate]
        weighed = self._sources[tokens].float()
        held = self._states.memory[seats]
        new = [place for place, length in enumerate(lengths) if length == 0]
        if new:
            held[new] = _nothing(held[new])
        each = torch.stack((gates, torch.ones_like(gates), weighed), dim=1)
        now, then = held[:, 0], held[:, 1]
        if compress.doubled:
            width = self._step.width
            then = _merged(then, each[..., :width])
            each = each[..., width:]
        now = _merged(now, each)
        done = [place for place, own in enumerate(lengths) if (own + 1) % compress.rate == 0]
        if done:
            firsts = positions[done] + 1 - compress.rate
            made = self._made(compress, now[done], firsts)
            self._states.columns[seats[done], self._ring + firsts // compress.rate] = made
            now, then = now.clone(), then.clone()
            now[done] = then[done]
            then[done] = _nothing(then[done])
        self._states.memory[seats] = torch.stack((now, then), dim=1)

    # -- rows that bring several -------------------------------------------------------------------

    def attend_stretch(self, row: int, begin: int, end: int) -> None:
        """Tokens ``begin`` to ``end`` of what a row brings."""
        own = self._states.rows
        seat, length = int(own.seats[row]), int(own.lengths[row]) + begin
        tokens = slice(int(own.starts[row]) + begin, int(own.starts[row]) + end)
        columns, count = self._states.columns[seat], end - begin
        rate = 0
        if (compress := self._compress) is not None:
            self._add_stretch(compress, tokens, seat, length)
            rate = compress.rate
        before = min(length, self._ring)
        device = columns.device
        held = torch.arange(length - before, length, device=device) % self._ring
        recent = torch.cat((columns[held], self._kv[tokens]))
        for first in range(0, count, KEPT_QUERIES):
            last = min(first + KEPT_QUERIES, count)
            low = max(0, before + first - self._ring)
            near = recent[low : before + last]
            compressed = (length + last) // rate if rate else 0
            keys = torch.cat((near, columns[self._ring : self._ring + compressed]))
            at = torch.arange(length + first, length + last, device=device)[:, None]
            places = torch.arange(length - before + low, length + last, device=device)
            known = (places <= at) & (places > at - self._step.window)
            if rate:
                complete = torch.arange(compressed, device=device) < (at + 1) // rate
                known = torch.cat((known, complete), dim=1)
            where = slice(tokens.start + first, tokens.start + last)
            asked = self._q[where].reshape(-1, self._step.width)
            scores = torch.mm(asked, keys.t()).float().mul_(self._step.scale)
            scores = scores.view(last - first, self._step.num_heads, -1)
            scores.masked_fill_(~known[:, None], _NONE)
            shares = self._share(scores, self._sinks[None, :, None]).to(keys.dtype)
            found = torch.mm(shares.view(-1, len(keys)), keys)
            self._out[where] = found.view(last - first, self._step.num_heads, -1)
        newest = min(count, self._ring)
        places = torch.arange(length + count - newest, length + count, device=device)
        columns[places % self._ring] = self._kv[tokens][count - newest :]

    def _add_stretch(self, compress: Compress, tokens: slice, seat: int, length: int) -> None:
        """Likewise, of the key that each token is a source of first."""
        rate, width, count = compress.rate, self._step.width, tokens.stop - tokens.start
        memory, place = self._states.memory[seat], length % compress.rate
        if length == 0:
            memory.copy_(_nothing(memory))
        num_keys = -(-(place + count) // rate)
        columns = self._sources.shape[1]
        gates = torch.full((num_keys * rate, columns), _NONE, device=memory.device)
        weighed = torch.zeros_like(gates)
        own = slice(place, place + count)
        gates[own] = self._gates[tokens].float()
        weighed[own] = self._sources[tokens].float()
        gates = gates.view(num_keys, rate, columns) + self._bias
        highest = gates.amax(dim=1)
        shares = (gates - _finite(highest)[:, None]).exp_()
        weighed = (weighed.view(gates.shape) * shares).sum(dim=1)
        each = torch.stack((highest, shares.sum(dim=1), weighed), dim=1)
        now, then = memory.clone().unbind(0)
        own_parts = each[..., -width:]
        if compress.doubled:
            later = each[..., :width].clone()
            later[0] = _merged(then, later[0])
            own_parts = own_parts.clone()
            own_parts[1:] = _merged(own_parts[1:], later[:-1])
        else:
            later = _nothing(own_parts)
            own_parts = own_parts.clone()
        own_parts[0] = _merged(now, own_parts[0])
        done = (place + count) // rate
        if done:
            firsts = (length // rate + torch.arange(done, device=memory.device)) * rate
            first = self._ring + length // rate
            made = self._made(compress, own_parts[:done], firsts)
            self._states.columns[seat, first : first + done] = made
        if done < num_keys:
            memory[0], memory[1] = own_parts[-1], later[-1]
        else:
            memory[0], memory[1] = later[-1], _nothing(memory[1])

    # -- both --------------------------------------------------------------------------------------

    def _made(
        self, compress: Compress, sums: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Keys of sums [n, 3, H] that are complete, of tokens from these positions on."""
        key = sums[:, 2] / sums[:, 1]
        key = key * (key.square().mean(dim=-1, keepdim=True) + compress.eps).rsqrt_() * self._gain
        frequencies, scale = _frequencies(compress.rope, compress.max_positions, key.device)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos().mul_(scale), angles.sin().mul_(scale)
        turned = key[:, -compress.rope.rotary_dim :]
        low, high = (
            (turned[:, ::2], turned[:, 1::2]) if compress.rope.pairs else turned.chunk(2, dim=-1)
        )
        both = low * cos - high * sin, high * cos + low * sin
        low.copy_(both[0])
        high.copy_(both[1])
        return key.to(self._kv.dtype)

    def _share(self, scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        """Softmax over the last dim and a sink."""
        highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
        shares = scores.sub_(highest).exp_()
        return shares.div_(shares.sum(dim=-1, keepdim=True) + (sinks - highest).exp())


@lru_cache(maxsize=8)
def _frequencies(
    rope: RopeConfig, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    frequencies, scale = inverse_frequencies(rope, 1, max_positions)
    return frequencies.to(device), scale


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Sums [..., 3, H] of no token."""
    sums = torch.zeros_like(like)
    sums[..., 0, :] = _NONE
    return sums


def _finite(highest: torch.Tensor) -> torch.Tensor:
    return highest.masked_fill(highest == _NONE, 0.0)


def _merged(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Sums [..., 3, H] of the tokens of both."""
    highest = torch.maximum(one[..., 0, :], other[..., 0, :])
    first, second = ((sums[..., 0, :] - _finite(highest)).exp() for sums in (one, other))
    total = one[..., 1, :] * first + other[..., 1, :] * second
    weighed = one[..., 2, :] * first + other[..., 2, :] * second
    return torch.stack((highest, total, weighed), dim=-2)
