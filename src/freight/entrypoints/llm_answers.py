"""Answers of one call of the Python API, as they are taken. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import Generic, TypeVar

from freight.errors import InputError
from freight.runtime.request import Completion

__all__ = ["Answers"]

Made = TypeVar("Made")


class Answers(Iterator[Made], Generic[Made]):
    """What is ``made`` of each completion. When the LLM is closed before all were taken, asking for
    more is a mistake: a dataset would end early with nothing said."""

    def __init__(
        self,
        answers: Generator[Completion],
        count: int,
        made: Callable[[Completion], Made],
    ) -> None:
        self._answers = answers
        self._count = count
        self._made = made
        self._num_taken = 0
        self._is_ended = False

    def __next__(self) -> Made:
        if self._is_ended:
            raise InputError(
                f"{self._count} answers were asked for.",
                f"The LLM was closed when {self._num_taken} of them had been taken.",
                "Take all before it is closed, like list(llm.generate(prompts)).",
            )
        self._refuse_another("Answers were asked for.")
        answer = next(self._answers)
        self._num_taken += 1
        return self._made(answer)

    def close(self) -> None:
        """No more are wanted."""
        self._answers.close()

    def end(self) -> None:
        """No more are to come, wanted or not."""
        self._refuse_another("The LLM was to be closed.")
        is_under_way = getgeneratorstate(self._answers) != GEN_CLOSED
        self._is_ended |= is_under_way and self._num_taken < self._count
        self._answers.close()

    def _refuse_another(self, asked: str) -> None:
        if getgeneratorstate(self._answers) == GEN_RUNNING:
            raise InputError(
                asked,
                "Another thread is just taking an answer of the same call.",
                "Let that thread end first; threads that each call generate do not meet.",
            )
