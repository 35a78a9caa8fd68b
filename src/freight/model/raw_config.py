"""Typed picks out of a raw config.json, with everything that is wrong collected on the way.

Knows JSON types and ``Key``; knows nothing of models. A pick that fails returns a placeholder, so
that all problems come out together; whoever picks must look at ``problems`` before use.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from freight.model.families import Key

__all__ = ["RawConfig"]

_T = TypeVar("_T")


def _is_number(value: object) -> bool:
    # The comparison is false for NaN, and exact for whole numbers that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


class RawConfig:
    """One JSON object; ``place`` names it in messages, ``problems`` grows with each bad pick."""

    def __init__(self, raw: Mapping[str, Any], problems: list[str], place: str = "") -> None:
        self.raw = raw
        self.problems = problems
        self.place = f"{place}." if place else ""

    def pick(self, key: Key) -> Any:
        """The value as JSON has it, or the key's default."""
        for name in key.names:
            if name in self.raw and (self.raw[name] is not None or key.null_is_value):
                return self.raw[name]
        if key.required:
            self.problems.append(f"{self.place}{key.names[0]} is missing")
        return key.default

    def count(self, key: Key) -> int | None:
        """A whole number; None where the key is absent or null and has no default."""
        value = self.pick(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
            return value
        return self._wrong(key, value, "a whole number", None)

    def number(self, key: Key) -> float | None:
        """A finite number; None where the key is absent or null and has no default."""
        value = self.pick(key)
        if value is None:
            return None
        if _is_number(value):
            return float(value)
        return self._wrong(key, value, "a number", None)

    def flag(self, key: Key) -> bool:
        """True or false."""
        value = self.pick(key)
        return value if isinstance(value, bool) else self._wrong(key, value, "true or false", False)

    def text(self, key: Key) -> str:
        """A string."""
        value = self.pick(key)
        return value if isinstance(value, str) else self._wrong(key, value, "a string", "")

    def numbers(self, key: Key) -> tuple[float, ...]:
        """A list of numbers; empty where the key is absent."""
        values = self.pick(key)
        if values is None:
            return ()
        if isinstance(values, list) and all(_is_number(value) for value in values):
            return tuple(float(value) for value in values)
        return self._wrong(key, values, "a list of numbers", ())

    def _wrong(self, key: Key, value: object, wanted: str, placeholder: _T) -> _T:
        self.problems.append(f"{self.place}{key.names[0]} is {value!r}, it must be {wanted}")
        return placeholder
