"""Beginnings that many prompts have alike, found over a whole dataset.

A radix tree over tokens whose edges are blocks of them, grown level by level for all prompts at
once: only those that still have a companion go on. Each prompt takes the node on its path at which
most tokens are spared in all. Knows tokens, no rows' formats and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def find_prefixes(tokens: npt.NDArray[np.int32], offsets: Ints, lengths: Ints) -> SharedPrefixes:
    """Of prompts that are ``lengths`` tokens of ``tokens`` from ``offsets`` on. A beginning is
    shorter than each prompt that has it. None where little would be spared of all."""
    count = len(offsets)
    keys = np.full(count, -1, dtype=np.int64)
    best = np.zeros(count, dtype=np.int64)
    depth = np.zeros(count, dtype=np.int64)
    active, group, num_nodes, length = np.arange(count), np.zeros(count, dtype=np.int64), 0, 0
    while True:
        going = lengths[active] > length + PREFIX_BLOCK
        active, group = active[going], group[going]
        if len(active) < 2:
            break
        node, sizes = _branches(tokens, offsets[active] + length, group)
        length += PREFIX_BLOCK
        shared = sizes[node] > 1
        active, group = active[shared], node[shared]
        spared = (sizes[group] - 1) * length
        better = spared > np.maximum(best[active], _LEAST_SPARED)
        chosen = active[better]
        best[chosen], depth[chosen] = spared[better], length
        keys[chosen] = num_nodes + group[better]
        num_nodes += len(sizes)
    return _counted(keys, depth, int(lengths.sum()))


def _branches(tokens: npt.NDArray[np.int32], starts: Ints, group: Ints) -> tuple[Ints, Ints]:
    """The next node of each prompt by its next block, and how many go to each node."""
    edges = np.empty((len(starts), PREFIX_BLOCK + 1), dtype=np.int32)
    edges[:, 0] = group
    edges[:, 1:] = tokens[starts[:, None] + np.arange(PREFIX_BLOCK)]
    whole = edges.view(np.dtype((np.void, edges.itemsize * edges.shape[1]))).ravel()
    _, node, sizes = np.unique(whole, return_inverse=True, return_counts=True)
    return node.astype(np.int64), sizes.astype(np.int64)


def _counted(keys: Ints, depth: Ints, num_prompt_tokens: int) -> SharedPrefixes:
    """Numbers from 0 on, of beginnings that more than one prompt has taken."""
    _, node, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    depth = np.where((keys >= 0) & (sizes[node] > 1), depth, 0)
    spared = depth.sum() - depth[np.unique(node, return_index=True)[1]].sum()
    if spared < _LEAST_SHARE * num_prompt_tokens:
        depth = np.zeros_like(depth)
    keys = np.where(depth > 0, keys, -1)
    found = np.unique(keys[keys >= 0])
    numbered = np.where(keys >= 0, np.searchsorted(found, keys), -1)
    return SharedPrefixes(keys=numbered, num_tokens=depth)
