"""MXFP4: any bytes mean what the format says, by the reference and by loops; products are those of
the rows that were made plain."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from freight.kernels import grouped, products
from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.micro import join_micro_rows, make_micro_plain_reference
from freight.kernels.products import Product, multiply, scratch_values
from freight.model.number_format import MicroFloats, find_compressed

OWN = MicroFloats()
COLUMNS = st.sampled_from([32, 64, 96, 160, 256, 2880])


def make_parts(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and exponents as checkpoints have them, but what float32 is too small for."""
    dice = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=dice)
    exponents = torch.randint(0, 252, (rows, columns // 32), dtype=torch.uint8, generator=dice)
    return blocks, exponents


def make_rows(rows: int, columns: int, seed: int, *, near_one: bool = False) -> CompressedRows:
    blocks, exponents = make_parts(rows, columns, seed)
    if near_one:
        exponents = exponents % 8 + 120
    raw = join_micro_rows(blocks, exponents)
    return CompressedRows(raw=raw, columns=columns, number_format=OWN)


def number(four: int) -> float:
    """A sign, two bits of exponent, biased by one, and one of mantissa."""
    exponent, mantissa = four >> 1 & 3, four & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if four & 8 else size


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 9), columns=COLUMNS, seed=st.integers(0, 1000))
def test_what_any_bytes_mean(rows: int, columns: int, seed: int) -> None:
    blocks, exponents = make_parts(rows, columns, seed)
    raw = join_micro_rows(blocks, exponents)
    assert raw.shape == (rows, OWN.row_bytes(columns))
    out = torch.empty(rows, columns, dtype=torch.float64)
    make_micro_plain_reference(raw, OWN, out)
    for row in range(rows):
        for column in range(0, columns, 7):
            four = int(blocks[row, column // 2]) >> 4 * (column % 2) & 15
            wanted = math.ldexp(number(four), int(exponents[row, column // 32]) - 127)
            assert out[row, column].item() == float(np.float32(wanted))
    shape = 1, rows, columns // 32
    theirs = convert_moe_packed_tensors(
        blocks.view(*shape, 16), exponents.view(shape), dtype=torch.float32
    )
    assert torch.equal(out.float(), theirs[0].t())


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 300), columns=COLUMNS, seed=st.integers(0, 1000))
def test_loops_make_the_same_numbers(rows: int, columns: int, seed: int) -> None:
    own = make_rows(rows, columns, seed)
    for dtype in (torch.float32, torch.bfloat16):
        found, wanted = (torch.full((rows, columns), torch.nan, dtype=dtype) for _ in range(2))
        dequantise(own, found)
        make_micro_plain_reference(own.raw, OWN, wanted)
        # Processors that make pairs of bfloat16 leave out what has no exponent of its own.
        tiny = torch.finfo(dtype).tiny if dtype is torch.bfloat16 else 0.0
        is_tiny = wanted.abs() < tiny
        assert torch.equal(found[~is_tiny], wanted[~is_tiny])
        assert bool((found[is_tiny].abs() <= tiny).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40, 300])
def test_products_are_those_of_plain_rows(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    own = make_rows(520, 2880, 7, near_one=True)
    plain = torch.empty(520, 2880)
    make_micro_plain_reference(own.raw, OWN, plain)
    x = torch.randn(tokens, 2880).to(dtype)
    bias = torch.randn(520).to(dtype)
    out = torch.empty(tokens, 520, dtype=dtype)
    scratch = torch.empty(scratch_values(2880, dtype), dtype=dtype)
    multiply(x, [Product(rows=own, out=out, bias=bias)], lambda count: scratch[:count])
    wanted = x.double() @ plain.double().t() + bias.double()
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-6 if dtype is torch.float32 else 8e-3)


def test_without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "micro_on_cpu", lambda *_: False)
    monkeypatch.setattr(products, "find_loops", lambda: None)
    own = make_rows(70, 96, 3, near_one=True)
    plain, out, x = torch.empty(70, 96), torch.empty(4, 70), torch.randn(4, 96)
    make_micro_plain_reference(own.raw, OWN, plain)
    scratch = torch.empty(scratch_values(96, torch.float32))
    multiply(x, [Product(rows=own, out=out)], lambda count: scratch[:count])
    torch.testing.assert_close(out, x @ plain.t())


def test_the_format_is_known_by_its_name() -> None:
    assert find_compressed(OWN.name) == OWN
    assert OWN.row_bytes(2880) == 2880 // 2 + 2880 // 32
