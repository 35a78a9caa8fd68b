"""What is read of a row's last token, as people get it: embeddings, and scores of labels.

Knows no files, no engine and no row but what it may ask of its own answer.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from freight.errors import InputError
from freight.jobs.json_values import read_integer
from freight.model.readout import PROBLEMS, Readout
from freight.runtime.request import Completion, SamplingParams, Vector

__all__ = [
    "READING",
    "Classification",
    "Embedding",
    "Form",
    "Reading",
    "read_completion",
    "reading_record",
]

_ENCODINGS: Final = ("float", "base64")
_FORM_KEYS: Final = ("dimensions", "encoding_format")
"""What a row may say of its embedding."""
READING: Final = SamplingParams(max_tokens=1)
"""Of a row whose last token is read: that stands where a new one would be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How an embedding is given: its first ``dimensions`` alone (None: all), as a list of numbers
    ("float") or as its bytes in base64, float32, the lowest first, by the names of OpenAI's API.
    Raises InputError for what is neither."""

    dimensions: int | None = None
    encoding_format: str = "float"

    def __post_init__(self) -> None:
        own = self.dimensions
        if own is not None and (type(own) is not int or own < 1):
            raise InputError(
                f"dimensions={own!r} was given.",
                "It must be a whole number, at least 1.",
                "Raise it, or leave it out for all.",
            )
        if self.encoding_format not in _ENCODINGS:
            raise InputError(
                f"encoding_format={self.encoding_format!r} was given.",
                f"It is one of {', '.join(_ENCODINGS)}.",
                "Use one of these.",
            )

    @property
    def description(self) -> str:
        """In words for people."""
        own = "all" if self.dimensions is None else self.dimensions
        return f"{own} dimensions, as {self.encoding_format}"

    def stated(self, readout: Readout, size: int) -> Form:
        """With those dimensions that the model's files say, where no others were asked for."""
        if self.dimensions is not None or readout.dimensions is None:
            return self
        return replace(self, dimensions=min(readout.dimensions, size))

    def check(self, size: int) -> None:
        """Refuse more dimensions than the model's."""
        if self.dimensions is not None and self.dimensions > size:
            raise InputError(
                f"dimensions={self.dimensions} was given.",
                f"The model's embeddings have {size}.",
                "Ask for fewer, or leave it out for all.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How rows of a job are read whose model has a ``readout``: ``size`` numbers each, given in
    this ``form`` where a row asks for no other."""

    readout: Readout
    size: int
    form: Form

    @property
    def keys(self) -> tuple[str, ...]:
        """What a row may say of it."""
        return () if self.readout.labels else _FORM_KEYS

    def of_row(self, record: Mapping[str, Any]) -> Form:
        """What a row asks of its answer. InputError for what cannot be."""
        if record.get("continuation") is not None:
            raise InputError(
                f'It has a "continuation", and the model makes {self.readout.name}.',
                "Of a row the last token is read, and none is scored.",
                "Write it behind the text, or leave it out.",
            )
        given = {name: record[name] for name in self.keys if record.get(name) is not None}
        if "dimensions" in given:
            given["dimensions"] = read_integer("dimensions", given["dimensions"])
        own = replace(self.form, **given) if given else self.form
        own.check(self.size)
        return own

    def refuse_longer(self, num_tokens: int) -> None:
        """InputError for a text with more tokens than the model's makers read."""
        most = self.readout.most_tokens
        if most is not None and num_tokens > most:
            raise InputError(
                f"The text has {num_tokens} tokens"
                + (", with the model's prompt before it." if self.readout.prompt else "."),
                f"By the model's files no more than {most} are read: what is behind them would be "
                "cut off by its makers.",
                "Shorten the text, or give token ids, which are read as they are.",
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedding:
    """The ``embedding`` [n] of a row, in float32; ``index`` is its place in the dataset."""

    index: int
    num_prompt_tokens: int
    embedding: Vector


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Classification:
    """A number for each of the model's ``labels``, as its head makes them: ``logits`` [n], in
    float32.

    ``probs`` [n] are what these say where the model was trained to tell labels apart (by softmax;
    by sigmoid, each for itself, where a row may have several), else None; ``label`` is the
    likeliest where a row has one. A reward is the one number of ``logits``, and its ``score``.
    """

    index: int
    num_prompt_tokens: int
    labels: tuple[str, ...]
    logits: Vector
    probs: Vector | None
    label: str | None
    score: float | None


def read_completion(
    completion: Completion, readout: Readout, form: Form
) -> Embedding | Classification:
    """The answer that a model with this readout has given."""
    vector = completion.vector
    assert vector is not None, "the model has no readout"
    own: dict[str, Any] = {
        "index": completion.index,
        "num_prompt_tokens": completion.num_prompt_tokens,
    }
    if not readout.labels:
        return Embedding(**own, embedding=_embedding(vector, readout, form))
    probs = _probabilities(vector, readout.problem)
    has_one = readout.problem == PROBLEMS[1]
    label = readout.labels[int(np.argmax(vector))] if has_one else None
    return Classification(
        **own,
        labels=readout.labels,
        logits=vector,
        probs=probs,
        label=label,
        score=_numbers(vector)[0] if readout.is_reward else None,
    )


def reading_record(
    answer: Embedding | Classification, form: Form, *, is_named: bool
) -> dict[str, Any]:
    """What an answer is in JSON, without the row's name and its tokens: with probabilities by the
    labels that they are of, and a reward by itself, or where these are not ``is_named`` as lists
    in the order of the labels alone."""
    if isinstance(answer, Embedding):
        if form.encoding_format == "base64":
            raw = answer.embedding.astype("<f4").tobytes()
            return {"embedding": base64.b64encode(raw).decode()}
        return {"embedding": _numbers(answer.embedding)}
    record: dict[str, Any] = {} if answer.label is None else {"label": answer.label}
    record |= {"score": answer.score} if is_named and answer.score is not None else {}
    if answer.probs is not None:
        probs = _numbers(answer.probs)
        record["probs"] = dict(zip(answer.labels, probs, strict=True)) if is_named else probs
    return {**record, "logits": _numbers(answer.logits)}


def _embedding(vector: Vector, readout: Readout, form: Form) -> Vector:
    """The first dimensions, then their length: so models that may be cut were trained."""
    part = vector[: form.dimensions].astype(np.float64)
    length = np.linalg.norm(part) if readout.is_unit else 1.0
    return (part / max(float(length), 1e-12)).astype(np.float32)


def _probabilities(logits: Vector, problem: str) -> Vector | None:
    wide = logits.astype(np.float64)
    if problem == PROBLEMS[1]:
        odds = np.exp(wide - wide.max())
        return np.asarray(odds / odds.sum(), dtype=np.float32)
    if problem == PROBLEMS[2]:
        return np.asarray((1 + np.tanh(wide / 2)) / 2, dtype=np.float32)  # never too large
    return None


def _numbers(vector: Vector) -> list[float]:
    """As few digits as tell each float32 from its neighbours."""
    return [float(str(number)) for number in vector]
