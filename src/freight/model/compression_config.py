"""Keys that are kept as a state, out of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freight.model.families.table import Key
from freight.model.layer_kinds import Compression, Index
from freight.model.raw_config import RawConfig

__all__ = ["compression_problems", "read_compression", "read_index"]


def read_compression(
    config: RawConfig, keys: Mapping[str, Key], switches: Mapping[str, Any]
) -> Compression | None:
    """Where the family says how wide the window of its layers is; ``kept_rates`` lists for each how
    many tokens one key stands for, ``kept_doubled`` whether twice as many are its sources. What is
    wrong goes to ``config``."""
    window = config.count(keys["kept_window"])
    if window is None:
        return None
    rates, doubled = config.raw.get("kept_rates"), config.raw.get("kept_doubled")
    if not isinstance(rates, list) or not isinstance(doubled, list):
        config.problems.append(f"compress_rates is {config.raw.get('compress_rates')!r}")
        return None
    return Compression(
        layers=(True,) * len(rates),
        rates=tuple(rates),
        doubled=tuple(doubled),
        window=window,
        width=switches["head_dim"] or 0,
        query_rank=config.count(keys["query_rank"]) or 0,
        groups=config.count(keys["kept_groups"]) or 0,
        out_rank=config.count(keys["kept_rank"]) or 0,
        longest=switches["max_positions"] or 0,
        index=read_index(config, keys),
    )


def read_index(config: RawConfig, keys: Mapping[str, Key]) -> Index | None:
    """What chooses of a row's keys, where the family has such."""
    chosen = config.count(keys["index_chosen"])
    if chosen is None:
        return None
    return Index(
        num_heads=config.count(keys["index_heads"]) or 0,
        width=config.count(keys["index_width"]) or 0,
        num_chosen=chosen,
        pairs=config.flag(keys["index_pairs"]),
    )


def compression_problems(
    own: Compression, num_layers: int, num_heads: int, turned: int
) -> list[str]:
    """What cannot be, where so many numbers of a head are ``turned``."""
    problems = [] if own.index is None else own.index.problems(turned)
    if len(own.rates) != num_layers or len(own.doubled) != num_layers:
        problems.append(f"{len(own.rates)} of {num_layers} layers say what keys they keep")
    if own.window < 2:
        problems.append(f"keys are kept of a window of {own.window} tokens")
    if min(own.query_rank, own.out_rank) < 1:
        problems.append("a width of layers that keep keys is below 1")
    if own.groups < 1 or num_heads % own.groups:
        problems.append(f"{num_heads} heads are no {own.groups} groups")
    if any(rate < 0 for rate in own.rates):
        problems.append(f"keys stand for {min(own.rates)} tokens each")
    if len({rate for rate, _ in zip(own.rates, own.doubled, strict=False) if rate}) > 2:
        problems.append("keys stand for more than two different numbers of tokens")
    return problems
