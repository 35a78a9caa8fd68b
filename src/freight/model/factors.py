"""Units whose products are multiplied by factors of the model, each as it was but for these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from freight.model.layer_kinds import Recurrence
from freight.model.programme import Add, Project, Scale, Step, Unit
from freight.model.switches import ModelConfig

__all__ = ["with_factors"]


def with_factors(unit: Unit, config: ModelConfig) -> Unit:
    """Products of one value that follow each other stay together."""
    steps: list[Step] = []
    waiting: list[Step] = []
    for step in unit.steps:
        if not isinstance(step, Project) or step.adds:
            steps += waiting
            waiting = []
        scales = list(_scales(step, config)) if isinstance(step, Project) else []
        if isinstance(step, Project) and step.adds and scales:
            update = [replace(scale, x="update") for scale in scales]
            steps += [replace(step, out="update", adds=False), *update, Add(x=step.out, y="update")]
        else:
            steps.append(step)
            waiting += scales
    return replace(unit, steps=(*steps, *waiting))


def _scales(step: Project, config: ModelConfig) -> Iterator[Scale]:
    """What a product is multiplied by; of what is convolved values, keys and queries apart."""
    factors, (_, _, name) = dict(config.factors), step.weight.name.split(".", 2)
    if name in factors:
        yield Scale(x=step.out, factor=factors[name])
    own = config.recurrence
    if name != "recurrence.mixed" or not isinstance(own, Recurrence):
        return
    keys, first = own.num_key_heads * own.key_width, 0
    widths = {"values": own.num_heads * own.value_width, "keys": keys, "queries": keys}
    for part, width in widths.items():
        if (factor := factors.get(f"recurrence.{part}")) is not None:
            yield Scale(x=step.out, factor=factor, first=first, num_columns=width)
        first += width
