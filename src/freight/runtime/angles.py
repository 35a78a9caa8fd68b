"""Cosines and sines that the tokens of a micro-batch are rotated by.

Every sweep wants those of a few positions, and mostly the same ones as the sweep before plus one:
they are taken from a table of the first positions, made as far as they were wanted. Where the
frequencies change with a row's length, and behind the table's end, they are made anew. The numbers
are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from freight.model.batch import MicroBatch
from freight.model.config import ModelConfig
from freight.model.frame import Angles
from freight.model.rope import inverse_frequencies
from freight.model.rope_config import RopeConfig, depends_on_length
from freight.quantities import MIB

__all__ = ["RotaryAngles"]

_MOST_BYTES: Final = 1 * MIB
"""Of a table of cosines, and of one of sines: memory that no plan knows of."""
_LEAST_POSITIONS: Final = 256


class RotaryAngles:
    """For one model, in its compute dtype; ``of`` leaves them on the device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._most_positions = config.max_positions
        self._dtype = dtype
        self._device = device
        self._tables: dict[RopeConfig, Angles] = {}

    def of(self, batch: MicroBatch, positions: torch.Tensor, rope: RopeConfig) -> Angles:
        """Those of all tokens [T, rotary/2]; ``positions`` [T] are in host memory."""
        longest = max(span.total_len for span in batch.rows)
        table = self._table(rope, longest)
        found = self._made(batch, rope) if table is None else table.of(positions)
        return Angles(cos=found.cos.to(self._device), sin=found.sin.to(self._device))

    def _table(self, rope: RopeConfig, longest: int) -> Angles | None:
        """Those of at least the first ``longest`` positions, or None where there are none."""
        most = _MOST_BYTES // (rope.rotary_dim // 2 * self._dtype.itemsize)
        if depends_on_length(rope) or longest > most:
            return None
        known = self._tables.get(rope)
        if known is None or len(known.cos) < longest:
            count = min(most, max(_LEAST_POSITIONS, 1 << (longest - 1).bit_length()))
            frequencies, scale = inverse_frequencies(rope, 1, self._most_positions)
            positions = torch.arange(count, dtype=torch.float32)
            known = self._turned(positions[:, None] * frequencies, scale)
            self._tables[rope] = known
        return known

    def _made(self, batch: MicroBatch, rope: RopeConfig) -> Angles:
        angles, scales = [], []
        frequencies, scale = inverse_frequencies(rope, 1, self._most_positions)
        for first, last, length in _stretches(batch, by_length=depends_on_length(rope)):
            if length:
                frequencies, scale = inverse_frequencies(rope, length, self._most_positions)
            positions = torch.arange(first, last, dtype=torch.float32)
            angles.append(positions[:, None] * frequencies)
            scales.append(torch.full((last - first, 1), scale))
        return self._turned(torch.cat(angles), torch.cat(scales))

    def _turned(self, angle: torch.Tensor, factor: torch.Tensor | float) -> Angles:
        cos = (angle.cos() * factor).to(self._dtype)
        return Angles(cos=cos, sin=(angle.sin() * factor).to(self._dtype))


def _stretches(batch: MicroBatch, *, by_length: bool) -> Iterator[tuple[int, int, int]]:
    """Positions of the batch's tokens as ranges [first, last) with one set of frequencies each, and
    where these go ``by_length`` the length: of the prompt, or up to a token that was made."""
    for span in batch.rows:
        if not by_length:
            yield span.kv_len, span.total_len, 0
            continue
        border = min(max(span.prompt_len, span.kv_len), span.total_len)
        if span.kv_len < border:
            yield span.kv_len, border, span.prompt_len
        for position in range(border, span.total_len):
            yield position, position + 1, position + 1
