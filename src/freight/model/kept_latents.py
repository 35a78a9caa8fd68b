"""Attention over latents of a whole row that are kept as its state, of which an indexer chooses, as
functions of tensors.

A state's columns are the row's keys in order, and behind them those of the indexer, side by side.
What a layer chooses for others it leaves as places of keys, which are the bits of other numbers. A
query that sees no more keys than are chosen attends all, whatever it finds there.
"""

from __future__ import annotations

import torch

from freight.model.frame import Frame, LayerStates
from freight.model.kept_choice import NONE, best_keys, blocks, clear_new, shares_of, together
from freight.model.kept_steps import AttendChosen, ChooseKeys
from freight.model.tiles import KEPT_QUERIES

__all__ = ["attend_chosen"]


def attend_chosen(step: AttendChosen, frame: Frame) -> None:
    q = frame.values[step.q]
    out = frame.new(step.out, q, q.shape[1])
    for states in frame.states:
        clear_new(states)
        for seat, columns, _ in states.beginnings:
            states.columns[seat].copy_(columns)
        own = _Layer(step, frame, states, out)
        rows = states.rows
        for row, count in enumerate(rows.counts.tolist()):
            own.append(row, count)
        single = rows.lengths[rows.counts == 1]
        longest = 1 + int(max(single, default=0))
        for some in together(len(single), own.numbers(longest, gathers=True)):
            own.attend_single(some)
        for row, count in enumerate(rows.counts.tolist()):
            total = int(rows.lengths[row]) + count
            for first, last in blocks(count * (count > 1), KEPT_QUERIES, own.numbers(total)):
                own.attend_stretch(row, first, last)


class _Layer:
    """One layer's step for the rows of one pool."""

    def __init__(
        self, step: AttendChosen, frame: Frame, states: LayerStates, out: torch.Tensor
    ) -> None:
        q, most = frame.values[step.q], step.most_keys
        self._step, self._rows = step, states.rows
        self._q = q.view(len(q), step.num_heads, step.width)
        self._out = out.view(self._q.shape)
        self._new, self._sinks = frame.values[step.k], None
        self._chosen = None if step.chosen is None else frame.values[step.chosen]
        if step.sinks is not None:
            self._sinks = frame.vector(step.sinks).float()[None, :, None]
        self._keys = states.columns[:, :most]
        self._index = None
        if step.index is not None:
            beside = states.columns[:, most:].flatten(1)[:, : most * step.index.width]
            assert beside.data_ptr() == states.columns[:, most:].data_ptr(), "these are written to"
            self._index = _Index(step.index, frame, beside)

    def numbers(self, count: int, *, gathers: bool = False) -> int:
        """That are made of so many keys for a query, with these where they are gathered."""
        step = self._step
        gathered = min(count, step.num_chosen) * step.width + count * step.index_numbers
        return count * (step.num_heads + step.index_heads) + gathered * gathers + 1

    def append(self, row: int, count: int) -> None:
        seat, start, length = (
            int(own[row]) for own in (self._rows.seats, self._rows.starts, self._rows.lengths)
        )
        tokens, places = slice(start, start + count), slice(length, length + count)
        self._keys[seat, places] = self._new[tokens]
        if self._index is not None:
            self._index.keys[seat, places] = self._index.new[tokens]

    def attend_single(self, some: slice) -> None:
        """Of rows that bring one token each: only the chosen keys are put together."""
        rows, device, step = self._rows, self._new.device, self._step
        tokens, seats, positions = (own[some] for own in rows.single(device))
        count = 1 + int(rows.lengths[rows.counts == 1][some].max())
        places = torch.arange(count, device=device)[None]
        if count > step.num_chosen:
            if self._index is None:
                places = self._recall(tokens, positions)
            else:
                index = self._index.keys[seats, :count].float()
                likeness = torch.bmm(self._index.q[tokens].float(), index.transpose(1, 2))
                seen = places <= positions[:, None]
                places = best_keys(likeness, self._index.weights[tokens], seen, step.num_chosen)
                self._leave(tokens, places)
            keys = self._keys[seats[:, None], places]
        else:
            keys = self._keys[seats, :count]
        scores = torch.bmm(self._q[tokens], keys.transpose(1, 2)).float().mul_(step.scale)
        scores.masked_fill_((places > positions[:, None])[:, None], NONE)
        shares = shares_of(scores, self._sinks)
        self._out[tokens] = torch.bmm(shares.to(keys.dtype), keys)

    def attend_stretch(self, row: int, first: int, last: int) -> None:
        """Tokens ``first`` to ``last`` of what a row brings: each has keys of its own choice."""
        own, step = self._rows, self._step
        seat, start, length = (int(o[row]) for o in (own.seats, own.starts, own.lengths))
        tokens, count = slice(start + first, start + last), length + last
        keys = self._keys[seat, :count]
        at = torch.arange(length + first, length + last, device=keys.device)[:, None]
        seen = torch.arange(count, device=keys.device) <= at
        if count > step.num_chosen:
            if self._index is None:
                places = self._recall(tokens, at[:, 0])
            else:
                index = self._index.keys[seat, :count].float()
                likeness = torch.matmul(self._index.q[tokens].float(), index.t())
                places = best_keys(likeness, self._index.weights[tokens], seen, step.num_chosen)
                self._leave(tokens, places)
            seen &= torch.zeros_like(seen).scatter_(1, places, True)
        scores = torch.mm(self._q[tokens].reshape(-1, step.width), keys.t())
        scores = scores.float().mul_(step.scale).view(last - first, step.num_heads, -1)
        shares = shares_of(scores.masked_fill_(~seen[:, None], NONE), self._sinks).to(keys.dtype)
        found = torch.mm(shares.view(-1, count), keys)
        self._out[tokens] = found.view(last - first, step.num_heads, -1)

    def _leave(self, tokens: torch.Tensor | slice, places: torch.Tensor) -> None:
        """For layers that attend the same keys."""
        if self._chosen is not None:
            bits = places.to(torch.int32).view(self._chosen.dtype)
            self._chosen[tokens, : bits.shape[1]] = bits

    def _recall(self, tokens: torch.Tensor | slice, positions: torch.Tensor) -> torch.Tensor:
        """Places [T, num_chosen] that a layer before has left of tokens at such positions; the
        first ones of those that see no more."""
        assert self._chosen is not None
        most = self._step.num_chosen
        columns = self._chosen[tokens, : 4 * most // self._chosen.itemsize]
        # One row is contiguous however far the next one would be: no view has other numbers then.
        left = columns.clone(memory_format=torch.contiguous_format).view(torch.int32)
        first = torch.arange(most, device=left.device, dtype=left.dtype)
        return torch.where(positions[:, None] < most, first, left).long()


class _Index:
    """What chooses in one layer: queries [T, heads, W] and their weights, new keys [T, W], and
    ``keys`` [seats, most, W] of each row."""

    def __init__(self, step: ChooseKeys, frame: Frame, keys: torch.Tensor) -> None:
        q = frame.values[step.q]
        self.q = q.view(len(q), step.num_heads, step.width)
        self.weights, self.new = frame.values[step.weights], frame.values[step.k]
        self.keys = keys.view(len(keys), -1, step.width)
