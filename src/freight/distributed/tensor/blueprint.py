"""Which rows and columns of which tensors make up each weight of the planner's programmes.

A planner's weight is a stack of the checkpoint's matrices, their rows and columns taken apart into
dims: "keys in" E J K D is, for J, the matrices of keys and values, each with rows K D and columns
E. Padded heads, columns and tokens have no row. Knows no rank and reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from freight.distributed.tensor.reading import Numbers
from freight.model.switches import ModelConfig

__all__ = ["Blueprint", "Matrix"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of a stack: the logical ``name`` of what has it. Its rows are ``row_dims``, its columns
    ``column_dims``; ``fused`` is its place, "q", "k" or "v", where it is one with others."""

    name: str
    row_dims: str
    column_dims: str
    fused: str = ""


_STACKS: Final[Mapping[str, str]] = {
    "keys in": "J",
    "mlp in": "G",
    "shared in": "G",
    "experts in": "NG",
    "experts out": "N",
}
_MATRICES: Final[Mapping[str, tuple[str, str]]] = {
    "queries in": ("HD", "E"),
    "keys in": ("KD", "E"),
    "attention out": ("E", "HD"),
    "mlp in": ("F", "E"),
    "mlp out": ("E", "F"),
    "router": ("N", "E"),
    "shared in": ("Q", "E"),
    "shared out": ("E", "Q"),
    "share": ("", "E"),
    "experts in": ("F", "E"),
    "experts out": ("E", "F"),
    "embedding": ("V", "E"),
    "head": ("V", "E"),
}


class Blueprint:
    """Of a model of ``config``, padded as ``padded``."""

    def __init__(self, config: ModelConfig, padded: ModelConfig) -> None:
        self.config = config
        self.padded = padded

    def stack(self, weight: str) -> str:
        """The dims of a planner's weight that choose one of several matrices, outermost first."""
        return _STACKS.get(weight, "")

    def matrix(self, weight: str, layer: int | None, chosen: Sequence[int]) -> Matrix:
        """The one that ``chosen`` numbers of the stack's dims name."""
        rows, columns = _MATRICES[weight]
        prefix = f"layers.{layer}"
        match weight:
            case "embedding":
                return Matrix("embedding", rows, columns)
            case "head":
                return Matrix("head.weight", rows, columns)
            case "queries in" | "keys in":
                part = "q" if weight == "queries in" else "kv"[chosen[0]]
                if self.config.fused_qkv:
                    return Matrix(f"{prefix}.attention.qkv", rows, columns, part)
                return Matrix(f"{prefix}.attention.{part}", rows, columns)
            case "attention out":
                return Matrix(f"{prefix}.attention.out", rows, columns)
            case "router":
                return Matrix(f"{prefix}.router.weight", rows, columns)
            case "share":
                return Matrix(f"{prefix}.shared.share", rows, columns)
        *expert, last = (*chosen, "down") if weight.endswith("out") else chosen
        if last != "down":
            last = "gate" if self.config.gated_mlp and last == 0 else "up"
        group = f"experts.{expert[0]}" if expert else weight.split()[0]
        return Matrix(f"{prefix}.{group}.{last}", rows, columns)

    def numbers(self, matrix: Matrix, dims: str, ranges: Mapping[str, range]) -> Numbers:
        """Rows, or columns, of a checkpoint's matrix for ranges of padded dims, in their order."""
        if dims in ("HD", "KD"):
            heads = np.array([self.head(head, dims[0], matrix.fused) for head in ranges[dims[0]]])
            found = heads[:, None] * self.config.head_dim + np.array(ranges["D"])
            return np.where(heads[:, None] < 0, -1, found).reshape(-1)
        if not dims:  # a matrix of one row
            return np.zeros(1, np.int64)
        numbers = np.array(ranges[dims])
        return np.where(numbers < self._size(dims, ".experts." in matrix.name), numbers, -1)

    def _size(self, dim: str, of_expert: bool) -> int:
        c = self.config
        match dim:
            case "F" if of_expert:
                assert c.experts is not None
                return c.experts.intermediate_size
            case "N" | "Q":
                assert c.experts is not None
                return c.experts.num_experts if dim == "N" else c.experts.shared_size
        return {"E": c.hidden_size, "F": c.intermediate_size, "V": c.vocab_size}[dim]

    def head(self, head: int, dim: str, fused: str = "") -> int:
        """The place of a padded head among those of its matrix; -1: it is padding.

        Heads that share keys stay together: each group is padded at its end."""
        c = self.config
        groups, shared = c.num_kv_heads, c.num_heads // c.num_kv_heads
        if dim == "K":
            group, within, size = head, 0, 1
        else:
            group, within = divmod(head, self.padded.num_heads // self.padded.num_kv_heads)
            size = shared
        if group >= groups or within >= size:
            return -1
        if not fused:
            return group * size + within
        return group * (shared + 2) + {"q": within, "k": shared, "v": shared + 1}[fused]
