"""The best policy for a workload on a machine: a linear programme inside an enumeration.

Block shapes are enumerated; for each a linear programme says which shares of weights, KV cache and
activations belong on which tier. The most promising are made whole, as the run time would realise
them, and priced by the forecast; what that finds best is chosen. Knows rates and sizes, no tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Final

from freight.errors import BudgetError
from freight.hardware.machine import Machine
from freight.plan.block_shapes import block_shapes, blocks_of, in_rows, moved_rows
from freight.plan.choices import Choice, Known, Solution, is_near, least_share, ranked
from freight.plan.copies import side_by_side
from freight.plan.default import Plan, Planner
from freight.plan.forecast import Forecast, forecast
from freight.plan.linear import LinearSolution, solve
from freight.plan.operation import Lane
from freight.plan.policy import Admission, Policy, Split
from freight.plan.recomputation import SHARES, why_not_recomputed
from freight.plan.wishes import Wishes

__all__ = ["Choice", "Search"]

_RULES: Final[tuple[Admission, ...]] = ("zigzag", "refill")
_BETWEEN: Final = (0.75, 1.25, 1.5, 1.75)
_BETWEEN_PRICED: Final = 2
_PROMISING: Final = 0.9
_TIMES_AS_LARGE: Final = (1.0, 2.0)
"""Blocks of rows that take less memory."""
_LEAST_BLOCKS: Final = 1.5
"""With fewer a block whose rows enter one by one is mostly filling or emptying."""
_NEAR: Final = (0.5, 4.0)
_FINALISTS: Final = 6
_MOST_PRICED: Final = 32
"""Micro-batches of all finalists together: pricing takes as long as there are operations."""
_MOST_ALIKE: Final = 2
"""Of blocks of as many rows those that the linear programme finds best."""
_MOST_NARROWED: Final = 8
_MOST_SKETCHED: Final = 8
_MOST_ALONE: Final = 2
_BUSY: Final = 0.95
_WITHIN: Final = (1.25, 1.0, 0.75, 0.5)  # blocks took 0.8 to 1.6 times what programmes say
_MOVED_ROWS: Final = ((0, 0), (1, 0), (0, 1), (1, 1), (0, -1))
"""Rows of a micro-batch that go from the GPU to RAM, and from there to disk."""
_ALMOST: Final = 0.87
"""Near plans of a rule whose first ones reach less than this share of the best one's speed nothing
better was found."""


_Promised = tuple[float, Plan]
"""A plan, and the seconds that the linear programme promises for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """``planner`` knows the model, the workload and the budgets, and makes policies whole.

    ``max_block_s`` bounds the time of a block, from its prompts to its last token. Without
    ``uses_disk`` nothing may be there after loading. Up to ``at_once`` plans are priced side by
    side, in copies of the process; what is found is the same.
    """

    planner: Planner
    machine: Machine
    max_block_s: float = math.inf
    uses_disk: bool = True
    at_once: int = 1
    known: Known = field(default_factory=lambda: Known(), init=False, repr=False, compare=False)
    wider: tuple[Search, float] | None = field(default=None, init=False, repr=False, compare=False)

    def best(self) -> Choice:
        """The plan with the shortest forecast; BudgetError, with all reasons, if none fits."""
        priced: list[Choice] = []
        plain = self._promised(self.planner.plan())  # raises where nothing fits
        self._price_near(priced, chain(self._finalists(), [plain]))
        self._price_recomputing(priced)
        for narrower in self._narrowed(priced):
            own: list[Choice] = []
            narrower._price_near(own, narrower._finalists(most=_MOST_NARROWED), beside=priced)
            priced += own
        for choice in ranked(self._fitting(priced)):
            # Where rows enter at any time more layers alone would be run: one per cent at most.
            best = choice if choice.plan.policy.is_continuous else self.price(choice.plan)
            if best.forecast.block_s <= self.max_block_s:
                return best
        raise self._refusal()

    def _promised(self, plan: Plan) -> _Promised:
        """A plan with what the linear programme promises for the best one of its shape."""
        own = plan.policy
        size, count, shares = own.micro_batch_size, own.num_micro_batches, own.shares_prefixes
        shape = self.planner.shape(size, count, own.admission, shares=shares)
        alike = replace(shape, chunk_tokens=own.chunk_tokens, recomputed=own.recomputed)
        solution = self._solve(alike)
        return solution.seconds if solution else 0.0, plan

    def _price_near(
        self, priced: list[Choice], some: Iterable[_Promised], *, beside: Sequence[Choice] = ()
    ) -> None:
        """Price plans, then what lies near the best of them."""
        self._price_all(some, priced, beside=beside)
        first = self._best_of(priced)
        most_s = first.forecast.seconds / _ALMOST if first else math.inf
        for rule in self._rules():
            for nearby in (self._between, self._twice_as_many):
                own = self._best_of(one for one in priced if one.plan.policy.admission == rule)
                if own is not None and own.forecast.seconds <= most_s:
                    self._price_all(nearby(own), priced, beside=beside)

    def sketch(self) -> Choice:
        """A good plan in a fraction of the time, roughly priced: of fewer finalists, and of no
        others. What ``best`` says where none of them is within the bound."""
        priced: list[Choice] = []
        self._price_all(self._finalists(most=_MOST_SKETCHED), priced)
        return self._best_of(priced) or self.best()

    def within(self, max_block_s: float) -> Search:
        """The same under another bound; what one of the two finds the other knows."""
        own = replace(self, max_block_s=max_block_s)
        object.__setattr__(own, "known", self.known)
        return own

    def _narrowed(self, priced: Sequence[Choice]) -> Iterator[Search]:
        """The same search with no keys attended by the CPU, and with all on the device, where no
        link is busy all the time. A linear programme thinks that all parts of a machine can be, so
        it finds blocks better that share their work out, and are not."""
        own, best = self.planner, self._best_of(priced)
        if own.compute_tier == "cpu" or best is None:
            return
        binding, wishes = best.forecast.binding, own.wishes
        if binding is not Lane.COMPUTE and best.forecast.utilisation()[binding] > _BUSY:
            return
        if wishes.cpu_attention is None:
            yield self._with(replace(wishes, cpu_attention=0.0), best)
        if wishes.kv is None and not wishes.cpu_attention:
            yield self._with(replace(wishes, kv=Split(gpu=1.0), cpu_attention=None), best)

    def _with(self, wishes: Wishes, best: Choice) -> Search:
        """A search that looks at block shapes only that could be better than ``best``."""
        found = replace(self, planner=replace(self.planner, wishes=wishes))
        object.__setattr__(found, "wider", (self, best.forecast.seconds))
        known = Known(timed=self.known.timed, problems=self.known.problems)
        object.__setattr__(found, "known", known)
        return found

    def _price_all(
        self, promised: Iterable[_Promised], priced: list[Choice], *, beside: Sequence[Choice] = ()
    ) -> None:
        """Price plans roughly, but for those of which the linear programme promises too little to
        be better than the best so far, also of those ``beside``."""

        def is_worth_it(own: _Promised) -> bool:
            seconds, plan = own
            fitting = self._fitting([*priced, *beside])
            best_s = min((choice.forecast.seconds for choice in fitting), default=math.inf)
            return (
                self._may_be(plan) and least_share(plan.policy, plan.workload) * seconds <= best_s
            )

        worth_it = filter(is_worth_it, promised)
        while some := [*islice(worth_it, self.at_once)]:
            self._price_at_once([plan for _, plan in some])
            # The first of them may have shown that others would not have been worth it.
            for own in filter(is_worth_it, some):
                priced.append(self.price(own[1], is_rough=True))

    def _price_at_once(self, plans: Iterable[Plan]) -> None:
        """Get to know the rough forecasts of these."""
        priced = self.known.priced
        new = {plan.policy: plan for plan in plans if (plan.policy, True) not in priced}
        tasks = [partial(self._told, plan, is_rough=True) for plan in new.values()]
        for plan, told in zip(new.values(), side_by_side(tasks), strict=True):
            priced[plan.policy, True] = Choice(plan=plan, forecast=told)

    def _fitting(self, priced: Iterable[Choice]) -> list[Choice]:
        return [choice for choice in priced if choice.forecast.block_s <= self.max_block_s]

    def _finalists(self, *, most: float = _MOST_PRICED) -> Iterator[_Promised]:
        """The few best of the linear programmes that can be realised, one for each block shape.
        Blocks take longer than these say: under a bound those that are well within it, too."""
        solutions = sorted(self._solutions(), key=lambda own: own.seconds)
        rules = self._rules()
        for share in (1.0,) if math.isinf(self.max_block_s) else _WITHIN:
            within = [own for own in solutions if own.block_s <= share * self.max_block_s]
            for rule in rules[::-1]:  # the one that is usually better first
                own = [solution for solution in within if solution.policy.admission == rule]
                yield from self._realised(own, most=most / len(rules))
                alone = [solution for solution in own if solution.policy.num_micro_batches == 1]
                yield from self._realised(alone, most=_MOST_ALONE)

    def frontier(self, count: int) -> list[Choice]:
        """Choices of which each is faster than those with shorter blocks, up to ``count``; of block
        shapes that the linear programmes find so."""
        kept: list[Solution] = []
        for own in sorted(self._solutions(), key=lambda own: (own.block_s, own.seconds)):
            if own.block_s <= self.max_block_s and (not kept or own.seconds < kept[-1].seconds):
                kept.append(own)
        step = max(1.0, (len(kept) - 1) / max(1, count - 1))
        some = {round(number * step) for number in range(count)}
        plans = self._realised([own for n, own in enumerate(kept) if n in some], most=math.inf)
        priced = (self.price(plan, is_rough=True) for _, plan in plans)
        return sorted(priced, key=lambda choice: choice.forecast.block_s)

    def price(self, plan: Plan, *, is_rough: bool = False) -> Choice:
        """The plan with its forecast."""
        key = plan.policy, is_rough
        if key not in self.known.priced:
            told = self._told(plan, is_rough=is_rough)
            self.known.priced[key] = Choice(plan=plan, forecast=told)
        return self.known.priced[key]

    def _told(self, plan: Plan, *, is_rough: bool) -> Forecast:
        own = self.planner
        return forecast(plan, self.machine, own.config, own.programme, own.dtype, is_rough=is_rough)

    def _realised(
        self, ranked: Iterable[Solution], *, most: float = _MOST_PRICED
    ) -> Iterator[_Promised]:
        shapes: set[tuple[int, int, Admission, float]] = set()
        alike = Counter[int]()
        for own in ranked:
            policy = own.policy
            count = policy.num_micro_batches
            shape = policy.block_rows, count, policy.admission, policy.recomputed
            is_one_more = most < math.inf and alike[policy.block_rows] == _MOST_ALIKE
            if shape in shapes or is_one_more:
                continue
            plan = self._whole(policy)
            if plan is not None and self._may_be(plan):
                shapes.add(shape)
                alike[policy.block_rows] += 1
                most -= count
                yield own.seconds, plan
            if most <= 0 or (len(shapes) == _FINALISTS and most < math.inf):
                return

    def _whole(self, policy: Policy) -> Plan | None:
        """The policy as the run time will have it. Where a tier is then too small by what rounding
        to whole rows has made of its share, a row of each micro-batch lies elsewhere."""
        key = policy, self.uses_disk
        if key not in self.known.whole:
            self.known.whole[key] = self._realise(policy)
        return self.known.whole[key]

    def _realise(self, policy: Policy) -> Plan | None:
        own = self.planner
        shares = policy.shares_prefixes and own.workload.beginnings is not None
        is_near = own.forgets_kv or (shares and not own.shares_anywhere)
        is_open = own.wishes.kv is None and not is_near
        for moved in _MOVED_ROWS if is_open else _MOVED_ROWS[:1]:
            kv = moved_rows(policy.kv, policy.micro_batch_size, *moved)
            if not kv.disk or policy.kv.disk or (own.has_disk_dir and self.uses_disk):
                plan = own.realise(replace(policy, kv=kv if any(moved) else policy.kv))
                if plan is not None:
                    return plan
        return None

    def _between(self, best: Choice) -> Iterator[_Promised]:
        """Micro-batches of sizes between those that were tried, near the best of a rule."""
        if self.planner.wishes.micro_batch_size is None:
            size = best.plan.policy.micro_batch_size
            sizes = sorted({math.ceil(size * factor) for factor in _BETWEEN} - {size})
            count = best.plan.policy.num_micro_batches
            yield from self._near(best, [(own, count) for own in sizes])

    def _twice_as_many(self, best: Choice) -> Iterator[_Promised]:
        """Of the micro-batches of the best of a rule, where there is anything to bring."""
        policy = best.plan.policy
        if not is_near(policy) and self.planner.wishes.num_micro_batches is None:
            yield from self._near(best, [(policy.micro_batch_size, 2 * policy.num_micro_batches)])

    def _near(self, best: Choice, shapes: Iterable[tuple[int, int]]) -> Iterator[_Promised]:
        """Blocks of so many rows in so many micro-batches, otherwise like the best one."""
        own, policy = self.planner, best.plan.policy
        policies = (
            chunked
            for size, count in shapes
            if size * count <= own.workload.num_rows
            for chunked in own.with_chunks(
                own.shape(size, count, policy.admission, shares=policy.shares_prefixes)
            )
        )
        solved = [own for own in map(self._solve, policies) if own and self._may_fit(own)]
        solved.sort(key=lambda found: found.seconds)
        yield from self._realised(solved, most=_BETWEEN_PRICED * policy.num_micro_batches)

    def _price_recomputing(self, priced: list[Choice]) -> None:
        """Price the best block shape, and one twice as large, with keys and values computed again
        of what came into attention, in some or all of the layers, by any rule. Where that is best,
        sizes near it."""
        own, best = self.planner, self._best_of(priced)
        if best is None or own.wishes.recomputed is not None or own.wishes.cpu_attention:
            return
        is_near = best.plan.policy.kv.share(best.plan.policy.compute_tier) == 1
        if is_near or why_not_recomputed(own.config, own.programme) is not None:
            return
        is_fixed = own.wishes.micro_batch_size is not None
        first, later = ((1.0,), (1.0,)) if is_fixed else (_TIMES_AS_LARGE, (1.0, *_BETWEEN))
        self._price_all(self._computing_again(best, first, SHARES), priced)
        better = self._best_of(priced)
        if better is not None and (share := better.plan.policy.recomputed):
            self._price_all(self._computing_again(better, later, (share,)), priced)

    def _computing_again(
        self, best: Choice, factors: Sequence[float], shares: Sequence[float]
    ) -> Iterator[_Promised]:
        own, policy, count = self.planner, best.plan.policy, best.plan.policy.num_micro_batches
        # What the linear programmes say of plans like the best is off by about as much.
        at_most_s = max(best.forecast.seconds / _PROMISING, self._promised(best.plan)[0])
        sizes = sorted({math.ceil(policy.micro_batch_size * factor) for factor in factors})
        for rule in self._rules():
            shapes = (
                own.shape(size, count, rule, shares=policy.shares_prefixes)
                for size in sizes
                if size * count <= own.workload.num_rows
            )
            again = (replace(shape, recomputed=share) for shape in shapes for share in shares)
            chunked = (policy for shape in again for policy in own.with_chunks(shape))
            solved = [
                found for found in map(self._solve, chunked) if found and self._may_fit(found)
            ]
            solved = [found for found in solved if found.seconds < at_most_s]
            solved.sort(key=lambda solution: solution.seconds)
            yield from self._realised(solved, most=_BETWEEN_PRICED * count)

    def _may_fit(self, solution: Solution) -> bool:
        """Whether its block may be within the bound, though it is said to take longer."""
        return solution.block_s <= max(_WITHIN) * self.max_block_s

    def _best_of(self, priced: Iterable[Choice]) -> Choice | None:
        fitting = self._fitting(priced)
        return min(fitting, key=lambda choice: choice.forecast.seconds, default=None)

    def _rules(self) -> tuple[Admission, ...]:
        asked = self.planner.wishes.admission
        if asked is None and self.planner.forgets_kv:
            return ("zigzag",)
        return _RULES if asked is None else (asked,)

    def _may_be(self, plan: Plan) -> bool:
        return self.uses_disk or not (
            plan.layout.tier_bytes()["disk"] or sum(plan.geometry.usage["disk"].values())
        )

    def _refusal(self) -> BudgetError:
        """Nothing keeps to the bound, or does without the disk."""
        if not self.uses_disk:
            return BudgetError(
                "A plan was to do without the disk.",
                "The model and a row do not fit into memory.",
                "Let it use the disk, or raise the budgets.",
            )
        solutions = sorted(self._solutions(), key=lambda own: own.block_s)
        plans = (self.planner.realise(own.policy) for own in solutions[:_FINALISTS])
        least = min(
            (self.price(plan, is_rough=True) for plan in plans if plan is not None),
            key=lambda choice: choice.forecast.block_s,
        )
        policy, block_s = least.plan.policy, least.forecast.block_s
        return BudgetError(
            f"A block was to take at most {self.max_block_s:g} s, from prompts to last tokens.",
            f"The least that was found is {block_s:.4g} s, for {policy.num_micro_batches} x "
            f"{policy.micro_batch_size} rows.",
            f"Raise --max-latency to {math.ceil(block_s)}, shorten the rows, or take a faster "
            "machine.",
        )

    def _solutions(self) -> Iterator[Solution]:
        """Block shapes with the best shares that a linear programme finds for them. A block whose
        rows enter at any time is about as large as the best one that is filled at once within the
        bound, or larger. Where nothing is brought more micro-batches gain nothing."""
        best: Solution | None = None
        enough: dict[tuple[Admission, int], int] = {}
        for rule in self._rules():
            for policy in block_shapes(self.planner, rule):
                count, size = policy.num_micro_batches, policy.micro_batch_size
                if count > enough.get((rule, size), count):
                    continue
                near = 1.0 if best is None else policy.block_rows / best.policy.block_rows
                if best is not None and policy.is_continuous and not self._may_fill(policy, near):
                    continue
                if (solution := self._solve(policy)) is not None:
                    yield solution
                    if solution.is_near:
                        enough[rule, size] = count
                    is_within = solution.block_s <= self.max_block_s
                    is_better = best is None or solution.seconds < best.seconds
                    if not policy.is_continuous and is_within and is_better:
                        best = solution

    def _may_fill(self, policy: Policy, near: float) -> bool:
        """Whether a block of ``near`` times the rows of the best one can be filled, and kept so."""
        blocks = self.planner.workload.num_rows / policy.block_rows
        return _NEAR[0] <= near <= _NEAR[1] and blocks >= _LEAST_BLOCKS

    def _solve(self, policy: Policy) -> Solution | None:
        key = policy, self.uses_disk
        if key not in self.known.solved:
            self.known.solved[key] = self._solved(policy) if self._is_open(policy) else None
        return self.known.solved[key]

    def _is_open(self, policy: Policy) -> bool:
        """Whether a shape could be better than the best one of a wider search, which finds a better
        solution for it, or the same."""
        if self.wider is None:
            return True
        search, best_s = self.wider
        found = search._solve(policy)
        least = least_share(policy, self.planner.workload)
        return found is not None and least * found.seconds <= best_s

    def _solved(self, policy: Policy) -> Solution | None:
        own = self.planner
        problem = self.known.problem(own, self.machine, policy, uses_disk=self.uses_disk)
        solution = solve(problem.of_blocks(blocks_of(own.workload, policy)))
        if solution is None:
            return None
        block_s = LinearSolution.of(problem, solution.shares).seconds
        if policy.is_continuous:
            block_s *= own.workload.max_new_tokens / own.workload.mean_new_tokens
        delegated = solution.cpu_attention()
        chosen = replace(
            policy,
            kv=in_rows(solution.split("kv"), policy.micro_batch_size),
            # Where the CPU attends some rows those near the arithmetic share all the same.
            shares_prefixes=own.wishes.shares_prefixes if delegated else policy.shares_prefixes,
            activations=solution.split("activations"),
            cpu_attention=delegated,
        )
        all_of_it = replace(chosen, weights=solution.split("weights"))
        return Solution(
            policy=chosen,
            block_s=block_s,
            seconds=solution.seconds,
            is_near=is_near(all_of_it),
        )
