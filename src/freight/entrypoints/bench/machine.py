"""Rates of the machine alone: disk, link to the device, and matrix products of a model's shapes.

Each is the best of several tries with nothing else under way, for a ceiling must not be too low;
beside it stands what all tries together come to, which is what a run of minutes can hope for on a
machine that others use too. Knows no policy and no rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from freight.entrypoints.bench.work import Work
from freight.kernels.eights import join_eight_rows
from freight.kernels.exponents import most_spared, shorten
from freight.kernels.grouped import CompressedRows, quantise
from freight.kernels.products import Product, multiply, scratch_values
from freight.memory.disk import DirectFile, Traffic
from freight.memory.tier import device_arena, host_arena
from freight.memory.transfer import copy_bytes, host_view
from freight.model.config import ModelConfig
from freight.model.decoder import build_programme
from freight.model.number_format import (
    EIGHT_COLUMNS,
    LINE_COLUMNS,
    MICRO_COLUMNS,
    EightFloats,
    LevelFloats,
    MicroFloats,
    RowFormat,
    ShortExponents,
)
from freight.quantities import MIB
from freight.runtime.device import ComputeDevice

__all__ = ["Rate", "measure_disk", "measure_link", "measure_products", "product_rows"]

_REQUEST_BYTES: Final = 4 * MIB
_RING_BYTES: Final = 128 * MIB
"""What is read goes to memory, as in a sweep: the same few buffers again would stay in a cache."""
_DEPTHS: Final = (1, 2, 4)
_PASSES: Final = 3
_MOST_READ_BYTES: Final = 512 * MIB
_COPY_BYTES: Final = 256 * MIB
_CHUNKS: Final = (512, 2048)
_HALVINGS: Final = 4
_MOST_SHAPES: Final = 4
_MOST_MATRIX_BYTES: Final = {"cpu": 64 * MIB, "cuda": 256 * MIB}
"""A device is not filled by less than a large model's matrix."""
_COLD_BYTES: Final = 256 * MIB
"""Matrices are used in turn: as in a sweep, they come from memory and not from a cache."""
_EIGHTS: Final = 0x78
"""Floats of 8 bits that are positive and no larger than half of the largest."""
_ROUNDS: Final = 2
_LEAST_TRIES: Final = 4
_MOST_TRIES: Final = 1000
_LEAST_S: Final = 0.05
_AT_ONCE: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Per second: of the fastest try, and of all tries."""

    best: float
    usual: float

    @classmethod
    def of(cls, amount: float, tries_s: Sequence[float]) -> Rate:
        """So much was done in each try."""
        return cls(best=amount / min(tries_s), usual=amount * len(tries_s) / sum(tries_s))

    def or_better(self, other: Rate | None) -> Rate:
        """The better one of each."""
        if other is None:
            return self
        return Rate(best=max(self.best, other.best), usual=max(self.usual, other.usual))


def measure_disk(path: Path) -> tuple[Rate, int]:
    """(bytes per second, requests in flight) of direct reads of 4 MiB, one after the other, at the
    best of 1, 2 and 4 requests in flight."""
    file = DirectFile(path, Traffic())
    size = min(file.num_bytes, _MOST_READ_BYTES)
    memory = host_arena(_RING_BYTES).take(_RING_BYTES, "read")
    views = [
        host_view(memory[i : i + _REQUEST_BYTES]) for i in range(0, _RING_BYTES, _REQUEST_BYTES)
    ]
    rates: dict[int, Rate] = {}
    for depth in _DEPTHS:
        tries_s = []
        for _ in range(_PASSES):
            started_s = time.perf_counter()
            _read(file, size, views, depth)
            tries_s.append(time.perf_counter() - started_s)
        rates[depth] = Rate.of(size, tries_s)
    file.close()
    usual = max(rate.usual for rate in rates.values())
    depth = max(rates, key=lambda depth: rates[depth].best)
    return Rate(best=rates[depth].best, usual=usual), depth


def _read(file: DirectFile, size: int, views: Sequence[memoryview], depth: int) -> None:
    def read_every(number: int) -> None:
        for place in range(number, size // _REQUEST_BYTES, depth):
            file.read(place * _REQUEST_BYTES, views[place % len(views)])

    if depth == 1:
        read_every(0)
        return
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(read_every, range(depth)))


def measure_link(device: ComputeDevice, sim_bytes_per_s: float | None) -> Rate:
    """Bytes per second from host memory (pinned, for CUDA) to the device."""
    if sim_bytes_per_s is not None:
        return Rate(best=sim_bytes_per_s, usual=sim_bytes_per_s)
    on_cuda = device.kind == "cuda"
    host = host_arena(_COPY_BYTES, pinned=on_cuda)
    source = host.take(_COPY_BYTES, "source")
    arena = device_arena(_COPY_BYTES, device.torch_device) if on_cuda else host_arena(_COPY_BYTES)
    target = arena.take(_COPY_BYTES, "target")
    rate = _rate(_COPY_BYTES, device.torch_device, lambda _: copy_bytes(source, target))
    host.close()
    return rate


def product_rows(work: Work) -> list[int]:
    """The numbers of rows that the work's products have: chunks of prompts, and the block's rows,
    halved some times for blocks that are smaller."""
    prompts = work.total_prompt_tokens
    chunks = {min(chunk, prompts) for chunk in _CHUNKS}
    blocks = {max(1, work.num_rows >> halving) for halving in range(_HALVINGS + 1)}
    return sorted(chunks | {rows for rows in blocks if rows <= max(chunks)})


def measure_products(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int],
    kept: Iterable[RowFormat] = (),
) -> dict[int, Rate]:
    """FLOP/s of [rows, columns] times a matrix of the model, by rows: of its largest shapes the one
    that does best, for a better policy could join the small ones, and of all that it may be
    ``kept`` as. Two rounds, some time apart: a machine that is busy for a moment must not lower a
    ceiling."""
    rates: dict[int, Rate] = {}
    for num_out, num_in in [*_shapes(config, dtype.itemsize, device)] * _ROUNDS:
        copies = max(1, _COLD_BYTES // (num_out * num_in * dtype.itemsize))
        weights = _random((min(copies, 64), num_out, num_in), dtype, device)
        out_dtype = torch.int32 if dtype is torch.int8 else dtype
        packed = [own for one in kept if (own := _packed(one, num_out, num_in, device))]
        for count in rows:
            x = _random((count, num_in), dtype, device)
            out = torch.empty(count, num_out, dtype=out_dtype, device=device)
            for way in [*_products(x, weights, out), *(_by_codes(x, own, out) for own in packed)]:
                rate = _rate(2 * count * num_out * num_in, device, way)
                rates[count] = rate.or_better(rates.get(count))
    return rates


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype is torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    return torch.rand(shape, dtype=dtype, device=device)


def _products(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> Iterator[Callable[[int], object]]:
    """All ways there are: a library's, and that of a run where it is another."""
    by_library = torch._int_mm if x.dtype is torch.int8 else torch.mm
    yield lambda turn: by_library(x, weights[turn % len(weights)].t(), out=out)
    if x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu":
        scratch = torch.empty(scratch_values(x.shape[1], x.dtype), dtype=x.dtype)
        narrow = weights.bfloat16()

        def multiply_once(turn: int) -> None:
            own = narrow[turn % len(narrow)]
            multiply(x, [Product(rows=own, out=out)], lambda count: scratch[:count])

        yield multiply_once


