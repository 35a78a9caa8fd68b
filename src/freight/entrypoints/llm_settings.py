"""What a caller of the Python API says of the engine, by keyword, as the engine's options.

Python checks no kinds: a value of a wrong one is refused here by its keyword, before anything is
made of it. Which values are usable is the options' own question.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.shares import parse_shares
from freight.errors import InputError
from freight.quantities import parse_bytes
from freight.runtime.options import EngineOptions, Shares

__all__ = ["read_model", "read_settings"]

_ADAPTER: Final = "a directory, or a Hub id"


def read_settings(given: Mapping[str, Any]) -> EngineOptions:
    """The options of what ``LLM`` was given, by its keywords. InputError where one is unusable."""
    read: dict[str, Any] = {}
    for name, value in given.items():
        field, reader, may_be_left = _SETTINGS[name]
        read[field] = None if value is None and may_be_left else reader(name, value)
    dummy = read.pop("dummy")
    return EngineOptions(**read, dummy_seed=0 if dummy else None)


def read_model(value: object, name: str = "model") -> str:
    """What names a model, or an adapter: a text or a path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        wanted = "a directory, a GGUF file, a Hub id, or demo" if name == "model" else _ADAPTER
        raise _refuse(name, value, wanted)
    return os.fsdecode(value)


def _refuse(name: str, value: object, wanted: str) -> InputError:
    return InputError(f"{name}={value!r} was given.", f"It must be {wanted}.", "Change it.")


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's, as Python has it."""
    is_number = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_number else value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "a text")
    return value


def _flag(name: str, value: object) -> bool:
    value = _plain(value)
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _whole(name: str, value: object, wanted: str = "a whole number") -> int:
    own = _plain(value)
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    raise _refuse(name, value, wanted)


def _number(name: str, value: object) -> float:
    own = _plain(value)
    is_number = isinstance(own, int | float) and not isinstance(own, bool)
    if is_number and abs(own) <= sys.float_info.max:
        return float(own)
    raise _refuse(name, value, "a number")


def _size(name: str, value: object) -> int:
    if isinstance(value, str):
        return parse_bytes(value, name=name)
    return _whole(name, value, 'a text like "8GiB", or a whole number of bytes')


def _shares(name: str, value: object) -> Shares | None:
    if isinstance(value, str):
        return parse_shares(name, value)
    own = value.tolist() if getattr(value, "ndim", None) == 1 else value  # type: ignore[attr-defined]
    if isinstance(own, Sequence) and not isinstance(own, bytes):
        return parse_shares(name, "/".join(map(str, own)))
    raise _refuse(name, value, 'percentages like "20/80/0" or (20, 80, 0)')


def _directory(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise _refuse(name, value, "a directory")
    path = Path(os.fsdecode(value))
    if not path.is_dir():
        raise InputError(
            f"{name}={value!r} was given.",
            "It is a file." if path.exists() else "There is no such directory.",
            "Make it first, or name another one on a fast disk.",
        )
    return path


_SETTINGS: Final[Mapping[str, tuple[str, Callable[[str, Any], Any], bool]]] = {
    "task": ("task", _text, False),
    "device": ("device", _text, False),
    "dtype": ("dtype", _text, False),
    "cpu_memory": ("cpu_memory_bytes", _size, True),
    "gpu_memory": ("gpu_memory_bytes", _size, True),
    "disk_dir": ("disk_dir", _directory, True),
    "weights": ("weights_percent", _shares, True),
    "kv": ("kv_percent", _shares, True),
    "activations": ("activations_percent", _shares, True),
    "micro_batch_size": ("micro_batch_size", _whole, True),
    "num_micro_batches": ("num_micro_batches", _whole, True),
    "cpu_attention": ("cpu_attention_percent", _number, True),
    "recompute_kv": ("recompute_percent", _number, True),
    "admission": ("admission", _text, False),
    "batch_tokens": ("batch_tokens", _whole, True),
    "draft_tokens": ("draft_tokens", _whole, False),
    "share_prefixes": ("share_prefixes", _flag, False),
    "roll_windows": ("roll_windows", _flag, False),
    "move_rows": ("move_rows", _flag, False),
    "lossless": ("lossless", _flag, False),
    "weight_bits": ("weight_bits", _whole, True),
    "kv_bits": ("kv_bits", _whole, True),
    "group_size": ("group_size", _whole, False),
    "group_dim": ("group_dim", _text, False),
    "sparse_attention": ("sparse_attention", _number, True),
    "compute": ("compute", _text, False),
    "overlap": ("overlap", _flag, False),
    "sim_bandwidth": ("sim_bytes_per_s", _size, True),
    "dummy_weights": ("dummy", _flag, False),
}
"""Of each keyword: the option that it is, how it is read, and whether None leaves it open."""
