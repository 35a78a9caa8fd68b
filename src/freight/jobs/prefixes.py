"""Beginnings that many rows have alike, found over a whole dataset.

A radix tree over tokens, grown block of tokens by block for all prompts at once: only those that
still have a companion go on, and a stretch without a fork is one node. Of its nodes those are taken
as beginnings with which most tokens are spared in all, each row having the deepest on its path.
Samples of one prompt are rows that have all of it alike. Knows tokens, no rows' formats and no
pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["PREFIX_BLOCK", "SharedPrefixes", "find_prefixes"]

PREFIX_BLOCK: Final = 16
"""Tokens of an edge: beginnings are multiples of it."""

_LEAST_SPARED: Final = 64
_LEAST_SHARE: Final = 0.05

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPrefixes:
    """For each prompt the number of its beginning, -1 for none, and how many tokens that has."""

    keys: Ints
    num_tokens: Ints

    @property
    def are_any(self) -> bool:
        return bool((self.keys >= 0).any())


def find_prefixes(
    tokens: npt.NDArray[np.int32], offsets: Ints, lengths: Ints, samples: Ints | None = None
) -> SharedPrefixes:
    """Of prompts that are ``lengths`` tokens of ``tokens`` from ``offsets`` on, each that of
    ``samples`` rows, or of one. A beginning is shorter than each prompt that has it. None where
    little would be spared of all."""
    rows = np.ones(len(offsets), dtype=np.int64) if samples is None else samples
    tree = _grow(tokens, offsets, lengths, rows)
    taken = _choose(tree)
    depth = tree.depths[taken[tree.places]]
    found, key = np.unique(taken[tree.places], return_inverse=True)
    spared = (np.bincount(key, weights=rows) - 1) * tree.depths[found]
    if spared.sum() < _LEAST_SHARE * (rows * lengths).sum():
        depth = np.zeros_like(depth)
    # The root is the first of those found, unless all prompts have a beginning.
    keys = np.where(depth > 0, key - (found[:1] == 0).sum(), -1)
    return SharedPrefixes(keys=keys.astype(np.int64), num_tokens=depth)


# -- the tree ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tree:
    """Nodes by number, parents before their children, the root first. Of each its parent, how many
    tokens its path has, how many rows go through it, and how many nodes are above it; ``places``
    are the deepest nodes on the prompts' paths."""

    parents: Ints
    depths: Ints
    num_rows: Ints
    ranks: Ints
    places: Ints


@dataclass(kw_only=True, slots=True)
class _Nodes:
    """Nodes that there are so far, as lists that grow by levels."""

    parents: list[Ints] = field(default_factory=list)
    depths: list[Ints] = field(default_factory=list)
    num_rows: list[Ints] = field(default_factory=list)
    count: int = 0

    def add(self, parents: Ints, depths: Ints, num_rows: Ints) -> Ints:
        """Their numbers."""
        self.parents.append(parents)
        self.depths.append(depths)
        self.num_rows.append(num_rows)
        first, self.count = self.count, self.count + len(parents)
        return np.arange(first, self.count)


def _grow(tokens: npt.NDArray[np.int32], offsets: Ints, lengths: Ints, rows: Ints) -> _Tree:
    """A stretch in which nobody leaves is one node, which is added when it ends."""
    nodes = _Nodes()
    nodes.add(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([rows.sum()]))
    places = np.zeros(len(offsets), dtype=np.int64)
    active, length = np.arange(len(offsets)), 0
    # Stretches that go on: the prompts' groups, and of each the node above and its rows.
    group = np.zeros(len(offsets), dtype=np.int64)
    above, weight = np.zeros(1, dtype=np.int64), np.array([-1])
    while len(active):
        going = lengths[active] > length + PREFIX_BLOCK
        goes = active[going]
        branch, first = _branches(tokens, offsets[goes] + length, group[going])
        came_from = group[going][first]
        size = np.bincount(branch, minlength=len(first))
        new_weight = np.bincount(branch, weights=rows[goes], minlength=len(first)).astype(np.int64)
        is_same = np.zeros(len(above), dtype=bool)
        is_same[came_from[new_weight == weight[came_from]]] = True
        # Groups that somebody leaves end here, and what goes on begins below them.
        ends = np.flatnonzero(~is_same & (weight > 0))
        node = above.copy()
        node[ends] = nodes.add(above[ends], np.full(len(ends), length), weight[ends])
        ended = ~is_same[group]
        places[active[ended]] = node[group[ended]]
        above = node[came_from]
        # A prompt that is alone goes on where it has samples, all the way.
        alone = (size == 1)[branch]
        several = alone & (rows[goes] > 1)
        last = (lengths[goes[several]] - 1) // PREFIX_BLOCK * PREFIX_BLOCK
        places[goes[several]] = nodes.add(above[branch[several]], last, rows[goes[several]])
        left, group = np.unique(branch[~alone], return_inverse=True)
        above, weight, active = above[left], new_weight[left], goes[~alone]
        length += PREFIX_BLOCK
    parents, depths, num_rows = map(np.concatenate, (nodes.parents, nodes.depths, nodes.num_rows))
    return _Tree(
        parents=parents, depths=depths, num_rows=num_rows, ranks=_ranks(parents), places=places
    )


