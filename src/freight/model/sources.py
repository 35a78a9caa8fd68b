"""Where a tensor of a checkpoint lies, and how it was packed where it was quantised.

Plain values; reads no file and knows no format's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

__all__ = ["ADAPTED", "HALVES", "Beside", "Dealt", "Packed", "TensorSource", "join_halves"]

HALVES = "halves"
"""How rows are packed that lie in two tensors."""
ADAPTED = "adapted"
"""And those to which an adapter adds something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """Rows of heads that lie in another order: of ``groups`` with ``each`` heads the first of every
    group come first, then the second ones. A head has ``width`` rows; the first of them is
    ``first``, what is before it lies in order. With ``of_columns`` a row's columns lie so."""

    groups: int
    each: int
    width: int
    first: int = 0
    of_columns: bool = False

    def find(self, row: int) -> tuple[int, int]:
        """Where a row lies, and how many of those after it lie behind it."""
        if row < self.first:
            return row, self.first - row
        head, inner = divmod(row - self.first, self.width)
        group, number = divmod(head, self.each)
        place = self.first + (number * self.groups + group) * self.width + inner
        return place, self.width - inner


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Rows of ``groups`` that lie beside others of the same group, which has ``group_rows`` in all:
    of each of the ``parts`` (rows, first) one after the other so many rows of every group, from its
    row ``first`` on."""

    groups: int
    group_rows: int
    parts: tuple[tuple[int, int], ...]
    of_columns: ClassVar[bool] = False

    def find(self, row: int) -> tuple[int, int]:
        """Where a row lies, and how many of those after it lie behind it."""
        for width, first in self.parts:
            if row < self.groups * width:
                group, inner = divmod(row, width)
                return group * self.group_rows + first + inner, width - inner
            row -= self.groups * width
        raise AssertionError("no part has it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What has to be done to a tensor before its rows can be read in place.

    ``parts`` are the checkpoint's tensors that hold it, whole; its own rows begin there with
    ``first_row``. ``scheme`` names how they are packed, by ``bits`` in groups of ``group_size``
    (0: of a row, or of all). ``zero_shift`` is what stored zero points lack. The rows of each
    ``head_rows`` come with their halves woven together (0: they do not), those that are ``dealt``
    in another order, or beside others. ``minus_one``: the checkpoint has them plus one;
    ``logarithms``: it has minus what they are the logarithms of. Of the rows behind the first only
    every ``every``-th is meant; those of a ``turned`` tensor are its columns. ``scale`` is that of
    what is added, which of a ``turned`` one is kept turned.
    """

    scheme: str
    parts: Mapping[str, TensorSource]
    first_row: int = 0
    bits: int = 0
    group_size: int = 0
    zero_shift: int = 0
    head_rows: int = 0
    dealt: Dealt | Beside | None = None
    minus_one: bool = False
    logarithms: bool = False
    every: int = 1
    turned: bool = False
    scale: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Bytes ``offset`` to ``offset + num_bytes`` of the file at ``path``, row-major.

    ``dtype`` is a name such as "bfloat16"; types that Freight does not run keep their safetensors
    name ("F8_E4M3"). Of a tensor that is ``packed`` it is what it becomes, as ``shape`` is; the
    bytes are those of its first part.
    """

    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    packed: Packed | None = None

    def rows(self, start: int, count: int) -> TensorSource:
        """The part that holds ``count`` rows (entries of the first dim) from ``start`` on."""
        num_rows = self.shape[0]
        assert 0 <= start and 0 <= count and start + count <= num_rows, (start, count, self.shape)
        shape = (count, *self.shape[1:])
        if self.packed is not None:
            first = self.packed.first_row + start * self.packed.every
            packed = replace(self.packed, first_row=first)
            return replace(self, shape=shape, packed=packed)
        row_bytes = self.num_bytes // num_rows if num_rows else 0
        return replace(
            self,
            offset=self.offset + start * row_bytes,
            num_bytes=count * row_bytes,
            shape=shape,
        )

    def every_row(self, every: int, first: int, count: int) -> TensorSource:
        """``count`` of the rows, ``every``-th by ``every``-th, from ``first`` on."""
        if every == 1:
            return self.rows(first, count)
        own = self.packed or Packed(scheme=self.dtype, parts={"rows": self})
        packed = replace(own, first_row=first, every=every)
        return replace(self, shape=(count, *self.shape[1:]), packed=packed)

    def columns_as_rows(self, every: int, first: int, count: int) -> TensorSource:
        """The same of the columns of this matrix [rows, columns]."""
        packed = Packed(
            scheme=self.dtype, parts={"rows": self}, first_row=first, every=every, turned=True
        )
        return replace(self, shape=(count, self.shape[0]), packed=packed)


def join_halves(turned: TensorSource, rest: TensorSource, shape: tuple[int, ...]) -> TensorSource:
    """A matrix of this shape whose heads have columns of ``turned``, which lie as rows there, and
    rows of ``rest``. Made plain, in float32: scales along the rows of one are not along its
    columns."""
    packed = Packed(scheme=HALVES, parts={"turned": turned, "rest": rest})
    return replace(turned, dtype="float32", shape=shape, packed=packed)
