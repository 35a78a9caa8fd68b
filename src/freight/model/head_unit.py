"""A chunk of the output head as a unit: what it norms and narrows, its rows, and what follows."""

from __future__ import annotations

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
    and what makes it as narrow as the embedding, where there are such."""
    steps: list[Step] = [step for step in (norm, narrow) if step is not None]
    last = narrow or norm
    rows = Weight(
        name="head.weight",
        out_dims=("V",),
        in_dims=("E",),
        num_rows=num_rows,
        num_columns=config.embedding_size,
        first_row=first_row,
    )
    steps.append(Project(x="x" if last is None else last.out, out="logits", weight=rows, bias=bias))
    if config.logits_scale is not None:
        steps.append(Scale(x="logits", factor=config.logits_scale))
    if config.logits_softcap is not None:
        steps.append(Cap(x="logits", limit=config.logits_softcap))
    return Unit(name=f"head.{first_row}", kind="head", layer=None, steps=tuple(steps))
