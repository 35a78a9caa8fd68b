"""A rate as a function of a size: measured at some points, interpolated between them.

Knows no machines. Between points the value follows a straight line over the size's logarithm, which
is how rates rise with request sizes and numbers of rows; outside it is that of the nearest point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from freight.errors import InputError

__all__ = ["Curve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """``points`` are (size, value), sizes ascending, both above 0. One point is a constant."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        numbers = [number for point in self.points for number in point]
        usable = all(math.isfinite(number) and number > 0 for number in numbers)
        if not self.points or not usable or sorted(set(sizes)) != sizes:
            raise InputError(
                f"A rate with the points {list(self.points)} was given.",
                "A rate has points of a size and a value above 0, sizes ascending.",
                "Write one number, or pairs like [[4096, 2e8], [1048576, 2e9]].",
            )

    @classmethod
    def constant(cls, value: float) -> Curve:
        return cls(points=((1.0, value),))

    def at(self, size: float) -> float:
        """The value for ``size``."""
        earlier = self.points[0]
        if size <= earlier[0]:
            return earlier[1]
        for later in self.points[1:]:
            if size <= later[0]:
                share = math.log(size / earlier[0]) / math.log(later[0] / earlier[0])
                return (1 - share) * earlier[1] + share * later[1]
            earlier = later
        return earlier[1]

    def scaled(self, factor: float) -> Curve:
        return Curve(points=tuple((size, factor * value) for size, value in self.points))

    def to_json(self) -> float | list[list[float]]:
        if len(self.points) == 1 and self.points[0][0] == 1:
            return self.points[0][1]
        return [list(point) for point in self.points]


def as_curve(value: float | Sequence[Sequence[float]]) -> Curve:
    """From JSON: one number, or pairs."""
    if isinstance(value, int | float):
        return Curve.constant(value)
    return Curve(points=tuple((float(size), float(number)) for size, number in value))
