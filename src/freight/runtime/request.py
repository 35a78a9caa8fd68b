"""What a caller asks of the engine for one row, and what it gets back.

Plain values: no tensors, no tokenizer, no schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from freight.errors import InputError

__all__ = ["Completion", "FinishReason", "Request", "SamplingParams"]

FinishReason = Literal["stop", "length"]


def _refuse(name: str, value: object, limit: str, advice: str) -> InputError:
    return InputError(f"{name}={value!r} was given.", f"{name} must be {limit}.", advice)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one row are chosen.

    Temperature 0 is greedy, and the default: a dataset job should give the same output twice.
    ``top_k`` 0 and ``top_p`` 1.0 switch these filters off. ``seed`` fixes a row's output whatever
    else is in the batch. Stop strings are left out of the text; a single one may be given bare.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.max_tokens < 1:
            raise _refuse("max_tokens", self.max_tokens, "at least 1", "Raise it.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise _refuse("temperature", self.temperature, "0 or more", "Use 0 for greedy.")
        if self.top_k < 0:
            raise _refuse("top_k", self.top_k, "0 or more", "Use 0 to switch it off.")
        if not 0 < self.top_p <= 1:
            raise _refuse("top_p", self.top_p, "in (0, 1]", "Use 1.0 to switch it off.")
        if not 0 <= self.seed < 2**63:
            raise _refuse("seed", self.seed, "in [0, 2**63)", "Use a small whole number.")
        if any(not text for text in self.stop):
            raise _refuse("stop", list(self.stop), "non-empty strings", "Leave empty ones out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row: ``index`` is its place in the dataset, ``prompt_ids`` its tokens (at least one)."""

    index: int
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the model answered to one row: the new tokens, end-of-sequence token not included."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
