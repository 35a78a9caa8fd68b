"""How long a processor takes for products, passes over memory and calls: means of some tries.

Matrices come from memory, not from a cache, and so do what is read and written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from freight.kernels.exponents import most_spared, shorten
from freight.kernels.grouped import CompressedRows, dequantise, quantise
from freight.kernels.integers import (
    IntegerRows,
    IntegerTokens,
    integer_product,
    quantise_rows,
    quantise_tokens,
)
from freight.kernels.products import Product, can_gate, multiply, scratch_values
from freight.kernels.tokens import activate, normalise, rotate
from freight.memory.process import system_memory_bytes
from freight.model.number_format import (
    TILE_ROWS,
    Grouped,
    RowFormat,
    ShortExponents,
    integer_scratch,
)
from freight.model.tiles import tile_rows
from freight.model.workspace import Workspace
from freight.quantities import GIB

__all__ = [
    "CODES",
    "COLUMNS",
    "LEAST_S",
    "LEAST_TRIES",
    "PRODUCT_S",
    "ROWS",
    "SMALL_ROWS",
    "WIDTH",
    "ColdMemory",
    "code_matrices",
    "compressed_s",
    "exponent_matrices",
    "integer_matrices",
    "integer_s",
    "matrix_shape",
    "pass_bytes_per_s",
    "plain_per_s",
    "product_s",
    "steps_s",
    "sweep_s",
    "typical_s",
]

WIDTH: Final = 2048
COLUMNS: Final = 5632
DEVICE_WIDTH: Final = 8192
"""Of matrices on a device, as wide as large models' are: it is done with smaller ones before the
next is asked for."""
ROWS: Final = (1, 4, 16, 64, 256, 512, 2048)
CODES: Final = Grouped(bits=4, group_size=64)
_COLD_BYTES: Final = 1 * GIB
"""Weights, keys and values are used in turn, as in a sweep: caches of half this size are rented."""
SMALL_ROWS: Final = 16
_MOST_SHARE: Final = 0.1
LEAST_S: Final = 0.06
PRODUCT_S: Final = 0.25
LEAST_TRIES: Final = 3
_MOST_TRIES: Final = 300
_DEVICE_TURN_S: Final = 2e-3
"""What a device is given at once: it works while it is asked for more, and is not waited for."""
_MOST_AT_ONCE: Final = 64
_FRESH: Final = 1 << 22
"""Numbers that are drawn, and then repeated: drawing a gigabyte takes seconds."""
_MOST_BYTE: Final = 56
"""Of compressed keys and values: any more might be a scale that is no number."""
_CHANGED: Final = 12
"""Values that are changed in turn, too seldom for any to come near zero."""


class ColdMemory:
    """Tensors that no cache holds: of one type all lie in the same memory, which is made once."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def tensors(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """As many as there is room for, two at least. Their numbers are ordinary ones: those near
        zero take some processors many times as long."""
        count = math.prod(shape)
        num_tensors = _cold_copies(count * dtype.itemsize)
        if dtype not in self._flat or self._flat[dtype].numel() < num_tensors * count:
            self._flat[dtype] = self._filled(num_tensors * count, dtype)
        whole = self._flat[dtype][: num_tensors * count]
        return list(whole.view(num_tensors, *shape))

    def _filled(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        some = min(count, _FRESH)
        if dtype.is_floating_point:
            fresh = torch.rand(some, dtype=dtype, device=self._where)
        else:
            fresh = torch.randint(_MOST_BYTE, (some,), dtype=dtype, device=self._where)
        flat = torch.empty(-(-count // some), some, dtype=dtype, device=self._where)
        return flat.copy_(fresh).view(-1)


def _cold_copies(num_bytes: int) -> int:
    """How many tensors of this size are larger than a cache; no more than a share of memory."""
    return max(2, int(min(_COLD_BYTES, _MOST_SHARE * system_memory_bytes()) // num_bytes))


def product_s(
    weights: Sequence[torch.Tensor],
    rows: int,
    dtype: torch.dtype,
    where: torch.device,
    *,
    least_s: float = PRODUCT_S,
    pause_s: float = 0.0,
    least_tries: int = LEAST_TRIES,
) -> float:
    """Of so many rows, tried for ``least_s`` in all, each time after a pause."""
    columns, width = weights[0].shape
    x = torch.rand(rows, width, dtype=dtype, device=where)
    out = torch.empty(rows, columns, dtype=dtype, device=where)
    scratch = torch.empty(scratch_values(width, dtype), dtype=dtype, device=where)

    def multiply_once(turn: int) -> None:
        own = weights[turn % len(weights)]
        multiply(x, [Product(rows=own, out=out)], lambda count: scratch[:count])

    return typical_s(multiply_once, where, least_s, pause_s, least_tries)


def integer_matrices() -> list[IntegerRows]:
    copies = _cold_copies(COLUMNS * (WIDTH + 4))
    raw = quantise_rows(torch.rand(COLUMNS, WIDTH))
    return [IntegerRows(raw=raw.clone(), columns=WIDTH) for _ in range(copies)]


def integer_s(weights: Sequence[IntegerRows], rows: int, dtype: torch.dtype) -> float:
    """As layers do it: from tokens in ``dtype`` to results in it."""
    x = torch.rand(rows, WIDTH, dtype=dtype)
    out = torch.empty(rows, COLUMNS, dtype=dtype)
    sums = torch.empty(integer_scratch(rows, COLUMNS, WIDTH), dtype=torch.int32)
    tokens = IntegerTokens(codes=torch.empty(x.shape, dtype=torch.int8), scales=torch.empty(rows))

    def multiply(turn: int) -> None:
        quantise_tokens(x, tokens)
        own = weights[turn % len(weights)]
        integer_product(tokens, own, None, out, sums, adds=False)

    return typical_s(multiply, x.device)


def matrix_shape(where: torch.device) -> tuple[int, int]:
    """Rows and columns of the matrices that tokens are multiplied by."""
    return (COLUMNS, WIDTH) if where.type == "cpu" else (DEVICE_WIDTH, DEVICE_WIDTH)


def code_matrices(where: torch.device) -> list[CompressedRows]:
    return _cold_rows(quantise(torch.rand(matrix_shape(where), device=where), CODES), CODES)


def exponent_matrices(where: torch.device) -> list[CompressedRows]:
    numbers = torch.randn(COLUMNS, WIDTH).bfloat16()
    own = ShortExponents(spare=most_spared(numbers))
    return _cold_rows(shorten(numbers, own).to(where), own)


def _cold_rows(raw: torch.Tensor, own: RowFormat) -> list[CompressedRows]:
    """A compressed matrix as often as no cache holds."""
    copies = _cold_copies(raw.numel())
    width = WIDTH if len(raw) == COLUMNS else DEVICE_WIDTH
    return [
        CompressedRows(raw=raw.clone(), columns=width, number_format=own) for _ in range(copies)
    ]


def compressed_s(
    weights: Sequence[CompressedRows], rows: int, dtype: torch.dtype, where: torch.device
) -> float:
    """Of so many rows by compressed ones, as layers multiply them."""
    columns, width = weights[0].shape
    x = torch.rand(rows, width, dtype=dtype, device=where)
    out = torch.empty(rows, columns, dtype=dtype, device=where)
    on_device = where.type != "cpu"
    count = scratch_values(width, dtype, rows=columns, on_device=on_device)
    scratch = torch.empty(count, dtype=dtype, device=where)

    def multiply_once(turn: int) -> None:
        own = Product(rows=weights[turn % len(weights)], out=out)
        multiply(x, [own], lambda count: scratch[:count])

    return typical_s(multiply_once, where)


def pass_bytes_per_s(memory: ColdMemory, dtype: torch.dtype, where: torch.device) -> float:
    """A product of two values of a chunk in the MLP: two are read, one is written. As between two
    products of matrices, none is in a cache."""
    # A device is done with a smaller one before the next is asked for.
    shape = (ROWS[-1] // 4 if where.type == "cpu" else 4 * ROWS[-1], COLUMNS)
    pool = memory.tensors(shape, dtype)
    changed = [torch.ones(shape, dtype=dtype, device=where) for _ in range(_CHANGED)]

    def multiply_values(turn: int) -> None:
        changed[turn % _CHANGED].mul_(pool[turn % len(pool)])

    return 3 * math.prod(shape) * dtype.itemsize / typical_s(multiply_values, where)


def steps_s(memory: ColdMemory, dtype: torch.dtype, where: torch.device) -> dict[str, float]:
    """Seconds for each byte of its value that a norm, a rotation, and silu with what it gates take,
    this also as a gate that products may take in."""
    tokens, heads = ROWS[-1], WIDTH // 64
    room = Workspace(torch.empty(16 * tokens * WIDTH, dtype=torch.uint8, device=where))
    pool = memory.tensors((tokens, WIDTH), dtype)
    gain, out = torch.ones(WIDTH, dtype=dtype, device=where), torch.empty_like(pool[0])
    turns = torch.full((2, tokens, 32), 0.5**0.5, dtype=dtype, device=where)

    def norm(turn: int) -> None:
        x = pool[turn % len(pool)]
        normalise(x, out, gain, None, num_heads=1, eps=1e-5, centred=False, workspace=room)

    def rotation(turn: int) -> None:
        rotate(pool[turn % len(pool)], heads, turns[0], turns[1], room)

    some = tokens // 4 if where.type == "cpu" else tokens
    shape = (some, COLUMNS)
    wide = memory.tensors(shape, dtype)
    changed = [torch.ones(shape, dtype=dtype, device=where) for _ in range(_CHANGED)]

    def gate(turn: int) -> None:
        activate(changed[turn % _CHANGED], "silu", wide[turn % len(wide)])

    narrow, whole = pool[0].nbytes, changed[0].nbytes
    rows = torch.ones(COLUMNS, WIDTH, dtype=dtype, device=where)
    products = [Product(rows=rows, out=changed[0], gates=gates) for gates in (False, True)]
    silu_s = typical_s(gate, where) / whole
    return {
        "norm": typical_s(norm, where) / narrow,
        "rotation": typical_s(rotation, where) / narrow,
        "silu": silu_s,
        "gate": 0.0 if can_gate(pool[0][:some], products) else silu_s,
    }


def plain_per_s(dtype: torch.dtype, where: torch.device) -> float:
    """Compressed weights made plain, a tile at a time as products use them."""
    count = tile_rows(64 * TILE_ROWS, WIDTH, on_device=where.type != "cpu")
    raw = torch.zeros(64 * TILE_ROWS, CODES.row_bytes(WIDTH), dtype=torch.uint8, device=where)
    rows = CompressedRows(raw=raw, columns=WIDTH, number_format=CODES)
    tile = torch.empty(count, WIDTH, dtype=dtype, device=where)

    def make_plain(turn: int) -> None:
        begin = turn * count % len(raw)
        dequantise(rows.rows(begin, begin + count), tile)

    return tile.numel() / typical_s(make_plain, where)


def sweep_s(where: torch.device) -> float:
    """Choosing a token for one row, and what comes before and after, is some tens of calls."""
    logits = torch.rand(1, 64, device=where)
    return 10 * typical_s(lambda _: logits.argmax(dim=-1).tolist(), where)


def typical_s(
    work: Callable[[int], object],
    where: torch.device,
    least_s: float = LEAST_S,
    pause_s: float = 0.0,
    least_tries: int = LEAST_TRIES,
) -> float:
    """The mean of several tries, after one that does not count unless one is enough: a run meets
    the slow ones too, and on a shared machine the median of tries is up to a tenth less than their
    mean. A device is given some at once. Each follows a pause."""
    spent_s, tries, at_once = 0.0, 0, 1

    def try_some() -> float:
        _synchronize(where)
        if pause_s:
            time.sleep(pause_s)
        started_s = time.perf_counter()
        for turn in range(tries, tries + at_once):
            work(turn)
        _synchronize(where)
        return time.perf_counter() - started_s

    with torch.inference_mode():
        if least_tries > 1:
            work(0)
        if where.type == "cuda":
            at_once = max(1, min(_MOST_AT_ONCE, int(_DEVICE_TURN_S / try_some())))
        while tries < least_tries or (spent_s < least_s and tries < _MOST_TRIES):
            spent_s += try_some()
            tries += at_once
    return spent_s / tries


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
