"""A parameter of the model, by its name and its dims.

Knows no tensor and no place where it is. Dims are letters, as in ``programme``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Weight"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter: a matrix whose rows are ``out_dims`` and whose columns are ``in_dims``.

    A vector (a norm's gain, a bias) is a matrix of one row. ``name`` is the logical name that the
    family table maps to the checkpoint; ``first_row`` is not 0 where a unit uses rows of a tensor.
    A vector that ``is_wide`` is kept in float32, whatever is computed with.
    """

    name: str
    out_dims: tuple[str, ...]
    in_dims: tuple[str, ...]
    num_rows: int
    num_columns: int
    first_row: int = 0
    is_wide: bool = False

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def is_matrix(self) -> bool:
        return bool(self.out_dims)
