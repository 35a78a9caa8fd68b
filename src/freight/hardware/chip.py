"""A chip of many as plain values: what it computes, remembers and sends, by its data sheet.

Unlike the rates of a ``Machine``, these are peaks: what is reached of them is a planner's business,
which scales them by efficiencies. Chips along the inner axes of a mesh share a host's links, others
a network's. Knows no model and no mesh.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from math import inf

from freight.errors import InputError

__all__ = ["Chip", "chip_names", "find_chip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """``flops`` per second by dtype. ``link_bytes_per_s`` is what one chip sends at once to others,
    and ``link_latency_s`` the fixed time of a collective along one axis.

    ``host_chips`` share a host, 0: all chips there are; between hosts a chip has ``outer_...``.
    ``dollars_per_hour`` is the rent of one chip. ``sources`` says where each value comes from.
    """

    name: str
    description: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    host_chips: int = 0
    outer_bytes_per_s: float = 0.0
    outer_latency_s: float = 0.0
    dollars_per_hour: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = {f"flops.{dtype}": rate for dtype, rate in self.flops.items()}
        names = ("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s")
        rates |= {name: getattr(self, name) for name in names}
        if self.host_chips:
            rates["outer_bytes_per_s"] = self.outer_bytes_per_s
        wrong = [f"{name} of {rate}" for name, rate in rates.items() if not 0 < rate < inf]
        if wrong or not self.flops:
            raise InputError(
                f"The chip {self.name!r} was described.",
                f"It has {', '.join(wrong) or 'no rate of arithmetic'}.",
                "Write a number above 0 for each.",
            )

    @property
    def dense_flops(self) -> float:
        """The peak in 16 bits, or in the widest format that it has."""
        order = ("bfloat16", "float16", "float32", "int8")
        return next(self.flops[dtype] for dtype in order if dtype in self.flops)

    def at(self, dollars_per_hour: float | None) -> Chip:
        """The same at another rent, if one is given. InputError where it is none."""
        if dollars_per_hour is None:
            return self
        if not 0 <= dollars_per_hour < inf:
            raise InputError(
                f"A rent of {dollars_per_hour} dollars an hour was given for {self.name}.",
                "It is a number from 0.",
                "Raise it, or leave it out.",
            )
        return replace(self, dollars_per_hour=dollars_per_hour)


def chip_names() -> list[str]:
    """Names of the chips that come with Freight."""
    folder = resources.files("freight.hardware") / "chips"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def find_chip(name: str) -> Chip:
    """A preset by its name. InputError if there is none; it lists names that are close."""
    names = chip_names()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
        raise InputError(
            f"The chip {name!r} was asked for.",
            "There is no preset of that name.",
            f"Did you mean {' or '.join(close)}?" if close else f"Presets are {', '.join(names)}.",
        )
    text = (resources.files("freight.hardware") / "chips" / f"{name}.json").read_text("utf-8")
    return Chip(**json.loads(text))
