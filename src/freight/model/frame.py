"""What the steps of a unit see: values by name, weights as parts, and where the rows' keys are.

Which tier brought a weight, and when, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.integers import IntegerRows, IntegerTokens, quantise_tokens
from freight.kernels.pages import Pages
from freight.kernels.row_states import RowStates
from freight.model.kv_view import KVView
from freight.model.programme import Project, Weight
from freight.model.rope_config import RopeConfig
from freight.model.routes import Routes
from freight.model.set_rows import SetRows
from freight.model.workspace import Workspace

__all__ = [
    "Angles",
    "DelegatedTokens",
    "Frame",
    "LayerStates",
    "Member",
    "PageCopies",
    "Rows",
    "Together",
    "WeightParts",
]

Rows = torch.Tensor | CompressedRows | IntegerRows
WeightParts = Sequence[tuple[int, Rows]]
"""A weight on the compute device: (first row, rows [n, columns]), in order, without gaps. What is
compressed in groups is made plain in tiles, each of which is used before the next; tokens meet
integer rows as integers. Plain rows may be narrower than the tokens."""


Ids = npt.NDArray[np.int64]

PageCopies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Bytes of pages: from where, and where to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Angles:
    """Cosines and sines [T, rotary/2] of what tokens are rotated by, in the compute dtype."""

    cos: torch.Tensor
    sin: torch.Tensor

    def of(self, tokens: slice | torch.Tensor) -> Angles:
        return Angles(cos=self.cos[tokens], sin=self.sin[tokens])


@dataclass(frozen=True, kw_only=True, slots=True)
class DelegatedTokens:
    """Tokens from ``first`` on are attended elsewhere: where their queries [n, N, H], keys and
    values [n, K, H] are put."""

    first: int
    targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStates:
    """What some rows keep in a layer beside pages of keys, by their seats: columns of their last
    tokens [seats, taps - 1, C], and matrices [seats, N, W, U], float32; or keys [seats, K, H], and
    the sums that the next ones are made of [seats, 2, 3, H]. ``beginnings`` are those
    that seats get first: what another row has when its tokens are done."""

    rows: RowStates
    columns: torch.Tensor
    memory: torch.Tensor
    beginnings: Sequence[tuple[int, torch.Tensor, torch.Tensor]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Some rows of what is worked on, and the weights that they meet."""

    weights: Mapping[str, WeightParts]
    rows: slice

    def vector(self, weight: Weight) -> torch.Tensor:
        return _vector(self.weights, weight)


class FindRows(Protocol):
    """Of some steps what they multiply by; None where no loop takes it. Where the second one
    ``gates`` the first one both are cut alike."""

    def __call__(self, steps: Sequence[Project], *, gates: bool = False) -> SetRows | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Several experts of a layer that are computed together. Of all that there are of it here,
    ``weights`` has each one's, by the names that the first one's have, and ``find_rows`` makes one
    table of what they are multiplied by in some steps. Those ``numbers`` [n] are computed: from the
    ``firsts`` on so many rows, ``counts``, of what they work on are their tokens'. ``rounds`` says
    what goes to which tokens, ascending: each token's first rows of what experts make, then its
    second ones, and so on, in the order of its experts."""

    weights: Sequence[Mapping[str, WeightParts]]
    find_rows: FindRows
    numbers: Ids
    firsts: Ids
    counts: Ids
    rounds: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def members(self, some: npt.NDArray[np.bool_] | None = None) -> list[Member]:
        """All, or ``some`` of them."""
        own = slice(None) if some is None else some
        places = zip(self.numbers[own], self.firsts[own], self.counts[own], strict=True)
        return [
            Member(weights=self.weights[number], rows=slice(first, first + count))
            for number, first, count in places
        ]


@dataclass(kw_only=True, slots=True)
class Frame:
    """What the steps of one unit see: values by name, and where the rows' keys are.

    ``values["x"]`` [T, D] is the residual stream and is updated in place. ``angles`` are those of
    each way to rotate, ``positions`` [T] count from 0. ``kv`` pairs pools with the views that index
    them; ``around`` says for each, if for any, what is copied before its rows are attended and
    after. ``states`` are those of rows in a layer without keys. A router fills ``routes``; an
    expert works on ``chosen`` [n], the tokens that chose it, with their ``shares`` [n]; several
    that work ``together`` on the tokens of each, one after the other.
    ``delegated`` tokens are attended elsewhere. ``token_ids`` [T] are there for routers that go by
    them.
    """

    weights: Mapping[str, WeightParts]
    workspace: Workspace
    values: dict[str, torch.Tensor]
    angles: Mapping[RopeConfig, Angles] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    kv: Sequence[tuple[Pages, KVView]] = field(default_factory=tuple)
    around: Sequence[tuple[PageCopies, PageCopies]] = ()
    states: Sequence[LayerStates] = field(default_factory=tuple)
    delegated: DelegatedTokens | None = None
    routes: Routes | None = None
    chosen: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    together: Together | None = None
    integers: dict[str, IntegerTokens] = field(default_factory=dict)
    """Values as integers, until they change: several products take the same one."""

    def new(self, name: str, like: torch.Tensor, num_columns: int) -> torch.Tensor:
        """A value of as many rows as ``like``, in the workspace unless it is there already."""
        if name not in self.values:
            self.values[name] = self.workspace.take(like.shape[0], num_columns, dtype=like.dtype)
        return self.values[name]

    def tokens(self, name: str) -> IntegerTokens:
        """A value as integers."""
        if name not in self.integers:
            self.integers[name] = self.as_integers(self.values[name])
        return self.integers[name]

    def as_integers(self, x: torch.Tensor) -> IntegerTokens:
        found = IntegerTokens(
            codes=self.workspace.take(*x.shape, dtype=torch.int8),
            scales=self.workspace.take(x.shape[0], dtype=torch.float32),
        )
        quantise_tokens(x, found)
        return found

    def numbers(self, dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
        """What takes so many numbers from the workspace."""
        return lambda count: self.workspace.take(count, dtype=dtype)

    def plain(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        """All of a matrix, in the workspace unless it lies there as it is."""
        parts = self.weights[weight.name]
        first = parts[0][1]
        if len(parts) == 1 and isinstance(first, torch.Tensor) and first.dtype == dtype:
            return first
        whole = self.workspace.take(weight.num_rows, weight.num_columns, dtype=dtype)
        for begin, rows in parts:
            own = whole[begin : begin + rows.shape[0]]
            if isinstance(rows, CompressedRows):
                dequantise(rows, own)
            else:
                assert isinstance(rows, torch.Tensor), "no integer products are made of it"
                own.copy_(rows)
        return whole

    def vector(self, weight: Weight) -> torch.Tensor:
        return _vector(self.weights, weight)

    def members(self) -> list[Member]:
        """Whose weights what is worked on meets, and which rows of it."""
        if self.together is not None:
            return self.together.members()
        return [Member(weights=self.weights, rows=slice(None))]


def _vector(weights: Mapping[str, WeightParts], weight: Weight) -> torch.Tensor:
    rows = weights[weight.name][0][1]
    assert isinstance(rows, torch.Tensor)
    return rows.view(-1)
