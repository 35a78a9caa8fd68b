"""The header of a GGUF file: what is said of the model, and where each tensor lies.

Read by hand, and never a weight; knows no model. The format, versions 2 and 3, little-endian:
magic, version, counts, typed key-value pairs, each tensor's name, dims, type and offset, the data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A large model is several such files, of
which the first has what is said of it.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from freight.errors import ModelError

__all__ = ["GgufFile", "GgufTensor", "parts_of", "read_gguf"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_TEXT: Final = 8
_ARRAY: Final = 9
_ALIGNMENT: Final = 32
_MOST_DIMS: Final = 4
_MOST_NESTED: Final = 4

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_COUNT: Final = "split.count"

_TYPE_NAMES: Final = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """``shape`` has the rows first, ``offset`` counts from the start of the file at ``path``;
    ``kind`` is such as "Q4_K"."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """``metadata`` by its keys, arrays as lists, or None where they were not asked for; ``sizes``
    in bytes, of each file that it consists of."""

    path: Path
    sizes: Mapping[Path, int]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def parts_of(path: Path) -> list[Path]:
    """The files of a model that ``path`` is one of, by its name; itself where it is alone. Raises
    ModelError where one is missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, _, count = found.groups()
    numbers = range(1, int(count) + 1)
    parts = [path.with_name(f"{name}-{number:05d}-of-{count}.gguf") for number in numbers]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise ModelError(
            f"The file {path} was opened, one of {int(count)} of a model.",
            f"Of these {', '.join(missing) or 'all'} cannot be found beside it.",
            "Fetch all files of the model into one directory.",
        )
    return parts


def read_gguf(path: Path, *, with_arrays: bool = False) -> GgufFile:
    """Read the header, of all files of a model where they are several. A vocabulary is most of it,
    and few want it: arrays are skipped unless they are asked for. Raises ModelError where it is
    damaged, cut short or of another version, or where a file is missing."""
    first, *others = parts_of(path)
    whole = _read_one(first, with_arrays)
    # Files that were put together again say 0.
    count = whole.metadata.get(_COUNT) or 1
    if count != 1 + len(others):
        raise ModelError(
            f"The file {first} was opened.",
            f"It is one of {count} files of a model, and by its name one of {1 + len(others)}.",
            "Give the files the names that they were published with.",
        )
    for other in others:
        part = _read_one(other, with_arrays)
        whole = replace(
            whole, sizes={**whole.sizes, **part.sizes}, tensors={**whole.tensors, **part.tensors}
        )
    return whole


def _read_one(path: Path, with_arrays: bool) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data, with_arrays))
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, struct.error) as error:
        raise ModelError(
            f"The file {path} was opened.",
            f"It is damaged, cut short, or no GGUF file of version 2 or 3 ({error}).",
            "Fetch the file again from where it was published.",
        ) from error


class _Cursor:
    """Reads values one after the other. Raises ValueError or struct.error beyond the end."""

    def __init__(self, data: mmap.mmap, with_arrays: bool) -> None:
        self.data = data
        self.offset = 0
        self._with_arrays = with_arrays

    def number(self, kind: int) -> Any:
        form = _SCALARS[kind]
        (value,) = form.unpack_from(self.data, self.offset)
        self.offset += form.size
        return value

    def count(self) -> int:
        """A number of things of a byte at least, so that it cannot exceed what is left."""
        value: int = self.number(10)
        if value > len(self.data) - self.offset:
            raise ValueError(f"{value} bytes or more are announced at byte {self.offset}")
        return value

    def text(self) -> str:
        size = self.count()
        self.offset += size
        return self.data[self.offset - size : self.offset].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(kind)
        if depth == _MOST_NESTED:
            raise ValueError("arrays are nested too deep")
        inner, count = self.number(4), self.count()
        if self._with_arrays:
            return [self.value(inner, depth + 1) for _ in range(count)]
        if inner in _SCALARS:
            self.offset += count * _SCALARS[inner].size
            return None
        for _ in range(count):
            if inner == _TEXT:
                size = self.count()
                self.offset += size
            else:
                self.value(inner, depth + 1)
        return None


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    size = len(cursor.data)
    if cursor.data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.offset = len(_MAGIC)
    version = cursor.number(4)
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata = {cursor.text(): cursor.value(cursor.number(4)) for _ in range(num_values)}
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    entries = list(_entries(cursor, num_tensors))
    data_start = -(-cursor.offset // alignment) * alignment
    return GgufFile(
        path=path,
        sizes={path: size},
        metadata=metadata,
        tensors={
            name: GgufTensor(path=path, kind=kind, shape=shape, offset=data_start + offset)
            for name, kind, shape, offset in entries
        },
    )


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    for _ in range(count):
        name = cursor.text()
        num_dims = cursor.number(4)
        if num_dims > _MOST_DIMS:
            raise ValueError(f"{name} has {num_dims} dims")
        dims = [cursor.number(10) for _ in range(num_dims)]
        kind = cursor.number(4)
        offset = cursor.number(10)
        yield name, _TYPE_NAMES.get(kind, f"type {kind}"), tuple(reversed(dims)), offset
