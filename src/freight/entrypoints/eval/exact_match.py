"""Exact match: is each row's greedy answer the one that is expected?

White space at both ends is left out of both; all else counts. Knows no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from freight.entrypoints.eval.rows import Rows, read_records, refuse_row
from freight.errors import InputError
from freight.jobs.json_values import refuse_broken_text, wrong_kind
from freight.runtime.request import Completion

__all__ = ["ExactMatchScore", "make_rows"]

_OWN: Final = ("prompt", "messages", "max_tokens", "min_tokens", "stop", "stop_token_ids")
"""What a row may say for itself; how tokens are chosen is not its business, they are greedy."""


def make_rows(path: Path, answer_key: str) -> Rows:
    """The rows that are answered; each row's id is the answer that is expected."""
    for where, record in read_records(path):
        try:
            answer = _read_answer(answer_key, record.get(answer_key))
        except InputError as error:
            raise refuse_row(where, error) from error
        yield where, {"id": answer, **{key: record[key] for key in _OWN if key in record}}


def _read_answer(key: str, value: object) -> str:
    if value is None:
        raise InputError(
            f'It has no "{key}".',
            "Without one there is nothing to compare with.",
            "Give every row one, or name its key with --answer-key.",
        )
    if not isinstance(value, str):
        raise wrong_kind(key, value, "a string")
    refuse_broken_text(value, key)
    return value


class ExactMatchScore:
    """The share of rows that are right, as it grows."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._num_right = 0

    def add(self, completion: Completion, answer: Any) -> None:
        self._num_rows += 1
        self._num_right += completion.text.strip() == answer.strip()

    def result(self) -> dict[str, float]:
        return {
            "accuracy": self._num_right / self._num_rows,
            "right": self._num_right,
            "rows": self._num_rows,
        }
