"""Runs what the planner writes down: a list of computations and moves, over the ranks it is for.

The one executor for all layouts. Computations are einsums on what each rank has; moves are made by
the ranks' back end, and the bytes that leave each rank are counted by kind. Knows layouts, no model
and no schedule: what is not a product is computed by the ``Functions`` that come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal, Protocol

from freight.distributed.tensor.looped import (
    GatherProducts,
    ProductScatter,
    Stage,
    gather_products,
    product_scatter,
    stages,
)
from freight.distributed.tensor.moves import make_move
from freight.distributed.tensor.packed import PackedWeight, make_packed_move
from freight.distributed.tensor.plain import PLAIN, compute_plain
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.regions import Piece, Region, Regions, in_regions, names_of
from freight.distributed.tensor.tracing import Timeline
from freight.distributed.tensor.vectors import Vector, Vectors
from freight.model.switches import ModelConfig
from freight.partition.layout import Layout
from freight.partition.moves import Move, MoveKind
from freight.partition.sharded import Compute, Sharded, Transfer

__all__ = ["Executor", "Functions", "Moved", "What", "last_uses"]

What = Literal["weights", "activations", "keys and values", "between layers"]
Moved = Counter[tuple[MoveKind, What]]


class Functions(Protocol):
    """What a layer computes that is not plain, and the vectors of what is."""

    config: ModelConfig
    vectors: Vectors

    def compute(self, step: Compute, operands: list[Parts], values: Mapping[str, Parts]) -> Parts:
        """The result of a step on all own ranks; ``values`` are all that there are."""


class Executor:
    """``moved`` counts bytes that have left the own ranks, by kind of move and of tensor. With
    ``looped`` moves of activations go on while products are computed of what is there.
    ``regions`` compile what stands between moves. ``timeline`` is told of computations."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        looped: bool = False,
        regions: Regions | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.ranks = ranks
        self.moved: Moved = Counter()
        self._looped = looped
        self._regions = regions
        self._timeline = timeline

    def run(
        self, own: Sharded, given: Mapping[str, Parts], functions: Functions
    ) -> dict[str, Parts]:
        """The outputs of ``own``. ``given`` are its inputs and weights, laid out as it says."""
        values = dict(given)
        waiting: dict[str, list[Vector]] = {}
        vectors = functions.vectors
        steps: Sequence[Stage] = own.steps
        if self._looped:
            steps = stages(own, apart=vectors.packed.keys() | vectors.inputs.keys())
        pieces = steps if self._regions is None else in_regions(steps, own.outputs)
        last = last_uses(pieces, own.outputs)

        def lacking(step: Stage, name: str, layout: Layout) -> list[Vector]:
            """Biases that a value is to be given now: once, and when it is no more a sum that ranks
            have parts of."""
            own = _biases(step, name, waiting, vectors)  # which may be those of its last form
            waiting.setdefault(name, []).extend(own)
            return [] if layout.partial else waiting.pop(name)

        for number, step in enumerate(pieces):
            if isinstance(step, Region):
                biases = [lacking(each, each.out, each.out_layout) for each in step.steps]
                values |= self._region(step, values, biases, functions)
            else:
                for name, layout, parts in self._run(step, values, functions):
                    values[name] = parts
                    for bias in lacking(step, name, layout):
                        values[name] = self._added(values[name], bias, layout)
            for used in last.get(number, ()):
                del values[used]
        return {name: values[name] for name in own.outputs}

    def _run(
        self, step: Stage, values: Mapping[str, Parts], functions: Functions
    ) -> Iterator[tuple[str, Layout, Parts]]:
        """What a step makes: values by name, and how they lie."""

        def multiply(product: Compute, operands: list[Parts]) -> Parts:
            return self._compute(product, operands, {}, functions)

        before = self.ranks.sent_bytes
        match step:
            case Transfer():
                what: What = "weights" if step.is_weight else "activations"
                packed = functions.vectors.packed.get(step.value)
                moved = self.move(values[step.value], step.before, step.move, what, packed)
                yield step.value, step.after, moved
            case GatherProducts():
                made = gather_products(step, values, self.ranks, multiply)
                self.moved["all-gather", "activations"] += self.ranks.sent_bytes - before
                for product in step.products:
                    yield product.out, product.out_layout, made[product.out]
            case ProductScatter():
                sums = product_scatter(step, values, self.ranks, multiply)
                self.moved["reduce-scatter", "activations"] += self.ranks.sent_bytes - before
                yield step.product.out, step.transfer.after, sums
            case Compute():
                operands = [values[operand] for operand in step.operands]
                yield step.out, step.out_layout, self._compute(step, operands, values, functions)

    @property
    def compiles(self) -> bool:
        return self._regions is not None

    def move(
        self,
        parts: Parts,
        layout: Layout,
        own: Move,
        what: What,
        packed: PackedWeight | None = None,
    ) -> Parts:
        """One move, counted; of a weight that is ``packed``."""
        before = self.ranks.sent_bytes
        if packed is None:
            moved = make_move(self.ranks, parts, layout, own)
        else:
            moved = make_packed_move(self.ranks, parts, layout, own, packed)
        self.moved[own.kind, what] += self.ranks.sent_bytes - before
        return moved

    def gather(self, parts: Parts, axes: str, what: What) -> list[Parts]:
        """For each own rank what all have along some axes, in order, counted."""
        before = self.ranks.sent_bytes
        gathered = self.ranks.all_gather(parts, axes)
        self.moved["all-gather", what] += self.ranks.sent_bytes - before
        return gathered

    def _compute(
        self,
        step: Compute,
        operands: list[Parts],
        values: Mapping[str, Parts],
        functions: Functions,
    ) -> Parts:
        with nullcontext() if self._timeline is None else self._timeline.computing(step.out):
            if step.kind not in PLAIN:
                return functions.compute(step, operands, values)
            made = []
            for rank, *own in zip(self.ranks.own, *operands, strict=True):
                beside = functions.vectors.beside(step, self.ranks.mesh, rank)
                made.append(compute_plain(functions.config, step, own, beside))
            return made

    def _region(
        self,
        own: Region,
        values: Mapping[str, Parts],
        lacking: Sequence[Sequence[Vector]],
        functions: Functions,
    ) -> dict[str, Parts]:
        """What a region makes that others use."""
        assert self._regions is not None
        found: dict[str, Parts] = {name: [] for name in own.outputs}
        mesh, config = self.ranks.mesh, functions.config
        with nullcontext() if self._timeline is None else self._timeline.computing(own.outputs[-1]):
            for index, rank in enumerate(self.ranks.own):
                mine = {name: values[name][index] for name in own.inputs}
                given = [
                    (
                        functions.vectors.beside(step, mesh, rank),
                        [bias.along(step.out_layout, mesh, rank) for bias in biases],
                    )
                    for step, biases in zip(own.steps, lacking, strict=True)
                ]
                for name, part in self._regions.compute(own, config, mine, given).items():
                    found[name].append(part)
        return found

    def _added(self, parts: Parts, bias: Vector, layout: Layout) -> Parts:
        mesh = self.ranks.mesh
        return [
            part + bias.along(layout, mesh, rank)
            for rank, part in zip(self.ranks.own, parts, strict=True)
        ]


def _biases(
    step: Stage, name: str, waiting: dict[str, list[Vector]], vectors: Vectors
) -> list[Vector]:
    """Those that a value lacks behind a step: of a product its own, otherwise those of the partial
    sums that it is made of."""
    for product in _computes(step):
        if product.out == name and product.kind == "product":
            own = vectors.biases.get(product.operands[1])
            return [] if own is None else [own]
    if not isinstance(step, Compute):
        return []
    return [bias for operand in step.operands for bias in waiting.pop(operand, [])]


def _computes(step: Stage) -> tuple[Compute, ...]:
    match step:
        case GatherProducts():
            return step.products
        case ProductScatter():
            return (step.product,)
        case Compute():
            return (step,)
    return ()


def last_uses(steps: Sequence[Piece], outputs: Mapping[str, Layout]) -> dict[int, list[str]]:
    """Names of the values that may be forgotten after which step."""
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        last |= dict.fromkeys(names_of(step), number)
    forgotten: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in outputs:
            forgotten.setdefault(number, []).append(name)
    return forgotten
