"""Rates by size: held against numpy's interpolation over the logarithms of the sizes."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import InputError
from freight.hardware.curve import Curve, as_curve

SIZES = st.integers(1, 2**40)
VALUES = st.floats(1e-6, 1e18)
CURVES = st.dictionaries(SIZES, VALUES, min_size=1, max_size=9).map(
    lambda points: Curve(points=tuple(sorted((float(s), v) for s, v in points.items())))
)


@given(CURVES, st.floats(0.5, 2.0**41))
def test_between_points_it_is_a_line_over_the_logarithm(curve: Curve, size: float) -> None:
    sizes, values = zip(*curve.points, strict=True)
    wanted = numpy.interp(math.log(size), numpy.log(sizes), values)
    assert curve.at(size) == pytest.approx(wanted, rel=1e-6)


@given(CURVES)
def test_points_are_met_and_ends_hold(curve: Curve) -> None:
    for size, value in curve.points:
        assert curve.at(size) == pytest.approx(value)
    assert curve.at(curve.points[0][0] / 2) == curve.points[0][1]
    assert curve.at(curve.points[-1][0] * 2) == curve.points[-1][1]


@given(VALUES, SIZES)
def test_one_number_is_a_constant(value: float, size: int) -> None:
    assert as_curve(value).at(size) == value


@given(CURVES, st.floats(1e-3, 1e3), SIZES)
def test_scaling_scales_every_value(curve: Curve, factor: float, size: int) -> None:
    assert curve.scaled(factor).at(size) == pytest.approx(factor * curve.at(size))


@given(CURVES)
def test_json_gives_the_same_curve(curve: Curve) -> None:
    assert as_curve(curve.to_json()) == curve


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0.0, 1.0),),
        ((1.0, 0.0),),
        ((1.0, -2.0),),
        ((1.0, math.nan),),
        ((1.0, math.inf),),
        ((2.0, 1.0), (1.0, 1.0)),
        ((1.0, 1.0), (1.0, 2.0)),
    ],
)
def test_unusable_points_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InputError):
        Curve(points=points)
