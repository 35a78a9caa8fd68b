"""Attention over keys that are kept as a state of each row, as functions of tensors.

A state's columns are the last keys of a row, that of position p in place p modulo as many as there
are; behind them compressed ones in order; and where an indexer chooses of these, behind them its
own, side by side. Its matrices are the sums of both. Rows that bring one token are computed
together, others a stretch at a time.
"""

from __future__ import annotations

import torch

from freight.model.frame import Frame, LayerStates
from freight.model.kept_choice import NONE, best_keys, blocks, clear_new, shares_of, together
from freight.model.kept_keys import KeptKeys
from freight.model.kept_steps import AttendKept, ChooseKept
from freight.model.tiles import KEPT_QUERIES, KEPT_TOKENS

__all__ = ["attend_kept"]


def attend_kept(step: AttendKept, frame: Frame) -> None:
    q = frame.values[step.q]
    out = frame.new(step.out, q, q.shape[1])
    for states in frame.states:
        clear_new(states)
        for seat, columns, memory in states.beginnings:
            states.columns[seat].copy_(columns)
            states.memory[seat].copy_(memory)
        own = _Layer(step, frame, states, q, out)
        counts = states.rows.counts.tolist()
        for some in together(counts.count(1), own.numbers(gathers=True)):
            own.attend_single(some)
        for row, count in enumerate(counts):
            for begin in range(0, count if count > 1 else 0, KEPT_TOKENS):
                own.attend_stretch(row, begin, min(begin + KEPT_TOKENS, count))


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
        self._step, self._rows, self._columns = step, states.rows, states.columns
        self._q = q.view(len(q), step.num_heads, step.width)
        self._out = out.view(self._q.shape)
        self._kv = frame.values[step.kv]
        self._sinks = frame.vector(step.sinks).float()[None, :, None]
        self._ring = step.window - 1
        self._keys: KeptKeys | None = None
        self._index: _Index | None = None
        if (own := step.compress) is not None:
            end = self._ring + own.most_keys
            keys, sums = states.columns[:, self._ring : end], states.memory[..., : step.width]
            self._keys = KeptKeys(own, frame, keys, sums)
            if step.choose is not None:
                beside = states.columns[:, end:], states.memory[..., step.width :]
                self._index = _Index(step.choose, frame, *beside)

    def numbers(self, *, gathers: bool = False) -> int:
        """That are made of all keys of a row for a query, with these where they are gathered."""
        count, width = self._columns.shape[1:]
        heads = self._step.num_heads + (self._index.num_heads if self._index is not None else 0)
        return count * (heads + width * gathers)

    def attend_single(self, some: slice) -> None:
        """Of rows that bring one token each."""
        device, lengths = self._kv.device, self._rows.lengths[self._rows.counts == 1][some]
        tokens, seats, positions = (own[some] for own in self._rows.single(device))
        count, complete = 0, None
        if self._keys is not None:
            rate = self._keys.step.rate
            self._keys.add_single(tokens, seats, positions)
            count = int(lengths.max() + 1) // rate
            complete = torch.arange(count, device=device) < (positions[:, None] + 1) // rate
            if self._index is not None:
                self._index.keys.add_single(tokens, seats, positions)
                complete = self._index.choose_single(tokens, seats, complete)
        kept = self._columns[seats, : self._ring + count]
        keys = torch.cat((kept, self._kv[tokens][:, None]), dim=1)
        places = torch.arange(keys.shape[1], device=device)
        known = places < positions[:, None].clamp(max=self._ring)
        known[:, -1] = True
        if complete is not None:
            known[:, self._ring : -1] = complete
        scores = torch.bmm(self._q[tokens], keys.transpose(1, 2)).float().mul_(self._step.scale)
        shares = shares_of(scores.masked_fill_(~known[:, None], NONE), self._sinks)
        self._out[tokens] = torch.bmm(shares.to(keys.dtype), keys)
        self._columns[seats, positions % self._ring] = self._kv[tokens]

    def attend_stretch(self, row: int, begin: int, end: int) -> None:
        """Tokens ``begin`` to ``end`` of what a row brings."""
        own, ring, count = self._rows, self._ring, end - begin
        seat, length = int(own.seats[row]), int(own.lengths[row]) + begin
        tokens = slice(int(own.starts[row]) + begin, int(own.starts[row]) + end)
        columns, rate = self._columns[seat], 0
        if self._keys is not None:
            rate = self._keys.step.rate
            self._keys.add_stretch(tokens, seat, length)
        if self._index is not None:
            self._index.keys.add_stretch(tokens, seat, length)
        before, device = min(length, ring), columns.device
        held = torch.arange(length - before, length, device=device) % ring
        recent = torch.cat((columns[held], self._kv[tokens]))
        for first, last in blocks(count, KEPT_QUERIES, self.numbers()):
            low = max(0, before + first - ring)
            where = slice(tokens.start + first, tokens.start + last)
            compressed = (length + last) // rate if rate else 0
            keys = torch.cat((recent[low : before + last], columns[ring : ring + compressed]))
            at = torch.arange(length + first, length + last, device=device)[:, None]
            places = torch.arange(length - before + low, length + last, device=device)
            known = (places <= at) & (places > at - self._step.window)
            if rate:
                complete = torch.arange(compressed, device=device) < (at + 1) // rate
                if self._index is not None:
                    complete = self._index.choose_stretch(where, seat, complete)
                known = torch.cat((known, complete), dim=1)
            scores = torch.mm(self._q[where].reshape(-1, self._step.width), keys.t())
            scores = scores.float().mul_(self._step.scale)
            scores = scores.view(last - first, self._step.num_heads, -1)
            shares = shares_of(scores.masked_fill_(~known[:, None], NONE), self._sinks)
            found = torch.mm(shares.to(keys.dtype).view(-1, len(keys)), keys)
            self._out[where] = found.view(last - first, self._step.num_heads, -1)
        newest = min(count, ring)
        places = torch.arange(length + count - newest, length + count, device=device)
        columns[places % ring] = self._kv[tokens][count - newest :]


