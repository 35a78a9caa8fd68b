"""The messages of a conversation, checked before a chat template sees them.

A template puts into the prompt whatever it is given: content that comes in parts, as OpenAI's API
also takes it, would end there as Python writes a list. Knows no template and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freight.errors import InputError
from freight.jobs.json_values import wrong_kind

__all__ = ["read_messages"]


def read_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    """The conversation with the text of each message in one piece; parts are joined by newlines,
    as vLLM joins them for templates that take text. Raises ``InputError``."""
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return [_read_message(message) for message in messages]
    expected = "a list of at least one object, each with a role and a content"
    raise wrong_kind("messages", messages, expected)


def _read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise wrong_kind("role", role, 'a string like "user"')
    if content is None or isinstance(content, str):  # None: an assistant's call of a tool
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
