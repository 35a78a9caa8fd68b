"""Inputs that each layer has of its own: a few numbers of each token, from a table beside the
embedding's (Gemma 4 E2B; https://ai.google.dev/gemma/docs/gemma-3n, "per-layer embeddings").

They are made for all layers at once, with the embedding, and pass from unit to unit beside the
residual stream. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import replace

from freight.model.activations import activation_step
from freight.model.decoder_parts import Parts
from freight.model.programme import Add, Embed, MultiplyColumns, Scale, Step

__all__ = ["add_inputs", "make_inputs"]


def make_inputs(parts: Parts) -> list[Step]:
    """The table's rows, and what a matrix makes of the embedding ``x``, normed layer by layer: of
    both, as ``inputs``, the sum over the root of 2. The first step looks the rows up."""
    c = parts.config
    assert c.layer_inputs is not None
    table = parts.matrix("embedding.inputs", "V", "i")
    made = parts.norm("embedding.inputs_norm", "made", "made")
    return [
        Embed(out="inputs", weight=table),
        Scale(x="inputs", factor=c.layer_inputs**0.5),
        parts.project("embedding.inputs_of", "x", "made", ("i", "D")),
        Scale(x="made", factor=c.hidden_size**-0.5),
        replace(made, weight=parts.vector(made.weight.name, "p"), num_heads=c.num_layers),
        Add(x="inputs", y="made"),
        Scale(x="inputs", factor=2**-0.5),
    ]


def add_inputs(parts: Parts, layer: int) -> list[Step]:
    """What the layer's inputs, times as many numbers of the stream, come to goes into that."""
    c, prefix = parts.config, f"layers.{layer}.inputs"
    assert c.layer_inputs is not None
    return [
        parts.project(f"{prefix}.gate", "x", "own", ("p", "D")),
        activation_step(c.activation, prefix, "own", parts.vector),
        MultiplyColumns(x="own", y="inputs", first=layer * c.layer_inputs),
        parts.project(f"{prefix}.out", "own", "update", ("D", "p")),
        parts.norm(f"{prefix}.norm", "update", "update"),
        Add(x="x", y="update"),
    ]
