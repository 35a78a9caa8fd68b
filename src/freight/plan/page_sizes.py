"""Sizes of what rows keep: pages of keys and values, or of what comes into attention; states."""

from __future__ import annotations

from freight.model.switches import ModelConfig
from freight.plan.forms import BLOCK
from freight.plan.policy import Policy
from freight.quantities import align_up

__all__ = ["far_page_sizes", "fitting_page_tokens", "near_page_sizes", "page_size", "state_size"]


def page_size(config: ModelConfig, page_tokens: int, element_bytes: int) -> int:
    """Bytes of a page; compressed ones may not fill their last block."""
    used = page_tokens * config.kept_bytes_per_token_per_layer(element_bytes)
    return used if config.kv_format is None else align_up(used, BLOCK)


def state_size(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of what a row keeps in a layer without keys: whole blocks, for it may be on disk."""
    own = config.recurrence
    if own is None or not any(own.layers):
        return 0
    return align_up(own.state_bytes(element_bytes), BLOCK)


def near_page_sizes(config: ModelConfig, page_tokens: int, element_bytes: int) -> tuple[int, ...]:
    """By layer, bytes of a page on the compute tier; 0 of layers that have no keys of their own.
    All have one size, in which rows may lie elsewhere and move, unless all keys stay there."""
    if config.sharing is None:
        return tuple(page_size(config, page_tokens, element_bytes) * own for own in config.keeping)
    sizes = (config.kept_bytes_per_token_in(i, element_bytes) for i in range(config.num_layers))
    kept = zip(sizes, config.keeping, strict=True)
    return tuple(page_tokens * size * keeps for size, keeps in kept)


def far_page_sizes(config: ModelConfig, policy: Policy, element_bytes: int) -> tuple[int, ...]:
    """By layer, bytes of a page off the compute tier: keys and values, or what comes into
    attention; 0 of layers that have no keys of their own."""
    kept = page_size(config, policy.page_tokens, element_bytes)
    inputs = align_up(policy.page_tokens * config.hidden_size * element_bytes, BLOCK)
    return tuple(
        (inputs if is_recomputed else kept) * keeps
        for keeps, is_recomputed in zip(
            config.keeping, policy.recomputes(config.num_layers), strict=True
        )
    )


def fitting_page_tokens(config: ModelConfig, max_tokens: int, element_bytes: int) -> int:
    """How many tokens a page should have: a power of two from 16 on, so that pages are whole disk
    blocks. Of compressed ones the size with which a row of so many tokens takes least."""
    tokens = 16
    if config.kv_format is None:
        while page_size(config, tokens, element_bytes) % BLOCK:
            tokens *= 2
        return tokens
    sizes = [tokens << doubling for doubling in range(5)]
    return min(
        sizes, key=lambda size: -(-max_tokens // size) * page_size(config, size, element_bytes)
    )
