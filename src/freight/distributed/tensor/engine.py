"""Answers rows with a model that is cut over ranks: one rank leads, the others follow.

The first rank has the rows, the house's scheduler and sampler; before each call it tells the others
what the rows bring and which way is taken, and all compute it. Rows take the seats of a batch,
whose keys every rank keeps its part of; weights are in memory, none is offloaded. Prompts come
together, longer ones in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from freight.distributed.tensor.model import Batch, TensorModel
from freight.distributed.tensor.ranks import Ranks
from freight.distributed.tensor.switch import Switch
from freight.errors import InputError
from freight.memory.kv_cache import KVCache
from freight.model.batch import MicroBatch, RowKey
from freight.plan.policy import Policy, Split
from freight.plan.sweep import BatchWork
from freight.plan.workload import Workload
from freight.quantities import format_bytes
from freight.runtime.answers import NewTokens
from freight.runtime.params import check_vocabulary
from freight.runtime.request import Completion, Request
from freight.runtime.sampler import Draw, sample
from freight.runtime.scheduler import Scheduler
from freight.runtime.scores import score
from freight.runtime.tokenizer import Tokenizer

__all__ = ["TensorEngine", "follow"]

_PAGE_TOKENS: Final = 16
_END, _BEGIN, _STEP = range(3)
_HEADER: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What all seats bring: their lengths so far [R], how many tokens [R], and these [R, L]."""

    lengths: torch.Tensor
    num_new: torch.Tensor
    ids: torch.Tensor
    way: int

    def tokens(self) -> list[list[int]]:
        return [
            row[:count] for row, count in zip(self.ids.tolist(), self.num_new.tolist(), strict=True)
        ]


