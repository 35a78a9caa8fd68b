"""The messages of a conversation, checked before a chat template sees them.

A template puts into the prompt whatever it is given: content that comes in parts, as OpenAI's API
also takes it, would end there as Python writes a list. Knows no template and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from freight.errors import InputError
from freight.jobs.json_values import read_object, wrong_kind

__all__ = ["read_messages", "read_template_values"]

_OF_FREIGHT: Final = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "documents",
    "messages",
    "tokenize",
    "tools",
)
"""What a template is given in one way here, whatever a row says."""


def read_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    """The conversation with the text of each message in one piece; parts are joined by newlines,
    as vLLM joins them for templates that take text. Raises ``InputError``."""
    if not isinstance(messages, list) or not messages:
        expected = "a list of at least one object, each with a role and a content"
        raise wrong_kind("messages", messages, expected)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            expected = "an object with a role and a content"
            raise wrong_kind(f"messages[{index}]", message, expected)
    return [_read_message(message) for message in messages]


def read_template_values(value: object) -> Mapping[str, Any]:
    """``chat_template_kwargs``: what the row sets of the names that its model's template reads,
    like {"enable_thinking": false}. Those that are null count as absent. Raises ``InputError``."""
    given = {} if value is None else read_object("chat_template_kwargs", value)
    values = {name: own for name, own in given.items() if own is not None}
    for name in _OF_FREIGHT:
        if name in values:
            raise InputError(
                f'Its "chat_template_kwargs" set "{name}".',
                "The template is given messages alone, up to where the answer begins.",
                f"Leave {name} out.",
            )
    return values


def _read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise wrong_kind("role", role, 'a string like "user"')
    if isinstance(content, str) or (content is None and role == "assistant"):  # a call of a tool
        return message
    if not isinstance(content, list):
        raise wrong_kind("content", content, "a string or a list of parts")
    return {**message, "content": "\n".join(map(_read_part, content))}


def _read_part(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if isinstance(text, str):
        return text
    raise InputError(
        f'A part of its "content" is of type {kind!r}.'
        if kind != "text"
        else "A part has no text.",
        "The model reads text alone.",
        'Write parts like {"type": "text", "text": "..."}, and leave others out.',
    )
