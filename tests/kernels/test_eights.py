"""Floats of 8 bits: any of them is what torch takes it for, by the reference and by loops; products
are those of the rows that were made plain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import grouped, products
from freight.kernels.eights import are_numbers, join_eight_rows, make_eights_plain_reference
from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.products import Product, multiply, scratch_values
from freight.model.number_format import EightFloats, find_compressed

OWN = EightFloats()
COLUMNS = st.sampled_from([16, 64, 112, 128, 160, 256, 576, 1408])


def make_rows(rows: int, columns: int, seed: int) -> CompressedRows:
    """All floats but the two that are no numbers, scales of any size."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=dice)
    codes[(codes & 0x7F) == 0x7F] = 3
    scales = torch.randn(rows, -(-columns // 128), generator=dice) * 0.01
    raw = join_eight_rows(codes, scales)
    assert raw.shape == (rows, OWN.row_bytes(columns))
    return CompressedRows(raw=raw, columns=columns, number_format=OWN)


def plain(own: CompressedRows) -> torch.Tensor:
    """Number by number, as torch has them."""
    columns = own.columns
    codes = own.raw[:, :columns].contiguous().view(torch.float8_e4m3fn).double()
    scales = own.raw[:, columns:].contiguous().view(torch.float32).double()
    return torch.stack([codes[:, i] * scales[:, i // 128] for i in range(columns)], dim=1)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 300), columns=COLUMNS, seed=st.integers(0, 1000))
def test_what_any_bytes_mean(rows: int, columns: int, seed: int) -> None:
    own = make_rows(rows, columns, seed)
    wanted = plain(own)
    for dtype in (torch.float32, torch.bfloat16):
        found, reference = (torch.full((rows, columns), torch.nan, dtype=dtype) for _ in range(2))
        dequantise(own, found)
        make_eights_plain_reference(own.raw, OWN, reference)
        assert torch.equal(reference, wanted.float().to(dtype))
        # Processors that make pairs of bfloat16 leave out what has no exponent of its own.
        is_tiny = wanted.abs() < torch.finfo(torch.bfloat16).tiny
        assert torch.equal(found[~is_tiny], reference[~is_tiny])
        assert bool((found[is_tiny].double().abs() < 2e-38).all())


def test_what_is_no_number_is_seen() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wrong = codes.view(torch.float8_e4m3fn).float().isnan()
    assert int(wrong.sum()) == 2
    assert are_numbers(codes[~wrong])
    assert not any(are_numbers(code[None]) for code in codes[wrong])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40, 300])
@pytest.mark.parametrize("columns", [128, 1408, 1504])
def test_products_are_those_of_plain_rows(columns: int, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    own = make_rows(1030, columns, 7)
    x = torch.randn(tokens, columns).to(dtype)
    bias = torch.randn(1030).to(dtype)
    out = torch.empty(tokens, 1030, dtype=dtype)
    scratch = torch.empty(scratch_values(columns, dtype), dtype=dtype)
    multiply(x, [Product(rows=own, out=out, bias=bias)], lambda count: scratch[:count])
    wanted = x.double() @ plain(own).t() + bias.double()
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-6 if dtype is torch.float32 else 8e-3)


def test_without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "eights_on_cpu", lambda *_: False)
    monkeypatch.setattr(products, "find_loops", lambda: None)
    own = make_rows(70, 160, 3)
    out, x = torch.empty(4, 70), torch.randn(4, 160)
    scratch = torch.empty(scratch_values(160, torch.float32))
    multiply(x, [Product(rows=own, out=out)], lambda count: scratch[:count])
    torch.testing.assert_close(out, x @ plain(own).float().t())


def test_the_format_is_known_by_its_name() -> None:
    assert find_compressed(OWN.name) == OWN
    assert OWN.row_bytes(576) == 576 + 4 * 5
