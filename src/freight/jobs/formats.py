"""The lines of a dataset: what an input row may say, and how an output row is written.

Knows no tokenizer, no engine and no files. A row that cannot be used becomes a ``Row`` with an
``error``; it never stops the rows beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freight.errors import InputError
from freight.jobs.api_names import (
    Batch,
    is_envelope,
    is_without_effect,
    one_prompt,
    open_envelope,
    refuse_nameless,
    rename,
)
from freight.jobs.chats import read_messages, read_template_values
from freight.jobs.json_values import (
    kind_of,
    read_biases,
    read_flag,
    read_ids,
    read_integer,
    read_number,
    read_object,
    read_texts,
    refuse_broken_text,
    wrong_kind,
)
from freight.jobs.readings import Form, Reading, read_completion, reading_record
from freight.runtime.request import Completion, CompletionOutput, Logprob, SamplingParams

__all__ = [
    "ROW_KEYS",
    "Row",
    "RowId",
    "RowLimits",
    "completion_row",
    "dump_row",
    "error_row",
    "fit_max_tokens",
    "load_record",
    "logprob_record",
    "parse_row",
    "prompt_logprobs_record",
    "reading_row",
    "row_keys",
    "score_row",
]

RowId = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """What the model can take: positions of prompt and answer together, rows of the embedding, and
    where it has no tokenizer, why it takes no text. With a ``reading`` nothing is generated."""

    max_positions: int
    vocab_size: int
    why_no_text: str = "The model has no tokenizer."
    reading: Reading | None = None

    @property
    def noun(self) -> str:
        """What people call that which a row gives."""
        return "prompt" if self.reading is None else "text"

    def too_long(self, length: str) -> InputError:
        """What to raise where a row has more tokens than positions."""
        return InputError(
            f"The {self.noun} has {length}.",
            f"The model has {self.max_positions} positions"
            f"{', one of them for an answer' if self.reading is None else ''}.",
            f"Shorten the {self.noun}.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One input row. Of ``text``, ``token_ids``, ``messages`` and ``error`` exactly one is set.

    ``template_values`` are what the chat template of ``messages`` is given beside them.
    ``continuation`` is to be scored behind them, text behind text and token ids behind token ids.
    ``row_id`` is ``None`` where the row has none of its own; ``overrides`` are the fields of
    ``SamplingParams`` that the row sets for itself, ``unread`` the keys that mean nothing here.
    ``batch`` is set where the row is a line of a batch file, and empty where such a line has an
    error; ``form`` where it asks for another than the job's. ``is_foreign`` is said of an error in
    what no row is, and a line of a batch file may be.
    """

    row_id: RowId | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict)
    continuation: str | Sequence[int] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    batch: Batch | None = None
    form: Form | None = None
    is_foreign: bool = False
    unread: Sequence[str] = ()


def parse_row(
    line: bytes, *, where: str, defaults: SamplingParams, reading: Reading | None = None
) -> Row:
    """Read one line of JSONL. ``where`` ("Line 7 of data.jsonl") opens the text of an error.

    Keys that are null count as absent, and keys that are not ours belong to the user.
    """
    keys = row_keys(reading)
    row_id: RowId | None = None
    batch: Batch | None = None
    is_foreign = True
    try:
        record: Mapping[str, Any] = load_record(line)
        if is_envelope(record):
            batch, row_id = {}, _read_id("custom_id", record["custom_id"])
            batch, record = open_envelope(
                record, keys, None if reading is None else reading.readout
            )
        else:
            row_id = _own_id(record)
            refuse_nameless(record)
        is_foreign = False
        record = rename(record) if reading is None else record
        unread = [
            key
            for key, value in record.items()
            if key not in keys and not is_without_effect(key, value)
        ]
        if reading is not None:
            own, form = _read_prompt(record, is_read=True), reading.of_row(record)
            changed = None if form == reading.form else form
            return replace(own, row_id=row_id, form=changed, batch=batch, unread=unread)
        if record.get("continuation") is not None:
            return replace(_read_pair(record), row_id=row_id, unread=unread)
        overrides = _read_overrides(record, defaults)
        row = _read_prompt(record)
        return replace(row, row_id=row_id, overrides=overrides, batch=batch, unread=unread)
    except RecursionError:
        why = str(_too_deep())
    except InputError as error:
        why = str(error)
    return Row(row_id=row_id, error=f"{where}: {why}", batch=batch, is_foreign=is_foreign)


