"""Products of a rank's tokens and weights that are kept otherwise than tokens, as integers in
groups or in fewer bits, or that are both in 16.

The dims of a step become tokens, rows and columns, and the kernels of one machine multiply. Knows
no mesh and no rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from freight.distributed.tensor.packed import PackedWeight
from freight.kernels.grouped import CompressedRows
from freight.kernels.products import Product, multiply
from freight.partition.sharded import Compute

__all__ = ["multiply_narrow", "multiply_packed"]


def multiply_packed(
    step: Compute, x: torch.Tensor, raw: torch.Tensor, packed: PackedWeight
) -> torch.Tensor:
    """The step's product of x and a part of a weight of integers, in x's type."""
    columns, kind = packed.num_columns(raw), packed.number_format
    shared = [dim for dim in packed.dims if dim in step.layouts[0].dims]
    matrices = raw.reshape(prod(raw.shape[: len(shared)]), -1, raw.shape[-1])
    rows = [CompressedRows(raw=own, columns=columns, number_format=kind) for own in matrices]
    sizes = dict(zip(packed.dims, raw.shape, strict=False))
    return _multiply(step, x, rows, sizes, packed.columns)


def multiply_narrow(step: Compute, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The same of a weight that is kept in fewer bits than x, or in as many; None where its rows do
    not lie one after the other."""
    first, second, made = (layout.dims for layout in (*step.layouts, step.out_layout))
    columns = [dim for dim in second if dim not in made]
    shared = [dim for dim in second if dim in made and dim in first]
    own = [dim for dim in second if dim not in columns and dim not in shared]
    matrix = weight.permute([second.index(dim) for dim in (*shared, *own, *columns)])
    if not matrix.is_contiguous():
        return None
    sizes = dict(zip(second, weight.shape, strict=True))
    width = prod(sizes[dim] for dim in columns)
    rows = [*matrix.reshape(prod(sizes[dim] for dim in shared), -1, width)]
    return _multiply(step, x, rows, {dim: sizes[dim] for dim in (*shared, *own)}, columns)


def _multiply(
    step: Compute,
    x: torch.Tensor,
    matrices: Sequence[torch.Tensor | CompressedRows],
    sizes: dict[str, int],
    columns: Sequence[str],
) -> torch.Tensor:
    """Of one matrix, or of one for each of the dims that x, the weight and the product share. Dims
    of the weight but its columns are in ``sizes``, in the order of its rows."""
    first, made = step.layouts[0].dims, step.out_layout.dims
    shared = [dim for dim in sizes if dim in first]
    rest = [dim for dim in first if dim not in shared and dim not in columns]
    own = [dim for dim in sizes if dim not in shared]
    sizes = dict(zip(first, x.shape, strict=True)) | sizes
    tokens = x.permute([first.index(dim) for dim in (*shared, *rest, *columns)]).reshape(
        len(matrices), prod(sizes[dim] for dim in rest), -1
    )
    out = x.new_empty(*tokens.shape[:2], matrices[0].shape[0])

    def scratch(size: int) -> torch.Tensor:
        return x.new_empty(size)

    for some, rows, target in zip(tokens, matrices, out, strict=True):
        if len(some):
            multiply(some, [Product(rows=rows, out=target)], scratch)
    dims = (*shared, *rest, *own)
    return out.view([sizes[dim] for dim in dims]).permute([dims.index(dim) for dim in made])
