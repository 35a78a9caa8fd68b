"""What a model is to be run for: the answers that it generates, embeddings, or scores of labels.

Knows switches alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from freight.errors import InputError, ModelError
from freight.model.readout import Readout
from freight.model.switches import ModelConfig

__all__ = ["TASKS", "for_task", "refuse_other", "task_of"]

TASKS: Final = ("auto", "generate", "embed", "classify")


def for_task(config: ModelConfig, task: str) -> ModelConfig:
    """The switches of the model as it is to be run; "auto" is what its files say. Raises InputError
    where it cannot be run so, ModelError where it cannot be run for what its files say."""
    own = task_of(config.readout)
    if task == "auto" and own == "embed":
        _refuse_doubtful(config, is_asked=False)
    if task in ("auto", own):
        wanted = config.readout
    elif task == "generate" and own == "embed":
        return replace(config, readout=None)
    elif task != "embed":
        raise _not_made(config.readout, task)
    if task == "embed":
        _refuse_doubtful(config, is_asked=True)
        wanted = config.embedding
    return replace(config, readout=wanted)


def task_of(readout: Readout | None) -> str:
    """What a model with this readout is run for."""
    if readout is None:
        return "generate"
    return "classify" if readout.labels else "embed"


def refuse_other(
    readout: Readout | None,
    task: str,
    asked: str,
    *,
    spare: str | None = None,
    takes_task: bool = True,
) -> None:
    """InputError where what was ``asked`` is of a ``task``, and a model with this ``readout`` is
    run for another one. ``spare`` says what could be left out instead, ``takes_task`` whether a
    user can say what the model is run for."""
    own = task_of(readout)
    if own == task:
        return
    makes = "generates" if readout is None else f"makes {readout.name}"
    limit = f"The model {makes}."
    if task == "generate":
        limit = f"The model {makes}: there is no next token, and there are no odds of one."
    does = {"generate": "generates", "embed": "embeds", "classify": "has labels"}[task]
    choices = [] if spare is None else [spare]
    choices += ["run it with the task embed"] if takes_task and task == "embed" else []
    last = f"choose a model that {does}"
    if takes_task and task != "embed" and own == "embed":
        last += f"; if this one does, run it with the task {task}"
    told = f"{', '.join(choices)}, or {last}" if choices else last
    raise InputError(asked, limit, f"{told[0].upper()}{told[1:]}.")


def _not_made(readout: Readout | None, task: str) -> InputError:
    asked = f"The task {task} was asked for."
    if task == "classify":
        return InputError(
            asked,
            "It is of a model that has labels, and this one has none: its config.json names no "
            "architecture that ends in ForSequenceClassification.",
            "Leave the task out, or choose a model that has labels.",
        )
    return InputError(
        asked,
        "It is of a model that generates, and this one has a head of labels instead.",
        "Leave the task out to have its labels scored, or choose a model that generates.",
    )


def _refuse_doubtful(config: ModelConfig, *, is_asked: bool) -> None:
    """Near vectors that are wrong look like right ones."""
    doubts = [*config.embedding.doubts]
    if not config.final_norm:
        doubts.append("they are read behind a norm, and it has no norm behind its last layer")
    if not doubts:
        return
    limit = f"Those of this model would be others than its makers': {'; '.join(doubts)}."
    if is_asked:
        raise InputError("Embeddings were asked for.", limit, "Choose another model.")
    raise ModelError(
        "The model makes embeddings, by the files beside its config.json.",
        limit,
        "Choose another model; if this one can generate, the task generate lets it.",
    )
