"""Logits -> one token per row: greedy, or drawn with temperature, min-p, top-k and top-p.

Knows no schedule and keeps no state: a row's draw is a hash of its seed and position, so its tokens
do not depend on what else is in the batch or on when it runs. The order is that of vLLM: biases,
bans and penalties (``penalties``), what may come at all, temperature, min-p, top-k, top-p; tokens
that tie with the last one to survive survive too, so that no sort's whim decides. The draw is an
inverse cumulative sum over token ids in float64.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.model.batch import RowKey
from freight.runtime.params import SamplingParams
from freight.runtime.penalties import History, adjust, is_adjusted

__all__ = ["NO_TOKEN", "Draw", "sample", "sample_seed", "uniform"]

NO_TOKEN: Final = -1
"""In place of a token that cannot be chosen."""

# Bounds the float64 copies of logits to 4 MiB each, which is also where they are fastest.
_CHUNK_VALUES: Final = 512 * 1024
# Most nuclei are smaller; a row with a larger one is sorted in full.
_NUCLEUS_GUESS: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One token to choose: of row ``place`` of the logits, to stand at ``position`` of its row.

    Rows of equal place are drawn of the same logits, each by the seed in its own ``params``.
    ``banned`` are tokens that must not come yet; ``allowed``, a bit for each token, those that may
    come at all.
    """

    row: RowKey
    place: int
    position: int
    params: SamplingParams
    history: History
    banned: Sequence[int] = ()
    allowed: npt.NDArray[np.uint8] | None = None

    @property
    def is_adjusted(self) -> bool:
        return self.allowed is not None or is_adjusted(self.params, len(self.history.output))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    temperature: float
    min_p: float
    top_k: int
    top_p: float


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per draw, from ``logits`` [R, V], float32: ``NO_TOKEN`` where the highest of
    them is infinite, or no number."""
    if not draws:
        return []
    greedy = _argmax(logits)
    are_numbers = logits.gather(1, greedy[:, None]).squeeze(1).isfinite()
    best = greedy.masked_fill(~are_numbers, NO_TOKEN).tolist()
    tokens: list[int] = [best[draw.place] for draw in draws]
    num_rows = max(1, _CHUNK_VALUES // logits.shape[1])
    for settings, members in _groups(draws, tokens, logits.shape[1]):
        for start in range(0, len(members), num_rows):
            part = members[start : start + num_rows]
            chosen = _choose(logits, settings, [draws[i] for i in part])
            for i, token in zip(part, chosen, strict=True):
                tokens[i] = token
    return tokens


def _choose(logits: torch.Tensor, settings: _Settings, draws: Sequence[Draw]) -> list[int]:
    """Tokens of a few draws with equal settings, from a copy of their logits."""
    places = torch.tensor([draw.place for draw in draws], device=logits.device)
    rows = logits.index_select(0, places)
    for row, draw in zip(rows, draws, strict=True):
        if draw.is_adjusted:
            adjust(row, draw.params, draw.history, draw.banned)
            if len(draw.banned) >= len(row) and not row.isfinite().any():
                # Bans leave nothing: as if there were none.
                adjust(row.copy_(logits[draw.place]), draw.params, draw.history, ())
        if draw.allowed is not None:
            _keep_to(row, draw.allowed, logits[draw.place])
    if not settings.temperature:
        tokens: list[int] = _argmax(rows).tolist()
        return tokens
    return _draw(rows, settings, [uniform(draw.params.seed, draw.position) for draw in draws])


def _keep_to(row: torch.Tensor, allowed: npt.NDArray[np.uint8], own: torch.Tensor) -> None:
    """Leave only tokens with a bit, which rows of the embedding behind the tokenizer's have not.
    Where bans leave none of them, those of the row's ``own`` logits."""
    bits = np.unpackbits(allowed, count=len(row), bitorder="little")
    hidden = torch.from_numpy(bits == 0).to(row.device)
    row.masked_fill_(hidden, -torch.inf)
    if not row.isfinite().any():
        row.copy_(own).masked_fill_(hidden, -torch.inf)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the highest entries of each row; the first NaN where there is one."""
    if logits.device.type == "cpu":
        # numpy's is vectorised and starts no threads: 20 times as fast here.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=-1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of ``seed`` and ``position`` alone.

    It has 52 bits, so that no product of it with a sum rounds up to that sum.
    """
    whole = seed % 2**64  # the same number where it is negative, by its bits
    digest = hashlib.blake2b(struct.pack("<QQ", whole, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 12) / 2**52)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of a row's samples; the first has the row's own."""
    if not sample:
        return seed
    digest = hashlib.blake2b(f"{seed}/sample {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _groups(
    draws: Sequence[Draw], best: Sequence[int], vocab_size: int
) -> Iterator[tuple[_Settings, list[int]]]:
    """The draws that are not plainly greedy, gathered by equal settings, where there is a ``best``
    token to be had."""
    groups: dict[_Settings, list[int]] = {}
    for i, draw in enumerate(draws):
        params = draw.params
        if best[i] != NO_TOKEN and (params.temperature > 0 or draw.is_adjusted):
            settings = _Settings(
                temperature=params.temperature,
                min_p=params.min_p,
                top_k=params.top_k if params.top_k < vocab_size else 0,
                top_p=params.top_p,
            )
            groups.setdefault(settings, []).append(i)
    yield from groups.items()


def _draw(logits: torch.Tensor, settings: _Settings, draws: list[float]) -> list[int]:
    """Tokens of rows [r, V] with equal settings, by one number in [0, 1) per row."""
    best = logits.amax(dim=-1, keepdim=True).double()
    if settings.min_p:
        least = best + settings.temperature * math.log(settings.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    floor = _floor(logits, best, settings)
    values, ids = (logits, None) if floor is None else _survivors(logits, floor)
    sums = _weights(values, best, settings.temperature).cumsum(dim=-1)
    targets = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
    places = torch.searchsorted(sums, targets, right=True)
    tokens: list[int] = (places if ids is None else ids.gather(1, places)).squeeze(1).tolist()
    return tokens


def _weights(values: torch.Tensor, best: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities [r, n] in float64, not normalised: the best token of a row weighs 1."""
    return ((values.double() - best) / temperature).exp_()


