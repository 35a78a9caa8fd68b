"""Values as bytes, for other ranks to read: pickled, but nothing is made of them that could act.

Whoever reaches the port of torchrun's store can write into it. So of what comes only plain values,
arrays and objects of Freight's own classes are made; no other function is called.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

from freight.errors import RankError

__all__ = ["pack", "unpack"]

_BUILTINS: Final = ("bytearray", "complex", "frozenset", "range", "set", "slice", "tuple")
_PLAIN: Final = {
    *(("builtins", name) for name in _BUILTINS),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    # How numpy makes an array, or one of its numbers, of bytes.
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
}
_OWN: Final = "freight"


def pack(value: Any) -> bytes:
    return pickle.dumps(value)


def unpack(data: bytes) -> Any:
    """The value. RankError where it would be of a class that is no plain value and not Freight's:
    a rank sends none."""
    return _Reader(io.BytesIO(data)).load()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.partition(".")[0] == _OWN:
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise RankError(
            f"A message made of {module}.{name} came from another rank.",
            "Ranks send plain values and Freight's own; this one is not by Freight.",
            "Look at who can reach the ports of this run.",
        )
