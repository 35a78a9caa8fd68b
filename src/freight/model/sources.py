"""Where a tensor of a checkpoint lies, and how it was packed where it was quantised.

Plain values; reads no file and knows no format's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Packed", "TensorSource"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What has to be done to a tensor before its rows can be read in place.

    ``parts`` are the checkpoint's tensors that hold it, whole; its own rows begin there with
    ``first_row``. ``scheme`` names how they are packed, by ``bits`` in groups of ``group_size``
    (0: of a row, or of all). ``zero_shift`` is what stored zero points lack. The rows of each
    ``head_rows`` come with their halves woven together (0: they do not). ``minus_one``: the
    checkpoint has them plus one. Of the rows behind the first only every ``every``-th is meant;
    those of a ``turned`` tensor are its columns.
    """

    scheme: str
    parts: Mapping[str, TensorSource]
    first_row: int = 0
    bits: int = 0
    group_size: int = 0
    zero_shift: int = 0
    head_rows: int = 0
    minus_one: bool = False
    every: int = 1
    turned: bool = False


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
