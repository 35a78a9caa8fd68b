"""The sweeps of a run in which rows enter while others are under way, without running it.

The rule that the run follows, on rows that are known by their lengths alone: who enters when, and
what each brings. Answers are taken to be as long as the workload says. Knows no token ids, no
tensors and no seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from freight.plan.admission import Outlook, Pace, Pages
from freight.plan.policy import Policy, Tier
from freight.plan.rollout import BlockRow, Brought, WorkSizes, computing_rows, work_of
from freight.plan.sweep import Sweep

__all__ = ["Census", "RolledSweep", "roll_out"]

Ints = npt.NDArray[np.int64]

_NOBODY: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """Rows that bring tokens to a sweep, by the seat that each has: its number, the tokens of its
    prompt that are computed and of its answer, those that have keys, and those that it brings."""

    seats: Ints
    numbers: Ints
    prompts: Ints
    answers: Ints
    kv_lens: Ints
    brought: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledSweep:
    """A sweep as it is expected; ``num_ended`` rows end in it."""

    census: Census
    num_ended: int

    @property
    def num_tokens(self) -> int:
        return int(self.census.brought.sum())

    def sweep(self, index: int, policy: Policy, sizes: WorkSizes) -> Sweep:
        """The sweep with all that it moves."""
        own = self.census
        seats = _seats(policy)
        members: list[list[Brought]] = [[] for _ in range(policy.num_micro_batches)]
        for place, seat in enumerate(own.seats.tolist()):
            k, number = divmod(seat, len(seats))
            tier, is_delegated = seats[number]
            prompt_tokens = int(own.prompts[place]) + (not own.answers[place])
            row = BlockRow(
                number=int(own.numbers[place]),
                prompt_tokens=prompt_tokens,
                new_tokens=int(own.answers[place]),
                home=tier,
                is_delegated=is_delegated,
                scored_tokens=sizes.scored_tokens(prompt_tokens),
                is_sibling=sizes.is_sibling(int(own.numbers[place])),
            )
            kv_len, count = int(own.kv_lens[place]), int(own.brought[place])
            members[k].append(
                Brought(
                    row=row,
                    kv_len=kv_len,
                    num_new=count,
                    makes_token=row.new_tokens > 0 and kv_len + count >= row.prompt_tokens,
                    seat=number,
                )
            )
        works = [work_of(k, rows, sizes) for k, rows in enumerate(members) if rows]
        return Sweep(index=index, works=tuple(works))


def _seats(policy: Policy) -> list[tuple[Tier, bool]]:
    """Of one micro-batch, in the order of its rows: tier, and whether the CPU attends them."""
    return [
        (tier, is_delegated)
        for tier, is_delegated, count in policy.homes(policy.micro_batch_size)
        for _ in range(count)
    ]


@dataclass(kw_only=True, slots=True)
class _Block:
    """The state of all seats of the block; ``numbers`` is -1 where one is free."""

    policy: Policy
    lengths: Sequence[tuple[int, int]]
    longest: int
    num_pages: dict[Tier, int]
    slot_pages: int
    shared_tokens: int
    samples: int
    computing: frozenset[int]
    seats: list[tuple[Tier, bool]]
    numbers: Ints
    prompts: Ints
    answers: Ints
    kv_lens: Ints
    known: Ints
    next_row: int = 0
    curves: dict[tuple[int, int], Pages] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: Sequence[tuple[int, int]],
        policy: Policy,
        num_pages: dict[Tier, int],
        slot_pages: int,
        shared_tokens: int,
        sharers: float,
        samples: int,
    ) -> _Block:
        seats = _seats(policy)
        count = len(seats) * policy.num_micro_batches

        def column(value: int = 0) -> Ints:
            return np.full(count, value, dtype=np.int64)

        return cls(
            policy=policy,
            lengths=lengths,
            longest=max(1, max(new for _, new in lengths)),
            num_pages=num_pages,
            slot_pages=slot_pages,
            shared_tokens=shared_tokens,
            samples=samples,
            computing=computing_rows(len(lengths), sharers),
            seats=seats,
            numbers=column(_NOBODY),
            prompts=column(),
            answers=column(),
            kv_lens=column(),
            known=column(),
        )

    def is_empty(self) -> bool:
        return not (self.numbers != _NOBODY).any()

    # -- rows that enter -------------------------------------------------------------------------

    def enter(self, pace: Pace) -> None:
        if self.next_row == len(self.lengths) or not (pace.allows() or self.is_empty()):
            return
        outlooks = {tier: self._outlook(tier) for tier in {tier for tier, _ in self.seats}}
        slots = self._slots()
        while self.next_row < len(self.lengths) and (pace.allows() or self.is_empty()):
            prompt, new = self.lengths[self.next_row]
            curve = self._curve(prompt, new)
            fits = {tier: o.fits(curve, self.num_pages[tier]) for tier, o in outlooks.items()}
            passes = np.all(slots + curve <= self.slot_pages, axis=1)
            seat = next(
                (seat for seat in self._free_seats() if self._has_room(seat, fits, passes)), None
            )
            if seat is None:
                return
            tier = self._tier(seat)
            outlooks[tier].add(curve)
            if tier != self.policy.compute_tier:
                slots[seat // len(self.seats)] += curve
            self.numbers[seat] = self.next_row
            self.prompts[seat] = self.known[seat] = prompt if new else max(1, prompt - 1)
            self.answers[seat] = new
            is_computing = self.next_row in self.computing
            self.kv_lens[seat] = 0 if is_computing else min(self.shared_tokens, prompt - 1)
            if self.next_row % self.samples:  # a sibling
                self.kv_lens[seat] = self.prompts[seat] - 1
            self.next_row += 1
            pace.take(1)

    def _has_room(
        self, seat: int, fits: Mapping[Tier, bool], passes: npt.NDArray[np.bool_]
    ) -> bool:
        """Whether pages of the row that would sit there fit its tier, and its micro-batch's slot if
        they are brought to one."""
        tier = self._tier(seat)
        is_near = tier == self.policy.compute_tier
        return fits[tier] and (is_near or bool(passes[seat // len(self.seats)]))

    def _curve(self, prompt: int, new: int) -> Pages:
        """Pages of a row from when it enters: the same on each tier."""
        if (prompt, new) not in self.curves:
            outlook = Outlook(self.longest, self.policy.page_tokens)
            own = [max(0, prompt - self.shared_tokens)]
            self.curves[prompt, new] = outlook.curve(own, [max(1, new)])
        return self.curves[prompt, new]

    def _tier(self, seat: int) -> Tier:
        return self.seats[seat % len(self.seats)][0]

    def _outlook(self, tier: Tier) -> Outlook:
        outlook = Outlook(self.longest, self.policy.page_tokens)
        here = (self.numbers != _NOBODY) & self._of_all([own == tier for own, _ in self.seats])
        if here.any():
            outlook.add(outlook.curve(*self._kept(here)))
        return outlook

    def _slots(self) -> Pages:
        """Pages that each micro-batch's offloaded rows take, [micro-batches, stretches]."""
        outlook = Outlook(self.longest, self.policy.page_tokens)
        far = [tier != self.policy.compute_tier for tier, _ in self.seats]
        here = np.flatnonzero((self.numbers != _NOBODY) & self._of_all(far))
        pages = outlook.curve([], [])
        slots = np.zeros((self.policy.num_micro_batches, len(pages)), dtype=np.int32)
        np.add.at(slots, here // len(self.seats), outlook.curves(*self._kept(here)))
        return slots

    def _of_all(self, of_one: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """Of the seats of all micro-batches, from those of one."""
        return np.array([*of_one] * self.policy.num_micro_batches)

    def _kept(self, seats: Ints | npt.NDArray[np.bool_]) -> tuple[Pages, Pages]:
        """Tokens of which rows have keys of their own, and how many they make yet."""
        left = self.answers[seats] - (self.known[seats] - self.prompts[seats])
        own = np.maximum(0, self.known[seats] - self.shared_tokens)
        return own, np.maximum(1, left)

    def _free_seats(self) -> Iterator[int]:
        """As the run gives them out: in the micro-batch that brings fewest tokens, of the kind of
        seat of which the largest share is free."""
        size = len(self.seats)
        taken = (self.numbers != _NOBODY).reshape(-1, size)
        loads = np.where(taken, (self.known - self.kv_lens).reshape(-1, size), 0).sum(axis=1)
        for k in np.lexsort((taken.sum(axis=1), loads)):
            kinds = [*dict.fromkeys(self.seats)]
            free = {
                kind: [s for s, own in enumerate(self.seats) if own == kind and not taken[k, s]]
                for kind in kinds
            }
            shares = [(-len(free[own]) / self.seats.count(own), i) for i, own in enumerate(kinds)]
            for share, i in sorted(shares):
                if share:
                    yield int(k) * size + free[kinds[i]][0]

    # -- what rows bring -------------------------------------------------------------------------

    def census(self) -> Census:
        """One token each, and of prompts what there is room for, those first that came first."""
        there = self.numbers != _NOBODY
        left = np.where(there, self.known - self.kv_lens, 0)
        decodes = there & (self.known > self.prompts) & (left == 1)
        brought = np.where(decodes, 1, 0)
        size = len(self.seats)
        budgets = self.policy.max_batch_tokens - decodes.reshape(-1, size).sum(axis=1)
        prompts = np.flatnonzero(there & ~decodes)
        for seat in prompts[np.argsort(self.numbers[prompts])]:
            count = min(left[seat], budgets[seat // size])
            brought[seat] = count
            budgets[seat // size] -= count
        seats = np.flatnonzero(brought)
        return Census(
            seats=seats,
            numbers=self.numbers[seats],
            prompts=self.prompts[seats],
            answers=self.answers[seats],
            kv_lens=self.kv_lens[seats],
            brought=brought[seats],
        )

    def take_in(self, census: Census) -> int:
        """After the sweep: keys, new tokens, and rows that have ended; how many have."""
        seats = census.seats
        self.kv_lens[seats] += census.brought
        makes = seats[self.kv_lens[seats] == self.known[seats]]
        self.known[makes] += self.answers[makes] > 0
        made = self.known[makes] - self.prompts[makes]
        ended = makes[made >= self.answers[makes]]
        self.numbers[ended] = _NOBODY
        return len(ended)


def roll_out(
    lengths: Sequence[tuple[int, int]],
    policy: Policy,
    *,
    num_pages: dict[Tier, int],
    slot_pages: int,
    mean_answer: float,
    shared_tokens: int = 0,
    sharers: float = math.inf,
    samples: int = 1,
) -> list[RolledSweep]:
    """The sweeps for rows of (prompt, new) tokens, in order, of which the first ``shared_tokens``
    are computed once for about ``sharers`` rows. ``num_pages`` are the pages per layer on each tier
    that rows have to themselves, ``slot_pages`` those that a micro-batch's offloaded rows may have
    together; ``samples`` rows, one behind the other, have one prompt. Rows stay for ``mean_answer``
    sweeps on average."""
    block = _Block.of(lengths, policy, num_pages, slot_pages, shared_tokens, sharers, samples)
    stay = float(block.longest) if policy.admission == "diagonal" else max(1.0, mean_answer)
    pace = Pace(policy, stay)
    sweeps: list[RolledSweep] = []
    while True:
        pace.begin_sweep(stay)
        block.enter(pace)
        if block.is_empty():
            return sweeps
        census = block.census()
        sweeps.append(RolledSweep(census=census, num_ended=block.take_in(census)))
