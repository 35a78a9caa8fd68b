"""How much of a chip's peaks is reached, and how that is fitted to what was measured.

A layer takes its arithmetic, its reading of memory and its moves one after the other, each at some
share of the data sheet's rate, and a fixed time on top. Peaks alone say far too little: by them the
540B model would decode in 8.65 ms what took 28.5. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from scipy.optimize import lsq_linear

from freight.errors import InputError
from freight.hardware.curve import Curve

__all__ = ["DEFAULTS", "Efficiency", "Phase", "Sample", "calibrate"]

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the peak rates of arithmetic, memory and links that are reached, and the fixed
    seconds of a layer. ``compute_by_tokens`` are shares of arithmetic by a step's tokens per chip,
    where they depend on these. ``overlap`` is the share of a move that runs while the product that
    it belongs to is computed, as far as that takes as long. ``source`` says where this comes from,
    ``chip`` on which chip it was measured, if on one."""

    compute: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    layer_s: float = 0.0
    overlap: float = 0.0
    compute_by_tokens: Curve | None = None
    source: str = "peaks of the data sheet"
    chip: str = ""

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("compute", "memory", "link")}
        wrong = [f"{name} of {share:g}" for name, share in shares.items() if not 0 < share <= 1]
        curve = self.compute_by_tokens
        wrong += (
            [f"compute of {share:g}" for _, share in curve.points if share > 1] if curve else []
        )
        wrong += [f"overlap of {self.overlap:g}"] if not 0 <= self.overlap <= 1 else []
        wrong += [f"layer_s of {self.layer_s:g}"] if not 0 <= self.layer_s < 1 else []
        if wrong:
            raise InputError(
                "Efficiencies were given.",
                f"They have {', '.join(wrong)}.",
                "Shares are above 0 and at most 1, and a layer takes seconds below 1.",
            )

    def at(self, tokens_per_chip: float) -> Efficiency:
        """For a step of so many tokens."""
        if self.compute_by_tokens is None:
            return self
        share = self.compute_by_tokens.at(tokens_per_chip)
        return replace(self, compute=share, compute_by_tokens=None)


_ON: Final = "PaLM 540B on 64 TPU v4 (Pope et al., Table 2)"
_DECODING: Final = f"fitted to three decode latencies of {_ON}: int8 and bfloat16 at batch 64, 512"
_MEMORY: Final = 0.859
_LAYER_S: Final = 8.24e-5
_PROMPTS: Final = ((32.0, 0.559), (16384.0, 0.830))

_DECODE: Final = Efficiency(
    compute=0.615, memory=_MEMORY, layer_s=_LAYER_S, source=_DECODING, chip="tpu-v4"
)
_PREFILL: Final = Efficiency(
    compute=_PROMPTS[0][1],
    memory=_MEMORY,
    layer_s=_LAYER_S,
    compute_by_tokens=Curve(points=_PROMPTS),
    source=f"arithmetic fitted to the prefill of 1 and of 512 x 2048 tokens of {_ON}, 32 and 16384 "
    "to a chip, the rest to decoding",
    chip="tpu-v4",
)

DEFAULTS: Final[dict[tuple[bool, Phase], Efficiency]] = {
    (False, "decode"): _DECODE,
    (True, "decode"): replace(
        _DECODE, source=f"nothing was published; as for stationary weights: {_DECODING}"
    ),
    (False, "prefill"): _PREFILL,
    (True, "prefill"): _PREFILL,
}
"""By whether weights are gathered, and phase. Of both prefills one was published, at numbers of
tokens that are far apart: what they differ by is taken to be the tokens' doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A measured step: what it took, and what arithmetic, memory and moves take at peak rates."""

    seconds: float
    compute_s: float
    memory_s: float
    link_s: float
    num_layers: int


def calibrate(
    samples: Sequence[Sample], start: Efficiency, source: str, chip: str = ""
) -> Efficiency:
    """The efficiencies under which the samples are met best, by relative error. With one sample
    only arithmetic is fitted, with two memory too, with three the fixed time, from four on the
    links; the rest stays as in ``start``. Arithmetic is one share for all samples. InputError where
    there is none.
    """
    if not samples:
        raise InputError(
            "Efficiencies were to be fitted.", "There is no sample.", "Measure a step at least."
        )
    taken = np.array([[own.compute_s, own.memory_s, own.num_layers, own.link_s] for own in samples])
    known = np.array([1 / start.compute, 1 / start.memory, start.layer_s, 1 / start.link])
    free = min(len(samples), 4)
    seconds = np.array([own.seconds for own in samples])
    rest = (seconds - taken[:, free:] @ known[free:]) / seconds
    lower = np.array([1.0, 1.0, 0.0, 1.0])[:free]
    fit = lsq_linear(taken[:, :free] / seconds[:, None], rest, bounds=(lower, np.inf)).x
    known[:free] = np.maximum(fit, lower)
    return Efficiency(
        compute=float(1 / known[0]),
        memory=float(1 / known[1]),
        layer_s=float(known[2]),
        link=float(1 / known[3]),
        overlap=start.overlap,
        source=source,
        chip=chip,
    )
