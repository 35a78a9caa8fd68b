"""Heads of keys and values where layers do not all have the same, or attend those of others. Plain
data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Heads", "OtherHeads", "Sharing"]


class Heads(NamedTuple):
    """Key/value heads of a layer, and how wide all its heads are."""

    num_kv: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherHeads:
    """What heads some layers have, those that ``layers`` names, where the others have the model's:
    ``num_heads`` of queries and ``num_kv_heads`` of keys and values, all ``head_dim`` wide. With
    ``keys_are_values`` they have one matrix for both (Gemma 4)."""

    layers: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    keys_are_values: bool

    @property
    def heads(self) -> Heads:
        return Heads(self.num_kv_heads, self.head_dim)

    def problems(self, num_layers: int) -> list[str]:
        """What is wrong with them in a model of so many layers."""
        problems = []
        if len(self.layers) != num_layers:
            problems.append(f"{len(self.layers)} of {num_layers} layers say what heads they have")
        if min(self.num_heads, *self.heads) < 1 or self.num_heads % max(1, self.num_kv_heads):
            problems.append(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} of keys and values "
                f"that are {self.head_dim} wide"
            )
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Layers from number ``first`` on make no keys and values: each attends those of the last layer
    before that has a window where it has one, or has none either. Their MLPs are ``mlp_size``
    wide."""

    first: int
    mlp_size: int
