"""What a user may ask of attention that changes the answers a little: compressed keys and values,
and only the highest scores counted. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from freight.errors import InputError
from freight.model.number_format import GROUP_SIZE, fit_head
from freight.model.switches import ModelConfig

__all__ = ["approximate", "check_share", "describe_groups"]


def approximate(
    config: ModelConfig,
    *,
    kv_bits: int | None = None,
    group_size: int = GROUP_SIZE,
    attended_share: float | None = None,
) -> ModelConfig:
    """The model with keys and values of so many bits and so large a share of keys attended; None
    leaves it as it is. InputError where there is no such thing."""
    if attended_share is not None:
        check_share(attended_share)
        config = replace(config, attended_share=attended_share)
    if kv_bits is not None:
        if config.slope_span is not None:
            raise InputError(
                f"--kv-bits {kv_bits} was given.",
                "Keys of this model carry their positions, which so few bits do not hold.",
                "Leave it out.",
            )
        # Of narrower values no group has zeros behind them, too.
        width = gcd(*(heads.width for heads in config.all_heads), config.value_width or 0)
        config = replace(config, kv_format=fit_head(kv_bits, group_size, width))
    return config


def check_share(share: float) -> None:
    """InputError where it is no share of keys."""
    if not 0 < share <= 1:
        raise InputError(
            f"--sparse-attention {share:g} was given.",
            "It is the share of a row's keys whose values count, above 0 and at most 1.",
            "Write 0.1 for a tenth, or leave it out: then all count.",
        )


def describe_groups(config: ModelConfig, group_size: int) -> str:
    """What to tell where groups of keys and values are smaller than was asked; else nothing."""
    if config.kv_format is None or config.kv_format.group_size == group_size:
        return ""
    return (
        f"keys and values in groups of {config.kv_format.group_size}: "
        f"{group_size} does not divide a head of {config.head_dim}"
    )
