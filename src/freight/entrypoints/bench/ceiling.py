"""The ceiling: the least time that any policy needs for the work, from the machine's rates.

Arithmetic on plain numbers; knows no devices and measures nothing.

There are R rows, each with a prompt of P tokens and N new tokens; where lengths differ, sums over
the rows take the place of R times one. A row passes the model N times: a pass with its prompt, then
N - 1 with one token each. A *sweep* is a pass of the model, of any number of rows together. With W
bytes of matrices, M bytes of memory beside the process, k(j) bytes of keys and values, and of what
is kept instead in layers without them, that a row has before pass j (none before the first), and b
rows per sweep on average:

- **sweeps.** S = R N / b, at least N.
- **moving.** During a sweep all W must be in memory at some time, and so must the keys and values
  of its rows. Memory holds M of that when the sweep begins, the rest is brought: of all sweeps
  together at least max(0, S (W - M) + R sum_j k(j)) bytes, at the path's rate B. (What of the keys
  and values is not in memory is read as weights are: trading one for the other gains nothing.)
- **computing.** Products of prompts, C, at the best rate at any number of rows; of new tokens at
  the rate of products of b rows; attention's products at the best rate. In the last layer a
  prompt's tokens but the last one need keys and values alone.
- **the last prompt.** When the last prompt is done, all of C is; its row still needs N - 1 sweeps,
  of lengths that differ the least N.
  A later pass of any row either was computed before that, which adds its arithmetic c to C, or
  comes after, which adds its k(j) to what is moved: where W > M, at least
  C + max(0, (N - 1)(W - M) / B + R sum_j min(c, k(j) / B)).
- **warm-up and drain.** When generating starts memory is full of weights, so the first unit waits
  only for what of it is larger than M. After the last byte of the last sweep comes at least
  nothing: a policy may end with a unit that is in memory. Counted from the start of loading,
  min(W, M) bytes more are moved.

The bound is the largest of these, b the number of rows that makes it least. Where all rows fit and
decoding waits for the disk, it is the sum of the longer of moving and computing over the sweeps.
With a device, weights reach it over a link (M is then its memory; keys and values are let off,
since the host could attend to them) and from the disk (M is both memories). It holds for every
order of sweeps, with prompts and new tokens in one sweep or not, as long as they are multiplied
apart. Let off entirely: norms, rotations, logits, activations, embedding rows, scratch, all waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from freight.entrypoints.bench.work import Work
from freight.model.config import ModelConfig
from freight.model.decoder import build_programme
from freight.model.kept_steps import AttendChosen, AttendKept
from freight.model.layer_kinds import Recurrence
from freight.model.programme import Unit

__all__ = ["Ceiling", "ModelCost", "Path", "find_ceiling", "model_cost"]

_MOST_CANDIDATES: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """A model in numbers: bytes of all matrices but the embedding table, of the first unit's, FLOPs
    of the products of one token in the layers and in the head, of all layers with the same
    attention window (the window, FLOPs per query and key, bytes of keys and values per token), the
    bytes of what a row keeps in layers without keys, and of the layers' FLOPs those that can be
    spared where nothing comes of a token but what others see of it."""

    weight_bytes: float
    first_unit_bytes: float
    layer_flops: float
    head_flops: float
    attention: Sequence[tuple[int | None, float, float]]
    state_bytes: float = 0.0
    spared_flops: float = 0.0

    def attention_flops(self, first_keys: int, num_queries: int) -> float:
        """Of one row's queries, the first of which sees ``first_keys`` keys."""
        return sum(
            flops * _windowed(first_keys, num_queries, window)
            for window, flops, _ in self.attention
        )

    def kv_bytes(self, num_tokens: int) -> float:
        """What the next token of a row with so many reads: its own keys are not there yet."""
        return self.state_bytes + sum(
            size * (num_tokens if window is None else min(num_tokens, window - 1))
            for window, _, size in self.attention
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """A way that weights come: its rate, and the memory at its end."""

    name: str
    bytes_per_s: float
    room_bytes: float
    carries_kv: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """The bound with its parts, in seconds; ``bounds`` is each lower bound by its name."""

    seconds: float
    with_loading_s: float
    block_rows: int
    prefill_s: float
    decode_s: float
    warm_up_s: float
    bounds: Mapping[str, float]

    @property
    def limited_by(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)


def model_cost(config: ModelConfig, *, weight_size: float, element_size: int) -> ModelCost:
    """Of a model whose weights take ``weight_size`` bytes each in a file or in memory, whichever is
    less, and whose keys and values take ``element_size``.

    Of experts it counts as many as a token takes, also of their bytes: a sweep of rows that all
    choose the same ones brings no more, and what rows choose is not known before.
    """
    programme = build_programme(config)
    units = programme.units[1:]
    sizes = [weight_size * sum(w.num_elements for w in u.weights if w.is_matrix) for u in units]
    shares = [_share(config, unit) for unit in units]
    flops = [share * unit.matmul_flops(1) for unit, share in zip(units, shares, strict=True)]
    head = sum(own for unit, own in zip(units, flops, strict=True) if unit.kind == "head")
    picks_at = programme.picks_at - 1
    seen = units[picks_at - 1]
    keys = seen.keys() if seen.kind == "attention" else None
    spared = sum(flops[picks_at:]) - head
    spared += 0.0 if keys is None else seen.matmul_flops(1) - keys.matmul_flops(1)
    return ModelCost(
        weight_bytes=sum(size * share for size, share in zip(sizes, shares, strict=True)),
        first_unit_bytes=sizes[0],
        layer_flops=sum(flops) - head,
        head_flops=head,
        attention=_attention(config, units, element_size),
        state_bytes=(
            config.state_bytes_per_row(element_size)
            if isinstance(config.recurrence, Recurrence)
            else 0.0
        ),
        spared_flops=spared,
    )


def _share(config: ModelConfig, unit: Unit) -> float:
    """Of an expert, the part of it that every token needs; of other units, all."""
    if unit.expert is None or config.experts is None:
        return 1.0
    return config.experts.per_token / config.experts.num_experts


def _attention(
    config: ModelConfig, units: Sequence[Unit], element_size: int
) -> tuple[tuple[int | None, float, float], ...]:
    flops: defaultdict[int | None, float] = defaultdict(float)
    sizes: defaultdict[int | None, float] = defaultdict(float)
    for unit in units:
        if unit.kind == "attention" and unit.layer is not None:
            window = config.sliding_windows[unit.layer]
            flops[window] += unit.attention_flops(1)
            sizes[window] += config.kept_bytes_per_token_in(unit.layer, element_size)
        for step in unit.steps:
            for most, own, numbers in _kept(step):
                flops[most] += own
                sizes[most] += numbers * element_size
    return tuple((window, flops[window], sizes[window]) for window in flops)


def _kept(step: object) -> Iterator[tuple[int | None, float, float]]:
    """Of keys that are a row's state, like those: how many are attended at most, FLOPs of a query
    and a key, and numbers of a key. Compressed keys are left out, of which each layer has few."""
    if isinstance(step, AttendKept):
        yield step.window, 4.0 * step.num_heads * step.width, step.width
    if isinstance(step, AttendChosen):
        yield step.num_chosen, 4.0 * step.num_heads * step.width, step.width
        yield None, 2.0 * step.index_heads * step.index_numbers, step.index_numbers


def find_ceiling(
    cost: ModelCost, work: Work, paths: Sequence[Path], product_flops: Mapping[int, float]
) -> Ceiling:
    """The least bound over all numbers of rows per sweep.

    ``product_flops`` is the rate of matrix products (FLOP/s) by their number of rows.
    """
    sums = _Sums.of(cost, work, paths, product_flops)
    ceilings = [
        _bound(cost, work, paths, product_flops, sums, least, most)
        for least, most in _candidates(work)
    ]
    return min(ceilings, key=lambda ceiling: ceiling.seconds)


def _candidates(work: Work) -> Iterator[tuple[int, int]]:
    """Ranges of rows per sweep, the largest first; of many rows, some to a range."""
    step = -(-work.num_rows // _MOST_CANDIDATES)
    for most in range(work.num_rows, 0, -step):
        yield max(1, most - step + 1), most


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """What does not depend on the rows per sweep: seconds of prompts and of new tokens' attention,
    keys and values that are read, and by path the bound of the last prompt."""

    prefill_s: float
    attention_s: float
    kv_bytes: float
    after_prompts_s: Mapping[str, float]

    @classmethod
    def of(
        cls,
        cost: ModelCost,
        work: Work,
        paths: Sequence[Path],
        product_flops: Mapping[int, float],
    ) -> _Sums:
        best = max(product_flops.values())
        lengths = Counter(work.lengths())
        flops = work.total_prompt_tokens * cost.layer_flops + work.num_rows * cost.head_flops
        flops -= (work.total_prompt_tokens - work.num_rows) * cost.spared_flops
        flops += sum(n * cost.attention_flops(1, prompt) for (prompt, _), n in lengths.items())
        attention = sum(
            n * cost.attention_flops(prompt + 1, new - 1) for (prompt, new), n in lengths.items()
        )
        read = Counter[int]()
        for (prompt, new), count in lengths.items():
            for held in range(prompt, prompt + new - 1):
                read[held] += count
        sizes = {held: cost.kv_bytes(held) for held in read}
        prefill_s = flops / best
        after = {}
        for path in paths:
            missing = cost.weight_bytes - path.room_bytes
            after[path.name] = prefill_s
            if missing > 0:
                compute_s = (cost.layer_flops + cost.head_flops) / best
                size = path.carries_kv / path.bytes_per_s
                passes = sum(n * min(compute_s, sizes[held] * size) for held, n in read.items())
                sweeps = min(new for _, new in lengths) - 1
                after[path.name] += sweeps * missing / path.bytes_per_s + passes
        return cls(
            prefill_s=prefill_s,
            attention_s=attention / best,
            kv_bytes=sum(n * sizes[held] for held, n in read.items()),
            after_prompts_s=after,
        )


def _bound(
    cost: ModelCost,
    work: Work,
    paths: Sequence[Path],
    product_flops: Mapping[int, float],
    sums: _Sums,
    least_rows: int,
    most_rows: int,
) -> Ceiling:
    """Where a sweep has from ``least_rows`` to ``most_rows`` rows on average, whichever is best."""
    steps = work.total_new_tokens - work.num_rows
    products = steps * (cost.layer_flops + cost.head_flops) / _rate(product_flops, most_rows)
    decode_s = products + sums.attention_s
    bounds = {"arithmetic": sums.prefill_s + decode_s}
    with_loading = sums.prefill_s + decode_s
    longest = max(new for _, new in work.lengths())
    for path in paths:
        sweeps = [max(longest, work.total_new_tokens / rows) for rows in (least_rows, most_rows)]
        missing = min(count * (cost.weight_bytes - path.room_bytes) for count in sweeps)
        moved = max(0.0, missing + sums.kv_bytes * path.carries_kv)
        bounds[path.name] = moved / path.bytes_per_s
        bounds[f"prompts, then {path.name}"] = sums.after_prompts_s[path.name]
        first = min(cost.weight_bytes, path.room_bytes)
        with_loading = max(with_loading, (moved + first) / path.bytes_per_s)
    warm_up_s = max(
        (max(0.0, cost.first_unit_bytes - path.room_bytes) / path.bytes_per_s for path in paths),
        default=0.0,
    )
    bounds["arithmetic"] += warm_up_s
    seconds = max(bounds.values())
    return Ceiling(
        seconds=seconds,
        with_loading_s=max(seconds, with_loading),
        block_rows=most_rows,
        prefill_s=sums.prefill_s,
        decode_s=decode_s,
        warm_up_s=warm_up_s,
        bounds=bounds,
    )


def _rate(product_flops: Mapping[int, float], num_rows: int) -> float:
    """The best rate of products of up to so many rows, by the next larger measured number."""
    larger = [rows for rows in product_flops if rows >= num_rows]
    most = min(larger) if larger else max(product_flops)
    return max(rate for rows, rate in product_flops.items() if rows <= most)


def _windowed(first_keys: int, num_queries: int, window: int | None) -> int:
    """Pairs of query and key: first_keys, first_keys + 1, ... each at most ``window``."""
    if window is None:
        return num_queries * first_keys + num_queries * (num_queries - 1) // 2
    growing = min(num_queries, max(0, window - first_keys))
    grown = growing * first_keys + growing * (growing - 1) // 2
    return grown + (num_queries - growing) * window
