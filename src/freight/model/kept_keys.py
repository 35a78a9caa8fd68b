"""Compressed keys of rows, as functions of tensors: tokens are added to the sums that the next keys
are made of, and keys that are complete are put behind those before.

Sums are of each number the highest gate, the sum of e^(gate - highest), and these times what they
weigh: of the key that is being made and of the one after it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from freight.model.frame import Frame
from freight.model.kept_steps import Compress
from freight.model.rope import inverse_frequencies
from freight.model.rope_config import RopeConfig

__all__ = ["KeptKeys"]

_NONE: Final = float("-inf")


class KeptKeys:
    """Of one layer: ``keys`` [seats, E, H] in the order of their tokens, and the ``sums`` [seats,
    2, 3, H], views of what rows keep."""

    def __init__(
        self, step: Compress, frame: Frame, keys: torch.Tensor, sums: torch.Tensor
    ) -> None:
        self.step, self.keys, self._sums = step, keys, sums
        self._sources, self._gates = frame.values[step.x], frame.values[step.gates]
        self._bias = frame.vector(step.bias).view(step.rate, -1)
        self._gain = frame.vector(step.weight).float()
        self._width = keys.shape[-1]

    def add_single(
        self, tokens: torch.Tensor, seats: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """One token of each of some rows, at these positions; a device is not waited for."""
        rate = self.step.rate
        gates = self._gates[tokens].float() + self._bias[positions % rate]
        weighed = self._sources[tokens].float()
        held = self._sums[seats]
        held = torch.where((positions == 0)[:, None, None, None], _nothing(held), held)
        each = torch.stack((gates, torch.ones_like(gates), weighed), dim=1)
        now, then = held[:, 0], held[:, 1]
        if self.step.doubled:
            then = _merged(then, each[..., : self._width])
        now = _merged(now, each[..., -self._width :])
        firsts = positions // rate * rate
        done = ((positions + 1) % rate == 0)[:, None]
        if self.keys.shape[1]:  # or no row is so long that a key is complete
            # One that is not complete yet lies where it will, and is not looked at.
            number = firsts // rate
            known = number < self.keys.shape[1]
            number = torch.where(known, number, 0)
            made = torch.where(known[:, None], self._made(now, firsts), self.keys[seats, number])
            self.keys[seats, number] = made
        now, then = (
            torch.where(done[..., None], then, now),
            torch.where(done[..., None], _nothing(then), then),
        )
        self._sums[seats] = torch.stack((now, then), dim=1)

    def add_stretch(self, tokens: slice, seat: int, length: int) -> None:
        """Tokens that follow each other in a row that has had ``length`` before."""
        rate, width, count = self.step.rate, self._width, tokens.stop - tokens.start
        sums, place = self._sums[seat], length % rate
        if length == 0:
            sums.copy_(_nothing(sums))
        num_keys = -(-(place + count) // rate)
        columns, own = self._sources.shape[1], slice(place, place + count)
        gates = torch.full((num_keys * rate, columns), _NONE, device=sums.device)
        weighed = torch.zeros_like(gates)
        gates[own] = self._gates[tokens].float()
        weighed[own] = self._sources[tokens].float()
        gates = gates.view(num_keys, rate, columns) + self._bias
        highest = gates.amax(dim=1)
        shares = (gates - _finite(highest)[:, None]).exp_()
        weighed = (weighed.view(gates.shape) * shares).sum(dim=1)
        # Of each key the tokens' own, and what they give to the one after it.
        each = torch.stack((highest, shares.sum(dim=1), weighed), dim=1)
        now, then = sums.clone().unbind(0)
        parts = each[..., -width:].clone()
        later = _nothing(parts)
        if self.step.doubled:
            later = each[..., :width].clone()
            later[0] = _merged(then, later[0])
            parts[1:] = _merged(parts[1:], later[:-1])
        parts[0] = _merged(now, parts[0])
        done, first = (place + count) // rate, length // rate
        if done:
            firsts = (first + torch.arange(done, device=sums.device)) * rate
            self.keys[seat, first : first + done] = self._made(parts[:done], firsts)
        is_open = done < num_keys
        sums[0] = parts[-1] if is_open else later[-1]
        sums[1] = later[-1] if is_open else _nothing(later[-1])

    def _made(self, sums: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys of sums [n, 3, H] that are complete, of tokens from these positions on."""
        rope, key = self.step.rope, sums[:, 2] / sums[:, 1]
        key = key * (key.square().mean(dim=-1, keepdim=True) + self.step.eps).rsqrt_() * self._gain
        frequencies, scale = _frequencies(rope, self.step.max_positions, key.device)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos().mul_(scale), angles.sin().mul_(scale)
        turned = key[:, -rope.rotary_dim :]
        low, high = (turned[:, ::2], turned[:, 1::2]) if rope.pairs else turned.chunk(2, dim=-1)
        both = low * cos - high * sin, high * cos + low * sin
        low.copy_(both[0])
        high.copy_(both[1])
        return key.to(self.keys.dtype)


@lru_cache(maxsize=8)
def _frequencies(
    rope: RopeConfig, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    frequencies, scale = inverse_frequencies(rope, 1, max_positions)
    return frequencies.to(device), scale


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Sums [..., 3, H] of no token."""
    sums = torch.zeros_like(like)
    sums[..., 0, :] = _NONE
    return sums


def _finite(highest: torch.Tensor) -> torch.Tensor:
    return highest.masked_fill(highest == _NONE, 0.0)


def _merged(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Sums [..., 3, H] of the tokens of both."""
    highest = torch.maximum(one[..., 0, :], other[..., 0, :])
    first, second = ((sums[..., 0, :] - _finite(highest)).exp() for sums in (one, other))
    total = one[..., 1, :] * first + other[..., 1, :] * second
    weighed = one[..., 2, :] * first + other[..., 2, :] * second
    return torch.stack((highest, total, weighed), dim=-2)
