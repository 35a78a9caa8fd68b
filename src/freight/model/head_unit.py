"""A chunk of the output head as a unit: what it norms and narrows, its rows, and what follows; or
what reads a row's last token in its place."""

from __future__ import annotations

from dataclasses import replace

from freight.model.programme import Cap, Norm, Project, Scale, Step, Unit
from freight.model.switches import ModelConfig
from freight.model.weight import Weight

__all__ = ["head_unit"]


def head_unit(
    config: ModelConfig,
    first_row: int,
    num_rows: int,
    *,
    norm: Norm | None,
    narrow: Project | None,
    bias: Weight | None = None,
) -> Unit:
    """So many rows of the vocabulary from ``first_row`` on, behind the last ``norm`` of the stream
    and what makes it as narrow as the embedding, where there are such. Where the model's readout
    is one of labels the rows are theirs, else it is what the norm makes."""
    readout = config.readout
    steps: list[Step] = [step for step in (norm, narrow) if step is not None]
    if readout is not None and not readout.labels:
        assert norm is not None, "nothing is made of the stream"
        return _unit(first_row, [replace(norm, out="logits")])
    last = narrow or norm
    rows = Weight(
        name="head.weight" if readout is None else "score.weight",
        out_dims=("V",) if readout is None else ("y",),
        in_dims=("E",) if readout is None else ("D",),
        num_rows=num_rows,
        num_columns=config.embedding_size if readout is None else config.hidden_size,
        first_row=first_row,
    )
    steps.append(Project(x="x" if last is None else last.out, out="logits", weight=rows, bias=bias))
    if readout is None and config.logits_scale is not None:
        steps.append(Scale(x="logits", factor=config.logits_scale))
    if readout is None and config.logits_softcap is not None:
        steps.append(Cap(x="logits", limit=config.logits_softcap))
    return _unit(first_row, steps)


def _unit(first_row: int, steps: list[Step]) -> Unit:
    return Unit(name=f"head.{first_row}", kind="head", layer=None, steps=tuple(steps))
