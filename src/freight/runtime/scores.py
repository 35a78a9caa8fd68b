"""Log-probabilities of tokens, by the model's own logits, in float32.

New tokens are scored from whole rows of logits. A prompt has too many tokens for that: the head
comes in chunks, so each scored position keeps what its log-softmax needs of the chunks so far, the
maximum, the sum of exponentials under it (Milakov and Gimelshein 2018), the token's own logit and
the highest logits with their ids. Knows no rows and no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["STATE_COLUMNS", "RunningScores", "ScoreLog", "Scores", "join_states", "score"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

STATE_COLUMNS: Final = 3
"""Float32 values per scored position beside its highest logits, which take two each."""

# Bounds what a chunk of rows of logits is copied to: 4 MiB.
_CHUNK_VALUES: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of n tokens: log-probabilities [n], ranks [n] (1 is the highest, 0 not known), and the k
    most likely tokens in their places, ids and log-probabilities [n, k], the highest first."""

    logprobs: Floats
    ranks: Ints
    top_ids: Ints
    top_logprobs: Floats

    def __len__(self) -> int:
        return len(self.logprobs)

    def part(self, first: int, last: int, num_top: int) -> Self:
        """A copy of tokens ``first`` to ``last`` with fewer alternatives."""
        return type(self)(
            logprobs=self.logprobs[first:last].copy(),
            ranks=self.ranks[first:last].copy(),
            top_ids=self.top_ids[first:last, :num_top].copy(),
            top_logprobs=self.top_logprobs[first:last, :num_top].copy(),
        )


class ScoreLog:
    """The scores of one row's new tokens as they come, at most ``capacity``."""

    def __init__(self, capacity: int, num_top: int) -> None:
        self._num = 0
        self._scores = Scores(
            logprobs=np.empty(capacity, dtype=np.float32),
            ranks=np.empty(capacity, dtype=np.int32),
            top_ids=np.empty((capacity, num_top), dtype=np.int32),
            top_logprobs=np.empty((capacity, num_top), dtype=np.float32),
        )

    def append(self, scores: Scores, i: int) -> None:
        """Take the i-th of ``scores``, which may have more alternatives."""
        log, place = self._scores, self._num
        num_top = log.top_ids.shape[1]
        log.logprobs[place], log.ranks[place] = scores.logprobs[i], scores.ranks[i]
        log.top_ids[place] = scores.top_ids[i, :num_top]
        log.top_logprobs[place] = scores.top_logprobs[i, :num_top]
        self._num += 1

    def result(self) -> Scores:
        return self._scores.part(0, self._num, self._scores.top_ids.shape[1])


