"""What OpenAI's API calls differently, in the words of a row: names, and the lines of a batch file.

A line of a batch file is {"custom_id": ..., "url": ..., "body": {...}}, and its body a row. The
shape of the answer is made in ``batch_rows``. Knows no values of parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from freight.errors import InputError
from freight.jobs.json_values import kind_of, wrong_kind
from freight.model.readout import Readout
from freight.model.task import refuse_other
from freight.runtime.structured_outputs import from_response_format

__all__ = [
    "Batch",
    "is_envelope",
    "is_without_effect",
    "one_prompt",
    "open_envelope",
    "refuse_nameless",
    "rename",
    "suspicion",
]

Batch = Mapping[str, str]
"""What a line of a batch file wants to be answered as: its "kind", chat, text, embedding or
classes, and "model"."""

_KINDS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/embeddings": "embedding",
    "/classify": "classes",
    "/v1/classify": "classes",
}
_TASKS: Final[Mapping[str, str]] = {
    "chat": "generate",
    "text": "generate",
    "embedding": "embed",
    "classes": "classify",
}
"""What a model is run for that answers each kind."""
_PROMPTS: Final[Mapping[str, str]] = {
    "chat": "messages",
    "text": "prompt",
    "embedding": "input",
    "classes": "input",
}
"""What a body of each kind has, and none of the others."""
_GIVEN: Final = {*_PROMPTS.values()}
_NOTHING: Final[tuple[object, ...]] = (None, False, [], {}, "")
_NOT_OFFERED: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "echo": _NOTHING,
    "suffix": _NOTHING,
    "stream": _NOTHING,
    "add_generation_prompt": (None, True),
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
    "best_of": (None, 1),
    "continue_final_message": _NOTHING,
    "dry_multiplier": (None, 0),
    "include_stop_str_in_output": _NOTHING,
    "length_penalty": (None, 1),
    "logits_processors": _NOTHING,
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "reasoning_effort": _NOTHING,
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": _NOTHING,
    "typical_p": (None, 1),
    "use_beam_search": _NOTHING,
}
"""Parameters of other servers that change answers, with the values by which they change none."""
_MEANT: Final[Mapping[str, str]] = {
    "do_sample": "temperature",
    "max_new_token": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
}
"""Other libraries' names for what a row says by its own."""
_STRUCTURES: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older names of vLLM's for one kind of structured outputs each."""
_RENAMED: Final = ("max_completion_tokens", "response_format", "top_logprobs")
"""OpenAI's names that ``rename`` knows."""
_OF_SERVICES: Final = frozenset(
    (
        *(
            "model",
            "user",
            "metadata",
            "store",
            "service_tier",
            "prediction",
            "parallel_tool_calls",
        ),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream_options"),
        *("request_id", "priority", "cache_salt"),
    )
)
"""Keys of a batch body that change no answer, whatever they are."""
_USUAL: Final[Mapping[str, tuple[object, ...]]] = {
    "id": (None,),
    "continuation": (None,),
    "add_special_tokens": (None,),
    "modalities": (None, ["text"]),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "verbosity": (None, "medium"),
}
"""Others, with the values that change none."""
_NOT_OF_ROWS: Final = frozenset((*_USUAL, *_OF_SERVICES, *_NOT_OFFERED))


def is_envelope(record: Mapping[str, Any]) -> bool:
    """Whether a line is one of a batch file: rows of other files may have a custom_id, too."""
    return isinstance(record.get("custom_id"), str) and not _GIVEN & set(record)


def refuse_nameless(record: Mapping[str, Any]) -> None:
    """InputError for what would be a line of a batch file, had it a string as custom_id."""
    found = [key for key in ("custom_id", "body", "method", "url") if record.get(key) is not None]
    # Datasets of web pages have a url, too: one key alone tells nothing.
    is_likely = len(found) > 1 or isinstance(record.get("body"), dict)
    if _GIVEN & set(record) or not is_likely:
        return
    custom_id = record.get("custom_id")
    wrong = 'no "custom_id"' if custom_id is None else f'its "custom_id" is {kind_of(custom_id)}'
    raise InputError(
        f'It has "{found[-1]}", as lines of batch files do, and {wrong}.',
        "Such a line is known by a string there.",
        'Give it one, like "custom_id": "row-1".',
    )


