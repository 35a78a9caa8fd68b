"""The cheapest way of a feed-forward layer over a mesh: a shortest path over layouts.

Nodes are layouts of the value at hand, edges are moves, products and the activation function, and
an edge's length is its time. Weights are stored as in ``layers.Cut``; a product may gather them
over any of their innermost axes first. Which nodes and edges there are depends on no size, so they
are found once; a size prices them. Knows none of the papers' layouts: it finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product as choices
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from freight.partition.einsum import product
from freight.partition.fabric import Fabric
from freight.partition.layout import Layout, all_layouts
from freight.partition.moves import Move, MoveKind, legal_moves, move
from freight.partition.sharded import Sharded, Sizes
from freight.partition.timing import moves_s

__all__ = ["Prices", "Route", "best_route", "seconds_of"]

_AXES = "xyz"
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What an edge's time is made of: links, arithmetic and memory per chip, and bytes of an
    element. Weights are read as they are used, gathered ones whole."""

    fabric: Fabric
    flops: float
    memory_bytes_per_s: float = inf
    activation_bytes: float = 2.0
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0


@dataclass(frozen=True, slots=True)
class Route:
    """``steps`` from stream to stream, in words, and the ``seconds`` of all. ``stream`` is how the
    stream [B, W] lies before and after. ``moves`` has for each step the move of the value [B, W] at
    hand, or of a product the axes that cut its weight's two dims as it is used, or nothing."""

    seconds: float
    stream: Layout
    steps: tuple[str, ...]
    moves: tuple[Move | tuple[str, str] | None, ...]


@dataclass(frozen=True, slots=True)
class _Edge:
    """From node to node. ``value`` is what is moved, by its dims; ``held`` cuts the larger side of
    it. Of a product, ``cut`` are the axes that share its arithmetic, and ``gathers`` what is done
    to its weight. ``move`` is that of a ``Route``."""

    start: int
    end: int
    text: str
    kind: MoveKind | None = None
    value: str = ""
    held: str = ""
    axes: str = ""
    cut: str = ""
    gathers: str = ""
    weight_held: str = ""
    move: Move | tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Graph:
    """Nodes are (place along the layer, layout): 0 the stream, 1 hidden, 2 gated, 3 the output."""

    nodes: tuple[tuple[int, Layout], ...]
    edges: tuple[_Edge, ...]


def best_route(sizes: Sizes, prices: Prices) -> Route:
    """The fastest from any layout of the stream that is cut over all chips back to the same.

    The mesh has the axes x, y and z; weights are stored as ``E_x F_zy``.
    """
    graph, mesh = _graph(), prices.fabric.mesh
    feasible = [_divides(layout, place, sizes, prices) for place, layout in graph.nodes]
    edges = [own for own in graph.edges if feasible[own.start] and feasible[own.end]]
    lengths = np.array([_seconds(own, sizes, prices) for own in edges])
    rows, columns = (np.array([getattr(own, end) for own in edges]) for end in ("start", "end"))
    size = len(graph.nodes)
    # Of edges between the same two nodes the shortest; a sparse matrix would add them up.
    order = np.lexsort((lengths, columns, rows))
    first = np.ones(len(order), dtype=bool)
    first[1:] = (np.diff(rows[order]) != 0) | (np.diff(columns[order]) != 0)
    kept = order[first]
    matrix = csr_array((lengths[kept], (rows[kept], columns[kept])), shape=(size, size))
    by_ends = {(int(rows[k]), int(columns[k])): edges[k] for k in kept}
    starts = [
        node
        for node, (place, layout) in enumerate(graph.nodes)
        if place == 0 and feasible[node] and _is_spread(layout, mesh.names)
    ]
    ends = {layout: node for node, (place, layout) in enumerate(graph.nodes) if place == 3}
    distances, before = dijkstra(matrix, indices=starts, return_predecessors=True)
    targets = [ends[graph.nodes[start][1]] for start in starts]
    totals = [float(distances[row, target]) for row, target in enumerate(targets)]
    row = int(np.argmin(totals))
    steps, node = [], targets[row]
    while node != starts[row]:
        previous = int(before[row, node])
        steps.append(by_ends[previous, node])
        node = previous
    steps.reverse()
    return Route(
        totals[row],
        graph.nodes[starts[row]][1],
        tuple(step.text for step in steps),
        tuple(step.move for step in steps),
    )


