"""A residual stream that is several, by loops of our own on a CPU, each number once from memory and
back: torch's steps pass over all of it a dozen times. Knows no model."""

from __future__ import annotations

from typing import Final

import torch

from freight.kernels.sharing import share_alike
from freight.kernels.threads import as_numbers, find_loops, has_words

__all__ = ["collapse_streams", "expand_streams", "share_streams"]

_WIDTH: Final = 16
_LEAST_SHARED: Final = 1 << 15
"""Numbers that are worth another thread."""


def collapse_streams(
    x: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor,
    base: torch.Tensor,
    out: torch.Tensor,
    mapped: torch.Tensor,
    *,
    eps: float,
    floor: float,
) -> bool:
    """Mappings [T, M] of x [T, S D], and out [T, D], as ``stream_loops.collapse`` says, of a weight
    [M, S D], factors and base [M], all float32; False where there is no such loop."""
    loops, width = find_loops(), out.shape[1]
    are_known = has_words(x) and has_words(out) and weight.is_contiguous()
    if loops is None or not are_known or width % _WIDTH:
        return False
    source, target, matrix = as_numbers(x), as_numbers(out), weight.view(-1).numpy()
    sizes = x.stride(0), x.shape[1] // width, width
    given = matrix, factors.numpy(), base.numpy(), eps, floor
    found = mapped.numpy()

    def work(first: int, last: int) -> None:
        loops.streams.collapse(first, last, source, *sizes, *given, target, out.stride(0), found)

    share_alike(len(x), work, -(-_LEAST_SHARED // x.shape[1]), in_turns=True)
    return True


def share_streams(
    mapped: torch.Tensor,
    shares: torch.Tensor,
    num_streams: int,
    *,
    magnitude: float,
    least_share: float,
    rounds: int,
    floor: float,
) -> bool:
    """Shares [T, S] or [T, S + S S] of mappings [T, M], likewise."""
    loops = find_loops()
    if loops is None or not has_words(shares):
        return False
    source, target, pitch = mapped.numpy(), as_numbers(shares), shares.stride(0)
    sizes = num_streams, magnitude, least_share, rounds, floor

    def work(first: int, last: int) -> None:
        loops.streams.share(first, last, source, *sizes, target, pitch)

    numbers = mapped.shape[1] * max(1, rounds)
    share_alike(len(mapped), work, -(-_LEAST_SHARED // numbers))
    return True


def expand_streams(
    x: torch.Tensor, y: torch.Tensor, shares: torch.Tensor, num_streams: int, *, mixed: bool
) -> bool:
    """x [T, S D] by an update y [T, D] and shares, likewise."""
    loops, width = find_loops(), y.shape[1]
    if loops is None or not all(map(has_words, (x, y, shares))) or width % _WIDTH:
        return False
    target, update, parts = as_numbers(x), as_numbers(y), as_numbers(shares)

    def work(first: int, last: int) -> None:
        loops.streams.expand(
            first,
            last,
            target,
            x.stride(0),
            num_streams,
            width,
            update,
            y.stride(0),
            parts,
            shares.stride(0),
            mixed,
        )

    share_alike(len(x), work, -(-_LEAST_SHARED // x.shape[1]), in_turns=True)
    return True
