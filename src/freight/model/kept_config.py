"""Keys that are kept as a state, out of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freight.model.families.table import Key
from freight.model.layer_kinds import CompressedKeys, Index
from freight.model.raw_config import RawConfig

__all__ = ["kept_problems", "read_index", "read_kept"]


def read_kept(
    config: RawConfig, keys: Mapping[str, Key], switches: Mapping[str, Any]
) -> CompressedKeys | None:
    """Where the family says how wide the window of its layers is; ``kept_rates`` lists for each how
    many tokens one key stands for, ``kept_doubled`` whether twice as many are its sources,
    ``kept_kinds`` what it is called. What is wrong goes to ``config``."""
    window = config.count(keys["kept_window"])
    if window is None:
        return None
    rates, doubled, kinds = (
        config.raw.get(f"kept_{name}") or [] for name in ("rates", "doubled", "kinds")
    )
    wrong = [kind for kind, rate in zip(kinds, rates, strict=False) if not _is_rate(rate)]
    if wrong:
        stated = ", ".join(f"{kind}: {rates[kinds.index(kind)]!r}" for kind in dict.fromkeys(wrong))
        config.problems.append(
            f"layer_types, with numbers of tokens by compress_rates, are {stated}, these must be "
            "known kinds with counts of 1 or more"
        )
        return None
    return CompressedKeys(
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


def _is_rate(rate: object) -> bool:
    return isinstance(rate, int) and not isinstance(rate, bool) and rate >= 0


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
        turns_last=config.flag(keys["index_turns_last"]),
        of_stream=config.flag(keys["index_of_stream"]),
        eps=config.number(keys["index_eps"]) or 0.0,
        shared=_shared(config),
    )


def _shared(config: RawConfig) -> tuple[bool, ...]:
    """Which layers attend what another one's indexer has chosen; nothing where none does."""
    own = config.raw.get("index_shared")
    if not isinstance(own, list) or not any(own):
        return ()
    if own[0]:
        config.problems.append("the first layer is to attend what one before it has chosen")
    return tuple(own)


def kept_problems(own: CompressedKeys, num_layers: int, num_heads: int, turned: int) -> list[str]:
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
    if own.width < turned:
        problems.append(f"rotary width {turned} exceeds head width {own.width}")
    kinds = {pair for pair in zip(own.rates, own.doubled, strict=False) if pair[0]}
    if len({is_doubled for _, is_doubled in kinds}) < len(kinds):
        problems.append("keys of one kind stand for different numbers of tokens")
    if any(
        is_doubled and not rate for rate, is_doubled in zip(own.rates, own.doubled, strict=False)
    ):
        problems.append("keys of two windows stand for no tokens")
    return problems