def score(logits: torch.Tensor, places: list[int], token_ids: list[int], num_top: int) -> Scores:
    """Scores of ``token_ids``, the i-th by row ``places[i]`` of ``logits`` [R, V], float32."""
    num_rows = max(1, _CHUNK_VALUES // logits.shape[1])
    num_top = min(num_top, logits.shape[1])
    parts = []
    for start in range(0, len(places), num_rows):
        rows = logits[torch.tensor(places[start : start + num_rows], device=logits.device)]
        ids = torch.tensor(token_ids[start : start + num_rows], device=logits.device)
        ids.clamp_(min=0)  # a row without a token is at its end
        own = rows.gather(1, ids[:, None])
        ranks = (rows > own).sum(dim=-1, keepdim=True) + 1
        top = rows.topk(num_top, dim=-1)
        total = rows.logsumexp(dim=-1, keepdim=True)
        parts.append((own - total, ranks.int(), top.indices.int(), top.values - total))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    return Scores(
        logprobs=columns[0][:, 0],
        ranks=columns[1][:, 0],
        top_ids=columns[2],
        top_logprobs=columns[3],
    )


class RunningScores:
    """The state of one micro-batch's scored positions: ``state`` float32 [S, 3 + 2k]."""

    def __init__(self, state: torch.Tensor) -> None:
        self._num_top = (state.shape[1] - STATE_COLUMNS) // 2
        self._best, self._sum, self._own = state[:, 0], state[:, 1], state[:, 2]
        self._top = state[:, STATE_COLUMNS : STATE_COLUMNS + self._num_top]
        self._top_ids = state[:, STATE_COLUMNS + self._num_top :].view(torch.int32)

    def clear(self) -> None:
        for values in (self._best, self._own, self._top):
            values.fill_(-torch.inf)
        self._sum.zero_()
        self._top_ids.zero_()

    def merge(
        self, start: int, logits: torch.Tensor, first_token: int, targets: torch.Tensor
    ) -> None:
        """Take in the logits [n, c] of tokens ``first_token`` on, for positions ``start`` on, whose
        own tokens are ``targets`` [n]. ``logits`` is used up."""
        rows = slice(start, start + len(logits))
        self._merge_own(rows, logits, first_token, targets)
        self._merge_top(rows, logits, first_token)
        best = torch.maximum(self._best[rows], logits.amax(dim=-1))
        self._sum[rows] *= torch.exp(self._best[rows] - best)
        self._sum[rows] += logits.sub_(best[:, None]).exp_().sum(dim=-1)
        self._best[rows] = best

    def _merge_own(
        self, rows: slice, logits: torch.Tensor, first_token: int, targets: torch.Tensor
    ) -> None:
        columns = targets - first_token
        is_here = (columns >= 0) & (columns < logits.shape[1])
        found = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
        self._own[rows] = torch.where(is_here, found, self._own[rows])

    def _merge_top(self, rows: slice, logits: torch.Tensor, first_token: int) -> None:
        if self._num_top == 1:
            values, ids = logits.max(dim=-1, keepdim=True)
        else:
            values, ids = logits.topk(min(self._num_top, logits.shape[1]), dim=-1)
        values = torch.cat([self._top[rows], values], dim=-1)
        ids = torch.cat([self._top_ids[rows], (ids + first_token).int()], dim=-1)
        # A stable sort: of equal logits the lower id comes first, however the head is cut.
        order = values.argsort(dim=-1, descending=True, stable=True)[:, : self._num_top]
        self._top[rows] = values.gather(1, order)
        self._top_ids[rows] = ids.gather(1, order)

    def result(self) -> Scores:
        """The scores, once all chunks are in: no numbers where the logits are none."""
        total = self._best + self._sum.log()
        above = (self._top > self._own[:, None]).sum(dim=-1)
        ranks = torch.where(above < self._num_top, above + 1, 0)
        return Scores(
            logprobs=(self._own - total).cpu().numpy(),
            ranks=ranks.int().cpu().numpy(),
            top_ids=self._top_ids.contiguous().cpu().numpy(),
            top_logprobs=(self._top - total[:, None]).cpu().numpy(),
        )


def join_states(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of parts of the vocabulary that follow each other, states [..., 3 + 2k] of the same
    positions: that of all of it."""
    best = torch.stack([own[..., 0] for own in states]).amax(dim=0)
    # A part without any number weighs nothing, also where none has one.
    sums = [
        own[..., 1] * torch.where(own[..., 0] == best, 1.0, torch.exp(own[..., 0] - best))
        for own in states
    ]
    out = torch.empty_like(states[0])
    out[..., 0], out[..., 1] = best, torch.stack(sums).sum(dim=0)
    out[..., 2] = torch.stack([own[..., 2] for own in states]).amax(dim=0)
    num_top = (out.shape[-1] - STATE_COLUMNS) // 2
    middle = STATE_COLUMNS + num_top
    values = torch.cat([own[..., STATE_COLUMNS:middle] for own in states], dim=-1)
    ids = torch.cat([own[..., middle:].view(torch.int32) for own in states], dim=-1)
    order = values.argsort(dim=-1, descending=True, stable=True)[..., :num_top]
    out[..., STATE_COLUMNS:middle] = values.gather(-1, order)
    out[..., middle:] = ids.gather(-1, order).view(torch.float32)
    return out