def _branches(tokens: npt.NDArray[np.int32], starts: Ints, group: Ints) -> tuple[Ints, Ints]:
    """The next branch of each prompt by its group and next block; where each is first met."""
    edges = np.empty((len(starts), PREFIX_BLOCK + 1), dtype=np.int32)
    edges[:, 0] = group
    edges[:, 1:] = tokens[starts[:, None] + np.arange(PREFIX_BLOCK)]
    whole = edges.view(np.dtype((np.void, edges.itemsize * edges.shape[1]))).ravel()
    _, first, branch = np.unique(whole, return_index=True, return_inverse=True)
    return branch.astype(np.int64), first.astype(np.int64)


def _ranks(parents: Ints) -> Ints:
    """How many nodes are above each."""
    ranks = np.zeros(len(parents), dtype=np.int64)
    here = np.flatnonzero(np.arange(len(parents)) > 0)
    above = parents[here]
    while len(here):
        ranks[here] += 1
        going = above > 0
        here, above = here[going], parents[above[going]]
    return ranks


# -- the choice ----------------------------------------------------------------------------------


def _choose(tree: _Tree) -> Ints:
    """For each node the beginning of the rows that are there and no deeper: itself, one above it,
    or the root for none.

    From the leaves up, for each node and each that may be the nearest beginning above it: what is
    spared below if the node is one too, and if it is not. A beginning costs its own tokens, and as
    many as are the least worth sparing. From the root down, what was better.
    """
    passing = np.bincount(
        tree.parents[1:], weights=tree.num_rows[1:], minlength=len(tree.parents)
    ).astype(np.int64)
    staying = tree.num_rows - passing
    members = [np.flatnonzero(tree.ranks == rank) for rank in range(int(tree.ranks.max()) + 1)]
    is_taken: list[npt.NDArray[np.bool_]] = []
    # By (node of the rank, rank of the beginning), what all below spare.
    below = np.zeros((len(members[-1]), len(members)), dtype=np.int64)
    for rank in range(len(members) - 1, 0, -1):
        own = members[rank]
        depths = _depths_above(tree, own, rank)
        without = staying[own, None] * depths + below[:, :rank]
        cost = tree.depths[own] + _LEAST_SPARED
        with_it = staying[own] * tree.depths[own] + below[:, rank] - cost
        is_taken.append(with_it[:, None] > without)
        spared = np.maximum(without, with_it[:, None])
        below = np.zeros((len(members[rank - 1]), rank), dtype=np.int64)
        np.add.at(below, np.searchsorted(members[rank - 1], tree.parents[own]), spared)
    taken = np.zeros(len(tree.parents), dtype=np.int64)
    for rank, is_better in enumerate(reversed(is_taken), start=1):
        own = members[rank]
        nearest = taken[tree.parents[own]]
        is_own = is_better[np.arange(len(own)), tree.ranks[nearest]]
        taken[own] = np.where(is_own, own, nearest)
    return taken


def _depths_above(tree: _Tree, nodes: Ints, rank: int) -> Ints:
    """Of nodes that have so many above them, the tokens of these, the root's first."""
    depths = np.empty((len(nodes), rank), dtype=np.int64)
    above = nodes
    for column in range(rank - 1, -1, -1):
        above = tree.parents[above]
        depths[:, column] = tree.depths[above]
    return depths
