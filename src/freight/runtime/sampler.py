"""Logits -> one token per row: greedy, or drawn with temperature, top-k and top-p.

Knows no schedule and keeps no state: a row's draw is a hash of its seed and position, so its tokens
do not depend on what else is in the batch or on when it runs. Filters go in the usual order,
temperature, top-k, top-p; tokens that tie with the last one to survive survive too, so that no
sort's whim decides. The draw is an inverse cumulative sum over token ids in float64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from freight.errors import ModelError
from freight.runtime.request import SamplingParams

__all__ = ["sample", "uniform"]

# Bounds the float64 copies of logits to 4 MiB each, which is also where they are fastest.
_CHUNK_VALUES: Final = 512 * 1024
# Most nuclei are smaller; a row with a larger one is sorted in full.
_NUCLEUS_GUESS: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    temperature: float
    top_k: int
    top_p: float


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """One token id per row of ``logits`` [R, V], float32.

    ``positions[r]`` is the place of the new token in its row's sequence. Raises ModelError where
    logits are not numbers.
    """
    assert logits.shape[0] == len(params) == len(positions)
    if not params:
        return []
    greedy = _argmax(logits)
    _demand_numbers(logits.gather(1, greedy[:, None]).squeeze(1))
    tokens: list[int] = greedy.tolist()
    for settings, rows in _groups(params, logits.shape[1]):
        chosen = logits if len(rows) == len(params) else logits[torch.tensor(rows)]
        draws = [uniform(params[row].seed, positions[row]) for row in rows]
        num_rows = max(1, _CHUNK_VALUES // logits.shape[1])
        for start in range(0, len(rows), num_rows):
            part = slice(start, start + num_rows)
            drawn = _draw(chosen[part], settings, draws[part])
            for row, token in zip(rows[part], drawn, strict=True):
                tokens[row] = token
    return tokens


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
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 12) / 2**52)


def _groups(
    params: Sequence[SamplingParams], vocab_size: int
) -> Iterator[tuple[_Settings, list[int]]]:
    """The rows that are not greedy, gathered by equal settings."""
    groups: dict[_Settings, list[int]] = {}
    for row, item in enumerate(params):
        if item.temperature > 0:
            top_k = item.top_k if item.top_k < vocab_size else 0
            settings = _Settings(temperature=item.temperature, top_k=top_k, top_p=item.top_p)
            groups.setdefault(settings, []).append(row)
    yield from groups.items()


def _draw(logits: torch.Tensor, settings: _Settings, draws: list[float]) -> list[int]:
    """Tokens of rows [r, V] with equal settings, by one number in [0, 1) per row."""
    best = logits.amax(dim=-1, keepdim=True).double()
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


def _demand_numbers(best: torch.Tensor) -> None:
    bad = (~best.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ModelError(
            f"Tokens were to be chosen for {len(best)} rows.",
            f"The logits of {len(bad)} of them hold no finite maximum (first: row {bad[0]}).",
            "The weights are damaged, or overflow in this number format: try --dtype float32.",
        )
