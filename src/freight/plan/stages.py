"""A stage of a pipeline: some layers of a model, as a programme of their own.

Its first unit enters what another stage has sent into the residual stream, unless it is the first
stage and looks tokens up; its last one picks what the next stage gets, unless it is the last and
makes logits. Layers count from the stage's first, weights keep their names. Knows no machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from freight.model.config import ModelConfig
from freight.model.decoder import build_programme
from freight.model.programme import Programme, Unit
from freight.model.sources import TensorSource
from freight.plan.model_limits import check_stages

__all__ = ["StageModel", "stage_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageModel:
    """Layers of a model. ``config`` is that of a model of these alone, ``programme`` its units."""

    layers: range
    config: ModelConfig
    programme: Programme

    def sources(self, whole: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
        """Of the weights that the stage has."""
        names = {weight.name for unit in self.programme.units for weight in unit.weights}
        return {name: source for name, source in whole.items() if name in names}


def stage_model(config: ModelConfig, layers: range) -> StageModel:
    """Those ``layers`` of a model; all of them are the model itself. Raises InputError where it
    cannot be cut."""
    if len(layers) == config.num_layers:
        return StageModel(layers=layers, config=config, programme=build_programme(config))
    check_stages(config)
    whole = build_programme(config)
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    own = [
        replace(unit, layer=unit.layer - layers.start)
        for unit in whole.units
        if unit.layer is not None and unit.layer in layers
    ]
    head = [unit for unit in whole.units if unit.kind == "head"]
    first = whole.embedding if is_first else _empty("entrance", "embedding")
    last = head if is_last else [_empty("departure", "head")]
    return StageModel(
        layers=layers,
        config=config.of_layers(layers),
        programme=Programme(units=(first, *own, *last), carried=whole.carried),
    )


def _empty(name: str, kind: str) -> Unit:
    return Unit(name=name, kind=kind, layer=None, steps=())  # type: ignore[arg-type]
