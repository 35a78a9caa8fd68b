"""Short exponents: any bits come back, by the reference and by loops, with an instruction that
spreads bytes and without; products are those of plain rows to the bit."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import exponent_lines, products, threads
from freight.kernels.exponents import (
    make_plain_reference,
    most_spared,
    shorten,
    shorten_reference,
)
from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.products import Product, multiply, scratch_values
from freight.model.number_format import ExactCompression, ShortExponents, find_compressed

COLUMNS = st.sampled_from([64, 128, 192, 256, 320, 640])
KINDS = ["normal", "any bits", "zeros", "seven exponents", "all spared but seven"]


def make_numbers(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    dice = np.random.default_rng(seed)
    if kind == "normal":
        numbers = dice.standard_normal((rows, columns)) * 10.0 ** dice.integers(-5, 5, (rows, 1))
        return torch.from_numpy(numbers).bfloat16()
    bits = dice.integers(0, 1 << 16, (rows, columns))
    if kind == "zeros":
        bits &= 0x8000
    elif kind == "seven exponents":
        bits = (bits & 0x807F) | (dice.integers(100, 107, (rows, columns)) << 7)
    elif kind == "all spared but seven":
        bits = (bits & 0x807F) | (np.arange(columns) % 256 << 7)
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def shortened(x: torch.Tensor, more: int = 0) -> CompressedRows:
    own = ShortExponents(spare=most_spared(x) + more)
    return CompressedRows(raw=shorten(x, own), columns=x.shape[1], number_format=own)


def bits_of(x: torch.Tensor) -> np.ndarray:
    kind = torch.int32 if x.dtype is torch.float32 else torch.int16
    return x.contiguous().view(kind).numpy()


def expand(row: bytes, columns: int, spare: int) -> list[int]:
    """A row's numbers as bits, by what ``number_format`` says of it and nothing else."""
    lines, notes = columns // 64, -(-columns // 256)
    at = columns + 24 * lines
    noted = struct.unpack_from(f"<{notes}H", row, at)
    top, spared = row[at + 2 * notes], row[at + 2 * notes + 1 :][:spare]
    found, used = [0] * columns, 0
    for line in range(lines):
        if line % 4 == 0:
            assert noted[line // 4] == used
        words = struct.unpack_from("<3Q", row, columns + 24 * line)
        for place in range(64):
            code = sum((word >> place & 1) << bit for bit, word in enumerate(words))
            exponent = top - code
            if code == 7:
                exponent, used = spared[used], used + 1
            eight, half = divmod(place // 8, 2)
            byte = row[64 * line + place]
            column = 64 * line + 32 * half + 8 * eight + place % 8
            found[column] = (byte & 0x80) << 8 | exponent << 7 | byte & 0x7F
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_lie_as_is_said(kind: str) -> None:
    x = make_numbers(kind, 3, 320, 1)
    own = shortened(x)
    assert isinstance(own.number_format, ShortExponents)
    for row, wanted in zip(own.raw.numpy(), bits_of(x).view(np.uint16), strict=True):
        assert expand(row.tobytes(), 320, own.number_format.spare) == wanted.tolist()


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 40),
    columns=COLUMNS,
    more=st.integers(0, 9),
    seed=st.integers(0, 999),
)
def test_any_bits_come_back(kind: str, rows: int, columns: int, more: int, seed: int) -> None:
    x = make_numbers(kind, rows, columns, seed)
    own = shortened(x, more)
    assert isinstance(own.number_format, ShortExponents)
    assert torch.equal(own.raw, shorten_reference(x, own.number_format))
    out = torch.empty_like(x)
    make_plain_reference(own.raw, own.number_format, out)
    assert np.array_equal(bits_of(out), bits_of(x))
    wide = torch.empty(x.shape)
    for found, wanted in ((torch.empty_like(x), x), (wide, x.float())):
        dequantise(own, found)
        assert np.array_equal(bits_of(found), bits_of(wanted))


