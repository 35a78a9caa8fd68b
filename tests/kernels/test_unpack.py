"""Packed matrices mean what their formats say, bit for bit: against numpy, and for GGUF the gguf
package; what groups cannot hold exactly is not made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.codebooks import read_codebook
from freight.kernels.grouped import CompressedRows, dequantise, dequantise_reference
from freight.kernels.micro import join_micro_blocks, make_micro_plain_reference
from freight.kernels.unpack import Unpacked, exact_rows, unpack_blocks, unpack_words
from freight.model.gguf_tensors import BLOCKS
from freight.model.number_format import Grouped, MicroFloats, find_compressed
from freight.model.packed_tensors import becomes
from freight.model.packing import Packing
from freight.model.sources import Packed

from ..runtime import packed

Array = np.ndarray[Any, Any]
WAYS = {
    "awq": ("awq", 0, False, packed.awq),
    "gptq": ("gptq", 1, False, packed.gptq),
    "gptq_v2": ("gptq", 0, False, lambda own: packed.gptq(own, less=0)),
    "symmetric": ("compressed-tensors", 0, True, packed.compressed_tensors),
    "asymmetric": (
        "compressed-tensors",
        0,
        False,
        lambda own: packed.compressed_tensors(own, symmetric=False),
    ),
}


def both_ways(rows: torch.Tensor, columns: int, number_format: Grouped) -> list[torch.Tensor]:
    """The rows made plain by the loops and by the reference."""
    own = CompressedRows(raw=rows, columns=columns, number_format=number_format)
    found = [torch.empty(own.shape), torch.empty(own.shape)]
    dequantise(own, found[0])
    dequantise_reference(own, found[1])
    return found


@settings(deadline=None, max_examples=80)
@given(
    way=st.sampled_from(sorted(WAYS)),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([16, 32, 128]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 999),
    cut=st.tuples(st.integers(0, 15), st.integers(16, 24)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    is_channel=st.booleans(),
)
def test_words(
    way: str,
    bits: int,
    size: int,
    groups: int,
    seed: int,
    cut: tuple[int, int],
    dtype: torch.dtype,
    is_channel: bool,
) -> None:
    scheme, shift, symmetric, turn = WAYS[way]
    bits = 4 if scheme == "awq" else bits
    columns = size * groups
    size = columns if is_channel else size
    dice = np.random.default_rng(seed)
    shape = (24, columns // size)
    half = np.full(shape, 2 ** (bits - 1))
    own = packed.Quantised(
        codes=dice.integers(0, 2**bits, (24, columns)).astype(np.uint32),
        zeros=(half if symmetric else dice.integers(0, 2**bits, shape)).astype(np.uint32),
        scales=torch.from_numpy(dice.normal(0, 0.02, shape)).to(dtype),
        group_size=size,
        bits=bits,
    )
    parts = turn(own)
    packing = Packing(scheme=scheme, bits=bits, group_size=size, symmetric=symmetric)
    number_format = becomes(packing, columns, str(dtype).removeprefix("torch."))
    how = Packed(scheme=scheme, parts={}, bits=bits, group_size=size, zero_shift=shift)
    rows = exact_rows(unpack_words(how, parts, *cut), number_format)
    assert rows is not None and find_compressed(number_format.name) == number_format
    assert rows.shape == (cut[1] - cut[0], number_format.row_bytes(columns))
    for found in both_ways(rows, columns, number_format):
        assert torch.equal(found, own.plain[slice(*cut)])


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> Array:
    """Blocks of any bytes, but with scales that are numbers."""
    dice = np.random.default_rng(seed)
    raw = dice.integers(0, 256, (rows, blocks, BLOCKS[kind].num_bytes), dtype=np.uint8)
    scales = dice.normal(0, 0.01, (rows, blocks, 2)).astype(np.float16)
    scales = scales.view(np.uint8).reshape(rows, blocks, 4)
    width = 4 if kind in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else 2
    if kind == "IQ1_M":  # the upper halves of four bytes have the scale
        bits = scales[..., :2].copy().view(np.uint16)
        parts = (bits >> np.array([0, 4, 8, 12], dtype=np.uint16)) & 15
        raw[..., 49::2] = (raw[..., 49::2] & 15) | (parts << 4).astype(np.uint8)
    elif kind in ("Q2_K", "Q3_K", "Q6_K"):
        raw[..., -width:] = scales[..., :width]
    else:
        raw[..., :width] = scales[..., :width]
    return raw.reshape(rows, -1)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(kind for kind in BLOCKS if kind != "MXFP4")),
    rows=st.integers(1, 20),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_blocks(kind: str, rows: int, blocks: int, seed: int) -> None:
    raw = random_blocks(kind, rows, blocks, seed)
    wanted = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
    block = BLOCKS[kind]
    assert wanted.shape[1] == blocks * block.values
    assert isinstance(block.becomes, Grouped)
    own = exact_rows(unpack_blocks(kind, torch.from_numpy(raw), block.num_bytes), block.becomes)
    assert own is not None
    for found in both_ways(own, wanted.shape[1], block.becomes):
        assert torch.equal(found, wanted)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 20), groups=st.integers(1, 5), seed=st.integers(0, 999))
def test_blocks_of_small_floats(rows: int, groups: int, seed: int) -> None:
    dice, size = np.random.default_rng(seed), BLOCKS["MXFP4"].num_bytes
    raw = dice.integers(0, 256, (rows, groups, size), dtype=np.uint8)
    raw[..., 0] = dice.integers(1, 250, (rows, groups))
    wanted = quants.dequantize(raw.reshape(rows, -1), GGMLQuantizationType.MXFP4)
    own = join_micro_blocks(torch.from_numpy(raw))
    found = torch.empty(wanted.shape)
    make_micro_plain_reference(own, MicroFloats(), found)
    assert torch.equal(found, torch.from_numpy(wanted))


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([16, 32, 64, 256]),
    rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_wide_factors_are_those_of_numpy(
    bits: int, size: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    number_format = Grouped(bits=bits, group_size=size, wide=True)
    codes = dice.integers(0, 2**bits, (rows, 2, size)).astype(np.uint8)
    # Scales of few digits: products are exact, so that nothing hangs on how they are added.
    scales = dice.normal(0, 1, (rows, 2)).astype(np.float16).astype(np.float32)
    lowest = dice.normal(0, 1, (rows, 2)).astype(np.float32)
    own = Unpacked(
        codes=torch.from_numpy(codes),
        scale=torch.from_numpy(scales).double(),
        lowest=torch.from_numpy(lowest).double(),
        most_code=2**bits - 1,
    )
    made = exact_rows(own, number_format)
    assert made is not None
    raw = torch.empty(rows + 1, made.shape[1], dtype=torch.uint8)
    raw[1:] = made  # rows need not begin where a buffer does
    wanted = codes.astype(np.float32) * scales[..., None] + lowest[..., None]
    found = torch.empty(rows, 2 * size, dtype=dtype)
    dequantise(CompressedRows(raw=raw[1:], columns=2 * size, number_format=number_format), found)
    assert torch.equal(found, torch.from_numpy(wanted.reshape(rows, -1)).to(dtype))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("scale", "lowest"),
    [
        (1 / 3, 0.0),  # more digits than float32 has
        (float(np.float32(1 / 3)), 0.0),  # a product would be rounded
        (1.0, 1 / 3),
        (float("inf"), 0.0),
        (float("nan"), 0.0),
        (1.0, float("-inf")),
        (1e39, 0.0),
    ],
)
def test_what_would_be_rounded_is_not_made(scale: float, lowest: float, wide: bool) -> None:
    own = Unpacked(
        codes=torch.zeros(1, 1, 32, dtype=torch.uint8),
        scale=torch.full((1, 1), scale, dtype=torch.float64),
        lowest=torch.full((1, 1), lowest, dtype=torch.float64),
        most_code=15,
    )
    assert exact_rows(own, Grouped(bits=4, group_size=32, wide=wide)) is None


def test_codebooks_are_those_of_the_gguf_package() -> None:
    for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"):
        theirs = getattr(quants, kind)
        theirs.init_grid()
        wanted = torch.from_numpy(theirs.grid.reshape(theirs.grid_shape).astype(np.int32))
        assert torch.equal(read_codebook(kind), wanted)
