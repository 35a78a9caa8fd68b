"""Steps on sixteen numbers at once, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from freight.kernels.attention_steps import exponential, power_of_two
from freight.kernels.sixteen_rows import put_largest, put_totals
from freight.kernels.vectors import load, spliced, store

U = np.uintp


@njit(nogil=True)
def _powers(x, out):  # type: ignore[no-untyped-def]
    for place in range(0, len(x), 16):
        store(out, U(place), power_of_two(load(x, U(place))))


@njit(nogil=True)
def _exponentials(x, out):  # type: ignore[no-untyped-def]
    for place in range(0, len(x), 16):
        store(out, U(place), exponential(load(x, U(place))))


@njit(nogil=True)
def _splice(a, b, count, out):  # type: ignore[no-untyped-def]
    store(out, U(0), spliced(load(a, U(0)), load(b, U(0)), count))


@njit(nogil=True)
def _both(rows, start, sums, most, place):  # type: ignore[no-untyped-def]
    put_totals(rows, start, sums, place)
    put_largest(rows, start, most, place)


@pytest.mark.parametrize(
    ("function", "oracle", "low", "high", "units"),
    [(_powers, np.exp2, -126.0, 127.0, 3), (_exponentials, np.exp, -87.0, 88.0, 2)],
)
def test_powers_are_right_to_a_few_units_in_the_last_place(
    function: object, oracle: np.ufunc, low: float, high: float, units: int
) -> None:
    x = np.linspace(low, high, 1 << 18).astype(np.float32)
    x[: 1 << 12] = np.linspace(-1, 1, 1 << 12)
    found = np.empty_like(x)
    function(x, found)  # type: ignore[operator]
    wanted = oracle(x.astype(np.float64))
    # Below the normal numbers there are no units to be right to.
    counted = wanted > 1.2e-38
    error = np.abs(found - wanted)[counted] / np.spacing(wanted[counted].astype(np.float32))
    assert error.max() <= units


def test_whole_powers_are_exact_and_those_far_below_nothing() -> None:
    x = np.array([0, 1, -1, 5, -20, 127, -126, 0, *[-250, -1e3, -3e38, -np.inf] * 2], np.float32)
    found = np.empty_like(x)
    _powers(x, found)
    np.testing.assert_array_equal(found, np.exp2(x.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16, 40])
def test_a_splice_has_the_first_of_one_and_the_rest_of_another(count: int) -> None:
    a, b = np.arange(16, dtype=np.float32), -np.arange(1, 17, dtype=np.float32)
    found = np.empty(16, np.float32)
    _splice(a, b, U(count), found)
    np.testing.assert_array_equal(found, np.where(np.arange(16) < count, a, b))


def test_one_number_of_each_of_sixteen_rows() -> None:
    rows = np.random.default_rng(0).normal(size=20 * 16).astype(np.float32)
    sums, most = np.zeros((2, 24), np.float32)
    _both(rows, U(32), sums, most, U(5))
    own = rows[32:].reshape(-1, 16)[:16]
    np.testing.assert_allclose(sums[5:21], own.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(most[5:21], own.max(1))
    assert not sums[:5].any()
    assert not sums[21:].any()
