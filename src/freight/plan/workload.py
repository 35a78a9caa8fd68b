"""The work of a job as the planner sees it: how many rows, how long.

A plain value. It does not know the rows themselves, their order, or any machine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np

from freight.errors import InputError
from freight.plan.admission import Lengths
from freight.plan.beginnings import Beginnings, Held, Shared

__all__ = ["RowLength", "Workload", "evenly"]

_ALIKE: Final = 1.2
_GOLDEN: Final = (5**0.5 - 1) / 2
"""Multiples of it fill an interval evenly, whichever stretch of them is taken."""


_Given = ParamSpec("_Given")
_Value = TypeVar("_Value")


def _kept(
    reckon: Callable[Concatenate[Workload, _Given], _Value],
) -> Callable[Concatenate[Workload, _Given], _Value]:
    """Reckons a workload's number once: a search asks a thousand times, of as many groups."""

    def found(self: Workload, /, *given: _Given.args, **named: _Given.kwargs) -> _Value:
        key = (reckon.__name__, *given, *named.values())
        if key not in self._known:
            self._known[key] = reckon(self, *given, **named)
        value: _Value = self._known[key]
        return value

    found.__name__, found.__doc__ = reckon.__name__, reckon.__doc__
    return found


class RowLength(NamedTuple):
    """A row as far as is expected: tokens of its prompt and its answer, and how many first ones of
    the prompt are those of the ``beginning`` with that number, which it may compute for all."""

    prompt: int
    new: int
    shared: int = 0
    beginning: int = 0
    computes: bool = False


