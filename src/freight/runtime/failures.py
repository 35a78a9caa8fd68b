"""Rows for which the model computes no numbers: of damaged weights, or too large for their type.

Such a row ends with an error and the rows beside it go on; where every row does, it is the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from freight.errors import ModelError
from freight.runtime.request import Completion

__all__ = ["demand_numbers", "no_numbers", "refuse_where_all_fail"]

_ENOUGH: Final = 16
"""Rows that fail before any other is answered: the next ones would as well."""


def no_numbers(asked: str, what: str = "What the model computed for it") -> ModelError:
    """The error of such a row, or of all of them."""
    return ModelError(
        asked,
        f"{what} is infinite, or no number.",
        "The weights are damaged, or overflow in this number format: try --dtype float32.",
    )


def demand_numbers(completion: Completion, name: str) -> None:
    """Raises ModelError where a row has failed, for those who need an answer to each."""
    if completion.has_failed:
        raise no_numbers(f"{name} was to be answered.")


def refuse_where_all_fail(
    completions: Iterable[Completion], *, has_answers: bool = False
) -> Iterator[Completion]:
    """The same completions; rows that fail come once another has not, unless there were such before
    (``has_answers``). Raises ModelError where many have failed and none has not, or all have."""
    failed: list[Completion] = []
    for completion in completions:
        if completion.has_failed and not has_answers:
            failed.append(completion)
            if len(failed) >= _ENOUGH:
                break
            continue
        has_answers = True
        yield from failed
        failed.clear()
        yield completion
    if failed:
        many = f"The first {len(failed)} rows were" if len(failed) > 1 else "The first row was"
        what = "What the model computed for all of them" if len(failed) > 1 else None
        asked = f"{many} to be answered."
        raise no_numbers(asked, what) if what else no_numbers(asked)
