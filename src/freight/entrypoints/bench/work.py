"""The work of a benchmark: rows of one length, the same for every system.

Knows no model but its vocabulary, and no machine.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

from freight.errors import InputError
from freight.model.config import ModelConfig
from freight.plan.workload import Workload

__all__ = ["Work", "check_work", "make_rows", "parse_shape"]

_SHAPE: Final = re.compile(r"([0-9]+):([0-9]+)")
_MOST_TOKENS: Final = 10**7


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """``num_rows`` prompts of ``prompt_tokens``, each answered with exactly ``new_tokens``."""

    num_rows: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise InputError(
                f"--rows {self.num_rows} was given.",
                "There is nothing to measure without a row.",
                "Give at least 1.",
            )

    @property
    def total_tokens(self) -> int:
        """Prompt and new tokens of one row."""
        return self.prompt_tokens + self.new_tokens

    def workload(self) -> Workload:
        return Workload(
            num_rows=self.num_rows,
            max_prompt_tokens=self.prompt_tokens,
            max_new_tokens=self.new_tokens,
            max_total_tokens=self.total_tokens,
            total_prompt_tokens=self.num_rows * self.prompt_tokens,
            total_new_tokens=self.num_rows * self.new_tokens,
        )


def parse_shape(text: str) -> tuple[int, int]:
    """(prompt tokens, new tokens) of "128:16"."""
    match = _SHAPE.fullmatch(text.strip())
    numbers = (0, 0) if match is None else (int(match[1]), int(match[2]))
    if not all(1 <= number <= _MOST_TOKENS for number in numbers):
        raise InputError(
            f"--shape {text} was given.",
            "A shape is prompt tokens and new tokens, both at least 1.",
            "Write it like 128:16.",
        )
    return numbers


def check_work(work: Work, config: ModelConfig) -> None:
    """Refuse rows that are longer than the model's positions."""
    if work.total_tokens > config.max_positions:
        raise InputError(
            f"--shape {work.prompt_tokens}:{work.new_tokens} was given.",
            f"The model has {config.max_positions} positions, a row takes {work.total_tokens}.",
            "Give a shorter shape.",
        )


def make_rows(work: Work, vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for the same work; the first three ids, often special, left out
    where there are others."""
    draw = random.Random(0)
    ids = range(min(3, vocab_size - 1), vocab_size)
    return [draw.choices(ids, k=work.prompt_tokens) for _ in range(work.num_rows)]
