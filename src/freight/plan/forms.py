"""Units that are laid out alike: as many and as large tensors, lying alike in their files.

A model has a few forms and many units, up to thousands with experts; what follows from a form need
be found only once. Knows byte ranges, no tiers and no shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from freight.model.programme import Programme, Unit, Weight
from freight.model.sources import TensorSource

__all__ = ["BLOCK", "Forms", "find_forms", "in_file_order"]

BLOCK: Final = 4096
"""Alignment of direct I/O, in bytes."""

Forms = tuple[tuple[Unit, ...], tuple[int, ...]]


def in_file_order(unit: Unit, sources: Mapping[str, TensorSource]) -> list[Weight]:
    """The unit's matrices, so that what is read from disk is one stretch of a file."""
    matrices = [weight for weight in unit.weights if weight.is_matrix]
    return sorted(
        matrices, key=lambda w: (str(sources[w.name].path), sources[w.name].offset + w.first_row)
    )


def find_forms(programme: Programme, sources: Mapping[str, TensorSource]) -> Forms:
    """One unit of each form, the embedding left out, and for every unit which form it has."""
    numbers: dict[tuple[object, ...], int] = {}
    forms: list[Unit] = []
    form_of = []
    for unit in programme.units[1:]:
        form = _form(unit, sources)
        if form not in numbers:
            numbers[form] = len(forms)
            forms.append(unit)
        form_of.append(numbers[form])
    return tuple(forms), tuple(form_of)


def _form(unit: Unit, sources: Mapping[str, TensorSource]) -> tuple[object, ...]:
    """Shapes and formats in the order of the file, places within a block, and gaps where tensors
    may be read together: what a layout depends on."""
    vectors = tuple(weight.num_columns for weight in unit.weights if not weight.is_matrix)
    matrices: list[tuple[object, ...]] = []
    before: TensorSource | None = None
    for weight in in_file_order(unit, sources):
        source = sources[weight.name].rows(weight.first_row, weight.num_rows)
        gap = -1
        if before is not None and before.path == source.path:
            gap = source.offset - before.offset - before.num_bytes
        near = gap if 0 <= gap <= BLOCK else -1
        shape = (weight.num_rows, weight.num_columns)
        matrices.append((shape, source.dtype, source.offset % BLOCK, near))
        before = source
    return unit.kind, vectors, tuple(matrices)