def fit_max_tokens(num_prompt_tokens: int, max_tokens: int, limits: RowLimits) -> int:
    """``max_tokens``, lowered to the positions that the prompt leaves. What is read of the last one
    needs none."""
    room = limits.max_positions - num_prompt_tokens + (limits.reading is not None)
    if num_prompt_tokens < 1:
        raise InputError(
            f"The {limits.noun} is empty.",
            "The model needs at least one token.",
            "Put text into it.",
        )
    if room < min(1, max_tokens):
        raise limits.too_long(f"{num_prompt_tokens} tokens")
    return min(max_tokens, room)


def completion_row(row_id: RowId, completion: Completion) -> bytes:
    """The output row of an answer, without its newline.

    One answer is spread out in the row itself; several are in its "outputs".
    """
    record: dict[str, Any] = {"id": row_id}
    outputs = [_output(output) for output in completion.outputs]
    if len(outputs) == 1:
        record |= {"text": completion.text, "prompt_tokens": completion.num_prompt_tokens}
        record |= outputs[0]
    else:
        record["prompt_tokens"] = completion.num_prompt_tokens
        record["completion_tokens"] = completion.num_new_tokens
        record["outputs"] = outputs
    if completion.prompt_logprobs is not None:
        record["prompt_logprobs"] = prompt_logprobs_record(completion.prompt_logprobs)
    return dump_row(record)


def score_row(row_id: RowId, completion: Completion, *, num_cut: int) -> bytes:
    """The output row of a continuation that was scored, without its newline. Where the row was too
    long for the model it says how many tokens it lost at its beginning."""
    record: dict[str, Any] = {
        "id": row_id,
        "logprob": _rounded(completion.log_likelihood),
        "is_greedy": completion.is_greedy,
        "num_tokens": len(completion.scored),
    }
    return dump_row({**record, "num_cut": num_cut} if num_cut else record)


def reading_row(row_id: RowId, completion: Completion, reading: Reading, form: Form) -> bytes:
    """The output row of what was read of a prompt's last token, without its newline."""
    answer = read_completion(completion, reading.readout, form)
    own = reading_record(answer, form, is_named=True)
    return dump_row({"id": row_id, **own, "prompt_tokens": completion.num_prompt_tokens})


def row_keys(reading: Reading | None) -> frozenset[str]:
    """The keys of a row that mean something."""
    if reading is None:
        return ROW_KEYS
    return frozenset(("id", "prompt", "input", "messages", "chat_template_kwargs", *reading.keys))


def _output(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
    }
    if output.logprobs is not None:
        record["cumulative_logprob"] = _rounded(output.cumulative_logprob or 0.0)
        record["logprobs"] = {"content": [logprob_record(item) for item in output.logprobs]}
    return record


def logprob_record(item: Logprob) -> dict[str, Any]:
    """The shape that OpenAI gives it in chats, and the token's id beside its text."""
    return {**_token(item), "top_logprobs": [_token(other) for other in item.top]}


def prompt_logprobs_record(items: Sequence[Logprob | None]) -> list[dict[str, Any] | None]:
    """That of each token of a prompt; the first has none."""
    return [None if item is None else logprob_record(item) for item in items]


def _token(item: Logprob) -> dict[str, Any]:
    return {"token": item.text, "token_id": item.token_id, "logprob": _rounded(item.logprob)}


def _rounded(logprob: float) -> float:
    """A float32's worth of digits."""
    return round(logprob, 6)


def error_row(row_id: RowId, error: str) -> bytes:
    """The output row of a row that could not be used, without its newline."""
    return dump_row({"id": row_id, "error": error})


def dump_row(record: Mapping[str, Any]) -> bytes:
    """A line of JSON, without its newline, that every reader takes for one."""
    text = json.dumps(record, ensure_ascii=False)
    # Many readers take these for the end of a line, though JSON does not.
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    try:
        return text.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs, which an error may quote
        return json.dumps(record).encode()