def _packed(
    kept: RowFormat, num_out: int, num_in: int, device: torch.device
) -> list[CompressedRows]:
    """A compressed matrix, as often as no cache holds; none where it would not be of the format."""
    if isinstance(kept, ShortExponents):
        if num_in % LINE_COLUMNS:
            return []
        numbers = torch.randn(num_out, num_in).bfloat16()
        kept = ShortExponents(spare=most_spared(numbers))
        return _copies(shorten(numbers, kept).to(device), num_in, kept)
    if isinstance(kept, EightFloats):
        codes = torch.randint(0, _EIGHTS, (num_out, num_in), dtype=torch.uint8)
        scales = torch.full((num_out, -(-num_in // EIGHT_COLUMNS)), 0.01)
        return _copies(join_eight_rows(codes, scales).to(device), num_in, kept)
    if isinstance(kept, MicroFloats):
        if num_in % MICRO_COLUMNS:
            return []
        shape = num_out, kept.row_bytes(num_in)
        raw = torch.randint(100, 120, shape, dtype=torch.uint8)
        return _copies(raw.to(device), num_in, kept)
    if isinstance(kept, LevelFloats):
        if not kept.fits(num_in):
            return []
        # Scales that are numbers, as float32 and as floats of 8 bits.
        raw = torch.randint(0, 64, (num_out, kept.row_bytes(num_in)), dtype=torch.uint8)
        return _copies(raw.to(device), num_in, kept)
    dim, others = (num_out, num_in) if kept.across else (num_in, num_out)
    if dim % kept.group_size or others % 4:
        return []
    return _copies(quantise(torch.rand(num_out, num_in), kept).to(device), num_in, kept)


def _copies(raw: torch.Tensor, columns: int, kept: RowFormat) -> list[CompressedRows]:
    copies = max(1, min(64, _COLD_BYTES // raw.numel()))
    return [
        CompressedRows(raw=raw.clone(), columns=columns, number_format=kept) for _ in range(copies)
    ]


def _by_codes(
    x: torch.Tensor, weights: Sequence[CompressedRows], out: torch.Tensor
) -> Callable[[int], object]:
    """As layers multiply them."""
    scratch = torch.empty(scratch_values(x.shape[1], x.dtype), dtype=x.dtype, device=x.device)

    def multiply_once(turn: int) -> None:
        own = Product(rows=weights[turn % len(weights)], out=out)
        multiply(x, [own], lambda count: scratch[:count])

    return multiply_once


def _shapes(
    config: ModelConfig, element_size: int, device: torch.device
) -> Iterator[tuple[int, int]]:
    """(rows, columns) of the model's matrices, the largest few, cut where they are very large."""
    units = build_programme(config).units[1:]
    shapes = {(w.num_rows, w.num_columns) for u in units for w in u.weights if w.is_matrix}
    largest = sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True)[:_MOST_SHAPES]
    for num_out, num_in in largest:
        most = _MOST_MATRIX_BYTES[device.type] // (num_in * element_size)
        yield min(num_out, max(1, most)), num_in


def _rate(amount: float, device: torch.device, work: Callable[[int], object]) -> Rate:
    """Of many tries, each of which does so much; the first one counts only if it is the fastest. A
    device is given some at once: it works while it is asked for more."""
    tries_s: list[float] = []
    at_once = _AT_ONCE if device.type == "cuda" else 1
    while len(tries_s) < _LEAST_TRIES or (sum(tries_s) < _LEAST_S and len(tries_s) < _MOST_TRIES):
        _synchronize(device)
        started_s = time.perf_counter()
        for turn in range(at_once):
            work(len(tries_s) * at_once + turn)
        _synchronize(device)
        tries_s.append((time.perf_counter() - started_s) / at_once)
    return Rate.of(amount, tries_s[1:]).or_better(Rate.of(amount, tries_s))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
