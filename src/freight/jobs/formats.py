"""The lines of a dataset: what an input row may say, and how an output row is written.

Knows no tokenizer, no engine and no files. A row that cannot be used becomes a ``Row`` with an
``error``; it never stops the rows beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freight.errors import InputError
from freight.runtime.request import Completion, SamplingParams

__all__ = [
    "Row",
    "RowId",
    "RowLimits",
    "completion_row",
    "error_row",
    "fit_max_tokens",
    "parse_row",
    "refuse_broken_text",
]

RowId = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """What the model can take: positions of prompt and answer together, rows of the embedding."""

    max_positions: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One input row. Of ``text``, ``token_ids``, ``messages`` and ``error`` exactly one is set.

    ``row_id`` is ``None`` where the row has none of its own; ``overrides`` are the fields of
    ``SamplingParams`` that the row sets for itself.
    """

    row_id: RowId | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def parse_row(line: bytes, *, where: str, defaults: SamplingParams) -> Row:
    """Read one line of JSONL. ``where`` ("Line 7 of data.jsonl") opens the text of an error.

    Keys that are null count as absent, and keys that are not ours belong to the user.
    """
    row_id: RowId | None = None
    try:
        record = _load(line)
        row_id = _read_id(record.get("id"))
        overrides = _read_overrides(record, defaults)
        return replace(_read_prompt(record), row_id=row_id, overrides=overrides)
    except InputError as error:
        return Row(row_id=row_id, error=f"{where}: {error}")


def fit_max_tokens(num_prompt_tokens: int, max_tokens: int, limits: RowLimits) -> int:
    """``max_tokens``, lowered to the positions that the prompt leaves."""
    room = limits.max_positions - num_prompt_tokens
    if num_prompt_tokens < 1:
        raise InputError(
            "The prompt is empty.", "The model needs at least one token.", "Put text into it."
        )
    if room < 1:
        raise InputError(
            f"The prompt has {num_prompt_tokens} tokens.",
            f"The model has {limits.max_positions} positions, one of them for an answer.",
            "Shorten the prompt.",
        )
    return min(max_tokens, room)


def completion_row(row_id: RowId, completion: Completion) -> bytes:
    """The output row of an answer, without its newline."""
    return _dump(
        {
            "id": row_id,
            "text": completion.text,
            "prompt_tokens": completion.num_prompt_tokens,
            "completion_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
    )


def error_row(row_id: RowId, error: str) -> bytes:
    """The output row of a row that could not be used, without its newline."""
    return _dump({"id": row_id, "error": error})


def _dump(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False)
    # Many readers take these for the end of a line, though JSON does not.
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def _load(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(
            "It was read as UTF-8.",
            f"Byte {error.start + 1} of the line is not: {error.reason}.",
            "Convert the file to UTF-8.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            "It was read as JSON.", f"It is not: {error}.", "Write one JSON object per line."
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"It holds {_kind(record)}.",
            "A row is a JSON object.",
            'Write it like {"prompt": "..."}.',
        )
    return record


def _read_id(value: object) -> RowId | None:
    if isinstance(value, str):
        refuse_broken_text(value, "id")
        return value
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _wrong("id", value, "a string or a whole number")


def _read_prompt(record: Mapping[str, Any]) -> Row:
    prompt, messages = record.get("prompt"), record.get("messages")
    if (prompt is None) == (messages is None):
        found = "neither" if prompt is None else "both"
        raise InputError(
            f'It has {found} of "prompt" and "messages".',
            "A row has exactly one of them.",
            'Write it like {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]}.',
        )
    if messages is not None:
        return Row(messages=_read_messages(messages))
    if isinstance(prompt, str):
        refuse_broken_text(prompt, "prompt")
        return Row(text=prompt)
    if isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
        return Row(token_ids=prompt)
    raise _wrong("prompt", prompt, "a string or a list of whole numbers (token ids)")


def _read_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return messages
    raise _wrong("messages", messages, "a list of at least one object")


def _read_overrides(record: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    overrides = {
        key: read(key, value)
        for key, read in _OVERRIDES.items()
        if (value := record.get(key)) is not None
    }
    replace(defaults, **overrides)  # refuses values out of range
    return overrides


def _read_integer(key: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(key, value, "a whole number")


def _read_number(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    raise _wrong(key, value, "a number")


def _read_stop(key: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _wrong(key, value, "a string or a list of strings")
    for text in texts:
        refuse_broken_text(text, key)
    return tuple(texts)


_OVERRIDES: Mapping[str, Callable[[str, object], Any]] = {
    "max_tokens": _read_integer,
    "temperature": _read_number,
    "top_k": _read_integer,
    "top_p": _read_number,
    "seed": _read_integer,
    "stop": _read_stop,
}


def refuse_broken_text(text: str, key: str) -> None:
    """JSON may escape half a surrogate pair, which no encoding can carry on: refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f'Its "{key}" holds half a surrogate pair at character {error.start + 1}.',
            "Such text cannot be encoded.",
            "Repair the text where it was cut.",
        ) from error


def _wrong(key: str, value: object, expected: str) -> InputError:
    return InputError(f'Its "{key}" is {_kind(value)}.', f"It must be {expected}.", "Change it.")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
