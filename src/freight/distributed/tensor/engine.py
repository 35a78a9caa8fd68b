"""Answers rows with a model that is cut over ranks: one rank leads, the others follow.

The first rank has the rows, the house's scheduler and sampler; before each call it tells the others
what the rows bring and which way is taken, and all compute it. Rows take the seats of a batch,
whose keys every rank keeps its part of. Prompts come in calls of their own, single tokens of rows
of any age in another. Where weights come from the disk the calls of a sweep are computed together,
layer by layer. A model in stages has as many batches: while one is in a later stage the first
computes another. A stage is told of a call by the one before, and the last sends logits back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch

from freight.distributed.tensor.calls import Batch, Left, ModelCall
from freight.distributed.tensor.model import TensorModel
from freight.distributed.tensor.names import describe
from freight.distributed.tensor.scoring import Scored, state_width
from freight.distributed.tensor.seats import Call, Seats
from freight.distributed.tensor.stages import Wire
from freight.distributed.tensor.switch import Switch
from freight.distributed.tensor.ways import Way
from freight.memory.kv_cache import KVCache
from freight.model.batch import MicroBatch
from freight.plan.policy import Admission, Policy, Split
from freight.plan.sweep import BatchWork
from freight.plan.workload import Workload
from freight.quantities import align_up, format_bytes
from freight.runtime.answers import NewTokens
from freight.runtime.params import check_tokenizer, check_vocabulary
from freight.runtime.request import Completion, Request
from freight.runtime.sampler import Draw, sample
from freight.runtime.scheduler import Scheduler
from freight.runtime.scores import RunningScores, Scores, score
from freight.runtime.tokenizer import Tokenizer

__all__ = ["TensorEngine", "follow"]

_PAGE_TOKENS: Final = 16
_END, _BEGIN, _STEP = range(3)
_HEADER: Final = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """A call as all ranks know it: ``lengths`` [B] of all seats of its batch, the ``seats`` [R] of
    its rows, how many tokens they bring [R], and these [R, L]. From the ``first`` [R] of these on
    ``targets`` [R, C] are scored."""

    lengths: torch.Tensor
    seats: torch.Tensor
    num_new: torch.Tensor
    ids: torch.Tensor
    first: torch.Tensor
    targets: torch.Tensor

    @property
    def packed(self) -> torch.Tensor:
        rows = self.seats, self.num_new, self.first
        return torch.cat((self.lengths, *rows, self.ids.flatten(), self.targets.flatten()))

    @classmethod
    def of(cls, packed: torch.Tensor, seats: int, rows: int, width: int, scored: int) -> Self:
        sizes = [seats, rows, rows, rows, rows * width, rows * scored]
        lengths, own, num_new, first, ids, targets = torch.split(packed, sizes)
        return cls(
            lengths=lengths,
            seats=own,
            num_new=num_new,
            ids=ids.view(rows, width),
            first=first,
            targets=targets.view(rows, scored),
        )

    @classmethod
    def size(cls, seats: int, rows: int, width: int, scored: int) -> int:
        """Of what is packed."""
        return seats + rows * (3 + width + scored)

    def tokens(self) -> list[list[int]]:
        return [
            row[:count] for row, count in zip(self.ids.tolist(), self.num_new.tolist(), strict=True)
        ]


class TensorEngine:
    """On the first rank. One run at a time may use it; ``close`` lets the others go.

    ``rows`` are computed together, of at most the workload's longest tokens each, in each of as
    many batches as there are stages; a call has up to ``call_tokens``. Rows bring up to
    ``batch_tokens`` of their prompts to a sweep (None: all), whose calls are computed ``together``,
    layer by layer, or one after the other.
    ``taken`` counts tokens and calls by way.
    """

    def __init__(
        self,
        model: TensorModel,
        switch: Switch,
        *,
        workload: Workload,
        tokenizer: Tokenizer | None,
        rows: int,
        call_tokens: int,
        batch_tokens: int | None = None,
        admission: Admission | None = None,
        together: bool = False,
    ) -> None:
        self.model = model
        self.taken: dict[Way, list[int]] = {way: [0, 0] for way in switch.ways}
        self._switch = switch
        self._workload = workload
        self._tokenizer = tokenizer
        self._longest = workload.max_total_tokens
        self._num_top = workload.max_logprobs
        self._call_tokens = call_tokens
        self._together = together
        # Where ways want keys otherwise, going from one to the other moves those of all rows.
        rule: Admission = "refill" if model.keeps_keys(switch.ways) else "zigzag"
        self.policy = Policy(
            compute_tier="cpu",
            weights=Split(cpu=1),
            kv=Split(cpu=1),
            activations=Split(cpu=1),
            micro_batch_size=rows,
            num_micro_batches=1,
            max_batch_tokens=batch_tokens or rows * self._longest,
            page_tokens=_PAGE_TOKENS,
            admission=admission or rule,
            entry_pace=float(max(1, workload.max_new_tokens)),  # a block fills at once
            shares_prefixes=False,
        )
        self._is_open = True

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Answer rows in an order of the scheduler's choosing, each exactly once."""
        rows, shared = self.policy.micro_batch_size, self._check(requests)
        count = self.model.passage.stage.count
        _tell(self.model, [_BEGIN, rows, self._longest, count])
        lanes = deque(self._lane(shared, number) for number in range(count))
        while lanes:
            lane = lanes.popleft()
            for done in lane:
                if done is None:  # its turn comes again when the others have computed
                    lanes.append(lane)
                    break
                yield done

    def _lane(self, requests: Iterator[Request], number: int) -> Iterator[Completion | None]:
        """One batch, and a scheduler for it, which takes what comes next of the requests. None
        where logits are on their way through other stages."""
        rows = self.policy.micro_batch_size
        pages = self._pages(rows)
        eos_ids = frozenset() if self._tokenizer is None else self._tokenizer.eos_token_ids
        scheduler = Scheduler(
            requests,
            policy=self.policy,
            kv_cache=pages,
            slot_pages=0,
            tokenizer=self._tokenizer,
            eos_ids=eos_ids,
            lengths=self._workload.answers(),
            is_structured=self._workload.is_structured,
            describe=lambda sweep, batch, continues: BatchWork(batch=batch, continues=continues),
        )
        batch = self.model.begin(rows, self._longest)
        count, parts = len(batch.lengths), self.model.row_parts
        seats = Seats(count, parts, pages, self._call_tokens)
        for sweep in scheduler.sweeps():
            for work in sweep.works:
                logits, scores = yield from self._computed(batch, seats, work.batch, number)
                made = _make(logits, scheduler.draws(work.batch))
                yield from scheduler.update(work.batch, replace(made, prompt_scores=scores))

    def _pages(self, rows: int) -> KVCache:
        """What the scheduler counts: pages without bytes, for all seats."""
        count = rows * -(-self._longest // _PAGE_TOKENS)
        return KVCache(
            pools={"compute": [torch.empty(count, 0, dtype=torch.uint8)]},
            tails=[torch.empty(0, 0, dtype=torch.uint8)],
            file=None,
            num_disk_pages=0,
            page_tokens=_PAGE_TOKENS,
            far_page_bytes=(0,),
        )

    def _check(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            check_vocabulary(request.params, self.model.config.vocab_size)
            check_tokenizer(request.params, self._tokenizer)
            yield request

    def _computed(
        self, batch: Batch, seats: Seats, work: MicroBatch, lane: int
    ) -> Generator[None, None, tuple[torch.Tensor, Scores | None]]:
        """Logits [n, V] in float32, of the rows that make a token, and scores of prompts; None
        where others may compute."""
        calls, free = seats.calls(work)
        batch.lengths[free] = 0
        found = torch.empty(work.num_logits, self.model.config.vocab_size)
        states = torch.empty(work.num_scored, state_width(self._num_top))
        together = len(calls) if self._together else 1
        for first in range(0, len(calls), together):
            some = calls[first : first + together]
            made = self._sweep(batch, some, lane)
            answers = self.model.passage.answers
            if answers is not None and any(call.wanted or call.scored for call in some):
                yield None
                made = [self._received(answers, call) for call in some]
            for call, own in zip(some, made, strict=True):
                if call.wanted:
                    rows, places = ([pair[part] for pair in call.wanted] for part in range(2))
                    found[places] = own.logits[rows].float().cpu()
                for scored in call.scored:
                    count, place = len(scored.targets), scored.place
                    states[place : place + count] = own.states[scored.row, :count].cpu()
        return found, RunningScores(states).result() if work.num_scored else None

    def _received(self, answers: Wire, call: Call) -> Left:
        """What the last stage has made of a call."""
        device, rows = self.model.executor.ranks.device, len(call.seats)
        logits = states = torch.empty(0)
        if call.wanted:
            size = rows, self.model.config.vocab_size
            like = torch.empty(size, dtype=self.model.dtype, device=device)
            (logits,) = answers.receive([like])
        if call.scored:
            count = _most_scored(call)
            like = torch.empty(rows, count, state_width(self._num_top), device=device)
            (states,) = answers.receive([like])
        return Left(logits, states)

    def _sweep(self, batch: Batch, calls: Sequence[Call], lane: int) -> list[Left]:
        """What is left of each call, where all layers are here."""
        self.model.passage.allow(len(calls))
        told = [
            self._tell_of(batch, call, lane, len(calls) - number)
            for number, call in enumerate(calls, start=1)
        ]
        return self.model.sweep(batch, told)

    def _tell_of(self, batch: Batch, call: Call, lane: int, left: int) -> ModelCall:
        """What all are told of a call; ``left`` others follow in its sweep."""
        for seat, kv_len, tokens in zip(call.seats, call.kv_lens, call.tokens, strict=True):
            if tokens:
                batch.lengths[seat] = kv_len
        rows, width = len(call.seats), call.width
        ids = torch.zeros(rows, width, dtype=torch.long)
        for row, tokens in enumerate(call.tokens):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        count = _most_scored(call)
        first, targets = torch.zeros(rows, dtype=torch.long), torch.full((rows, count), -1)
        for own in call.scored:
            first[own.row] = own.first
            targets[own.row, : len(own.targets)] = torch.tensor(own.targets)
        told = _Told(
            lengths=batch.lengths,
            seats=torch.tensor(call.seats),
            num_new=torch.tensor([*map(len, call.tokens)]),
            ids=ids,
            first=first,
            targets=targets,
        )
        way = self._way(call)
        counts = self.taken[way]
        counts[0], counts[1] = counts[0] + call.num_tokens, counts[1] + 1
        index, num_top = self.model.ways.index(way), self._num_top
        header = [_STEP, rows, width, index, bool(call.wanted), lane, left, count, num_top]
        _tell(self.model, header)
        _from_first(self.model, told.packed)
        return _prepared(self.model, batch, told, header)

    def _way(self, call: Call) -> Way:
        """By the tokens of a call; but not one that would make twice as many of those of a row."""
        way = self._switch.way(call.num_padded)
        if align_up(call.width, self.model.token_parts(way)) >= 2 * call.width:
            return self._switch.way(1)
        return way

    def status(self) -> str:
        """What a rank holds."""
        mesh, stage = self.model.executor.ranks.mesh, self.model.passage.stage
        held = format_bytes(self.model.weights_held)
        status = f"{held} of weights on each of {mesh.num_chips} ranks ({mesh})"
        if stage.count > 1:
            status += (
                f" of the first of {stage.count} stages, "
                f"layers {stage.layers.start}-{stage.layers.stop - 1}"
            )
        if away := self.model.layers.num_away:
            status += f"; {away} of {len(stage.layers)} layers come from its disk in every sweep"
        return status

    def summary(self) -> str:
        """How rows were computed: together, and in which ways."""
        policy, mesh = self.policy, self.model.executor.ranks.mesh
        when = "as others end" if policy.is_continuous else "when all before have ended"
        ways = "; ".join(
            f"{describe(way, mesh)}: {tokens} tokens in {calls} calls"
            for way, (tokens, calls) in self.taken.items()
        )
        count = self.model.passage.stage.count
        rows = "1 row" if policy.micro_batch_size == 1 else f"{policy.micro_batch_size} rows"
        together = f"{count} x {rows}" if count > 1 else rows
        return f"{self.status()}, {together} together, which enter {when}\nlayouts: {ways}"

    def close(self) -> None:
        if self._is_open:
            _tell(self.model, [_END])
        self._is_open = False


def follow(model: TensorModel) -> None:
    """On all other ranks: compute what the first one tells, until it ends."""
    batches: list[Batch] = []
    calls: list[ModelCall] = []
    passage = model.passage
    while True:
        header = _tell(model, [])
        kind, rows, size = header[:3]
        if kind == _END:
            return
        if kind == _BEGIN:
            batches = [model.begin(rows, size) for _ in range(header[3])]
            continue
        batch, left = batches[header[5]], header[6]
        if not calls:
            passage.allow(left + 1)
        count = len(batch.lengths)
        sizes = count, rows, size, header[7]
        empty = torch.zeros(_Told.size(*sizes), dtype=torch.long)
        told = _Told.of(_from_first(model, empty), *sizes)
        calls.append(_prepared(model, batch, told, header))
        if left:
            continue
        for call, own in zip(calls, model.sweep(batch, calls), strict=True):
            if passage.answers is not None:
                made = (call.to_logits, own.logits), (call.scored is not None, own.states)
                for is_wanted, part in made:
                    if is_wanted:
                        passage.answers.send([part])
        calls = []


def _prepared(model: TensorModel, batch: Batch, call: _Told, header: Sequence[int]) -> ModelCall:
    batch.lengths = call.lengths.clone()
    way, is_wanted = model.ways[header[3]], bool(header[4])
    seats, scored = call.seats.tolist(), None
    if call.targets.shape[1]:
        device = model.executor.ranks.device
        first, targets = call.first.to(device), call.targets.to(device)
        scored = Scored(first=first, targets=targets, num_top=header[8])
    return model.prepare(
        batch,
        call.tokens(),
        way,
        None if len(seats) == len(batch.lengths) else seats,
        to_logits=is_wanted,
        scored=scored,
    )


def _most_scored(call: Call) -> int:
    """Of a row."""
    return max((len(own.targets) for own in call.scored), default=0)


def _tell(model: TensorModel, values: Sequence[int]) -> list[int]:
    """What the first rank says to all; the others' values count for nothing."""
    own = torch.tensor([*values, *[0] * (_HEADER - len(values))])
    return _from_first(model, own).tolist()


def _from_first(model: TensorModel, own: torch.Tensor) -> torch.Tensor:
    """To the ranks of its stage at once, to others from the stage before."""
    ranks, passage = model.executor.ranks, model.passage
    parts = [own.to(ranks.device) for _ in ranks.own]
    if passage.before is None:
        parts = ranks.all_gather(parts, ranks.mesh.names)[0][:1]
    else:
        parts = passage.before.receive(parts)
    if passage.after is not None:
        passage.after.send(parts)  # and is not to change until it has gone
    return parts[0].cpu().clone()


def _make(logits: torch.Tensor, draws: Sequence[Draw]) -> NewTokens:
    """A token for each draw, and the scores of those that ask for them."""
    token_ids = sample(logits, draws)
    scored = [i for i, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not scored:
        return NewTokens(token_ids=token_ids)
    num_top = max(draws[i].params.logprobs or 0 for i in scored)
    places = [draws[i].place for i in scored]
    return NewTokens(
        token_ids=token_ids,
        scores=score(logits, places, [token_ids[i] for i in scored], num_top),
    )
