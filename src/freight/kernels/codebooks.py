"""Blocks of GGUF whose codes stand for several numbers at once: the rows of a codebook.

A row has eight neighbours, or four of three bits and more; their signs lie beside it, or in it. The
codebooks are those of ggml's ``ggml-common.h``, kept in ``codebooks.npz`` under the names of the
types that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Final

import numpy as np
import torch

__all__ = ["POINTS", "read_codebook", "read_points"]

_SHIFTS_OF_SIGNS: Final = (0, 7, 14, 21)
_EIGHTHS: Final = 8
"""Of three levels each is moved up or down by an eighth."""

Points = tuple[torch.Tensor, torch.Tensor]
"""int32 [rows, groups, group size], and of each group what they are multiplied by, float64."""


@lru_cache(maxsize=8)
def read_codebook(kind: str) -> torch.Tensor:
    """int32 [rows, neighbours]."""
    with (resources.files("freight.kernels") / "codebooks.npz").open("rb") as file:
        return torch.from_numpy(np.load(file)[kind].astype(np.int32))


def read_points(kind: str, raw: torch.Tensor) -> Points:
    """raw uint8 [rows, blocks, bytes of a block]."""
    return _READERS[kind](raw)


def _numbers(raw: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The bytes as numbers of so many, lowest first, int64 [rows, blocks, numbers]."""
    own = raw.contiguous().view(*raw.shape[:-1], -1, num_bytes).long()
    return (own << (8 * torch.arange(num_bytes))).sum(-1)


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Two bytes as a float16 number, in float64 [rows, blocks, 1]."""
    return raw.contiguous().view(torch.float16).double()


def _parts(numbers: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Of each number its parts, [..., numbers x parts]."""
    return ((numbers[..., None] >> torch.tensor(shifts)) & mask).flatten(-2)


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """1 or -1 for each of the eight bits of a number, [..., numbers, 8]."""
    return 1 - 2 * ((bits[..., None] >> torch.arange(8)) & 1).int()


def _even(bits: torch.Tensor) -> torch.Tensor:
    """Seven bits with an eighth that makes the number of those that are set even."""
    return bits | (((bits[..., None] >> torch.arange(7)) & 1).sum(-1) & 1) << 7


def _join(values: torch.Tensor, scale: torch.Tensor) -> Points:
    """Values [rows, blocks, ...] as groups, with scales [rows, blocks, groups of a block]."""
    count = scale[0].numel()
    return values.reshape(len(values), count, -1), scale.reshape(len(scale), count)


def _look_up(kind: str, places: torch.Tensor) -> torch.Tensor:
    return read_codebook(kind)[places]


def _iq2_xxs(raw: torch.Tensor) -> Points:
    words = _numbers(raw[..., 2:], 4)
    places, rest = words[..., 0::2], words[..., 1::2]
    own = _look_up("IQ2_XXS", _parts(places, (0, 8, 16, 24), 255))
    signs = _signs(_even(_parts(rest, _SHIFTS_OF_SIGNS, 127)))
    return _join(own * signs, _half(raw[..., :2]) * (0.5 + (rest >> 28)) * 0.25)


def _iq2_xs(raw: torch.Tensor) -> Points:
    words = _numbers(raw[..., 2:66], 2)
    own = _look_up("IQ2_XS", words & 511)
    scale = _half(raw[..., :2]) * (0.5 + _parts(raw[..., 66:].long(), (0, 4), 15)) * 0.25
    return _join(own * _signs(_even(words >> 9)), scale)


def _iq2_s(raw: torch.Tensor) -> Points:
    own = raw.long()
    places = own[..., 2:34] | _parts(own[..., 66:74], (0, 2, 4, 6), 3) << 8
    scale = _half(raw[..., :2]) * (0.5 + _parts(own[..., 74:], (0, 4), 15)) * 0.25
    return _join(_look_up("IQ2_S", places) * _signs(own[..., 34:66]), scale)


def _iq3_xxs(raw: torch.Tensor) -> Points:
    words = _numbers(raw[..., 66:], 4)
    signs = _signs(_even(_parts(words, _SHIFTS_OF_SIGNS, 127)))
    own = _look_up("IQ3_XXS", raw[..., 2:66].long()).reshape(signs.shape)
    return _join(own * signs, _half(raw[..., :2]) * (0.5 + (words >> 28)) * 0.5)


def _iq3_s(raw: torch.Tensor) -> Points:
    own = raw.long()
    places = own[..., 2:66] | _parts(own[..., 66:74], (0, 1, 2, 3, 4, 5, 6, 7), 1) << 8
    signs = _signs(own[..., 74:106])
    scale = _half(raw[..., :2]) * (1 + 2 * _parts(own[..., 106:], (0, 4), 15))
    return _join(_look_up("IQ3_S", places).reshape(signs.shape) * signs, scale)


def _iq1_s(raw: torch.Tensor) -> Points:
    words = _numbers(raw[..., 34:], 2)
    places = raw[..., 2:34].long() | _parts(words, (0, 3, 6, 9), 7) << 8
    moved = (1 - 2 * (words >> 15)).repeat_interleave(4, dim=-1)[..., None]
    scale = _half(raw[..., :2]) * (2 * ((words >> 12) & 7) + 1) / _EIGHTHS
    return _join(_EIGHTHS * _look_up("IQ1_S", places) + moved.int(), scale)


def _iq1_m(raw: torch.Tensor) -> Points:
    own, words = raw.long(), _numbers(raw[..., 48:], 2)
    # The block's scale is the upper four bits of four words.
    bits = ((words >> 12) << torch.tensor((0, 4, 8, 12))).sum(-1, keepdim=True)
    bytes_of_scale = torch.cat([bits & 255, bits >> 8], dim=-1).to(torch.uint8)
    high = _parts(own[..., 32:48], (0, 4), 15)
    places = own[..., :32] | (high & 7) << 8
    values = _EIGHTHS * _look_up("IQ1_S", places) + (1 - 2 * (high >> 3))[..., None].int()
    scale = _half(bytes_of_scale) * (2 * _parts(words, (0, 3, 6, 9), 7) + 1) / _EIGHTHS
    return _join(values, scale)


_READERS: Final[Mapping[str, Callable[[torch.Tensor], Points]]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
POINTS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (43, 1)),
    "IQ3_XXS": (62, 2),
    "IQ3_S": (15, 2),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), (9, 2)),
}
"""The most that a point of a kind is, and what all points are apart at least."""
