"""Rotary frequencies of every kind, from the papers' formulas.

Knows a RopeConfig and a length; rotates nothing and keeps nothing. All in float32, in the order of
operations that the models were published with: frequencies are multiplied by positions of up to
some 100,000, where the last bit of a frequency shows.

Sources: RoFormer (2104.09864, eq. 15); position interpolation (2306.15595, eq. 4); YaRN
(2309.00071, section 3, with the NTK-aware scaling of its eq. 16); LongRoPE (2402.13753, section 3);
Llama 3.1 (its reference code).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from freight.model.rope_config import RopeConfig, depends_on_length

__all__ = ["inverse_frequencies", "is_same_up_to"]

_Frequencies = tuple[torch.Tensor, float]


def inverse_frequencies(
    rope: RopeConfig, seq_len: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Frequencies [rotary_dim / 2] in radians per position, and what scales cosine and sine.

    ``seq_len`` is the length of the sequence that is rotated, ``max_positions`` the model's limit.
    """
    frequencies, scale = _KINDS[rope.kind](rope, seq_len, max_positions)
    return (frequencies * torch.tensor(rope.gains) if rope.gains else frequencies), scale


def is_same_up_to(rope: RopeConfig, seq_len: int, max_positions: int) -> bool:
    """Whether sequences of up to ``seq_len`` tokens have the same frequencies."""
    if not depends_on_length(rope):
        return True
    (short, _), (long, _) = (inverse_frequencies(rope, n, max_positions) for n in (1, seq_len))
    return torch.equal(short, long)


def _wavelengths(rope: RopeConfig, theta: float | torch.Tensor) -> torch.Tensor:
    """theta ** (2 i / d): positions per radian."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return torch.as_tensor(theta**exponents)


def _default(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    return 1.0 / _wavelengths(rope, rope.theta), 1.0


def _proportional(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    """The fastest waves of a whole head; its other elements stay as they are."""
    frequencies = 1.0 / _wavelengths(rope, rope.theta) / (rope.factor or 1.0)
    frequencies[int(rope.share * rope.rotary_dim // 2) :] = 0.0
    return frequencies, 1.0


def _linear(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    return 1.0 / _wavelengths(rope, rope.theta) / _factor(rope, max_positions), 1.0


def _dynamic(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    """NTK-aware scaling by the length reached: the base grows so that the slowest wave fits."""
    factor = _factor(rope, max_positions)
    length = torch.tensor(max(seq_len, max_positions))
    stretch = factor * length / max_positions - (factor - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / _wavelengths(rope, theta), 1.0


def _yarn(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    """Slow waves interpolated, fast ones left, a ramp between (YaRN, section 3.2)."""
    factor = _factor(rope, max_positions)
    waves = _wavelengths(rope, rope.theta)
    low = _turning_dim(rope, rope.beta_fast or 32.0)
    high = _turning_dim(rope, rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    frequencies = 1.0 / (factor * waves) * (1.0 - kept) + 1.0 / waves * kept
    return frequencies, _yarn_scaling(rope, factor)


def _turning_dim(rope: RopeConfig, num_turns: float) -> float:
    """The dim whose wave turns ``num_turns`` times within the length of the pre-training."""
    length = _original(rope)
    turns = math.log(length / (num_turns * 2.0 * math.pi))
    return rope.rotary_dim * turns / (2.0 * math.log(rope.theta))


def _yarn_scaling(rope: RopeConfig, factor: float) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = 0.1 * math.log(factor) if factor > 1.0 else 0.0
    if rope.mscale and rope.mscale_all_dim:
        return (growth * rope.mscale + 1.0) / (growth * rope.mscale_all_dim + 1.0)
    return growth + 1.0


def _longrope(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    """Searched factors per wave, one set up to the length of the pre-training and one beyond."""
    original = _original(rope)
    factors = torch.tensor(rope.long_factor if seq_len > original else rope.short_factor)
    growth = _factor(rope, max_positions)
    scaling = rope.attention_factor
    if scaling is None:
        scaling = math.sqrt(1.0 + math.log(max(growth, 1.0)) / math.log(original))
    return 1.0 / (factors * _wavelengths(rope, rope.theta)), scaling


def _llama3(rope: RopeConfig, seq_len: int, max_positions: int) -> _Frequencies:
    """Waves longer than the pre-training interpolated, short ones left, smooth between."""
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    factor, original = _factor(rope, max_positions), _original(rope)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    plain = 1.0 / _wavelengths(rope, rope.theta)
    periods = 2.0 * math.pi / plain
    # Where both are equal nothing is between.
    smooth = (original / periods - low) / ((high - low) or 1.0)
    between = (1.0 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(periods > original / low, plain / factor, between)
    return torch.where(periods < original / high, plain, scaled), 1.0


def _factor(rope: RopeConfig, max_positions: int) -> float:
    return max_positions / _original(rope) if rope.factor is None else rope.factor


def _original(rope: RopeConfig) -> int:
    assert rope.original_max_positions is not None
    return rope.original_max_positions


_KINDS: Final[dict[str, Callable[[RopeConfig, int, int], _Frequencies]]] = {
    "default": _default,
    "proportional": _proportional,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