class TensorEngine:
    """On the first rank. One run at a time may use it; ``close`` lets the others go.

    ``rows`` are computed together, of at most ``longest`` tokens each; prompts bring up to
    ``batch_tokens`` to a call.
    """

    def __init__(
        self,
        model: TensorModel,
        switch: Switch,
        *,
        workload: Workload,
        tokenizer: Tokenizer | None,
        rows: int,
        batch_tokens: int,
    ) -> None:
        self.model = model
        self._switch = switch
        self._workload = workload
        self._tokenizer = tokenizer
        self._longest = workload.max_total_tokens
        self._policy = Policy(
            compute_tier="cpu",
            weights=Split(cpu=1),
            kv=Split(cpu=1),
            activations=Split(cpu=1),
            micro_batch_size=rows,
            num_micro_batches=1,
            max_batch_tokens=batch_tokens,
            page_tokens=_PAGE_TOKENS,
            shares_prefixes=False,
        )
        self._is_open = True

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Answer rows in an order of the scheduler's choosing, each exactly once."""
        rows = self._policy.micro_batch_size
        pages = self._pages(rows)
        eos_ids = frozenset() if self._tokenizer is None else self._tokenizer.eos_token_ids
        scheduler = Scheduler(
            self._check(requests),
            policy=self._policy,
            kv_cache=pages,
            slot_pages=0,
            tokenizer=self._tokenizer,
            eos_ids=eos_ids,
            lengths=self._workload.answers(),
            describe=lambda sweep, batch, continues: BatchWork(batch=batch, continues=continues),
        )
        _tell(self.model.executor.ranks, [_BEGIN, rows, self._longest])
        batch, seats = self.model.begin(rows, self._longest), _Seats(rows, pages)
        for sweep in scheduler.sweeps():
            for work in sweep.works:
                logits = self._step(batch, seats, work.batch)
                made = _make(logits, scheduler.draws(work.batch))
                yield from scheduler.update(work.batch, made)

    def _pages(self, rows: int) -> KVCache:
        """What the scheduler counts: pages without bytes, for all seats."""
        count = rows * -(-self._longest // _PAGE_TOKENS)
        return KVCache(
            pools={"compute": torch.empty(1, count, 0, dtype=torch.uint8)},
            tails=torch.empty(1, 0, 0, dtype=torch.uint8),
            file=None,
            num_disk_pages=0,
            page_tokens=_PAGE_TOKENS,
            page_bytes=0,
        )

    def _check(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            check_vocabulary(request.params, self.model.config.vocab_size)
            if request.params.prompt_logprobs is not None:
                raise InputError(
                    "Log-probabilities of a prompt were asked for.",
                    "A model that is cut over ranks computes logits of the last token only.",
                    "Run the job without torchrun, or leave --prompt-logprobs out.",
                )
            yield request

    def _step(self, batch: Batch, seats: _Seats, work: MicroBatch) -> torch.Tensor:
        """Logits [n, V] in float32, of the rows that make a token."""
        call, wanted = seats.fill(work, self._switch, self.model)
        _tell(self.model.executor.ranks, [_STEP, *call.ids.shape, call.way])
        logits = _compute(self.model, batch, _share(self.model.executor.ranks, call))
        return logits[wanted].float().cpu()

    def status(self) -> str:
        """What a rank holds."""
        held = sum(part[0].nbytes for own in self.model.stored for part in own.values())
        mesh = self.model.executor.ranks.mesh
        return f"{format_bytes(held)} of weights on each of {mesh.num_chips} ranks ({mesh})"

    def summary(self) -> str:
        """What the ranks have sent."""
        moved = self.model.executor.moved
        lines = [
            f"{kind} of {what}: {format_bytes(size)}"
            for (kind, what), size in sorted(moved.items())
            if size
        ]
        return f"{self.status()}\nsent by the first rank: {', '.join(lines) or 'nothing'}"

    def close(self) -> None:
        if self._is_open:
            _tell(self.model.executor.ranks, [_END])
        self._is_open = False


class _Seats:
    """Which row of a batch a row of the job is."""

    def __init__(self, count: int, pages: KVCache) -> None:
        self._pages = pages
        self._free = list(range(count))
        self._taken: dict[RowKey, int] = {}
        self._count = count

    def fill(self, work: MicroBatch, switch: Switch, model: TensorModel) -> tuple[_Call, list[int]]:
        """The call for a micro-batch, and the seats whose logits are wanted, rows in order."""
        for key in [key for key in self._taken if key not in self._pages.rows]:
            self._free.append(self._taken.pop(key))
        width = max(span.num_new for span in work.rows)
        lengths = torch.zeros(self._count, dtype=torch.long)
        num_new = torch.zeros_like(lengths)
        ids = torch.zeros(self._count, width, dtype=torch.long)
        wanted = []
        for span in work.rows:
            for key in span.keys:
                seat = self._seat(key)
                lengths[seat], num_new[seat] = span.kv_len, span.num_new
                own = work.token_ids[span.start : span.end]
                ids[seat, : span.num_new] = torch.tensor(own, dtype=torch.long)
            if span.logit_positions:
                wanted.append(self._taken[span.row])
        way = model.ways.index(switch.way(self._count * width))
        return _Call(lengths=lengths, num_new=num_new, ids=ids, way=way), wanted

    def _seat(self, key: RowKey) -> int:
        if key not in self._taken:
            self._taken[key] = self._free.pop()
        return self._taken[key]


def follow(model: TensorModel) -> None:
    """On all other ranks: compute what the first one tells, until it ends."""
    ranks, batch = model.executor.ranks, None
    while True:
        kind, rows, size, way = _tell(ranks, [])
        if kind == _END:
            return
        if kind == _BEGIN:
            batch = model.begin(rows, size)
            continue
        assert batch is not None
        empty = torch.zeros(rows, dtype=torch.long)
        ids = torch.zeros(rows, size, dtype=torch.long)
        call = _Call(lengths=empty, num_new=empty, ids=ids, way=way)
        _compute(model, batch, _share(ranks, call))


def _compute(model: TensorModel, batch: Batch, call: _Call) -> torch.Tensor:
    batch.lengths = F.pad(call.lengths, (0, len(batch.lengths) - len(call.lengths)))
    return model.step(batch, call.tokens(), model.ways[call.way])


def _tell(ranks: Ranks, values: Sequence[int]) -> list[int]:
    """What the first rank says to all; the others' values count for nothing."""
    own = torch.tensor([*values, *[0] * (_HEADER - len(values))])
    return _from_first(ranks, own).tolist()


def _share(ranks: Ranks, call: _Call) -> _Call:
    """The first rank's call, on all."""
    packed = torch.cat((call.lengths[:, None], call.num_new[:, None], call.ids), dim=1)
    known = _from_first(ranks, packed)
    return _Call(lengths=known[:, 0], num_new=known[:, 1], ids=known[:, 2:], way=call.way)


def _from_first(ranks: Ranks, own: torch.Tensor) -> torch.Tensor:
    parts = [own.to(ranks.device) for _ in ranks.own]
    return ranks.all_gather(parts, ranks.mesh.names)[0][0].cpu()


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
