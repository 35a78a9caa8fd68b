"""Steps that multiply by weights, as functions of tensors: products of one value together, and with
them what they make of each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.grouped import CompressedRows
from freight.kernels.integers import IntegerRows, IntegerTokens, integer_product
from freight.kernels.products import Product, can_gate, multiply
from freight.kernels.sums import ADDS, GATES, PUTS
from freight.model.frame import Frame, Member, Rows, Together
from freight.model.kept_steps import ProjectGroups
from freight.model.number_format import integer_scratch
from freight.model.programme import Activate, Multiply, Project, Step
from freight.model.set_rows import SetRows, cut_rows, lie_together

__all__ = ["project", "project_gated", "project_groups"]


def project(steps: Sequence[Project], frame: Frame) -> None:
    """Products of one value: together, but for integers that have products of their own."""
    x = frame.values[steps[0].x]
    assert all(not step.adds or step.out in frame.values for step in steps)
    outs = [frame.new(step.out, x, step.weight.num_rows) for step in steps]
    known = _by_table(steps, x, outs, frame)
    if known is not None:
        known.multiply(x, outs, [ADDS if step.adds else PUTS for step in steps])
    for member in frame.members() if known is None else known.others():
        plain: list[Product] = []
        for step, out in zip(steps, outs, strict=True):
            for rows, bias, part in _parts(step, member, out):
                if isinstance(rows, IntegerRows):
                    tokens = frame.tokens(step.x).of(member.rows)
                    _multiply_integers(tokens, rows, bias, part, frame, adds=step.adds)
                else:
                    plain.append(Product(rows=rows, out=part, bias=bias, adds=step.adds))
        _multiply_plain(x[member.rows], plain, frame)


def project_groups(step: ProjectGroups, frame: Frame) -> None:
    x, count = frame.values[step.x], step.num_groups
    out = frame.new(step.out, x, step.weight.num_rows)
    width, height = x.shape[1] // count, step.weight.num_rows // count
    for first, rows in frame.weights[step.weight.name]:
        end = first + rows.shape[0]
        for group in range(first // height, -(-end // height)):
            low, high = max(first, group * height), min(end, (group + 1) * height)
            part, target = x[:, group * width : (group + 1) * width], out[:, low:high]
            if isinstance(rows, IntegerRows):
                own = replace(rows, raw=rows.raw[low - first : high - first])
                with frame.workspace.frame():
                    tokens = frame.as_integers(part)
                    _multiply_integers(tokens, own, None, target, frame, adds=False)
            else:
                some = cut_rows(rows, low - first, high - first)
                _multiply_plain(part, [Product(rows=some, out=target)], frame)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ByTable:
    """Experts of several that a table is told of: ``calls`` says which, and what multiplies them at
    once."""

    table: SetRows
    together: Together
    calls: Sequence[tuple[npt.NDArray[np.bool_], Callable[..., None]]]

    def multiply(
        self, x: torch.Tensor, outs: Sequence[torch.Tensor], outcomes: Sequence[int]
    ) -> None:
        """To the ``outs`` of steps, with what becomes of each."""
        own, table = self.together, self.table
        sets, targets = table.places[own.numbers], table.outs(outs)
        whats = [outcomes[step] for step, *_ in table.cuts]
        for some, call in self.calls:
            if some.any():
                call(x, sets[some], own.firsts[some], own.counts[some], targets, whats)

    def others(self) -> list[Member]:
        return self.together.members(~np.logical_or.reduce([some for some, _ in self.calls]))


def _by_table(
    steps: Sequence[Project],
    x: torch.Tensor,
    outs: Sequence[torch.Tensor],
    frame: Frame,
    *,
    gates: bool = False,
) -> _ByTable | None:
    if frame.together is None:
        return None
    table = frame.together.find_rows(steps, gates=gates)
    if table is None or not table.rows.takes(x, table.outs(outs)):
        return None
    calls = table.calls(frame.together.numbers, frame.together.counts)
    return _ByTable(table=table, together=frame.together, calls=calls)


_Part = tuple[Rows, torch.Tensor | None, torch.Tensor]
_PlainPart = tuple[torch.Tensor | CompressedRows, torch.Tensor | None, torch.Tensor]
"""Rows, their bias, and their columns of what is made."""


def _parts(step: Project, member: Member, out: torch.Tensor) -> Iterator[_Part]:
    """(rows, their bias, their part of out) of each part of a step's weight, from its first row
    on: tiers give parts in an order of their own."""
    bias = None if step.bias is None else member.vector(step.bias)[step.weight.first_row :]
    for first, rows in sorted(member.weights[step.weight.name], key=itemgetter(0)):
        own = slice(first, first + rows.shape[0])
        yield rows, None if bias is None else bias[own], out[member.rows, own]


def _multiply_plain(x: torch.Tensor, products: Sequence[Product], frame: Frame) -> None:
    if products:
        with frame.workspace.frame():
            multiply(x, products, frame.numbers(x.dtype))


def project_gated(products: Sequence[Project], rest: Sequence[Step], frame: Frame) -> bool:
    """What two products and an activation of the first one, times the second, make, all at once: of
    each number that the second one makes only its share in that is kept. False where this is not
    such a run, or there is no loop for it."""
    if len(products) != 2 or len(rest) != 2:
        return False
    (first, second), (activation, by) = products, rest
    assert isinstance(activation, Activate) and isinstance(by, Multiply)
    if activation.function != "silu" or by.y != second.out or first.adds or second.adds:
        return False
    x = frame.values[first.x]
    out = frame.new(first.out, x, first.weight.num_rows)
    known = _by_table(products, x, (out, out), frame, gates=True)
    members = frame.members() if known is None else known.others()
    gated: list[list[Product]] = []
    for member in members:
        if (own := _gated(products, x, out, member)) is None:
            return False
        gated.append(own)
    if known is not None:
        known.multiply(x, (out, out), (PUTS, GATES))
    for member, own in zip(members, gated, strict=True):
        _multiply_plain(x[member.rows], own, frame)
    return True


def _gated(
    products: Sequence[Project], x: torch.Tensor, out: torch.Tensor, member: Member
) -> list[Product] | None:
    """Of some rows; None where there is no loop."""
    parts: list[list[_PlainPart]] = [[], []]
    for own, step in zip(parts, products, strict=True):
        for rows, bias, part in _parts(step, member, out):
            if isinstance(rows, IntegerRows) or lie_together(rows):
                return None
            own.append((rows, bias, part))
    found = list(_gated_products(*parts))
    return found if can_gate(x[member.rows], found) else None


def _gated_products(gates: Sequence[_PlainPart], others: Sequence[_PlainPart]) -> Iterator[Product]:
    """Parts of a gate, each followed by just those rows that it gates, of parts that begin
    elsewhere as the tiers have them."""
    borders = {0}
    for parts in (gates, others):
        borders |= set(itertools.accumulate(rows.shape[0] for rows, _, _ in parts))
    for first, last in itertools.pairwise(sorted(borders)):
        for parts in (gates, others):
            rows, bias, out = _rows_of(parts, first, last)
            yield Product(rows=rows, out=out, bias=bias, gates=parts is others)


def _rows_of(parts: Sequence[_PlainPart], first: int, last: int) -> _PlainPart:
    """Rows of one of the parts."""
    begin = 0
    for rows, bias, out in parts:
        end = begin + rows.shape[0]
        if first < end:
            low, high = first - begin, last - begin
            own = cut_rows(rows, low, high)
            return own, None if bias is None else bias[low:high], out[:, low:high]
        begin = end
    raise AssertionError("no part has these rows")


def _multiply_integers(
    tokens: IntegerTokens,
    rows: IntegerRows,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    frame: Frame,
    *,
    adds: bool,
) -> None:
    with frame.workspace.frame():
        count = integer_scratch(out.shape[0], out.shape[1], rows.columns)
        sums = frame.workspace.take(count, dtype=torch.int32)
        integer_product(tokens, rows, bias, out, sums, adds=adds)
