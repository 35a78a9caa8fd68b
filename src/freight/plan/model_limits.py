"""What is not done with some models: with those that keep a state for each row, or have layers that
attend the keys of others."""

from __future__ import annotations

from dataclasses import replace

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.plan.policy import Split, Tier
from freight.plan.wishes import Wishes

__all__ = ["check_stages", "settle_wishes"]


def settle_wishes(config: ModelConfig, near: Tier, wishes: Wishes) -> Wishes:
    """The same without what such a model rules out and nobody has asked for, where ``near`` is the
    tier of the arithmetic: a state cannot be taken back, and stays on the tier of its row; keys
    that several layers attend stay near. Raises InputError for what was asked for."""
    if config.sharing is not None:
        wishes = _with_keys_near(
            _unattended(wishes, "has layers that attend the same keys, which stay"), near
        )
    if config.num_attention_layers == 0:
        wishes = _without_pages(config, wishes)
    if config.recurrence is None:
        return wishes
    if wishes.draft_tokens:
        raise InputError(
            f"--draft-tokens {wishes.draft_tokens} was given.",
            "Layers of this model keep a state, which a guess that fails would have changed.",
            "Leave --draft-tokens out.",
        )
    return replace(wishes, moves_rows=False)


def _without_pages(config: ModelConfig, wishes: Wishes) -> Wishes:
    """Of a model of which nothing is kept in pages of keys."""
    asked = {
        "--kv-bits": config.kv_format is not None,
        "--sparse-attention": config.attended_share < 1,
    }
    for flag, is_so in asked.items():
        if is_so:
            raise InputError(
                f"{flag} was given.",
                "Of rows as long as these this model keeps no pages of keys but a state, "
                "which stays and is attended as it is.",
                f"Leave {flag} out.",
            )
    return _unattended(wishes, "keeps a state of each row instead of keys, which is read")


def _unattended(wishes: Wishes, why: str) -> Wishes:
    """Without rows that the CPU attends for a device."""
    if wishes.cpu_attention:
        raise InputError(
            f"{wishes.cpu_attention:.0%} of the rows were to be attended on the CPU.",
            f"This model {why} where it is computed.",
            "Leave --cpu-attention out.",
        )
    return replace(wishes, cpu_attention=0.0)


def _with_keys_near(wishes: Wishes, near: Tier) -> Wishes:
    own = Split(gpu=1.0) if near == "gpu" else Split(cpu=1.0)
    if wishes.kv is not None and wishes.kv.share(near) < 1:
        raise InputError(
            f"{1 - wishes.kv.share(near):.0%} of the keys and values were to be kept elsewhere "
            f"than in the memory of the {near}.",
            "Several layers of this model attend the same ones, which stay where they are made.",
            "Leave --kv out.",
        )
    return replace(wishes, kv=own, forgets_keys=False)


def check_stages(config: ModelConfig) -> None:
    """Raises InputError where a model cannot be cut into stages of a pipeline."""
    if config.sharing is not None or config.layer_inputs is not None:
        raise InputError(
            "The model was to run in several stages.",
            "Its layers have inputs made with the embedding, or attend keys of earlier layers.",
            "Take one stage, or share out the rows.",
        )