def seconds_of(own: Sharded, prices: Prices) -> float:
    """What a layer that is written down takes at the same prices: its arithmetic, its weights and
    the keys and values that it attends to, read once, and its moves."""
    read = own.used_elements * prices.weight_bytes
    for step in own.computes:
        if step.kind == "attend":
            kept = step.layouts[1].elements({**own.sizes, "L": 1}, own.mesh)
            read += kept * own.sizes["S"] * prices.kv_bytes
    moves = moves_s(own, prices.fabric, prices.activation_bytes, prices.weight_bytes)
    moved = sum(seconds for _, seconds in moves)
    return own.flops / prices.flops + read / prices.memory_bytes_per_s + moved


def _is_spread(layout: Layout, axes: str) -> bool:
    return not layout.partial and set(axes) == set(layout.axes)


def _divides(layout: Layout, place: int, sizes: Sizes, prices: Prices) -> bool:
    wide = sizes["E" if place in (0, 3) else "F"]
    mesh = prices.fabric.mesh
    return not (sizes["B"] % mesh.size(layout.cuts[0]) or wide % mesh.size(layout.cuts[1]))


def _elements(value: str, held: str, sizes: Sizes, prices: Prices) -> float:
    total = 1.0
    for dim in value:
        total *= sizes[dim]
    return total / prices.fabric.mesh.size(held)


def _seconds(edge: _Edge, sizes: Sizes, prices: Prices) -> float:
    if edge.kind is not None:
        held = _elements(edge.value, edge.held, sizes, prices) * prices.activation_bytes
        return prices.fabric.seconds(edge.kind, held, edge.axes)
    if not edge.value:
        return 0.0
    seconds = 2.0 * _elements("BL" + edge.value, edge.cut, sizes, prices) / prices.flops
    held = _elements(edge.value, edge.weight_held, sizes, prices) * prices.weight_bytes
    seconds += held / prices.memory_bytes_per_s
    if edge.gathers:
        seconds += prices.fabric.seconds("all-gather", held, edge.gathers)
    return seconds


@cache
def _graph() -> _Graph:
    layouts = [*all_layouts(("B", "W"), _AXES)]
    numbers = {
        (place, layout): place * len(layouts) + n
        for place in range(4)
        for n, layout in enumerate(layouts)
    }
    edges = []
    for (place, layout), start in numbers.items():
        value = ("BLE", "BLGF", "BLF", "BLE")[place]
        for own in legal_moves(layout, _AXES):
            after = move(layout, own)
            held = "".join((after if own.kind == "all-gather" else layout).cuts)
            end = numbers[place, after]
            edges.append(
                _Edge(
                    start,
                    end,
                    str(own),
                    kind=own.kind,
                    value=value,
                    held=held,
                    axes=own.axes,
                    move=own,
                )
            )
        if place == 1 and not layout.partial:
            edges.append(_Edge(start, numbers[2, layout], "activate"))
        if place in (0, 2):
            edges += _products(place, layout, start, numbers)
    return _Graph(tuple(numbers), tuple(edges))


def _products(
    place: int, layout: Layout, start: int, numbers: dict[tuple[int, Layout], int]
) -> Iterator[_Edge]:
    """With all layouts that a stored weight can be gathered into and that fit."""
    value, stored = (("EGF", ("x", "zy")), ("FE", ("zy", "x")))[place // 2]
    for counts in choices(*(range(len(axes) + 1) for axes in stored)):
        used = tuple(axes[:count] for axes, count in zip(stored, counts, strict=True))
        gathered = "".join(axes[count:] for axes, count in zip(stored, counts, strict=True))
        operand = Layout(("B", "I"), layout.cuts, layout.partial)
        weight = Layout(("I", "O"), used)
        if layout.partial or layout.cuts[1] != used[0] or set(layout.cuts[0]) & set(used[1]):
            continue
        made = product(operand, weight, ("B", "O"))
        end = numbers[place + 1, Layout(("B", "W"), made.cuts, made.partial)]
        text = f"product with {'E F' if not place else 'F E'} cut by {used[0] or '-'} and "
        text += f"{used[1] or '-'}" + (f", gathered over {gathered}" if gathered else "")
        yield _Edge(
            start,
            end,
            text,
            value=value,
            cut="".join(sorted({*made.axes})),
            gathers=gathered,
            weight_held="".join(used),
            move=(used[0], used[1]),
        )
