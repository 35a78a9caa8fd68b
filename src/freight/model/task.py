"""What a model is to be run for: the answers that it generates, embeddings, or scores of labels.

Knows switches alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from freight.errors import InputError
from freight.model.readout import Readout
from freight.model.switches import ModelConfig

__all__ = ["TASKS", "for_task", "refuse_readout"]

TASKS: Final = ("auto", "generate", "embed", "classify")


def for_task(config: ModelConfig, task: str) -> ModelConfig:
    """The switches of the model as it is to be run; "auto" is what its files say. Raises InputError
    where it cannot be run so."""
    own = config.readout
    has_labels = own is not None and bool(own.labels)
    if task == "auto" or (task == "classify" and has_labels):
        return config
    if task == "generate" and not has_labels:
        return replace(config, readout=None)
    if task == "embed" and not config.final_norm:
        raise InputError(
            f"Embeddings of a {config.family} model were asked for.",
            "It has no norm behind its last layer, which they would be read behind.",
            "Choose another model.",
        )
    if task == "embed":
        return config if own is not None and not has_labels else replace(config, readout=Readout())
    wanted = "has labels" if task == "classify" else "generates"
    found = "scores labels" if has_labels else "has none, by its config.json"
    raise InputError(
        f"The task {task} was asked for.",
        f"It is of a model that {wanted}, and this one {found}.",
        "Leave the task out: the model's files say what it is for.",
    )


def refuse_readout(config: ModelConfig, asked: str) -> None:
    """InputError where a model is to generate, or to be scored by its odds, and makes no odds."""
    if config.readout is not None:
        raise InputError(
            asked,
            f"The model makes {config.readout.name}, by its files: no odds of a next token.",
            "Choose a model that generates, or use freight run, LLM.embed or LLM.classify.",
        )