class _Index:
    """What chooses compressed keys: keys of its own, narrow ones side by side in wide columns."""

    def __init__(
        self, step: ChooseKept, frame: Frame, columns: torch.Tensor, sums: torch.Tensor
    ) -> None:
        q, count = frame.values[step.q], step.compress.most_keys
        flat = columns.flatten(1)[:, : count * step.width]
        keys = flat.view(len(flat), count, step.width)
        assert keys.data_ptr() == columns.data_ptr(), "these are to be written to"
        self.keys = KeptKeys(step.compress, frame, keys, sums)
        self._most, self.num_heads = step.num_chosen, step.num_heads
        self._q = q.view(len(q), step.num_heads, step.width)
        self._weights = frame.values[step.weights]

    def choose_single(
        self, tokens: torch.Tensor, seats: torch.Tensor, complete: torch.Tensor
    ) -> torch.Tensor:
        """Of the keys that are ``complete`` [R, E] for one token of each row the chosen ones."""
        if complete.shape[1] <= self._most:
            return complete
        keys = self.keys.keys[seats, : complete.shape[1]].float()
        likeness = torch.bmm(self._q[tokens].float(), keys.transpose(1, 2))
        return self._best(likeness, self._weights[tokens], complete)

    def choose_stretch(self, tokens: slice, seat: int, complete: torch.Tensor) -> torch.Tensor:
        """Likewise for tokens of one row."""
        if complete.shape[1] <= self._most:
            return complete
        keys = self.keys.keys[seat, : complete.shape[1]].float()
        likeness = torch.matmul(self._q[tokens].float(), keys.t())
        return self._best(likeness, self._weights[tokens], complete)

    def _best(
        self, likeness: torch.Tensor, weights: torch.Tensor, complete: torch.Tensor
    ) -> torch.Tensor:
        best = best_keys(likeness, weights, complete, self._most)
        return torch.zeros_like(complete).scatter_(1, best, True) & complete