@settings(deadline=None, max_examples=40)
@given(columns=COLUMNS, data=st.data())
def test_parts_of_rows(columns: int, data: st.DataObject) -> None:
    """Whole lines from anywhere, laid apart, into arrays of words and of halves of them."""
    kind = data.draw(st.sampled_from(KINDS))
    x = make_numbers(kind, 9, columns, data.draw(st.integers(0, 99)))
    own = shortened(x)
    begin = 64 * data.draw(st.integers(0, columns // 64 - 1))
    width = 64 * data.draw(st.integers(1, (columns - begin) // 64))
    top = data.draw(st.integers(0, 8))
    height = data.draw(st.integers(1, 9 - top))
    rows = own.raw.numpy().reshape(-1), columns, own.raw.shape[1]
    wanted = bits_of(x[top : top + height, begin : begin + width]).view(np.uint16)
    for kind_of_out, size in ((np.uint16, 1), (np.uint32, 2)):
        # Halves of lines a row of them apart, as registers of sixteen by sixteen want them.
        halves = width // 32
        out = np.full(height * halves * 40, 7, np.uint16).view(kind_of_out)
        part = 0, halves * 40 // size, 40 // size
        exponent_lines.lay_exponents(rows, top, height, begin, width, out, *part, 32)
        found = out.view(np.uint16).reshape(height, halves, 40)
        assert np.array_equal(found[..., :32].reshape(height, width), wanted)
        assert (found[..., 32:] == 7).all()
    wide = np.zeros((height, width + 16), np.float32)
    exponent_lines.lay_wide(rows, top, height, begin, width, wide.reshape(-1), 0, width + 16)
    assert np.array_equal(wide[:, :width].view(np.uint32), wanted.astype(np.uint32) << 16)


@pytest.mark.parametrize("has_loops", [True, False])
def test_most_spared_is_the_least_that_serves(
    has_loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_loops:
        monkeypatch.setattr(threads, "find_loops", lambda: None)
    x = make_numbers("any bits", 20, 128, 3)
    exponents = bits_of(x).view(np.uint16) >> 7 & 0xFF
    wanted = max(
        min(sum(not first <= e < first + 7 for e in row) for first in range(250))
        for row in exponents.tolist()
    )
    assert most_spared(x) == wanted
    with pytest.raises(AssertionError):
        shorten(x, ShortExponents(spare=wanted - 1))


@pytest.mark.parametrize("columns", [64, 256, 2048, 8192])
def test_what_normal_numbers_want_is_enough(columns: int) -> None:
    """As plans take it where no number has been looked at, and not much more than it is."""
    scales = 2.0 ** torch.linspace(-6, -5, 400)[:, None]
    x = (torch.randn(400, columns, generator=torch.Generator().manual_seed(0)) * scales).bfloat16()
    own = ExactCompression().fit(columns)
    assert own is not None and find_compressed(own.name) == own
    assert most_spared(x) <= own.spare
    assert own.row_bytes(columns) <= 1.2 * ShortExponents(spare=most_spared(x)).row_bytes(columns)
    assert ExactCompression().fit(columns + 32) is None
    assert ExactCompression().fit(columns, columns) is None


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.sampled_from([1, 2, 5, 8, 17, 40, 130, 520]),
    num_rows=st.sampled_from([1, 6, 33, 70]),
    columns=st.sampled_from([64, 320, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_plain_rows(
    tokens: int,
    num_rows: int,
    columns: int,
    dtype: torch.dtype,
    with_bias: bool,
    adds: bool,
    seed: int,
) -> None:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=dice).to(dtype)
    plain = torch.randn(num_rows, columns, generator=dice).bfloat16()
    bias = torch.randn(num_rows, generator=dice).to(dtype) if with_bias else None
    before = torch.randn(tokens, num_rows, generator=dice).to(dtype)
    wanted = x.double() @ plain.double().t()
    wanted += (bias.double() if bias is not None else 0) + (before.double() if adds else 0)
    for least in (1, products.LEAST_PRODUCTS):  # loops, and torch for so few
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "LEAST_PRODUCTS", least)
            out = before.clone()
            room = torch.empty(scratch_values(columns, dtype), dtype=dtype)
            own = Product(rows=shortened(plain), out=out, bias=bias, adds=adds)
            multiply(x, [own], lambda count, room=room: room[:count])
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        largest = float(wanted.abs().max()) + 1
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("tokens", [3, 40, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loops_make_the_same_sums(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, as they lay the same numbers."""
    from freight.kernels import pairs

    monkeypatch.setattr(products, "loops_are_faster", lambda kept, dtype: True)
    monkeypatch.setattr(pairs, "_are_faster", lambda tokens, has_plain: True)
    monkeypatch.setattr(pairs, "_one_by_one", lambda tokens: False)
    dice = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 1088, generator=dice).to(dtype)
    plain = torch.randn(2051, 1088, generator=dice).bfloat16()
    found = []
    for rows in (plain, shortened(plain)):
        out = torch.empty(tokens, len(plain), dtype=dtype)
        room = torch.empty(scratch_values(1088, dtype), dtype=dtype)
        multiply(x, [Product(rows=rows, out=out)], lambda count, room=room: room[:count])
        found.append(out)
    assert np.array_equal(bits_of(found[0]), bits_of(found[1]))


AT_A_PAGE = """
import ctypes, mmap, sys

import numpy as np
import torch

from freight.kernels import pairs, products
from freight.kernels.grouped import CompressedRows
from freight.kernels.products import Product, multiply, scratch_values
from tests.kernels.test_exponents import make_numbers, shortened

products.LEAST_PRODUCTS = 1
pairs._one_by_one = lambda tokens: False
rows, page = 16, mmap.PAGESIZE
for columns in (64, 128, 192, 320, 576):
    plain = make_numbers("normal", rows, columns, 1)
    own = shortened(plain)
    size = own.raw.numel()
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + whole, page, 0) == 0
    held = np.frombuffer(memory, np.uint8, size, whole - size)
    held[:] = own.raw.numpy().reshape(-1)
    raw = torch.from_numpy(held).view(rows, -1)
    own = CompressedRows(raw=raw, columns=columns, number_format=own.number_format)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 20, 300):
            x = torch.randn(tokens, columns).to(dtype)
            out = torch.empty(tokens, rows, dtype=dtype)
            room = torch.empty(scratch_values(columns, dtype), dtype=dtype)
            multiply(x, [Product(rows=own, out=out)], lambda count: room[:count])
            wanted = x.double() @ plain.double().t()
            assert (out - wanted).abs().max() <= 2e-2 * wanted.abs().max(), (columns, dtype)
"""


def test_nothing_behind_the_last_row_is_read() -> None:
    """The rows end where memory does: who reads on is killed."""
    run_apart(AT_A_PAGE)


def run_apart(script: str, **environment: str) -> None:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "src")])
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, (done.returncode, done.stderr)


WITHOUT = """
from llvmlite import binding

features = binding.get_host_cpu_features()
features["avx512vbmi2"] = False
binding.get_host_cpu_features = lambda: features

import numpy as np
from freight.kernels import exponent_lines, exponent_registers
from tests.kernels.test_exponents import KINDS, bits_of, make_numbers, shortened

assert not exponent_registers.HAS_EXPANSION
for kind in KINDS:
    x = make_numbers(kind, 5, 320, 7)
    own = shortened(x)
    rows = own.raw.numpy().reshape(-1), 320, own.raw.shape[1]
    wanted = bits_of(x).view(np.uint16)
    for kind_of_out, size in ((np.uint16, 1), (np.uint32, 2)):
        out = np.zeros(5 * 320 // size, kind_of_out)
        exponent_lines.lay_exponents(rows, 0, 5, 0, 320, out, 0, 320 // size, 32 // size, 32)
        assert np.array_equal(out.view(np.uint16).reshape(5, 320), wanted), kind
    wide = np.zeros((5, 320), np.float32)
    exponent_lines.lay_wide(rows, 0, 5, 0, 320, wide.reshape(-1), 0, 320)
    assert np.array_equal(wide.view(np.uint32), wanted.astype(np.uint32) << 16), kind
"""


def test_without_an_instruction_that_spreads_bytes(tmp_path: Path) -> None:
    run_apart(WITHOUT, NUMBA_CACHE_DIR=str(tmp_path))
