"""The sweeps of a run in which rows enter while others are under way, without running it.

The rule that the run follows, on rows that are known by their lengths alone: who enters when, and
what each brings. Answers are taken to be as long as the workload says, so no row outgrows its tier,
and none moves to a slower one. Knows no token ids, no tensors and no seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

from freight.plan.admission import Lengths, Outlook, Pace, Pages
from freight.plan.policy import TIERS, Policy, Tier
from freight.plan.rollout import Brought, WorkSizes, row_of, work_of
from freight.plan.room import Room
from freight.plan.sweep import Sweep
from freight.plan.workload import RowLength

__all__ = ["Census", "RolledSweep", "roll_out"]

Ints = npt.NDArray[np.int64]

_NOBODY: Final = -1
_BITS: Final = 21  # of numbers of tokens


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
    """A sweep as it is expected, of rows that have these ``lengths``; ``num_ended`` end in it."""

    census: Census
    lengths: Sequence[RowLength]
    num_ended: int

    def sweep(self, index: int, policy: Policy, sizes: WorkSizes) -> Sweep:
        """The sweep with all that it moves."""
        own = self.census
        seats = policy.seats()
        members: list[list[Brought]] = [[] for _ in range(policy.num_micro_batches)]
        columns = (own.seats, own.numbers, own.prompts, own.answers, own.kv_lens, own.brought)
        for seat, row_number, prompt, answer, kv_len, count in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            k, number = divmod(seat, len(seats))
            tier, is_delegated = seats[number]
            prompt_tokens = prompt + (not answer)
            length = self.lengths[row_number]._replace(prompt=prompt_tokens, new=answer)
            row = row_of(row_number, length, tier, is_delegated, sizes)
            makes_token = answer > 0 and kv_len + count >= prompt_tokens
            members[k].append(Brought(row, kv_len, count, makes_token, number))
        works = [work_of(k, rows, sizes) for k, rows in enumerate(members) if rows]
        return Sweep(index=index, works=tuple(works))


@dataclass(kw_only=True, slots=True)
class _Block:
    """The state of all seats of the block; ``numbers`` is -1 where one is free. ``kinds`` are the
    different ``seats`` of a micro-batch, of which it has so many ``counts``; ``free`` has for each
    micro-batch and each of these a heap of those that are free."""

    policy: Policy
    lengths: Sequence[RowLength]
    outlook: Outlook
    unknown: bool
    num_pages: dict[Tier, int]
    slot_pages: int
    samples: int
    seats: list[tuple[Tier, bool]]
    kinds: list[tuple[Tier, bool]]
    counts: list[int]
    free: list[list[list[int]]]
    of_tier: dict[Tier, npt.NDArray[np.bool_]]
    numbers: Ints
    prompts: Ints
    answers: Ints
    kv_lens: Ints
    known: Ints
    shared: Ints
    next_row: int = 0
    num_taken: int = 0
    curves: dict[tuple[int, int, int], Pages] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: Sequence[RowLength],
        policy: Policy,
        num_pages: dict[Tier, int],
        slot_pages: int,
        samples: int,
        answers: Lengths | None,
    ) -> _Block:
        seats = policy.seats()
        kinds = [*dict.fromkeys(seats)]
        count = len(seats) * policy.num_micro_batches
        tiers = [tier for tier, _ in seats] * policy.num_micro_batches

        def column(value: int = 0) -> Ints:
            return np.full(count, value, dtype=np.int64)

        return cls(
            policy=policy,
            lengths=lengths,
            outlook=_outlook(lengths, policy, answers),
            unknown=answers is not None and policy.admission != "diagonal",
            num_pages=num_pages,
            slot_pages=slot_pages,
            samples=samples,
            seats=seats,
            kinds=kinds,
            counts=[seats.count(kind) for kind in kinds],
            free=[
                [[s for s, own in enumerate(seats) if own == kind] for kind in kinds]
                for _ in range(policy.num_micro_batches)
            ],
            of_tier={tier: np.array([own == tier for own in tiers]) for tier in {*tiers}},
            numbers=column(_NOBODY),
            prompts=column(),
            answers=column(),
            kv_lens=column(),
            known=column(),
            shared=column(),
        )

    def is_empty(self) -> bool:
        return not self.num_taken

    # -- rows that enter -------------------------------------------------------------------------

    def enter(self, pace: Pace) -> None:
        if self.next_row == len(self.lengths) or not (pace.allows() or self.is_empty()):
            return
        rooms, slots = self._rooms()
        size = len(self.seats)
        taken = (self.numbers != _NOBODY).reshape(-1, size)
        loads = np.where(taken, (self.known - self.kv_lens).reshape(-1, size), 0).sum(axis=1)
        batches = [*zip(loads.tolist(), taken.sum(axis=1).tolist(), strict=True)]
        entered: list[tuple[int, ...]] = []
        while self.next_row < len(self.lengths) and (pace.allows() or self.is_empty()):
            length = self.lengths[self.next_row]
            prompt, new = length.prompt, length.new
            curve = self._curve(prompt - length.shared, new, 0)
            found = self._first_fit(curve, rooms, slots, batches)
            if found is None:
                break
            k, kind, tier = found
            seat = k * size + heappop(self.free[k][kind])
            rooms[tier].take(curve)
            if tier != self.policy.compute_tier:
                slots[k].take(curve)
            known = prompt if new else max(1, prompt - 1)
            kept = 0 if length.computes else length.shared
            if self.next_row % self.samples:  # a sibling
                kept = known - 1
            entered.append((seat, self.next_row, known, new, kept, length.shared))
            batches[k] = batches[k][0] + known - kept, batches[k][1] + 1
            self.num_taken += 1
            self.next_row += 1
            pace.take(1)
        if entered:
            seats, numbers, known_tokens, answers, kv_lens, shared = np.array(entered).T
            self.numbers[seats], self.answers[seats] = numbers, answers
            self.prompts[seats] = self.known[seats] = known_tokens
            self.kv_lens[seats], self.shared[seats] = kv_lens, shared

    def _curve(self, tokens: int, answer: int, made: int) -> Pages:
        """Pages of a row with so many tokens of its own, of whose answer some are made: the same on
        each tier."""
        key = tokens, 0 if self.unknown else answer, made
        if key not in self.curves:
            self.curves[key] = self._pages(np.array([tokens]), *self._left([answer], [made]))[0]
        return self.curves[key]

    def _rooms(self) -> tuple[dict[Tier, Room], list[Room]]:
        """What there is of pages, on each tier and in the slot of each micro-batch, which its
        offloaded rows have."""
        here = np.flatnonzero(self.numbers != _NOBODY)
        of_kind, curves = self._curves(*self._kept(here))
        kinds, shape = len(curves), curves.shape[1:]
        flat = curves.reshape(kinds, math.prod(shape))
        rooms, is_far = {}, np.ones(len(here), dtype=bool)
        for tier, places in self.of_tier.items():
            own = places[here]
            taken = np.bincount(of_kind[own], minlength=kinds) @ flat
            pages = self.num_pages[tier]
            rooms[tier] = Room(pages, taken.reshape(shape), is_known=not self.unknown)
            if tier == self.policy.compute_tier:
                is_far &= ~own
        batches = self.policy.num_micro_batches
        cells = kinds * (here[is_far] // len(self.seats)) + of_kind[is_far]
        counts = np.bincount(cells, minlength=batches * kinds).reshape(batches, kinds)
        taken = (counts @ flat).reshape(batches, *shape)
        return rooms, [Room(self.slot_pages, own, is_known=not self.unknown) for own in taken]

    def _curves(self, tokens: Ints, left: Ints, made: Ints) -> tuple[Ints, Pages]:
        """For each row its kind, and the pages of a row of each kind: rows that entered together
        are often alike."""
        keys = (tokens << 2 * _BITS) + (left << _BITS) + made + 1
        order = keys.argsort(kind="stable")
        ordered = keys[order]
        begins = np.ones(len(keys), dtype=bool)
        np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
        of_kind = np.empty_like(order)
        of_kind[order] = begins.cumsum() - 1
        firsts = order[begins]
        return of_kind, self._pages(tokens[firsts], left[firsts], made[firsts])

    def _pages(self, tokens: Ints, left: Ints, made: Ints) -> Pages:
        """What each row takes, as rooms want it."""
        if self.unknown:
            return self.outlook.curves(tokens, left, made)
        return self.outlook.most(tokens, left)

    def _kept(self, seats: Ints) -> tuple[Ints, Ints, Ints]:
        """Tokens of which rows have keys of their own, how many they make yet, and how many they
        have made where that is all that the run would know."""
        own = np.maximum(0, self.known[seats] - self.shared[seats])
        return own, *self._left(self.answers[seats], self.known[seats] - self.prompts[seats])

    def _left(self, answers: Sequence[int] | Ints, made: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        before = np.asarray(made)
        if self.unknown:
            return np.maximum(1, self.outlook.longest - before), before
        return np.maximum(1, np.asarray(answers) - before), np.full_like(before, -1)

    def _first_fit(
        self,
        curve: Pages,
        rooms: dict[Tier, Room],
        slots: list[Room],
        batches: list[tuple[int, int]],
    ) -> tuple[int, int, Tier] | None:
        """Micro-batch, kind and tier of the first free seat where a row's pages fit: on the tier,
        and in the slot of its micro-batch if they are brought to one. As the run gives seats out:
        in the micro-batch that brings fewest tokens, of the kind of which the largest share is
        free; ``batches`` are the tokens and the rows of each."""
        near = self.policy.compute_tier
        for k in sorted(range(len(batches)), key=batches.__getitem__):
            kinds = enumerate(zip(self.free[k], self.counts, strict=True))
            for _, i in sorted((-len(free) / count, i) for i, (free, count) in kinds if free):
                tier = self.kinds[i][0]
                if rooms[tier].fits(curve) and (tier == near or slots[k].fits(curve)):
                    return k, i, tier
        return None

    # -- rows that move --------------------------------------------------------------------------

    def come_nearer(self) -> list[tuple[int, int]]:
        """When all have entered: (seat, seat on a faster tier) of rows that move in this sweep, the
        oldest of a micro-batch first, as far as there is room. Rows that the CPU attends stay."""
        policy = self.policy
        is_on = policy.moves_rows and not policy.recomputed and len(self.of_tier) > 1
        if not is_on or self.next_row < len(self.lengths):
            return []
        makes = (self.known > self.prompts) & (self.known - self.kv_lens == 1)
        there = (makes & (self.numbers != _NOBODY)).reshape(-1, len(self.seats))
        rooms: dict[Tier, Room] | None = None
        moves: list[tuple[int, int]] = []
        for k, movable in enumerate(there):
            if not self._has_faster(k):
                continue
            first = k * len(self.seats)
            seats = np.flatnonzero(movable) + first
            for seat in seats[np.argsort(self.numbers[seats])].tolist():
                kinds = self._faster(k, self.seats[seat - first])
                if not kinds:
                    continue
                rooms = self._rooms()[0] if rooms is None else rooms
                known = int(self.known[seat])
                tokens, made = known - int(self.shared[seat]), known - int(self.prompts[seat])
                curve = self._curve(max(0, tokens), int(self.answers[seat]), made)
                fitting = (own for own in kinds if rooms[self.kinds[own][0]].fits(curve))
                if (kind := next(fitting, None)) is None:
                    break
                rooms[self.kinds[kind][0]].take(curve)
                moves.append((seat, first + heappop(self.free[k][kind])))
        return moves

    def _has_faster(self, k: int) -> bool:
        """Whether any but the slowest tier has free seats whose rows the CPU does not attend."""
        slowest = max(TIERS.index(tier) for tier, _ in self.kinds)
        return any(
            own and not is_delegated and TIERS.index(tier) < slowest
            for own, (tier, is_delegated) in zip(self.free[k], self.kinds, strict=True)
        )

    def _faster(self, k: int, seat: tuple[Tier, bool]) -> list[int]:
        """The kinds of free seats that are on faster tiers than this one, the fastest first."""
        tier, is_delegated = seat
        return [
            kind
            for kind, (other, is_attended) in enumerate(self.kinds)
            if TIERS.index(other) < TIERS.index(tier) and self.free[k][kind]
            if not (is_delegated or is_attended)
        ]

    def settle(self, moves: Sequence[tuple[int, int]]) -> None:
        """After the sweep: rows that have not ended are in their new seats."""
        for seat, other in moves:
            left = other if self.numbers[seat] == _NOBODY else seat
            if left == seat:
                for own in self._columns():
                    own[other] = own[seat]
                self.numbers[seat] = _NOBODY
            self._free_seat(left)

    def _columns(self) -> tuple[Ints, ...]:
        """What is known of the row on each seat."""
        return self.numbers, self.prompts, self.answers, self.kv_lens, self.known, self.shared

    def _free_seat(self, seat: int) -> None:
        k, own = divmod(seat, len(self.seats))
        heappush(self.free[k][self.kinds.index(self.seats[own])], own)

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
        prompts = prompts[np.argsort(self.numbers[prompts])]
        counts = left[prompts].tolist()
        room = budgets.tolist()
        for i, k in enumerate((prompts // size).tolist()):
            counts[i] = min(counts[i], room[k])
            room[k] -= counts[i]
        brought[prompts] = counts
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
        for seat in ended.tolist():
            self._free_seat(seat)
        self.num_taken -= len(ended)
        return len(ended)


def _outlook(lengths: Sequence[RowLength], policy: Policy, answers: Lengths | None) -> Outlook:
    longest = max(1, max(row.new for row in lengths))
    if answers is None:
        return Outlook(longest, policy.page_tokens)
    return Outlook(answers.longest, policy.page_tokens, answers.log_survival())


def roll_out(
    lengths: Sequence[RowLength],
    policy: Policy,
    *,
    num_pages: dict[Tier, int],
    slot_pages: int,
    mean_answer: float,
    samples: int = 1,
    answers: Lengths | None = None,
) -> list[RolledSweep]:
    """The sweeps for rows of these lengths, in order. ``num_pages`` are the pages per layer on each
    tier that rows have to themselves, ``slot_pages`` those that a micro-batch's offloaded rows may
    have together; ``samples`` rows, one behind the other, have one prompt. Rows stay for
    ``mean_answer`` sweeps on average; where ``answers`` are given they end by themselves, and who
    enters knows no more of how long they will be."""
    block = _Block.of(lengths, policy, num_pages, slot_pages, samples, answers)
    stay = float(block.outlook.longest) if policy.admission == "diagonal" else max(1.0, mean_answer)
    pace = Pace(policy, stay)
    sweeps: list[RolledSweep] = []
    while True:
        pace.begin_sweep(stay)
        block.enter(pace)
        if block.is_empty():
            return sweeps
        moves = block.come_nearer()
        census = block.census()
        num_ended = block.take_in(census)
        sweeps.append(RolledSweep(census=census, lengths=lengths, num_ended=num_ended))
        block.settle(moves)