def load_record(line: bytes) -> dict[str, Any]:
    """The JSON object that a line is, or why it is none."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(
            "It was read as UTF-8.",
            f"Byte {error.start + 1} of the line is not: {error.reason}.",
            "Convert the file to UTF-8.",
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise InputError(
            "It was read as JSON.", f"It is not: {error}.", "Write one JSON object per line."
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"It holds {kind_of(record)}.",
            "A row is a JSON object.",
            'Write it like {"prompt": "..."}.',
        )
    return record


def _too_deep() -> InputError:
    return InputError("It was read as JSON.", "It is nested too deeply.", "Write it flatter.")


def _own_id(record: Mapping[str, Any]) -> RowId | None:
    """The id of a row; without one what OpenAI calls it, where that can be one."""
    own, custom = record.get("id"), record.get("custom_id")
    is_usable = isinstance(custom, str | int) and not isinstance(custom, bool)
    return _read_id("custom_id", custom) if own is None and is_usable else _read_id("id", own)


def _read_id(key: str, value: object) -> RowId | None:
    if isinstance(value, str):
        refuse_broken_text(value, key)
        return value
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise wrong_kind(key, value, "a string or a whole number")


def _read_prompt(record: Mapping[str, Any], *, is_read: bool = False) -> Row:
    """A prompt or a chat; where a row's last token ``is_read`` also a text by OpenAI's name for it,
    which is a column of the user's own beside one of these."""
    given = [name for name in ("prompt", "messages") if record.get(name) is not None]
    if is_read and not given:
        given = ["input"] if record.get("input") is not None else []
    if len(given) != 1:
        listed = '"prompt" and "messages"'
        found = f"both of {listed}" if given else f"neither of {listed}"
        if is_read and not given:
            found = 'none of "prompt", "input" and "messages"'
        raise InputError(
            f"It has {found}.",
            "A row has exactly one of them.",
            'Write it like {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]}.',
        )
    (name,) = given
    values = read_template_values(record.get("chat_template_kwargs"))
    if name == "messages":
        return Row(messages=read_messages(record[name]), template_values=values)
    if values:
        raise InputError(
            f'It has "chat_template_kwargs" and {"an" if name == "input" else "a"} "{name}".',
            f"A {_NOUNS[name]} is taken as it is, and no template is filled in.",
            'Leave them out, or give "messages".',
        )
    prompt = one_prompt(name, record[name]) if name == "input" else record[name]
    if isinstance(prompt, str):
        refuse_broken_text(prompt, name)
        return Row(text=prompt)
    if isinstance(prompt, list):
        return Row(token_ids=read_ids(name, prompt))
    raise wrong_kind(name, prompt, "a string or a list of whole numbers (token ids)")


def _read_pair(record: Mapping[str, Any]) -> Row:
    """A prompt and a continuation. How tokens are chosen does not matter then."""
    if record.get("messages") is not None:
        raise InputError(
            'It has both "continuation" and "messages".',
            "A continuation is scored behind a prompt.",
            "Write the conversation as a prompt, or leave the continuation out.",
        )
    for key, most in _OF_ANSWERS.items():
        value = record.get(key)
        if value is not None and (most is None or read_integer(key, value) > most):
            raise InputError(
                f'It has a "continuation", and its "{key}" is {value}.',
                "A continuation is scored, and nothing is generated.",
                f"Leave {key} or the continuation out.",
            )
    row, continuation = _read_prompt(record), record["continuation"]
    if row.text is not None and isinstance(continuation, str):
        refuse_broken_text(row.text + continuation, "continuation")
    elif row.token_ids is not None and isinstance(continuation, list):
        read_ids("continuation", continuation)
    else:
        kind = "a string" if row.text is not None else "a list of whole numbers (token ids)"
        raise wrong_kind("continuation", continuation, f"{kind}, as its prompt is")
    if not continuation:
        raise InputError(
            "The continuation is empty.", "There is nothing to score.", "Put text into it."
        )
    return replace(row, continuation=continuation)


def _read_overrides(record: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    overrides = {
        key: read(key, value)
        for key, read in _OVERRIDES.items()
        if (value := record.get(key)) is not None
    }
    defaults.with_changes(overrides)  # refuses values out of range
    return overrides


_OF_ANSWERS: Mapping[str, int | None] = {
    "max_tokens": 0,
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
}
"""What a row with a continuation may ask for at most; nothing where that is None."""

_OVERRIDES: Mapping[str, Callable[[str, object], Any]] = {
    "max_tokens": read_integer,
    "n": read_integer,
    "temperature": read_number,
    "top_k": read_integer,
    "top_p": read_number,
    "min_p": read_number,
    "repetition_penalty": read_number,
    "presence_penalty": read_number,
    "frequency_penalty": read_number,
    "logit_bias": read_biases,
    "seed": read_integer,
    "stop": read_texts,
    "stop_token_ids": read_ids,
    "min_tokens": read_integer,
    "ignore_eos": read_flag,
    "logprobs": read_integer,
    "prompt_logprobs": read_integer,
    "structured_outputs": read_object,
}

_NOUNS: Mapping[str, str] = {"prompt": "prompt", "input": "text"}

ROW_KEYS = frozenset(
    ("id", "prompt", "messages", "chat_template_kwargs", "continuation", *_OVERRIDES)
)
"""The keys of a row that mean something."""
