"""What a caller of the Python API gives, as rows in the words of a dataset.

Prompts, pairs and chats of any plain kind, and sampling parameters by either name. Knows no files
and no model.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from freight.errors import InputError
from freight.jobs.json_values import wrong_kind
from freight.runtime.request import SamplingParams
from freight.runtime.structured_outputs import StructuredOutputs

__all__ = [
    "Params",
    "Prompt",
    "Record",
    "as_items",
    "as_prompts",
    "as_texts",
    "chat_record",
    "either",
    "encode",
    "pair_record",
    "params_record",
    "prompt_record",
    "read_item",
    "read_params",
    "text_record",
]

Prompt = str | Sequence[int] | Mapping[str, Any]
OwnParams = SamplingParams | Mapping[str, Any] | None
Params = OwnParams | Sequence[OwnParams]
Record = dict[str, Any]


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    if not _are_many(prompts):
        return [_as_plain(prompts)]
    items = [_as_plain(prompt) for prompt in prompts]
    return [items] if items and all(isinstance(item, int) for item in items) else items


def as_texts(texts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Likewise of prompts and chats; the messages of one chat are no rows of their own."""
    items = as_prompts(texts)
    return [{"messages": items}] if _is_chat(items) else items


def _is_chat(item: Any) -> bool:
    is_list = isinstance(item, list | tuple) and len(item) > 0
    return is_list and all(isinstance(own, Mapping) and "role" in own for own in item)


def _are_many(given: Any) -> bool:
    """Whether it can be gone through, other than a text or a mapping, which are one."""
    is_number = getattr(given, "ndim", None) == 0  # an array's, or a tensor's
    return not (isinstance(given, str | Mapping) or is_number) and (
        hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    )


def _a_kind(value: object) -> str:
    """A float, an int."""
    name = type(value).__name__
    return f"A{'n' if name[0].lower() in 'aeiou' else ''} {name}"


def as_items(given: Any) -> list[Any]:
    """What cannot be many is one item, of which its reader says what is wrong."""
    return list(given) if _are_many(given) else [given]


def _as_plain(prompt: Any) -> Any:
    """Arrays and tensors of token ids, and their elements, as Python has them."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def params_record(params: SamplingParams) -> Record:
    """Sampling parameters in the words of a dataset."""
    structure = params.structured_outputs
    own = structure.as_mapping() if isinstance(structure, StructuredOutputs) else None
    return {**asdict(params), "structured_outputs": own}


def either(params: Params, sampling_params: Params) -> Params:
    """What was given by Freight's name or by vLLM's."""
    if params is not None and sampling_params is not None:
        raise InputError(
            "params and sampling_params were given.",
            "They are two names for one thing.",
            "Leave one of them out.",
        )
    return sampling_params if params is None else params


def read_params(
    params: Params, num_prompts: int
) -> tuple[SamplingParams, Sequence[SamplingParams | None]]:
    """What holds for all prompts, and what each of them sets for itself."""
    if not _are_many(params):
        return _as_params(params) or SamplingParams(), [None] * num_prompts
    own = [_as_params(one) for one in as_items(params)]
    if num_prompts != len(own):
        raise InputError(
            f"{num_prompts} prompts and {len(own)} sampling parameters were given.",
            "A list of parameters has one for each prompt.",
            "Give one SamplingParams for all prompts, or as many as there are prompts.",
        )
    return SamplingParams(), own


def _as_params(value: Any) -> SamplingParams | None:
    if value is None or isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            f"{_a_kind(value)} was given among the sampling parameters.",
            "They are values of SamplingParams, or mappings of its names.",
            "Write them like SamplingParams(max_tokens=64).",
        )
    names = [own.name for own in fields(SamplingParams)]
    unknown = [name for name in value if name not in names]
    if unknown:
        raise InputError(
            f"{unknown[0]!r} was given among the sampling parameters.",
            f"They are {', '.join(names)}.",
            "Write it as one of these, or leave it out.",
        )
    return SamplingParams(**value)


def prompt_record(item: Any) -> Record:
    """The row that a prompt is, in the words of a dataset."""
    if isinstance(item, str | list | tuple):
        return {"prompt": item}
    if isinstance(item, Mapping):
        ids, text = item.get("prompt_token_ids"), item.get("prompt")
        if (ids is None) != (text is None):
            return {"prompt": text if ids is None else ids}
    raise InputError(
        f"{_a_kind(item)} was given as a prompt.",
        'A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.',
        "Give one of these.",
    )


def text_record(item: Any) -> Record:
    """The row of a prompt, or of messages, whose last token is read."""
    if _is_chat(item):
        return chat_record(item)
    if not isinstance(item, Mapping):
        return prompt_record(item)
    if item.get("encoding_format") not in (None, "float"):
        raise InputError(
            f'It has the "encoding_format" {item["encoding_format"]}.',
            "Embeddings are arrays here, and not written.",
            "Leave it out, or run the rows as a file.",
        )
    is_chat = item.get("messages") is not None
    own = chat_record(item["messages"]) if is_chat else prompt_record(item)
    return {**own, "dimensions": item.get("dimensions")}


def pair_record(item: Any) -> Record:
    """The row that a context and a continuation are."""
    pair = [_as_plain(part) for part in item] if isinstance(item, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(part, str | list | tuple) for part in pair):
        raise InputError(
            f"{_a_kind(item)} was given as a pair.",
            "A pair is a context and a continuation, two texts or two lists of token ids.",
            'Write it like ("The sky is", " blue").',
        )
    return {"prompt": pair[0], "continuation": pair[1]}


def chat_record(item: Any) -> Record:
    if item is None:  # which in a row would be no messages at all
        raise wrong_kind("messages", item, "a list of objects, each with a role and a content")
    is_text = isinstance(item, str)
    return {"messages": list(item) if isinstance(item, Sequence) and not is_text else item}


def read_item(index: int, item: Any, read: Callable[[Any], Record]) -> Record:
    try:
        return read(item)
    except InputError as error:
        raise InputError(f"Prompt {index}: {error.asked}", error.limit, error.advice) from error


def encode(index: int, record: Record) -> bytes:
    try:
        return json.dumps(record, default=operator.index).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"Prompt {index} was given.",
            f"It holds something that is neither text nor number: {error}.",
            "Give plain strings, whole numbers, lists and dictionaries.",
        ) from error
