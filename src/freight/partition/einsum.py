"""What a computation makes of its operands' layouts: one rule for each axis.

Of the two operands of a product, for one axis: if it cuts a dim of both that is summed over, the
result is a partial sum; if it cuts a dim that both have and the result keeps, or a dim that only
one has while the other is replicated, it goes on to cut that dim. Anything else cannot be computed
until something is moved. The eight rules of Ong & Kwon are these on a mesh of one axis. Knows no
sizes and no tensors.
"""

from __future__ import annotations

from functools import cache

from freight.errors import InputError
from freight.partition.layout import Layout

__all__ = ["attention", "pointwise", "product", "square_sum"]


def product(left: Layout, right: Layout, out_dims: tuple[str, ...]) -> Layout:
    """The layout of an einsum's result. Raises InputError where it cannot be computed as it lies.

    Dims are letters of the einsum: those of either operand that are not in ``out_dims`` are summed
    over.
    """
    return _product(left, right, out_dims)


@cache  # of no size: a planner multiplies the same layouts on every mesh
def _product(left: Layout, right: Layout, out_dims: tuple[str, ...]) -> Layout:
    what = f"{left} times {right} to {' '.join(out_dims)}"
    if left.partial or right.partial:
        raise _refusal(what, "A partial sum cannot be multiplied.")
    cut: dict[str, str] = {}
    for operand, other in ((left, right), (right, left)):
        for dim, axes in zip(operand.dims, operand.cuts, strict=True):
            if dim in other.dims and other.cut(dim) != axes:
                raise _refusal(what, f"{dim} is cut by {axes or 'none'} here, otherwise there.")
            cut[dim] = axes
    for axis in {*left.axes} & {*right.axes}:
        if not any(axis in left.cut(dim) for dim in left.dims if dim in right.dims):
            raise _refusal(what, f"The axis {axis} cuts different dims of the two.")
    partial = "".join(axes for dim, axes in cut.items() if dim not in out_dims)
    return Layout(out_dims, tuple(cut[dim] for dim in out_dims), partial)


def pointwise(*operands: Layout, out_dims: tuple[str, ...] = ()) -> Layout:
    """Of a function of single elements, which can also join whole dims that ``out_dims`` leaves
    out, as a gate does. Raises InputError where a value is partial or operands lie differently."""
    first = operands[0]
    what = f"A function of {' and '.join(map(str, operands))}"
    if any(own != first for own in operands):
        raise _refusal(what, "They are laid out differently.")
    if first.partial:
        raise _refusal(what, "A function of a partial sum is not a partial sum.")
    kept = out_dims or first.dims
    if any(axes for dim, axes in zip(first.dims, first.cuts, strict=True) if dim not in kept):
        raise _refusal(what, "A dim that is joined is cut.")
    return Layout(kept, tuple(first.cut(dim) for dim in kept))


def square_sum(x: Layout, dim: str, *, centred: bool = False) -> Layout:
    """Of the sums that a norm over ``dim`` needs: partial over the axes that cut it. With J, sums
    and sums of squares, where it is ``centred``."""
    if x.partial:
        raise _refusal(f"A norm of {x}", "Its values are partial sums.")
    kept = tuple(own for own in x.dims if own != dim)
    cuts = tuple(x.cut(own) for own in kept)
    return (
        Layout((*kept, "J"), (*cuts, ""), x.cut(dim)) if centred else Layout(kept, cuts, x.cut(dim))
    )


def attention(queries: Layout, keys: Layout) -> Layout:
    """Of attention's result, which lies as its queries [B, L, H, D] do; keys and values are one
    tensor [B, L, J, K, D] with J = 2, and those that are kept lie as the new ones do.

    Rows are cut alike on both. Axes that cut heads of keys cut heads of queries first, in the same
    order; queries may be cut by more, over which keys are replicated. Raises InputError otherwise.
    """
    what = f"Attention of {queries} over {keys}"
    if queries.partial or keys.partial:
        raise _refusal(what, "Values are partial sums.")
    if any(own.cut(dim) for own in (queries, keys) for dim in ("L", "D")) or keys.cut("J"):
        raise _refusal(what, "Tokens of a row and numbers of a head are not cut.")
    if queries.cut("B") != keys.cut("B"):
        raise _refusal(what, "Rows are cut differently.")
    if not queries.cut("H").startswith(keys.cut("K")):
        raise _refusal(what, "Heads of keys are cut otherwise than those of queries.")
    return queries


def _refusal(what: str, limit: str) -> InputError:
    return InputError(
        f"{what} was asked for.", limit, "Move an operand first, so that both lie alike."
    )
