"""What an answer must look like: JSON of a schema, a regular expression, some texts, a grammar.

Plain values by vLLM's names, and OpenAI's ``response_format`` in their words. What they allow is
llguidance's business: it reads the grammar that is made of them here, and says what is wrong with
it. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final, Self

from freight.errors import InputError

__all__ = ["StructuredOutputs", "from_response_format"]

_KEPT_GRAMMARS: Final = 256
_WHITESPACE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Of JSON: as ``json.dumps`` writes it. Where any would do, tokens are spent on it, and a weak
model may write nothing else. A schema's own "x-guidance" goes before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """One of them is set: ``json`` is a schema as text, ``json_object`` any object, ``regex`` is
    Rust's syntax for the whole answer, ``choice`` the answers that there are, ``grammar`` in
    llguidance's kind of Lark."""

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    @classmethod
    def of(cls, value: object) -> Self | None:
        """Of {"json": ...} and its like, checked. None for None, and where nothing is set: null, or
        a "json_object" that is false."""
        if value is None or isinstance(value, cls):
            return value
        names = [own.name for own in fields(cls)]
        if not isinstance(value, Mapping) or set(value) - set(names):
            raise _refuse(value, f"It must be an object with one of {', '.join(names)}")
        given = {
            name: own
            for name, own in value.items()
            if own is not None and not (name == "json_object" and own is False)
        }
        if len(given) > 1:
            raise _refuse(value, f"It must be one of {', '.join(names)}, not {' and '.join(given)}")
        if not given:
            return None
        ((name, own),) = given.items()
        if name == "json" and isinstance(own, Mapping):
            own = json.dumps(own)
        if name == "choice" and isinstance(own, list | tuple):
            own = tuple(own)
        structure = cls(**{name: own})
        structure._check(name, own)
        return structure

    def as_mapping(self) -> dict[str, Any]:
        """What ``of`` makes an equal value of."""
        values = ((own, getattr(self, own.name)) for own in fields(self))
        return {own.name: value for own, value in values if value != own.default}

    def _check(self, name: str, own: Any) -> None:
        kinds = {"json_object": bool, "choice": tuple}
        is_fine = isinstance(own, kinds.get(name, str)) and bool(own)
        if name == "choice" and is_fine:
            is_fine = all(isinstance(text, str) and text for text in own)
        if not is_fine:
            raise _refuse({name: own}, f'Its "{name}" must be {_WANTED[name]}')
        wrong = _wrong_with(self)
        if wrong:
            raise InputError(
                f"structured_outputs asks for {name}={_short(own)}.",
                f"llguidance cannot use it: {wrong}.",
                "Correct it, or use less of what its language offers.",
            )

    def grammar_text(self) -> str:
        """As llguidance reads it."""
        from llguidance import LLMatcher

        if self.json is not None:
            return str(LLMatcher.grammar_from_json_schema(self.json, defaults=_WHITESPACE))
        if self.json_object:
            text = json.dumps({"type": "object"})
            return str(LLMatcher.grammar_from_json_schema(text, defaults=_WHITESPACE))
        if self.regex is not None:
            return str(LLMatcher.grammar_from_regex(self.regex))
        if self.choice:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
            return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
        return str(LLMatcher.grammar_from_lark(self.grammar or ""))


_WANTED: Final[Mapping[str, str]] = {
    "json": "an object that is a JSON schema, or one as text",
    "json_object": "true or false",
    "regex": "a regular expression",
    "choice": "a list of one or more texts, none of them empty",
    "grammar": "a Lark grammar",
}


@lru_cache(maxsize=_KEPT_GRAMMARS)
def _wrong_with(structure: StructuredOutputs) -> str:
    """In a line; empty where nothing is."""
    from llguidance import LLMatcher

    if structure.json is not None:
        try:
            json.loads(structure.json)
        except (ValueError, RecursionError) as error:
            return f"it is no JSON: {error}"
    try:
        told = str(LLMatcher.validate_grammar(structure.grammar_text()))
    except ValueError as error:
        told = str(error)
    return "" if told.startswith("WARNING") else " ".join(told.split()).rstrip(".")


def from_response_format(value: object) -> dict[str, Any]:
    """What OpenAI's ``response_format`` asks for, in vLLM's words; nothing where it is text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    named = value.get("json_schema") if isinstance(value, Mapping) else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if kind == "json_schema" and isinstance(schema, Mapping):
        return {"json": dict(schema)}
    raise InputError(
        f"response_format={_short(value)} was given.",
        'It must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"schema": {...}}}.',
        "Write it like one of these.",
    )


def _refuse(value: object, limit: str) -> InputError:
    return InputError(
        f"structured_outputs={_short(value)} was given.",
        f"{limit}.",
        'Write it like {"json": {"type": "object"}} or {"choice": ["yes", "no"]}.',
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
