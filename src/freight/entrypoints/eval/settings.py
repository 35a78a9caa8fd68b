"""Settings: which approximations a model is evaluated with, as people write them.

Knows which key sets which field of the engine's options; what a value may be, the options say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from freight.errors import InputError

__all__ = [
    "DEFAULT_SETTINGS",
    "EXACT",
    "KEYS",
    "SETTINGS_OF_QUANTISED",
    "Key",
    "Setting",
    "parse_settings",
]

EXACT: Final = "exact"
DEFAULT_SETTINGS: Final = (
    EXACT,
    "weights=8",
    "weights=4",
    "kv=4",
    "weights=4,kv=4",
    "weights=4,kv=4,sparse=0.1",
    "weights=3",
)
SETTINGS_OF_QUANTISED: Final = (EXACT, "kv=8", "kv=4", "kv=4,sparse=0.1")
"""Of a model whose weights are in few bits already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What a key stands for: a field of ``EngineOptions``, how its value is read, and values that
    it may have, for people."""

    field: str
    read: Callable[[str], Any]
    values: str


def _read_yes(value: str) -> bool:
    if value != "yes":
        raise ValueError(value)
    return True


KEYS: Final[Mapping[str, Key]] = {
    "lossless": Key(field="lossless", read=_read_yes, values="yes"),
    "weights": Key(field="weight_bits", read=int, values="8|4|3"),
    "kv": Key(field="kv_bits", read=int, values="8|4|3"),
    "group": Key(field="group_size", read=int, values="32|64|128"),
    "dim": Key(field="group_dim", read=str, values="output|input"),
    "sparse": Key(field="sparse_attention", read=float, values="0.1"),
    "compute": Key(field="compute", read=str, values="int8"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """``fields`` of the engine's options that differ from an exact run; none for that itself."""

    name: str
    fields: Mapping[str, Any]


def parse_settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Settings like "exact" and "weights=4,group=32", each once; the default ones for none."""
    settings = tuple(map(_parse_setting, texts or DEFAULT_SETTINGS))
    for place, setting in enumerate(settings):
        if any(setting.fields == other.fields for other in settings[:place]):
            raise _refuse(setting.name, "It was given twice.", "Leave one out.")
    return settings


def _parse_setting(text: str) -> Setting:
    name = ",".join(part.strip() for part in text.split(","))
    if name == EXACT:
        return Setting(name=name, fields={})
    found: dict[str, Any] = {}
    for part in name.split(","):
        word, equals, value = part.partition("=")
        key = KEYS.get(word)
        if key is None or not equals:
            raise _refuse(
                text,
                f"{part!r} is not known in a setting.",
                f"Use exact, or some of {_known()}, with commas between them.",
            )
        if key.field in found:
            raise _refuse(text, f"It has {word} twice.", "Leave one out.")
        try:
            found[key.field] = key.read(value)
        except ValueError:
            limit = f"{word} takes values like {key.values.replace('|', ', ')}."
            raise _refuse(
                text, limit, f"Write it like {word}={key.values.split('|')[0]}."
            ) from None
    return Setting(name=name, fields=found)


def _known() -> str:
    return ", ".join(f"{word}={key.values}" for word, key in KEYS.items())


def _refuse(text: str, limit: str, advice: str) -> InputError:
    return InputError(f"--setting {text} was given.", limit, advice)
