"""Several chips, each with tiers and a policy of its own: by rows, by layers, by heads, or mixed.

A way of sharing is data x stages x ranks. Each replica has its part of the rows; of a replica each
stage has a range of layers; of a stage each rank has its part of every matrix and its own key
heads. What one chip does is planned by the same search as for a lone one, with its part of the
model, of the rows and of its host. Knows rates and sizes, no tensors; nothing here is executed.

What is approximated:

- Stages hand over whole blocks (FlexGen, section 4.4): as many blocks are in flight as there are
  stages, or twice as many, and a stage holds the keys of all of them. With T blocks and S stages
  the prompts take (T + S - 1) of the slowest stage's sweeps, speeding them up by S T / (T + S - 1);
  later tokens take T each. Blocks that follow wait until all of a round have ended.
- The head is on the last stage; that has the embedding's table as well, which it needs only where
  both are one. Of the others each leaves room for the table in RAM, though only the first needs it.
- What crosses between chips is added to what is computed; none of it is hidden. Of ranks that are
  the moves of the 1D weight-stationary layout at the peak of the link, ends of each stage included.
- Chips of one host have equal parts of its cores, RAM and disk, and each its link to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from freight.errors import BudgetError, FreightError, InputError
from freight.hardware.chip import Chip
from freight.hardware.machine import Machine
from freight.model.config import DTYPE_BYTES, ModelConfig
from freight.model.decoder import build_programme, count_parameters
from freight.model.sources import TensorSource
from freight.partition.cost import Step
from freight.plan.bounded import best_within
from freight.plan.default import Planner
from freight.plan.model_limits import check_stages
from freight.plan.policy import Policy, Tier
from freight.plan.search import Choice, Search
from freight.plan.sending import sending_s
from freight.plan.shares import (
    Shares,
    cut_over,
    divisors,
    layer_ranges,
    part_of,
    sources_of,
    with_layers,
)
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.quantities import format_bytes

__all__ = ["Answer", "Parallel", "Refused", "Stage"]

_ROUNDS: Final = (1, 2)
"""Blocks in flight, over stages."""
_NEARER: Final = 0.95
"""How much of a bound, or of the best speed, counts as near."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What one chip does: layers ``first`` to ``last``, and how. Of the stage's other ranks and of
    other replicas the same is true. ``sent_s`` are seconds of sending of all its sweeps, in the
    prompts' sweeps and in later ones."""

    first: int
    last: int
    choice: Choice
    sent_s: tuple[float, float]

    @property
    def prefill_s(self) -> float:
        return self.choice.forecast.prefill_s + self.sent_s[0]

    @property
    def decode_s(self) -> float:
        return self.choice.forecast.decode_s + self.sent_s[1]

    @property
    def binding(self) -> str:
        """What works most: a lane, or the links between chips."""
        told = self.choice.forecast
        return "chip links" if sum(self.sent_s) > max(told.busy_s.values()) else told.binding.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All chips together. ``in_flight`` blocks go through the stages at a time; ``prefill_s`` and
    ``decode_s`` are as of a ``Forecast``, ``block_s`` is from a block's prompts to its last token.
    ``is_rough``: sketched, not planned in full."""

    shares: Shares
    stages: tuple[Stage, ...]
    in_flight: int
    prefill_s: float
    decode_s: float
    block_s: float
    new_tokens: float
    is_rough: bool

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def slowest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.prefill_s + stage.decode_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A way of sharing that cannot be, and why."""

    shares: Shares
    why: FreightError


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """A model and its work on ``num_chips``, of which ``host_chips`` share each ``machine``.

    ``budgets`` are a host's, of "gpu" each chip's; ``taken`` is what each chip's process has of
    them. ``sources`` says where weights of a configuration would lie, and raises where it may not
    be cut; the whole checkpoint has ``model_bytes``. ``chip`` has the links between chips.
    """

    config: ModelConfig
    workload: Workload
    machine: Machine
    budgets: Mapping[Tier, int]
    taken: Mapping[Tier, int]
    wishes: Wishes
    dtype: str
    sources: Callable[[ModelConfig], Mapping[str, TensorSource]]
    chip: Chip
    model_bytes: int
    num_chips: int
    host_chips: int = 1
    max_block_s: float = math.inf
    searches: dict[Shares, dict[int, list[Search]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of the stages of each way, by blocks in flight, once they are made: what a sketch has found
    serves the full plan."""

    def __post_init__(self) -> None:
        if self.num_chips < 1 or self.host_chips < 1:
            raise InputError(
                f"{self.num_chips} chips, {self.host_chips} to a host, were asked for.",
                "There is one at least of each.",
                "Raise --chips, or --host-chips.",
            )

    def ways(self) -> Iterator[Shares]:
        """All shares whose product is the number of chips; ranks are not mixed with stages, which
        spare memory as they do and send less."""
        for data in divisors(self.num_chips):
            each = self.num_chips // data
            yield Shares(data, each, 1)
            if each > 1:
                yield Shares(data, 1, each)

    def answers(self) -> list[Answer | Refused]:
        """Of each way, fastest first, those last that take too long or cannot be. All are sketched;
        what comes near the best is then planned in full."""

        def rank(own: Answer | Refused) -> tuple[bool, bool, float]:
            if isinstance(own, Refused):
                return True, True, 0.0
            return False, own.block_s > self.max_block_s, own.seconds

        sketched = sorted((self._told(own, is_rough=True) for own in self.ways()), key=rank)
        _, late, least = rank(sketched[0])
        near = [own for own in sketched if rank(own) <= (False, late, least / _NEARER)]
        told = [self._told(own.shares) if own in near else own for own in sketched]
        return sorted(told, key=rank)

    def best(self, answers: list[Answer | Refused]) -> Answer:
        """The fastest that keeps to the bound; BudgetError, with what is nearest, if none does."""
        told = [own for own in answers if isinstance(own, Answer)]
        if told and told[0].block_s <= self.max_block_s:
            return told[0]
        if told:
            near = min(told, key=lambda own: own.block_s)
            raise BudgetError(
                f"A block was to take at most {self.max_block_s:g} s on {self.num_chips} chips.",
                f"The least that was found is {near.block_s:.4g} s, with {near.shares}.",
                f"Raise --max-latency to {math.ceil(near.block_s)}, shorten the rows, or take "
                "more or faster chips.",
            )
        refused = [own for own in answers if isinstance(own, Refused)]
        # Of those that lack memory, what cuts weights finest lacks least.
        near_why = max(
            refused,
            key=lambda own: (isinstance(own.why, BudgetError), own.shares.ranks, own.shares.stages),
        ).why
        raise BudgetError(
            f"A model of {self.config.num_layers} layers was to run on {self.num_chips} chips.",
            " ".join(f"{own.shares}: {own.why.limit}" for own in refused),
            near_why.advice,
        )

    def price(self, shares: Shares, *, is_rough: bool = False) -> Answer:
        """The best plan with these shares, which may take longer than the bound where none of them
        keeps to it; ``is_rough``: a sketch of it. InputError where the model cannot be cut so,
        BudgetError where it does not fit."""
        config = self._cut(shares)
        workload = part_of(self.workload, shares.data, is_apart=True)
        if shares.stages == 1:
            return self._within(shares, config, workload, 1, is_rough)
        rows = workload.num_rows
        counts = sorted({min(rows, own * shares.stages) for own in _ROUNDS})
        told = [self._within(shares, config, workload, count, is_rough) for count in counts]
        return min(told, key=lambda own: (own.block_s > self.max_block_s, own.seconds))

    def _told(self, shares: Shares, *, is_rough: bool = False) -> Answer | Refused:
        try:
            return self.price(shares, is_rough=is_rough)
        except FreightError as error:
            return Refused(shares=shares, why=error)

    # -- what is cut ---------------------------------------------------------------------------

    def _cut(self, shares: Shares) -> ModelConfig:
        """The part of each matrix that a rank has, as a model."""
        config, stages = self.config, shares.stages
        if stages > config.num_layers:
            raise InputError(
                f"{stages} stages were asked for.",
                f"The model has {config.num_layers} layers, and a stage has one at least.",
                f"Take at most {config.num_layers} stages.",
            )
        if stages > 1:
            check_stages(config)
        if stages > 1 and self.wishes.admission not in (None, "zigzag"):
            raise InputError(
                f"{stages} stages were to take rows by {self.wishes.admission}.",
                "Stages hand over blocks whose rows enter together.",
                "Leave --admission out, or take zigzag.",
            )
        return cut_over(config, shares.ranks)

    def _search(
        self, config: ModelConfig, workload: Workload, layers: range, in_flight: int
    ) -> Search:
        """For a chip with these layers of ``config``."""
        is_last = layers.stop == config.num_layers
        own = with_layers(config, layers, with_ends=is_last)
        count = self.host_chips
        sources = sources_of(self.sources(config), layers, with_ends=is_last)
        room = {
            tier: size // (1 if tier == "gpu" else count) for tier, size in self.budgets.items()
        }
        for tier, size in self.taken.items():
            if tier in room:
                room[tier] -= size
        share = count_parameters(own) / count_parameters(self.config)
        if own == self.config:  # replicas on one host have one checkpoint
            share /= count
        room["disk"] -= math.ceil(self.model_bytes * share)
        if not is_last:
            room["cpu"] -= config.vocab_size * config.embedding_size * DTYPE_BYTES[self.dtype]
        short = {tier: size for tier, size in room.items() if size < 0}
        if short:
            lacks = ", ".join(f"{format_bytes(-size)} on {tier}" for tier, size in short.items())
            raise BudgetError(
                f"{len(layers)} layers were to run on a chip of {count} to a host.",
                f"A chip lacks {lacks}, before anything of it is loaded.",
                "Let fewer chips share a host, take one with more, or cut the model over more.",
            )
        planner = Planner(
            config=own,
            programme=replace(build_programme(own), needs_all=not is_last),
            sources=sources,
            dtype=self.dtype,
            workload=workload,
            compute_tier="gpu" if "gpu" in self.machine.units else "cpu",
            room=room,
            taken=self.taken,
            has_disk_dir=True,
            wishes=self.wishes,
            blocks_in_flight=in_flight,
        )
        names = ("compute", "disk read", "disk write") if count > 1 else ()
        return Search(planner=planner, machine=self.machine.scaled(dict.fromkeys(names, 1 / count)))

    # -- what it takes -------------------------------------------------------------------------

    def _within(
        self,
        shares: Shares,
        config: ModelConfig,
        workload: Workload,
        in_flight: int,
        is_rough: bool,
    ) -> Answer:
        """The best with so many blocks in flight. The stage with most weights says what a block is,
        the others follow; it is searched for under a bound that leaves time for what is around its
        sweeps."""
        lane = part_of(workload, in_flight)
        ranges = layer_ranges(config.num_layers, shares.stages)
        if shares not in self.searches:
            made = [self._search(config, lane, layers, in_flight) for layers in ranges]
            if shares.stages > 1:
                made = [_wishing(own, admission="zigzag") for own in made]
            self.searches[shares] = {in_flight: made}
        if in_flight not in self.searches[shares]:
            known = next(iter(self.searches[shares].values()))
            self.searches[shares][in_flight] = [_of_lane(own, lane, in_flight) for own in known]
        searches = self.searches[shares][in_flight]
        weights = [sum(search.planner.elements) for search in searches]
        lead = weights.index(max(weights))

        def told(choice: Choice) -> Answer:
            return self._assembled(shares, in_flight, ranges, searches, lead, choice, is_rough)

        return best_within(searches[lead], told, self.max_block_s, in_flight, is_rough=is_rough)

    def _assembled(
        self,
        shares: Shares,
        in_flight: int,
        ranges: list[range],
        searches: list[Search],
        lead: int,
        choice: Choice,
        is_rough: bool,
    ) -> Answer:
        policy, lane = choice.plan.policy, choice.plan.workload
        kinds = [_kind(search) for search in searches]
        choices: list[Choice] = []
        for number, kind in enumerate(kinds):
            if kind == kinds[lead]:
                choices.append(choice)
            elif kind in kinds[:number]:
                choices.append(choices[kinds.index(kind)])
            else:
                choices.append(_following(searches[number], policy, is_rough))
        stages = [
            Stage(
                first=layers.start,
                last=layers.stop - 1,
                choice=own,
                sent_s=self._sent_s(shares, len(layers), lane, policy),
            )
            for layers, own in zip(ranges, choices, strict=True)
        ]
        filled, kept = in_flight + shares.stages - 1, max(in_flight, shares.stages)
        if shares.stages == 1:
            filled = kept = 1
        slowest = max(stages, key=lambda own: own.prefill_s + own.decode_s)
        prefill_s = filled * max(own.prefill_s for own in stages)
        decode_s = kept * max(own.decode_s for own in stages)
        # A block's part of all, and where its stage waits for others of its round, theirs too.
        told = slowest.choice.forecast
        stretched = (prefill_s + decode_s) / told.seconds
        return Answer(
            shares=shares,
            stages=tuple(stages),
            in_flight=in_flight,
            prefill_s=prefill_s,
            decode_s=decode_s,
            block_s=told.block_s * stretched,
            new_tokens=self.workload.total_new_tokens,
            is_rough=is_rough,
        )

    def _sent_s(
        self, shares: Shares, num_layers: int, lane: Workload, policy: Policy
    ) -> tuple[float, float]:
        """Seconds of sending in all of a stage's sweeps, of prompts and of later tokens."""
        size = policy.micro_batch_size
        batches = max(lane.num_rows / size, 1.0)
        past = round(lane.mean_prompt_tokens)
        prefill = Step(phase="prefill", rows=size, new_tokens=max(1, past))
        decode = Step(phase="decode", rows=size, new_tokens=1, past=past)
        later = max(0.0, lane.mean_new_tokens - 1)
        chip, size = self.chip, DTYPE_BYTES[self.dtype]
        if chip.host_chips:  # as many in a host as are
            chip = replace(chip, host_chips=self.host_chips)
        layers = with_layers(self.config, range(num_layers), with_ends=True)
        first_s, later_s = (
            sending_s(layers, chip, size, shares, step) for step in (prefill, decode)
        )
        return batches * first_s, batches * later * later_s


def _wishing(search: Search, **wishes: object) -> Search:
    planner = search.planner
    changed = replace(planner.wishes, **wishes)  # type: ignore[arg-type]
    return replace(search, planner=replace(planner, wishes=changed, layouts={}))


def _of_lane(search: Search, lane: Workload, in_flight: int) -> Search:
    """For the same layers, whose weights lie as they do, and other rows."""
    own = replace(search.planner, workload=lane, blocks_in_flight=in_flight)
    return replace(search, planner=own)


def _kind(search: Search) -> tuple[ModelConfig, int]:
    """Stages of one kind have one plan: their layers are alike, and take as many bytes."""
    own = search.planner
    return own.config, sum(source.num_bytes for source in own.sources.values())


def _following(search: Search, policy: Policy, is_rough: bool) -> Choice:
    """The best for blocks of the same rows: with the same keys' places where they fit, and as many
    weights in memory as fit beside them."""
    plan = search.planner.realise(policy)
    if plan is not None:
        return search.price(plan, is_rough=is_rough)
    size, count = policy.micro_batch_size, policy.num_micro_batches
    other = _wishing(search, micro_batch_size=size, num_micro_batches=count)
    return other.sketch() if is_rough else other.best()
