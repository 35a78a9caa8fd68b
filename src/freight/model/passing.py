"""The values that pass from unit to unit beside each other, and from layer to layer."""

from __future__ import annotations

from freight.model.layer_kinds import CHOSEN, KeptLatents
from freight.model.switches import ModelConfig

__all__ = ["carried", "handed_columns", "handed_on"]

Columns = tuple[tuple[str, int], ...]
"""Of values by their names, how wide they are."""


def carried(config: ModelConfig) -> Columns:
    """What passes from unit to unit: the residual stream; what experts work on, or attention's
    update where the next unit must find the stream as it was; what experts have made so far, or
    that update; what they work on and make where that is narrow; what layers have of a token as
    inputs of their own; residual streams where these are several, and by what the experts' sum,
    which is in the place of the one, goes into each; and which keys a layer has chosen for others.
    """
    experts = config.experts
    has_two = config.attends_aside or experts is not None
    sums = config.norms_sum and not config.experts_see_stream
    has_three = sums or (config.attends_aside and experts is not None)
    names = ("x", "aside", "sum")[: 1 + has_two + has_three]
    narrow = ("narrow", "made") if experts is not None and experts.latent_size else ()
    width = experts.latent_size if experts is not None else 0
    inputs = [("inputs", config.input_columns)] if config.layer_inputs else []
    if (own := config.streams) is not None:
        inputs.append(("streams", own.count * config.hidden_size))
        inputs += [("shares", own.share_columns)] if experts is not None else []
    plain = (*((own, config.hidden_size) for own in names), *((own, width) for own in narrow))
    return (*plain, *inputs, *_chosen(config))


def handed_on(config: ModelConfig) -> Columns:
    """Of these what a layer hands on to the next: the residual stream, or all of them where they
    are several, and which keys were chosen for others."""
    own = config.streams
    name, count = ("x", 1) if own is None else ("streams", own.count)
    return ((name, count * config.hidden_size), *_chosen(config))


def handed_columns(config: ModelConfig) -> int:
    """How wide that is together."""
    return sum(columns for _, columns in handed_on(config))


def _chosen(config: ModelConfig) -> Columns:
    own = config.recurrence
    columns = own.chosen_columns if isinstance(own, KeptLatents) else 0
    return ((CHOSEN, columns),) if columns else ()
