"""Which ranks a collective joins: places along axes of a mesh. Knows no tensors."""

from __future__ import annotations

from functools import cache

from freight.partition.layout import Mesh

__all__ = ["members", "place", "reordered"]


@cache
def place(mesh: Mesh, rank: int, axes: str) -> int:
    """A rank's place along some axes taken as one, the first of them outermost."""
    where, found = mesh.coordinates(rank), 0
    for axis in axes:
        found = found * mesh.size(axis) + where[axis]
    return found


@cache
def members(mesh: Mesh, rank: int, axes: str) -> tuple[int, ...]:
    """The ranks that differ from a rank along these axes only, itself among them, in their order
    along the axes."""
    where = mesh.coordinates(rank)
    alike = [
        other
        for other in range(mesh.num_chips)
        if all(
            mesh.coordinates(other)[axis] == where[axis] for axis in mesh.names if axis not in axes
        )
    ]
    return tuple(sorted(alike, key=lambda other: place(mesh, other, axes)))


@cache
def reordered(mesh: Mesh, axes: str, order: str) -> tuple[int, ...]:
    """For each place along ``order`` the place along ``axes``, which are the same in another
    order."""
    ranks = members(mesh, 0, order)
    return tuple(place(mesh, rank, axes) for rank in ranks)