def _floor(logits: torch.Tensor, best: torch.Tensor, settings: _Settings) -> torch.Tensor | None:
    """The lowest logit [r, 1] that survives both filters, or None where there is no filter."""
    if not settings.top_k:
        return None if settings.top_p == 1 else _nucleus_floor(logits, best, settings)
    top = logits.topk(settings.top_k, dim=-1).values
    lowest = top[:, -1:]
    if settings.top_p == 1:
        return lowest
    weights = _weights(top, best, settings.temperature)
    num_ties = (logits == lowest).sum(-1, keepdim=True) - (top == lowest).sum(-1, keepdim=True)
    total = weights.sum(dim=-1, keepdim=True) + num_ties * weights[:, -1:]
    return _cut(top, weights, settings.top_p * total)


def _nucleus_floor(logits: torch.Tensor, best: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """The lowest logit [r, 1] of the smallest set that holds ``top_p`` of the probability."""
    weights = _weights(logits, best, settings.temperature)
    needed = settings.top_p * weights.sum(dim=-1, keepdim=True)
    top = logits.topk(min(_NUCLEUS_GUESS, logits.shape[1]), dim=-1).values
    weights = _weights(top, best, settings.temperature)
    floor = _cut(top, weights, needed)
    wide = (weights.sum(dim=-1, keepdim=True) < needed).squeeze(1)
    if wide.any():
        top = logits[wide].sort(dim=-1, descending=True).values
        floor[wide] = _cut(top, _weights(top, best[wide], settings.temperature), needed[wide])
    return floor


def _cut(top: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Of ``top`` [r, n], descending: the last that is reached before ``needed`` is gathered."""
    gathered_before = weights.cumsum(dim=-1) - weights
    num_kept = (gathered_before < needed).sum(dim=-1, keepdim=True)
    return top.gather(1, num_kept.clamp_(min=1) - 1)


def _survivors(logits: torch.Tensor, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits from ``floor`` up and their ids [r, most], ids ascending, padded with -inf."""
    kept = logits >= floor
    counts = kept.sum(dim=-1)
    row, token = kept.nonzero(as_tuple=True)
    first = counts.cumsum(0) - counts
    slot = torch.arange(len(row), device=logits.device) - first[row]
    shape = (len(logits), int(counts.max()))
    values = logits.new_full(shape, -torch.inf)
    ids = token.new_zeros(shape)
    values[row, slot] = logits[row, token]
    ids[row, slot] = token
    return values, ids
