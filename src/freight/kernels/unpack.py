"""Codes, scales and minima out of the ways in which others store quantised matrices.

Everything is put down in float64 first, where nothing is rounded: what the groups of
``model.number_format`` would not hold exactly shows, and is not made. References of the layouts:
AutoAWQ's ``gemm.py``, GPTQModel's ``qlinear``, compressed-tensors' ``pack_quantized``, ggml's
``ggml-quants.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from freight.kernels.codebooks import POINTS, read_points
from freight.kernels.grouped import join_rows
from freight.model.number_format import Grouped
from freight.model.sources import Packed

__all__ = ["Unpacked", "exact_rows", "unpack_blocks", "unpack_words"]

_HALF_OF_BYTES: Final = 128
# Of eight neighbours, in which place of the word each one is.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpacked:
    """codes uint8 [rows, groups, group size], none above ``most_code``; ``scale`` and ``lowest``
    float64 [rows, groups]. A value is lowest + code * scale."""

    codes: torch.Tensor
    scale: torch.Tensor
    lowest: torch.Tensor
    most_code: int


def exact_rows(own: Unpacked, number_format: Grouped) -> torch.Tensor | None:
    """The same in groups, uint8 [rows, row bytes]; None where these would not hold it exactly, or a
    product of code and scale would be rounded, or a number is not finite."""
    dtype = torch.float32 if number_format.wide else torch.float16
    # Put down anew: a turned matrix of one group counts as contiguous and lies otherwise.
    scale = torch.empty(own.scale.shape, dtype=dtype).copy_(own.scale)
    lowest = torch.empty(own.lowest.shape, dtype=dtype).copy_(own.lowest)
    largest = own.scale * own.most_code
    for exact, held in ((own.scale, scale), (own.lowest, lowest), (largest, largest.float())):
        if not bool((torch.isfinite(held) & (held.double() == exact)).all()):
            return None
    return join_rows(own.codes, scale, lowest, number_format)


# -- words of 32 bits: AWQ, GPTQ, compressed-tensors -----------------------------------------------


def unpack_words(
    packed: Packed, parts: Mapping[str, torch.Tensor], first: int, last: int
) -> Unpacked:
    """Rows ``first`` to ``last`` of a matrix [out, in] whose parts are given whole."""
    codes, scale, zero = _LAYOUTS[packed.scheme](packed, parts, first, last)
    scale = scale.double()
    return Unpacked(
        codes=codes.reshape(codes.shape[0], -1, packed.group_size),
        scale=scale,
        lowest=-zero.double() * scale,
        most_code=(1 << packed.bits) - 1,
    )


_Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _awq(packed: Packed, parts: Mapping[str, torch.Tensor], first: int, last: int) -> _Layout:
    """Words lie along the outputs, in an order of their own."""
    codes = _across(parts["qweight"], packed.bits, first, last, _AWQ_PLACES)
    zeros = _across(parts["qzeros"], packed.bits, first, last, _AWQ_PLACES)
    return codes.t(), parts["scales"][:, first:last].t(), zeros.t()


def _gptq(packed: Packed, parts: Mapping[str, torch.Tensor], first: int, last: int) -> _Layout:
    """Codes lie along the inputs, zero points along the outputs."""
    words = parts["qweight"][:, first:last].t()
    # What is missing was taken from whole words, and is given back to these: a zero point of 0 had
    # borrowed from its neighbour.
    missing = packed.zero_shift * sum(1 << place for place in range(0, 32, packed.bits))
    zeros = _across(parts["qzeros"] + missing, packed.bits, first, last)
    return _along(words, packed.bits), parts["scales"][:, first:last].t(), zeros.t()


def _upright(packed: Packed, parts: Mapping[str, torch.Tensor], first: int, last: int) -> _Layout:
    """Codes lie along the inputs, as signed numbers moved up by half of the levels."""
    codes = _along(parts["weight_packed"][first:last], packed.bits)
    half = 1 << (packed.bits - 1)
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        zeros = torch.tensor(half)
    elif zeros.dtype is torch.int8:
        zeros = zeros[first:last].int() + half
    else:
        zeros = _across(zeros.t(), packed.bits, first, last).t()
    return codes, parts["weight_scale"][first:last], zeros


def _bytes(packed: Packed, parts: Mapping[str, torch.Tensor], first: int, last: int) -> _Layout:
    """Signed numbers, one to a byte; scales and zero points of each row, or of all."""
    codes = (parts["rows"][first:last].int() + _HALF_OF_BYTES).to(torch.uint8)
    count, columns = codes.shape
    groups = columns // packed.group_size

    def of_rows(name: str) -> torch.Tensor:
        own = parts[name]
        return own.expand(count, groups) if len(own) == 1 else own[first:last]

    zeros = of_rows("zero_point").int() if "zero_point" in parts else torch.tensor(0)
    return codes, of_rows("scale"), zeros + _HALF_OF_BYTES


_LAYOUTS: Final[Mapping[str, Callable[..., _Layout]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _upright,
    "int-quantized": _bytes,
}


def _along(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, words] as the numbers in them, lowest bits first, uint8 [n, words * 32 / bits]."""
    # By bytes, which lie lowest first as well: of words, eight times as much would be moved.
    numbers = torch.empty(words.shape, dtype=torch.int32).copy_(words).view(torch.uint8)
    return numbers if bits == 8 else torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)


