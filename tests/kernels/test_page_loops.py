"""Four queries with the tokens of a page: by registers of either width, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from freight.kernels.page_loops import (
    score_four_by_halves,
    score_four_whole,
    sum_four_by_halves,
    sum_four_whole,
)

U = np.uintp
WIDTH = 96
BEGIN, STRIDE, FIRST = 5, 40, 32


def _pages(rng: np.random.Generator, count: int, dtype: str) -> tuple[Any, Any]:
    """An array whose tokens begin at WIDTH, and these [count, WIDTH] as float32."""
    raw = rng.standard_normal((count + 2) * WIDTH).astype(np.float32)
    if dtype == "bfloat16":
        halves = (raw.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        raw = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return halves, raw[WIDTH:-WIDTH].reshape(count, WIDTH)
    return raw, raw[WIDTH:-WIDTH].reshape(count, WIDTH)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("loop", [score_four_by_halves, score_four_whole])
def test_scores(loop: Callable[..., None], count: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    raw, keys = _pages(rng, count, dtype)
    queries: npt.NDArray[np.float32] = rng.standard_normal(FIRST + 4 * WIDTH).astype(np.float32)
    scores = np.zeros(BEGIN + 4 * STRIDE, np.float32)
    at = U(WIDTH)
    loop(queries, U(FIRST), U(WIDTH), raw, at, at, U(count), scores, U(BEGIN), U(STRIDE))
    found = scores[BEGIN:].reshape(4, STRIDE)[:, :count]
    np.testing.assert_allclose(found, queries[FIRST:].reshape(4, WIDTH) @ keys.T, atol=2e-5)
    assert not scores[:BEGIN].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("loop", [sum_four_by_halves, sum_four_whole])
def test_sums(loop: Callable[..., None], count: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    raw, values = _pages(rng, count, dtype)
    weights: npt.NDArray[np.float32] = rng.random(BEGIN + 4 * STRIDE).astype(np.float32)
    sums: npt.NDArray[np.float32] = rng.standard_normal(FIRST + 4 * WIDTH).astype(np.float32)
    own = weights[BEGIN:].reshape(4, STRIDE)[:, :count]
    expected = sums[FIRST:].reshape(4, WIDTH) + own @ values
    untouched = sums[:FIRST].copy()
    at = U(WIDTH)
    loop(sums, U(FIRST), U(WIDTH), raw, at, at, U(count), weights, U(BEGIN), U(STRIDE))
    np.testing.assert_allclose(sums[FIRST:].reshape(4, WIDTH), expected, atol=2e-5)
    np.testing.assert_array_equal(sums[:FIRST], untouched)
