"""Guesses at what a row says next: what followed the same tokens before, in its own text or in the
answers of rows before it.

A row brings guesses to a sweep beside the token that it has, and a token is drawn after each, as it
would have been in its own sweep: guesses stay as far as those say the same. So no answer depends on
them, and where weights are brought for every sweep a row that quotes its prompt needs fewer sweeps.
After "prompt lookup decoding" (Saxena 2023) and "Inference with Reference" (Yang et al. 2023,
2304.04487). Knows tokens, no model and no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from freight.model.batch import RowKey
from freight.runtime.answers import Row

__all__ = ["Drafts", "Guesses", "find_continuation"]

Ids = npt.NDArray[np.int32]

_LEAST_ALIKE: Final = 2
_MOST_ALIKE: Final = 8
_PAST_TOKENS: Final = 1 << 15
"""Of answers that are remembered."""
_BORDER: Final = -1


@dataclass(kw_only=True, slots=True)
class Guesses:
    """How many tokens were guessed, and how many of them came true."""

    num_tried: int = 0
    num_true: int = 0


class Drafts:
    """Of one block of rows: ``propose`` guesses, ``note`` hears how many came true, ``keep`` sees a
    row off. At most ``most`` tokens are guessed at once; of a row whose guesses fail fewer."""

    def __init__(self, most: int, guesses: Guesses) -> None:
        self._most = most
        self._guesses = guesses
        self._limits: dict[RowKey, int] = {}
        self._past = np.full(_PAST_TOKENS, _BORDER, dtype=np.int32)
        self._num_past = 0
        self._num_made = self._num_drawn = 0

    @property
    def tokens_per_sweep(self) -> float:
        """That a row makes which makes any, on average so far."""
        return self._num_made / self._num_drawn if self._num_drawn else 1.0

    def propose(self, row: Row, most: int) -> list[int]:
        """Up to ``most`` tokens that may follow those that the row has."""
        most = min(most, self._limits.get(row.key, self._most))
        if most < 1:
            return []
        text = _text(row)
        context = text[-_MOST_ALIKE:]
        num_alike, found = find_continuation(text, context, most)
        if num_alike < _MOST_ALIKE:
            past = self._past[: self._num_past]
            num_other, other = find_continuation(past, context, most)
            if num_other > num_alike:
                num_alike, found = num_other, other
        return [*found] if num_alike >= _LEAST_ALIKE else []

    def note(self, row: Row, num_tried: int, num_true: int) -> None:
        """Of so many guesses these came true, and with them a token was made."""
        self._num_drawn += 1
        self._num_made += 1 + num_true
        if not num_tried:
            return
        self._guesses.num_tried += num_tried
        self._guesses.num_true += num_true
        all_true = num_true == num_tried
        limit = self._limits.get(row.key, self._most)
        self._limits[row.key] = min(self._most, 2 * limit) if all_true else num_true + 1

    def keep(self, row: Row) -> None:
        """It has ended: others may go on as it did."""
        self._limits.pop(row.key, None)
        own = [*row.answer.request.prompt_ids[-_MOST_ALIKE:], *row.new_ids, _BORDER]
        own = own[-_PAST_TOKENS // 2 :]
        if self._num_past + len(own) > _PAST_TOKENS:  # the newer half stays
            rest = self._past[self._num_past - _PAST_TOKENS // 2 : self._num_past].copy()
            self._past[: len(rest)] = rest
            self._num_past = len(rest)
        self._past[self._num_past : self._num_past + len(own)] = own
        self._num_past += len(own)


def find_continuation(text: Ids, context: Ids, most: int) -> tuple[int, list[int]]:
    """How many of the last tokens of ``context`` stand alike in ``text``, at most all, with others
    behind them, and up to ``most`` that follow where they last do. Where the text ends there, what
    follows begins again: it goes on in circles."""
    length = len(context)
    ends = np.flatnonzero(text[:-1] == context[-1])
    if not len(ends):
        return 0, []
    num_alike = 1
    while num_alike < length:
        longer = ends[ends >= num_alike]
        longer = longer[text[longer - num_alike] == context[length - 1 - num_alike]]
        if not len(longer):
            break
        ends = longer
        num_alike += 1
    behind = text[int(ends[-1]) + 1 :][:most]
    borders = np.flatnonzero(behind == _BORDER)
    if len(borders):
        return num_alike, behind[: borders[0]].tolist()
    return num_alike, np.resize(behind, most).tolist()


def _text(row: Row) -> Ids:
    own = np.asarray(row.new_ids, dtype=np.int32)
    return np.concatenate((row.answer.prompt_array, own))