def evenly(
    alike: RowLength, count: int, begun: int, places: range, base: int = 0
) -> Iterator[RowLength]:
    """Those at ``places`` of ``count`` rows that are alike, of which as many beginnings as are
    ``begun`` have equal parts, numbered from ``base`` on; none begun: all have the one before."""
    for place in places:
        own = place * begun // count if begun else -1
        computes = begun > 0 and (not place or (place - 1) * begun // count != own)
        yield alike._replace(beginning=base + own, computes=computes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rows still to be answered, in numbers.

    A row is one sample: a request for ``n`` answers counts as n rows, its prompt's tokens once in
    ``total_prompt_tokens``. Requests have from ``min_samples`` to ``max_samples``.

    ``max_total_tokens`` is the largest prompt + new tokens of one row, which can be less than
    ``max_prompt_tokens + max_new_tokens``: the longest prompt need not ask for the longest answer.
    New tokens are upper bounds; rows may end sooner.

    ``lengths`` are (rows, prompt, new) of groups of rows in the order in which they run; empty
    where all are taken to be alike. ``brought`` are the same with what each brings where rows of
    one micro-batch share what they begin with, and keep no keys; empty where that is no less.

    ``is_brought``: they are what is brought so.

    ``beginnings`` are what prompts begin with that others begin with too, where some do.

    ``ends_early``: something else than its length can end an answer. How long answers then are is
    not known before; any length up to the longest is taken to be as likely as any other.

    ``is_structured``: some answers must look a certain way, and what keeps them so takes memory.

    ``max_scored_tokens`` are the most tokens of one prompt whose log-probabilities are wanted,
    ``total_scored_tokens`` those of all prompts, ``max_listed_tokens`` the most new ones,
    ``max_logprobs`` the most alternatives to each.
    """

    num_rows: int
    max_prompt_tokens: int
    max_new_tokens: int
    max_total_tokens: int
    total_prompt_tokens: int
    total_new_tokens: int
    min_samples: int = 1
    max_samples: int = 1
    max_scored_tokens: int = 0
    total_scored_tokens: int = 0
    max_listed_tokens: int = 0
    max_logprobs: int = 0
    lengths: tuple[tuple[int, int, int], ...] = ()
    brought: tuple[tuple[int, int, int], ...] = ()
    is_brought: bool = False
    ends_early: bool = False
    beginnings: Beginnings | None = None
    is_structured: bool = False
    _known: dict[tuple[Any, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("num_rows", 1),
            ("max_prompt_tokens", 1),
            ("max_new_tokens", 0),
            ("min_samples", 1),
            ("max_samples", self.min_samples),
        ):
            if getattr(self, name) < least:
                raise _refuse(f"{name}={getattr(self, name)}", f"It must be at least {least}.")
        counted = sum(count for count, _, _ in self.lengths)
        if self.lengths and counted != self.num_rows:
            raise _refuse(f"lengths of {counted} rows", f"There are {self.num_rows} rows.")
        longest, shortest = self.max_prompt_tokens + self.max_new_tokens, self._shortest_total()
        if not shortest <= self.max_total_tokens <= longest:
            raise _refuse(
                f"max_total_tokens={self.max_total_tokens}",
                f"One row has between {shortest} and {longest} tokens at most.",
            )
        least_prompts = -(-self.num_rows // self.max_samples)
        for name, least, most in (
            ("total_prompt_tokens", least_prompts, self.max_prompt_tokens * self.num_rows),
            ("total_new_tokens", 0, self.max_new_tokens * self.num_rows),
            ("total_scored_tokens", 0, self.max_scored_tokens * self.num_rows),
        ):
            if not least <= getattr(self, name) <= most:
                raise _refuse(
                    f"{name}={getattr(self, name)}",
                    f"{self.num_rows} rows have between {least} and {most}.",
                )

    @classmethod
    def of_alike(cls, num_rows: int, prompt_tokens: int, new_tokens: int) -> Workload:
        """Rows of one length."""
        return cls(
            num_rows=num_rows,
            max_prompt_tokens=prompt_tokens,
            max_new_tokens=new_tokens,
            max_total_tokens=prompt_tokens + new_tokens,
            total_prompt_tokens=num_rows * prompt_tokens,
            total_new_tokens=num_rows * new_tokens,
        )

    def with_beginning(self, tokens: int) -> Workload:
        """All prompts begin with the same ``tokens``, fewer than the shortest has."""
        if not tokens:
            return replace(self, beginnings=None)
        longest = self.max_prompt_tokens, self.max_total_tokens
        return replace(self, beginnings=Beginnings.of_all(tokens, self.num_rows, *longest))

    def with_samples(self, count: int) -> Workload:
        """So many of each row, which share its prompt."""
        if count == 1:
            return self
        lengths = self.lengths or ((self.num_rows, *self.row_lengths(0, 1)[0][:2]),)
        rows, prompts, new = (np.array(own) for own in zip(*lengths, strict=True))
        longest = np.repeat(prompts, rows)
        longest[0] = self.max_prompt_tokens
        beginnings = Beginnings.of(
            tuple(Shared(prompt - 1, own) for own, prompt, _ in lengths),
            keys=np.arange(self.num_rows),
            tokens=longest - 1,
            prompts=longest,
            totals=longest + np.repeat(new, rows),
            rows=np.full(self.num_rows, count),
        )
        return replace(
            self,
            num_rows=self.num_rows * count,
            total_new_tokens=self.total_new_tokens * count,
            min_samples=count,
            max_samples=count,
            lengths=tuple((own * count, prompt, most) for own, prompt, most in lengths),
            beginnings=beginnings if self.max_new_tokens > 1 else None,
        )

    def as_alone(self) -> Workload:
        """Of rows that share nothing but their own prompt's computation."""
        return replace(self, beginnings=None, brought=())

    def as_shared(self) -> Workload:
        """Of rows that share what they begin with. Where they keep no keys, and it is not the same
        for all, prompts are as long as what they bring; the longest of them stay."""
        if not self.brought or self.beginnings is not None:
            return self
        total = sum(count * prompt for count, prompt, _ in self.brought)
        return replace(
            self, lengths=self.brought, brought=(), is_brought=True, total_prompt_tokens=total
        )

    @property
    def has_many_lengths(self) -> bool:
        """Whether answers end at different times even where rows begin together."""
        return self.ends_early or self.max_new_tokens > _ALIKE * self.mean_new_tokens

    @property
    def mean_prompt_tokens(self) -> float:
        """That are computed, by row: samples of one prompt compute it once."""
        return self.total_prompt_tokens / self.num_rows

    @property
    def mean_row_prompt_tokens(self) -> float:
        """That a row has keys of."""
        return self._mean_row_prompt_tokens()

    @_kept
    def _mean_row_prompt_tokens(self) -> float:
        if self.lengths and self.min_samples < self.max_samples:
            return sum(count * prompt for count, prompt, _ in self.lengths) / self.num_rows
        return self.mean_prompt_tokens * self.samples

    @property
    def mean_new_tokens(self) -> float:
        """As far as is expected; at least one: a row is in one sweep."""
        return max(1.0, self.expected_new_tokens / self.num_rows)

    @property
    def expected_new_tokens(self) -> float:
        """Of all rows together."""
        if not self.ends_early:
            return float(self.total_new_tokens)
        return min(float(self.total_new_tokens), (self.total_new_tokens + self.num_rows) / 2)

    def scored_share(self, shared_tokens: float) -> float:
        """Of the prompts' tokens behind what they share, those whose log-probabilities are wanted:
        what is to be scored is not shared."""
        own = self.total_prompt_tokens - self.num_rows * shared_tokens
        return self.total_scored_tokens / max(1, own, self.total_scored_tokens)

    @property
    def samples(self) -> int:
        """Rows of one prompt, one behind the other, of which one computes it for all: as many as
        every request has, or 1 where they have different numbers."""
        return self.min_samples if self.min_samples == self.max_samples else 1

    @_kept
    def mean_shared_tokens(self, page_tokens: int) -> float:
        """Tokens of a row's beginning, in whole pages; 0 of none: nothing is shared."""
        groups = self._groups()
        return sum(group[0] * _whole(group[3], page_tokens) for group in groups) / self.num_rows

    @_kept
    def mean_computed_tokens(self, page_tokens: int) -> float:
        """Tokens of a row's prompt that are computed where beginnings are computed once, those of
        its beginning in proportion."""
        groups = self._groups()
        own = self.mean_row_prompt_tokens - self.mean_shared_tokens(page_tokens)
        begun = sum(group[4] * _whole(group[3], page_tokens) for group in groups)
        return own / self.samples + begun / self.num_rows

    def own_prompt_tokens(self, page_tokens: int) -> int:
        """The most of one prompt behind whole pages of its beginning."""
        if not page_tokens or self.beginnings is None:
            return self.max_prompt_tokens
        return min(self.max_prompt_tokens, self.beginnings.own_prompt_tokens(page_tokens))

    def own_total_tokens(self, page_tokens: int) -> int:
        """Likewise of one row."""
        if not page_tokens or self.beginnings is None:
            return self.max_total_tokens
        return min(self.max_total_tokens, self.beginnings.own_total_tokens(page_tokens))

    def most_begun(self, num_rows: int, page_tokens: int) -> int:
        """The most tokens of beginnings that so many rows one after the other have."""
        if not page_tokens or self.beginnings is None:
            return 0
        return self.beginnings.most_held(num_rows).tokens

    def begun(self, num_rows: int) -> int:
        """How many beginnings so many rows compute, on average."""
        return min(num_rows, round(num_rows * self._num_begun / self.num_rows))

    def most_held(self, block_rows: int, *, may_stay: bool) -> Held:
        """Beginnings of the rows of a block. If answers end early they ``may_stay``, where rows
        enter at any time, until the last of their rows has ended."""
        assert self.beginnings is not None
        sharers = self.num_rows / max(1, self._num_begun)
        longer = 2 * sharers / (sharers + 1) if may_stay and self.ends_early else 1.0
        return self.beginnings.most_held(math.ceil(block_rows * max(1.0, longer)))

    @property
    def _num_begun(self) -> int:
        """Beginnings of all rows."""
        return 0 if self.beginnings is None else sum(own.begun for own in self.beginnings.groups)

    def answers(self) -> Lengths:
        """What is known of the answers' lengths before any is there."""
        return Lengths(expected=self.mean_new_tokens, longest=self.max_new_tokens)

    @_kept
    def held_tokens(self, page_tokens: int, shared_page: int = 0) -> float:
        """Tokens of a row's pages on average over the sweeps that rows of all ages are in, but for
        what it shares in whole pages of so many: the page in progress is half full, and rows with
        long answers are met more often."""
        sweeps = held = 0.0
        for count, prompt, most, shared, _ in self._groups(is_exact=True):
            new = max(1.0, float(most))
            answer, square = new, new * new
            if self.ends_early:
                answer, square = (new + 1) / 2, (new + 1) * (2 * new + 1) / 6
            own = max(1.0, prompt - _whole(shared, shared_page))
            sweeps += count * answer
            held += count * (answer * (own + page_tokens / 2) + square / 2)
        return min(held / sweeps, float(self.max_total_tokens + page_tokens))

    def row_lengths(self, first: int, last: int, page_tokens: int = 0) -> list[RowLength]:
        """The rows ``first`` to ``last``, as far as is expected. They share what they begin with in
        whole pages of ``page_tokens``, 0: not at all. Beginnings are numbered from the first row's
        on."""
        found: list[RowLength] = []
        groups, begins, begun_before = self._ordered()
        for number in range(max(0, bisect_right(begins, first) - 1), len(groups)):
            count, prompt, new, shared, begun = groups[number]
            begin, num_begun = begins[number], begun_before[number]
            if begin >= last:
                break
            inside = range(max(first, begin) - begin, min(last, begin + count) - begin)
            prompt, new = int(prompt), int(new)
            row = RowLength(prompt, new, min(_whole(shared, page_tokens), prompt - 1))
            if row.shared:
                found += evenly(row, count, begun, inside, num_begun)
            else:
                found += [row] * len(inside)
        if (shares := next((row for row in found if row.shared), None)) is not None:
            least = shares.beginning
            found = [r._replace(beginning=r.beginning - least) if r.shared else r for r in found]
        if self.ends_early:
            return [r._replace(new=_expected(r.new, row)) for row, r in enumerate(found, first)]
        return found

    @_kept
    def _ordered(self) -> tuple[list[tuple[int, float, float, int, int]], list[int], list[int]]:
        """The groups, the first row of each, and how many beginnings those before have."""
        groups = [*self._groups()]
        begins = [0, *accumulate(count for count, *_ in groups)]
        begun = [0, *accumulate(begun for *_, begun in groups)]
        return groups, begins[:-1], begun[:-1]

    def _groups(self, *, is_exact: bool = False) -> Iterator[tuple[int, float, float, int, int]]:
        """(rows, prompt, new, shared, begun) of groups of rows; means of all are rounded unless
        ``is_exact``."""
        prompt, new = self.mean_row_prompt_tokens, self.total_new_tokens / self.num_rows
        alike = ((self.num_rows, prompt, new),)
        if not is_exact:
            alike = ((self.num_rows, max(1, round(prompt)), round(new)),)
        lengths = self.lengths or alike
        shared = (Shared(0, 0),) if self.beginnings is None else self.beginnings.groups
        if len(shared) < len(lengths):  # one that all have
            shared = shared + (shared[0]._replace(begun=0),) * (len(lengths) - 1)
        for own, other in zip(lengths, shared, strict=True):
            yield *own, *other

    def max_prompts(self, num_rows: int) -> int:
        """The most prompts that a micro-batch of so many rows computes.

        Samples of a request stay together, unless there are more: what is left of them then may
        be a single row.
        """
        if self.max_samples > num_rows:
            return num_rows
        return num_rows // self.min_samples

    def _shortest_total(self) -> int:
        """A prompt has a token at least, and may have no answer."""
        return max(self.max_prompt_tokens, self.max_new_tokens + 1)


def _whole(tokens: int, page_tokens: int) -> int:
    """In whole pages, of which there are none without tokens."""
    return tokens // page_tokens * page_tokens if page_tokens else 0


def _expected(most_tokens: int, row: int) -> int:
    """Tokens of a row's answer: evenly from 1 to ``most_tokens``, neighbours far apart."""
    return math.ceil(most_tokens * ((row + 1) * _GOLDEN % 1.0))


def _refuse(asked: str, limit: str) -> InputError:
    return InputError(
        f"A workload with {asked} was given.", limit, "Count prompt and new tokens of each row."
    )
