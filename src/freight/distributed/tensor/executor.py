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

import torch

from freight.distributed.tensor.looped import (
    GatherProducts,
    ProductScatter,
    Stage,
    gather_products,
    product_scatter,
    stages,
)
from freight.distributed.tensor.moves import make_move
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.tracing import Timeline
from freight.distributed.tensor.vectors import Vector, Vectors
from freight.partition.layout import Layout
from freight.partition.moves import Move, MoveKind
from freight.partition.sharded import Compute, Sharded, Transfer

__all__ = ["Executor", "Functions", "Moved", "What", "last_uses"]

What = Literal["weights", "activations", "keys and values", "between layers"]
Moved = Counter[tuple[MoveKind, What]]


class Functions(Protocol):
    """What a layer computes besides products, for all own ranks at once."""

    vectors: Vectors

    def compute(self, step: Compute, operands: list[Parts], values: Mapping[str, Parts]) -> Parts:
        """The result of a step; ``values`` are all that there are."""


class Executor:
    """``moved`` counts bytes that have left the own ranks, by kind of move and of tensor. With
    ``looped`` moves of activations go on while products are computed of what is there.
    ``timeline`` is told of computations."""

    def __init__(
        self, ranks: Ranks, *, looped: bool = False, timeline: Timeline | None = None
    ) -> None:
        self.ranks = ranks
        self.moved: Moved = Counter()
        self._looped = looped
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
            steps = stages(own, apart=vectors.scales.keys() | vectors.inputs.keys())
        last = last_uses(steps, own.outputs)
        for number, step in enumerate(steps):
            for name, layout, parts in self._run(step, values, functions):
                values[name] = parts
                lacks = waiting.setdefault(name, [])
                lacks += _biases(step, name, waiting, vectors)
                # A bias is added once: when its value is no more a sum that ranks have parts of.
                if not layout.partial:
                    for bias in waiting.pop(name):
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
                moved = self.move(values[step.value], step.before, step.move, what)
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

    def move(self, parts: Parts, layout: Layout, own: Move, what: What) -> Parts:
        """One move, counted."""
        before = self.ranks.sent_bytes
        moved = make_move(self.ranks, parts, layout, own)
        self.moved[own.kind, what] += self.ranks.sent_bytes - before
        return moved

    def _compute(
        self,
        step: Compute,
        operands: list[Parts],
        values: Mapping[str, Parts],
        functions: Functions,
    ) -> Parts:
        with nullcontext() if self._timeline is None else self._timeline.computing(step.out):
            if step.kind == "product":
                return self._product(step, operands, functions.vectors)
            if step.kind == "copy":
                return list(operands[0])
            if step.kind == "add":
                return [one + other for one, other in zip(*operands, strict=True)]
            return functions.compute(step, operands, values)

    def _product(self, step: Compute, operands: list[Parts], vectors: Vectors) -> Parts:
        """An einsum. Integer weights are made plain here: they have been moved as integers."""
        dims = ["".join(layout.dims) for layout in step.layouts]
        text = f"{dims[0]},{dims[1]}->{''.join(step.out_layout.dims)}"
        scale, affine = vectors.scales.get(step.operands[1]), vectors.inputs.get(step.operands[1])
        made = []
        for rank, x, weight in zip(self.ranks.own, *operands, strict=True):
            if affine is not None:
                x = x * affine.gain.along(step.layouts[0], self.ranks.mesh, rank)
                if affine.bias is not None:
                    x = x + affine.bias.along(step.layouts[0], self.ranks.mesh, rank)
            out = torch.einsum(text, x, weight.to(x.dtype))
            if scale is not None:
                out *= scale.along(step.out_layout, self.ranks.mesh, rank)
            made.append(out)
        return made

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


def last_uses(steps: Sequence[Stage], outputs: Mapping[str, Layout]) -> dict[int, list[str]]:
    """Names of the values that may be forgotten after which step."""
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        names = [name for own in _computes(step) for name in (*own.operands, own.out)]
        names += [step.value] if isinstance(step, Transfer) else []
        last |= dict.fromkeys(names, number)
    forgotten: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in outputs:
            forgotten.setdefault(number, []).append(name)
    return forgotten