def _across(
    words: torch.Tensor, bits: int, first: int, last: int, places: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Columns ``first`` to ``last`` of the numbers in int32 [n, words]."""
    each = 32 // bits
    begin = first // each
    numbers = _along(words[:, begin : -(-last // each)], bits)
    if places is not None:
        numbers = _cut(numbers, each)[..., list(places)].flatten(-2)
    return numbers[:, first - begin * each : last - begin * each]


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """The last dim in stretches of ``size``."""
    return x.reshape(*x.shape[:-1], -1, size)


# -- blocks: GGUF ----------------------------------------------------------------------------------


def unpack_blocks(kind: str, raw: torch.Tensor, num_bytes: int) -> Unpacked:
    """raw uint8 [rows, bytes] of blocks of so many bytes."""
    blocks = raw.view(raw.shape[0], -1, num_bytes)
    return _points(kind, blocks) if kind in POINTS else _BLOCKS[kind](blocks)


def _points(kind: str, blocks: torch.Tensor) -> Unpacked:
    """Points of a codebook as codes: how many steps they are above the least."""
    most, step = POINTS[kind]
    points, scale = read_points(kind, blocks)
    return Unpacked(
        codes=((points + most) // step).to(torch.uint8),
        scale=scale * step,
        lowest=scale * -most,
        most_code=2 * most // step,
    )


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """The first bytes of each block as float16 numbers, in float64."""
    return raw.contiguous().view(torch.float16).double()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """Lower halves of the bytes, then upper ones."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _signed(codes: torch.Tensor, scale: torch.Tensor, zero: int, most_code: int) -> Unpacked:
    return Unpacked(codes=codes, scale=scale, lowest=-zero * scale, most_code=most_code)


def _q4_0(raw: torch.Tensor) -> Unpacked:
    return _signed(_nibbles(raw[..., 2:]), _halves(raw[..., :2])[..., 0], 8, 15)


def _q4_1(raw: torch.Tensor) -> Unpacked:
    scale, lowest = _halves(raw[..., :4]).unbind(-1)
    return Unpacked(codes=_nibbles(raw[..., 4:]), scale=scale, lowest=lowest, most_code=15)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Of four bytes each bit, lowest first, in the place of a fifth one."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _q5_0(raw: torch.Tensor) -> Unpacked:
    codes = _nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return _signed(codes, _halves(raw[..., :2])[..., 0], 16, 31)


def _q5_1(raw: torch.Tensor) -> Unpacked:
    scale, lowest = _halves(raw[..., :4]).unbind(-1)
    codes = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return Unpacked(codes=codes, scale=scale, lowest=lowest, most_code=31)


def _q8_0(raw: torch.Tensor) -> Unpacked:
    # A signed byte and 128: its highest bit turned.
    return _signed(raw[..., 2:] ^ 128, _halves(raw[..., :2])[..., 0], 128, 255)


def _k_factors(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the eight groups of a block, which begins with two float16 numbers and
    twelve bytes of six-bit ones: of the first four groups as they are, of the others in parts."""
    scale, lowest = _halves(raw[..., :4]).unbind(-1)
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], dim=-1)
    factors = scale[..., None] * scales, -lowest[..., None] * minima
    return factors[0].flatten(-2), factors[1].flatten(-2)


def _k_nibbles(raw: torch.Tensor) -> torch.Tensor:
    """Codes [..., 8, 32]: 32 bytes have those of two groups."""
    return _cut(_nibbles(_cut(raw, 32)), 32).flatten(-3, -2)


def _q4_k(raw: torch.Tensor) -> Unpacked:
    scale, lowest = _k_factors(raw)
    codes = _k_nibbles(raw[..., 16:]).flatten(1, 2)
    return Unpacked(codes=codes, scale=scale, lowest=lowest, most_code=15)


def _q5_k(raw: torch.Tensor) -> Unpacked:
    scale, lowest = _k_factors(raw)
    # Each of 32 bytes has a bit for each group.
    fifth = (raw[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = (_k_nibbles(raw[..., 48:]) | fifth << 4).flatten(1, 2)
    return Unpacked(codes=codes, scale=scale, lowest=lowest, most_code=31)


def _pairs_of_bits(raw: torch.Tensor) -> torch.Tensor:
    """The lowest two bits of each byte, then the next ones."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (raw[..., None, :] >> shifts) & 3


def _q6_k(raw: torch.Tensor) -> Unpacked:
    scale = _halves(raw[..., 208:]) * raw[..., 192:208].contiguous().view(torch.int8)
    # Twice: 64 bytes with the lower four bits of 128 codes, 32 with the upper two.
    low = _nibbles(_cut(raw[..., :128], 64))
    high = _pairs_of_bits(_cut(raw[..., 128:192], 32))
    codes = _cut((low | high.flatten(-2) << 4).flatten(1), 16)
    return _signed(codes, scale.flatten(-2), 32, 63)


def _q2_k(raw: torch.Tensor) -> Unpacked:
    scale, lowest = _halves(raw[..., 80:]).unbind(-1)
    factors = raw[..., :16]
    return Unpacked(
        codes=_cut(_pairs_of_bits(_cut(raw[..., 16:80], 32)).flatten(1), 16),
        scale=(scale[..., None] * (factors & 15)).flatten(-2),
        lowest=(-lowest[..., None] * (factors >> 4)).flatten(-2),
        most_code=3,
    )


def _q3_k(raw: torch.Tensor) -> Unpacked:
    # Sixteen scales of six bits: the lower four of each in eight bytes, the upper two in four.
    factors = _nibbles(raw[..., 96:104]) | _pairs_of_bits(raw[..., 104:108]).flatten(-2) << 4
    scale = _halves(raw[..., 108:]) * (factors.int() - 32)
    third = (raw[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    low = _pairs_of_bits(_cut(raw[..., 32:96], 32)).flatten(-3)
    codes = _cut((low | third.flatten(-2) << 2).flatten(1), 16)
    return _signed(codes, scale.flatten(-2), 4, 7)


_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4 stand for."""
_MOST_LEVEL: Final = 128 + 113


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """128 more than what the codes stand for."""
    levels = torch.tensor([128 + level for level in _LEVELS], dtype=torch.uint8)
    return levels.index_select(0, codes.flatten().int()).view(codes.shape)


def _iq4_nl(raw: torch.Tensor) -> Unpacked:
    codes = _levels(_nibbles(raw[..., 2:]))
    return _signed(codes, _halves(raw[..., :2])[..., 0], 128, _MOST_LEVEL)


def _iq4_xs(raw: torch.Tensor) -> Unpacked:
    # Eight scales of six bits: the lower four of two in a byte, the upper two of all in a word.
    word = raw[..., 2:3].int() | raw[..., 3:4].int() << 8
    low = torch.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], dim=-1).flatten(-2)
    factors = low.int() | ((word >> torch.arange(0, 16, 2)) & 3) << 4
    scale = (_halves(raw[..., :2]) * (factors - 32)).flatten(-2)
    codes = _levels(_nibbles(_cut(raw[..., 8:], 16)).flatten(1, 2))
    return _signed(codes, scale, 128, _MOST_LEVEL)


_BLOCKS: Final[Mapping[str, Callable[[torch.Tensor], Unpacked]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
