"""Datasets of Ray: a class whose actors each hold a model and answer batches of rows.

    rows.map_batches(
        BatchAnswerer,
        fn_constructor_kwargs={"model": "demo", "params": {"max_tokens": 32}},
        compute=ray.data.ActorPoolStrategy(size=4),
        num_cpus=8,
        batch_size=10_000,
    )

Ray starts the actors, on as many machines as it has, and hands each batches until there are no
more. A batch is a job of its own, whose weights are brought once for a whole block of its rows, so
batches should be large. Imports nothing of Ray: what Ray calls is a plain class.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from freight.entrypoints.llm import LLM
from freight.errors import FreightError, InputError
from freight.jobs.readings import Classification, Embedding
from freight.runtime.failures import no_numbers
from freight.runtime.params import SamplingParams
from freight.runtime.request import Completion

__all__ = ["BatchAnswerer"]

Batch = dict[str, npt.NDArray[Any]]
Answer = Completion | Embedding | Classification

_LOG_PROBABILITIES: Final = ("logprobs", "prompt_logprobs")
_OWN: Final = {own.name for own in fields(SamplingParams)} - {"n", *_LOG_PROBABILITIES}
"""What a row may set for itself; the others change what columns an answer has."""
_WHOLE: Final = {own.name for own in fields(SamplingParams) if isinstance(own.default, int)}


class BatchAnswerer:
    """A model that answers batches. ``model`` and ``machine`` are what ``LLM`` takes; the model is
    wanted on every machine, and ``cpu_memory`` is for each actor. ``params`` are the names and
    values of ``SamplingParams``, for rows that have no column of that name.

    A row's seed is its column ``seed``, or is derived of its prompt: it follows neither from the
    batch that it is in nor from the actor. Raises InputError for log-probabilities, which have no
    column.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        params: Mapping[str, Any] | None = None,
        **machine: Any,
    ) -> None:
        self._params = SamplingParams(**(params or {}))
        wanted = [name for name in _LOG_PROBABILITIES if getattr(self._params, name) is not None]
        if wanted:
            raise InputError(
                f"{', '.join(wanted)} was asked for in batches of Ray.",
                "A batch has one column for each thing that an answer has, and none for these.",
                "Leave it out, or run the rows as a file.",
            )
        self._llm = LLM(model, **machine)
        if params and self._llm.makes != "answers":
            raise InputError(
                f"{', '.join(params)} was given for rows of a model that makes {self._llm.makes}.",
                "No token is chosen of it.",
                "Leave the parameters out.",
            )

    def __call__(self, batch: Batch) -> Batch:
        """The batch with ``text``, ``prompt_tokens``, ``completion_tokens``, ``finish_reason`` and
        ``error`` beside its columns, and ``texts`` where ``n`` is above 1. Of a model that embeds,
        with ``embedding``, ``prompt_tokens`` and ``error``, of one that labels with ``label``,
        ``probs``, ``score`` (a reward) and ``logits`` in place of an embedding; each is None where
        the row has none.

        Rows have a ``prompt``, text or token ids, or ``messages``. One that cannot be answered has
        the reason as its ``error``, which is empty for all others.
        """
        kind = "prompt" if "prompt" in batch else "messages"
        if kind not in batch:
            raise InputError(
                f"A batch with the columns {', '.join(batch) or 'none'} was given.",
                "A row has a prompt or messages.",
                "Rename the column, with rename_columns.",
            )
        rows = [_plain(value) for value in batch[kind]]
        own = {name: [_plain(value) for value in batch[name]] for name in _OWN & batch.keys()}
        settings = [{name: own[name][index] for name in own} for index in range(len(rows))]
        answers: list[Answer | None]
        errors = [""] * len(rows)
        try:
            answers = [*self._answer(kind, rows, settings)]
        except InputError:
            errors = [self._problem(kind, *row) for row in zip(rows, settings, strict=True)]
            answers = self._answer_others(kind, rows, settings, errors)
        columns = self._columns if self._llm.makes == "answers" else self._read_columns
        return {**batch, **columns(answers, errors)}

    def _answer(self, kind: str, rows: list[Any], settings: list[dict[str, Any]]) -> Any:
        """Answers in order, as they come; refused before anything runs."""
        if self._llm.makes != "answers":
            read = self._llm.embed if self._llm.makes == "embeddings" else self._llm.classify
            return read(rows if kind == "prompt" else [{kind: row} for row in rows])
        params = [self._own(row, setting) for row, setting in zip(rows, settings, strict=True)]
        return (self._llm.generate if kind == "prompt" else self._llm.chat)(rows, params)

    def _own(self, row: Any, setting: Mapping[str, Any]) -> SamplingParams:
        given = {name: _number(name, value) for name, value in setting.items()}
        given = {name: value for name, value in given.items() if value is not None}
        text = f"{self._params.seed}/{json.dumps(row)}"
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        return replace(self._params, **{"seed": int.from_bytes(digest), **given})

    def _problem(self, kind: str, row: Any, setting: dict[str, Any]) -> str:
        """Why a row cannot be answered; empty where it can."""
        try:
            self._answer(kind, [row], [setting])
        except InputError as error:
            return _reason(error)
        return ""

    def _answer_others(
        self, kind: str, rows: list[Any], settings: list[dict[str, Any]], errors: list[str]
    ) -> list[Answer | None]:
        good = [index for index, error in enumerate(errors) if not error]
        found = self._answer(
            kind, [rows[index] for index in good], [settings[index] for index in good]
        )
        answers: list[Answer | None] = [None] * len(rows)
        for index, answer in zip(good, found, strict=True):
            answers[index] = answer
        return answers

    def _read_columns(self, answers: list[Any], errors: list[str]) -> Batch:
        names: tuple[str, ...] = ("label", "probs", "score", "logits")
        names = ("embedding",) if self._llm.makes == "embeddings" else names
        found = {name: _objects([getattr(own, name, None) for own in answers]) for name in names}
        return {
            **found,
            "prompt_tokens": _counts(answers, "num_prompt_tokens"),
            "error": _texts(errors),
        }

    def _columns(self, answers: list[Any], errors: list[str]) -> Batch:
        failure = _reason(no_numbers("The row was computed."))
        errors = [
            failure if answer and answer.has_failed else error
            for answer, error in zip(answers, errors, strict=True)
        ]
        found = {
            "text": _texts([answer.text if answer else "" for answer in answers]),
            "prompt_tokens": _counts(answers, "num_prompt_tokens"),
            "completion_tokens": _counts(answers, "num_new_tokens"),
            "finish_reason": _texts(
                [str(answer.finish_reason) if answer else "error" for answer in answers]
            ),
            "error": _texts(errors),
        }
        if self._params.n > 1:
            found["texts"] = _objects(
                [[output.text for output in answer.outputs] if answer else [] for answer in answers]
            )
        return found


def _texts(values: list[str]) -> npt.NDArray[Any]:
    return np.array(values, dtype=object)


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    """A column of arrays or lists, which numpy would take for more dims."""
    found = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        found[index] = value
    return found


def _counts(answers: list[Any], name: str) -> npt.NDArray[Any]:
    return np.array([getattr(answer, name) if answer else 0 for answer in answers], dtype=np.int64)


def _plain(value: Any) -> Any:
    """As Python has it: numbers and arrays of numpy, and lists of such."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(part) for part in plain] if isinstance(plain, list) else plain


def _number(name: str, value: Any) -> Any:
    """A column that some rows have nothing in holds floating point numbers, and not-a-number."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if name in _WHOLE and value.is_integer() else value


def _reason(error: FreightError) -> str:
    return f"{error.asked} {error.limit} {error.advice}"