def open_envelope(
    record: Mapping[str, Any], row_keys: Collection[str], readout: Readout | None = None
) -> tuple[Batch, dict[str, Any]]:
    """What a batch line wants, and of its body what a row reads, by ``row_keys`` or by OpenAI's
    names. A body has no columns of its own: other keys are refused. Raises ``InputError``, also for
    what a model with this ``readout`` does not make."""
    known = {*row_keys} - {"id", "prompt"}
    if readout is None:
        known = {*row_keys, *_RENAMED, *_STRUCTURES} - {"id", "continuation"}
    url, body = record.get("url"), record.get("body")
    if not isinstance(body, dict):
        raise wrong_kind("body", body, "an object")
    kind = _KINDS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise InputError(
            f'Its "url" is {url if isinstance(url, str) else kind_of(url)}.',
            f"Freight answers {', '.join(_KINDS)}.",
            "Leave other requests out.",
        )
    asked = f'Its "url" is {url}.'
    refuse_other(readout, _TASKS[kind], asked, spare="leave such lines out")
    wanted = _PROMPTS[kind]
    if readout is not None and body.get("messages") is not None:
        wanted = "messages"
    if body.get(wanted) is None or any(body.get(own) for own in _GIVEN - {wanted}):
        raise InputError(asked, f'Such a body has "{wanted}".', f'Give it "{wanted}" alone.')
    for name, value in body.items():
        if name not in known and not _is_of_others(name, value, kind):
            raise _nothing_like(name, known)
    if body.get("top_logprobs") is not None and body.get("logprobs") is not True:
        raise InputError(
            'It has "top_logprobs" and not "logprobs": true.',
            "The one says how many the other has.",
            "Set logprobs, or leave top_logprobs out.",
        )
    model = body.get("model")
    batch = {"kind": kind, "model": model if isinstance(model, str) else ""}
    row = {key: value for key, value in body.items() if key not in _NOT_OF_ROWS}
    return batch, {**row, "prompt": one_prompt(wanted, row["prompt"])} if kind == "text" else row


def _is_of_others(name: str, value: object, kind: str) -> bool:
    """Whether a key that is of no row may be in a batch body."""
    if name == "add_special_tokens" and value is (kind != "chat"):
        return True
    return name in _OF_SERVICES or value in _USUAL.get(name, ()) or is_without_effect(name, value)


def _nothing_like(name: str, known: Iterable[str]) -> InputError:
    meant = None if name in _NOT_OFFERED else _meant(name, known)
    advice = f"Leave {name} out." if meant is None else f"Leave {name} out, or call it {meant}."
    return InputError(f'Its "{name}" is set.', "Freight has nothing like it.", advice)


def one_prompt(name: str, prompt: object) -> object:
    """The prompt itself of a list of one, as it may also be given by OpenAI's API."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return prompt
    if len(prompt) > 1:
        raise InputError(
            f'Its "{name}" is a list of {len(prompt)} {"texts" if name == "input" else "prompts"}.',
            "A request is answered for one.",
            "Write a line for each of them.",
        )
    return prompt[0]


def rename(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with ``max_completion_tokens`` as ``max_tokens``, with OpenAI's two fields for
    a chat's log-probabilities as Freight's one, and ``response_format`` as what it asks for."""
    renamed = _with_structure(record)
    most = renamed.pop("max_completion_tokens", None)
    if most is not None:
        if renamed.get("max_tokens") not in (None, most):
            raise InputError(
                'It has "max_tokens" and "max_completion_tokens".',
                "Both bound the answer, and they differ.",
                "Leave one of them out.",
            )
        renamed["max_tokens"] = most
    if renamed.get("messages") is not None and isinstance(renamed.get("logprobs"), bool):
        top = renamed.pop("top_logprobs", None)
        renamed["logprobs"] = (0 if top is None else top) if renamed["logprobs"] else None
    return renamed


def _with_structure(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with everything that says what an answer must look like under one name."""
    renamed, asked = dict(record), {}
    for name in ("structured_outputs", "response_format", *_STRUCTURES):
        value = renamed.pop(name, None)
        if value is None:
            continue
        if name == "response_format":
            value = from_response_format(value)
        asked[name] = {_STRUCTURES[name]: value} if name in _STRUCTURES else value
    found = [*asked.values()]
    if any(value != found[0] for value in found):
        raise InputError(
            f"It has {' and '.join(asked)}.",
            "Each says what the answer must look like, and they differ.",
            "Leave all but one of them out.",
        )
    return {**renamed, "structured_outputs": found[0]} if found else renamed


def is_without_effect(name: str, value: object) -> bool:
    """Whether a key that nothing reads would change nothing where it is read."""
    return value is None or value in _NOT_OFFERED.get(name, _NOTHING if name in _MEANT else ())


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The parameter that a key which nothing reads was probably to be."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return _MEANT.get(name, close[0] if close else None)


def suspicion(name: str, known: Iterable[str]) -> str | None:
    """What is wrong with a key that nothing reads, if it was probably meant as a parameter: it is
    misspelt, or one of other servers. Datasets have columns of their own, of which nothing is
    said."""
    if name in _NOT_OFFERED:
        return f"{name} (Freight has nothing like it)"
    meant = _meant(name, known)
    return None if meant is None else f"{name} (did you mean {meant}?)"
