"""A product of tokens and rows as loops see it, and the rows of several shared out over threads.
Knows no loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.grouped import CompressedRows
from freight.kernels.sharing import ranges_alike, share_alike, team_threads
from freight.kernels.sums import ADDS, GATES, PUTS
from freight.kernels.threads import as_numbers
from freight.model.number_format import Grouped

__all__ = [
    "LEAST_PRODUCTS",
    "LEAST_SHARED",
    "LEAST_SHARED_OF_FEW",
    "TOKENS_WORTH_ROWS",
    "Product",
    "Target",
    "share_targets",
]

LEAST_PRODUCTS: Final = 1 << 21
"""Of numbers, in a product that is worth calling threads for."""
LEAST_SHARED: Final = 1 << 23
LEAST_SHARED_OF_FEW: Final = 1 << 22
"""Products of numbers in a share: waking a thread takes as long as some millions of them."""
TOKENS_WORTH_ROWS: Final = 16
"""Tokens whose products with a row take about as long as the row comes from memory, or less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """out [T, n] = tokens times the ``rows`` [n, columns], plus the ``bias`` [n]; or out += that
    where it ``adds``, or out = silu(out) times that where it ``gates``."""

    rows: torch.Tensor | CompressedRows
    out: torch.Tensor
    bias: torch.Tensor | None = None
    adds: bool = False
    gates: bool = False

    @property
    def outcome(self) -> int:
        """What becomes of its sums, as loops are told."""
        return GATES if self.gates else ADDS if self.adds else PUTS

    @property
    def is_in_groups(self) -> bool:
        """Whether rows are integers in groups."""
        rows = self.rows
        return isinstance(rows, CompressedRows) and isinstance(rows.number_format, Grouped)


class Target:
    """A product as the loops see it, with rows as they take them: its ``units`` are rows, or panels
    of as many as they take at once."""

    def __init__(self, product: Product, unit_rows: int, rows: tuple[Any, ...]) -> None:
        self.count = product.rows.shape[0]
        self.rows = rows
        self.units = -(-self.count // unit_rows)
        self.out, self.pitch = as_numbers(product.out), product.out.stride(0)
        bias = product.bias
        self.bias: npt.NDArray[np.float32] = (
            np.empty(0, np.float32) if bias is None else bias.float().numpy()
        )
        self.adds = product.outcome

    @property
    def results(self) -> tuple[Any, ...]:
        """What loops are told of them last."""
        return self.bias, self.adds, self.out, self.pitch


def share_targets(
    targets: Sequence[Target],
    work: Callable[[Target, int, int], None],
    least: int,
    team: Callable[[Target, int, npt.NDArray[np.int64], npt.NDArray[np.int64]], None],
    *,
    is_short: bool = False,
) -> None:
    """Share the units of all targets out as one row of units, no fewer than ``least`` at a time; or
    have a ``team``, which work that ``is_short`` wants sooner, work on one after the other, as
    ``Team`` says."""
    if threads := team_threads(sum(own.units for own in targets) // least, is_short=is_short):
        for own in targets:
            borders = ranges_alike(own.units, least, in_turns=True)
            team(own, threads, np.zeros(1, np.int64), np.array(borders, np.int64))
        return

    def work_range(first: int, last: int) -> None:
        begin = 0
        for own in targets:
            low, high = max(first - begin, 0), min(last - begin, own.units)
            if low < high:
                work(own, low, high)
            begin += own.units

    share_alike(sum(own.units for own in targets), work_range, least, in_turns=True)
