"""Ways of computing a model over one mesh that share its stored weights.

A way is a cut of Pope et al. or a scheme of Ong & Kwon; both become the planner's programmes for
the rows and tokens of a call. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.partition.layers import Cut, block, embedding, layer_sizes, logits
from freight.partition.layout import Layout, Mesh
from freight.partition.named import Dynamic, dynamic_layer
from freight.partition.sharded import Sharded

__all__ = ["Programmes", "Way", "Ways"]

Way = Cut | Dynamic


@dataclass(frozen=True, slots=True)
class Programmes:
    """Of a call: ``layers`` without and with experts, and the ends."""

    embedding: Sharded
    layers: Mapping[bool, Sharded]
    logits: Sharded


class Ways:
    """``ways`` of a model, padded, over a mesh. Raises InputError where they store weights
    differently, or a scheme is asked for of a model that it is not for."""

    def __init__(self, config: ModelConfig, mesh: Mesh, ways: Sequence[Way]) -> None:
        self.config = config
        self.mesh = mesh
        self.ways = tuple(ways)
        cuts = [_cut_of(way) for way in ways]
        stored = {(own.width, own.inner, own.experts) for own in cuts}
        if len(stored) != 1:
            raise InputError(
                f"A model was to be cut in {len(cuts)} ways.",
                f"They store weights in {len(stored)} layouts.",
                "Give ways of one width, inner and experts.",
            )
        is_serial = config.experts is None and not config.parallel and config.norm_place == "before"
        is_serial &= config.qk_norm != "whole"
        if any(isinstance(way, Dynamic) for way in ways) and not is_serial:
            raise InputError(
                f"Schemes for a {config.family} model were asked for.",
                "They are for serial layers with one MLP, norms before their parts, and of single "
                "heads.",
                "Use cuts.",
            )
        self._stored = Cut(width=cuts[0].width, inner=cuts[0].inner, experts=cuts[0].experts)

    @property
    def row_parts(self) -> int:
        """Rows are padded to a multiple of this: all ways can cut them."""
        parts = 1
        for way in self.ways:
            if isinstance(way, Cut):
                parts = lcm(parts, self.mesh.size(set(way.rows + way.batch)))
        return parts

    def token_parts(self, way: Way) -> int:
        """Tokens of a row are padded to a multiple of this."""
        is_cut = isinstance(way, Dynamic) and (way.gathered or way.exchanged)
        return self.mesh.num_chips if is_cut else 1

    def stored(self, *, with_experts: bool) -> Mapping[str, Layout]:
        """How weights of a layer lie: as the least cut of all ways wants them."""
        layouts: dict[str, Layout] = {}
        for way in (self._stored, *self.ways):
            sizes = self.sizes(self.row_parts, self.mesh.num_chips, with_experts)
            own = self._layer(way, sizes, with_experts)
            for name, layout in own.weights.items():
                known = layouts.setdefault(name, layout)
                if len(layout.axes) < len(known.axes):
                    layouts[name] = layout
        return layouts

    def moved(self, *, with_experts: bool) -> frozenset[str]:
        """Weights of a layer that some way moves."""
        sizes = self.sizes(self.row_parts, self.mesh.num_chips, with_experts)
        return frozenset(
            step.value
            for way in self.ways
            for step in self._layer(way, sizes, with_experts).transfers
            if step.is_weight
        )

    def layouts_of(self, name: str, *, with_experts: bool) -> set[Layout]:
        """All in which a weight of a layer, or of an end, is there at any time."""
        sizes = self.sizes(self.row_parts, self.mesh.num_chips, with_experts)
        found = set()
        for way in (self._stored, *self.ways):
            cut = _cut_of(way)
            parts = (
                self._layer(way, sizes, with_experts),
                embedding(self.mesh, sizes, cut),
                logits(self.mesh, sizes, cut),
            )
            for own in parts:
                found |= {layout for weight, layout in own.weights.items() if weight == name}
                moves = [step for step in own.transfers if step.value == name]
                found |= {layout for step in moves for layout in (step.before, step.after)}
        return found

    def ends(self) -> Mapping[str, Layout]:
        """How the embedding and the head lie."""
        sizes = self.sizes(1, 1, False)
        both = embedding(self.mesh, sizes, self._stored), logits(self.mesh, sizes, self._stored)
        return {name: layout for own in both for name, layout in own.weights.items()}

    def sizes(self, rows: int, tokens: int, with_experts: bool) -> dict[str, float]:
        """Of a layer's dims; an MLP beside experts has a width of its own."""
        sizes = layer_sizes(self.config, rows=rows, new_tokens=tokens)
        return sizes if with_experts else {**sizes, "F": self.config.intermediate_size}

    def programmes(self, way: Way, rows: int, tokens: int) -> Programmes:
        """For ``rows`` of so many tokens, of which one each comes to the head."""
        return _programmes(self, way, rows, tokens)

    def scores(self, rows: int, tokens: int) -> Sharded:
        """The head on so many tokens of each of some rows, with its weights where they are."""
        return _scores(self, rows, tokens)

    def _layer(self, way: Way, sizes: dict[str, float], with_experts: bool) -> Sharded:
        if isinstance(way, Dynamic):
            return dynamic_layer(self.mesh, sizes, way, centred=self.config.has_centred_norms)
        return block(self.mesh, sizes, way, self.config, with_experts=with_experts)


@lru_cache(maxsize=512)
def _programmes(ways: Ways, way: Way, rows: int, tokens: int) -> Programmes:
    cut, config = _cut_of(way), ways.config
    kinds = {config.has_experts(layer) for layer in range(config.num_layers)}
    last = ways.sizes(rows, 1, False)
    return Programmes(
        embedding(ways.mesh, ways.sizes(rows, tokens, False), cut),
        {own: ways._layer(way, ways.sizes(rows, tokens, own), own) for own in kinds},
        logits(ways.mesh, last, cut, centred=config.has_centred_norms),
    )


@lru_cache(maxsize=64)
def _scores(ways: Ways, rows: int, tokens: int) -> Sharded:
    sizes = ways.sizes(rows, tokens, False)
    return logits(ways.mesh, sizes, ways._stored, centred=ways.config.has_centred_norms)


def _cut_of(way: Way) -> Cut:
    """Of a scheme the cut that stores weights as it does, and computes the ends."""
    return way if isinstance(way, Cut) else Cut(width="", inner="x")
