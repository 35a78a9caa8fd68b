"""The work of a benchmark: rows of one length or of many, the same for every system.

Knows no model but its vocabulary, and no machine.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from freight.errors import InputError
from freight.model.config import ModelConfig
from freight.plan.workload import Workload

__all__ = ["Work", "check_work", "make_rows", "parse_shape"]

_SHAPE: Final = re.compile(r"(?:([0-9]+)-)?([0-9]+):(?:([0-9]+)-)?([0-9]+)")
_MOST_TOKENS: Final = 10**7
_MOST_DRAWN: Final = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Work:
    """``num_rows`` prompts of ``prompt_tokens``, each answered with exactly ``new_tokens``; where
    ``least_prompt_tokens`` or ``least_new_tokens`` are fewer, with lengths drawn from there up."""

    num_rows: int
    prompt_tokens: int
    new_tokens: int
    least_prompt_tokens: int | None = None
    least_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise InputError(
                f"--rows {self.num_rows} was given.",
                "There is nothing to measure without a row.",
                "Give at least 1.",
            )

    @property
    def total_tokens(self) -> int:
        """Most prompt and new tokens of one row."""
        return self.prompt_tokens + self.new_tokens

    @property
    def is_ragged(self) -> bool:
        """Whether answers end where no system is told before."""
        return self.least_new_tokens not in (None, self.new_tokens)

    def lengths(self, most: int | None = None) -> list[tuple[int, int]]:
        """(prompt, new) tokens of each row, the same for the same work; of the first ``most``."""
        draw = random.Random(1)
        prompts = self.least_prompt_tokens or self.prompt_tokens, self.prompt_tokens
        answers = self.least_new_tokens or self.new_tokens, self.new_tokens
        count = self.num_rows if most is None else min(most, self.num_rows)
        return [(draw.randint(*prompts), draw.randint(*answers)) for _ in range(count)]

    @cached_property
    def total_prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths())

    @cached_property
    def total_new_tokens(self) -> int:
        return sum(new for _, new in self.lengths())

    def workload(self) -> Workload:
        """What a planner may know: all answers may be as long as the longest. Behind very many rows
        others are taken to be like these."""
        prompts = [prompt for prompt, _ in self.lengths(_MOST_DRAWN)]
        groups = [(1, prompt) for prompt in prompts]
        if left := self.num_rows - len(prompts):
            groups.append((left, round(sum(prompts) / len(prompts))))
        return Workload(
            num_rows=self.num_rows,
            max_prompt_tokens=max(prompts),
            max_new_tokens=self.new_tokens,
            max_total_tokens=max(prompts) + self.new_tokens,
            total_prompt_tokens=sum(count * prompt for count, prompt in groups),
            total_new_tokens=self.num_rows * self.new_tokens,
            lengths=tuple((count, prompt, self.new_tokens) for count, prompt in groups),
            ends_early=self.is_ragged,
        )


def parse_shape(text: str, num_rows: int) -> Work:
    """So many rows of "128:16" prompt and new tokens, or of "16-256:4-128"."""
    match = _SHAPE.fullmatch(text.strip())
    least_prompt, prompt, least_new, new = (
        (0, 0, 0, 0)
        if match is None
        else (
            int(match[1] or match[2]),
            int(match[2]),
            int(match[3] or match[4]),
            int(match[4]),
        )
    )
    if not (1 <= least_prompt <= prompt <= _MOST_TOKENS and 1 <= least_new <= new <= _MOST_TOKENS):
        raise InputError(
            f"--shape {text} was given.",
            "A shape is prompt tokens and new tokens, both at least 1.",
            "Write it like 128:16, or like 16-256:4-128 for lengths between two numbers.",
        )
    return Work(
        num_rows=num_rows,
        prompt_tokens=prompt,
        new_tokens=new,
        least_prompt_tokens=least_prompt,
        least_new_tokens=least_new,
    )


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
    return [draw.choices(ids, k=prompt) for prompt, _ in work.lengths()]
