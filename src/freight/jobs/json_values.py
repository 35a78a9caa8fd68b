"""Reading values out of JSON: what kind a value is, and refusals that say so.

Knows no rows and no fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from freight.errors import InputError

__all__ = [
    "kind_of",
    "read_biases",
    "read_flag",
    "read_ids",
    "read_integer",
    "read_number",
    "read_object",
    "read_texts",
    "refuse_broken_text",
    "wrong_kind",
]


def kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"the number {value}"  # 5.0 is no whole number to everyone
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")


def wrong_kind(key: str, value: object, expected: str) -> InputError:
    return InputError(f'Its "{key}" is {kind_of(value)}.', f"It must be {expected}.", "Change it.")


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


def read_integer(key: str, value: object) -> int:
    """A whole number, also one written as 5.0: so pandas writes columns that have gaps."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise wrong_kind(key, value, "a whole number")


def read_number(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    raise wrong_kind(key, value, "a number")


def read_flag(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise wrong_kind(key, value, "true or false")


def read_object(key: str, value: object) -> Mapping[str, object]:
    if isinstance(value, dict):
        return value
    raise wrong_kind(key, value, "an object")


def read_texts(key: str, value: object) -> tuple[str, ...]:
    """A string, or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong_kind(key, value, "a string or a list of strings")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong_kind(f"{key}[{index}]", text, "a string")
        refuse_broken_text(text, key)
    return tuple(texts)


def read_ids(key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_kind(key, value, "a list of whole numbers (token ids)")
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise wrong_kind(f"{key}[{index}]", token_id, "a whole number (a token id)")
    return tuple(value)


def read_biases(key: str, value: object) -> Mapping[int, float]:
    """An object of token ids, which JSON writes as strings, with numbers."""
    if not isinstance(value, dict):
        raise wrong_kind(key, value, 'an object of token ids with numbers, like {"50256": -100}')
    biases: dict[int, float] = {}
    for token_id, bias in value.items():
        number = read_number(f"{key}[{token_id}]", bias)
        try:
            biases[int(token_id)] = number
        except ValueError as error:
            raise InputError(
                f'Its "{key}" has the key "{token_id}".',
                'Keys are token ids, like "50256".',
                "Change it.",
            ) from error
    return biases
