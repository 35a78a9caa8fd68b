"""Steps of a residual stream that is several side by side (hyper-connections, 2409.19606), as data.

``streams`` [T, S D] has S of them. A block works on a weighted sum of all, and what it makes goes
into each by a share of its own; weights and shares are made of the streams themselves. They may be
mixed as well, by a matrix that comes near a doubly stochastic one (2512.24880).
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.weight import Weight

__all__ = ["Average", "Collapse", "Expand", "Spread", "StreamStep", "stream_elements"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """out [T, S D] = x [T, D], S times side by side"""

    x: str
    out: str
    num_streams: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """out [T, D] = the mean of the S streams of x [T, S D]"""

    x: str
    out: str
    num_streams: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Collapse:
    """out [T, D] = the sum of the S streams of x [T, S D], each times its weight, added in float32.

    The mappings of a token are the S, 2 S or 2 S + S^2 numbers of z = x weight^T / rms(x), each
    part times its own of ``scale``, plus ``base``: weights are sigmoid(z) + ``floor``. With
    ``shares`` these get ``magnitude`` sigmoid(z) + ``least_share`` of the next S, and where there
    are ``rounds`` a matrix M [S, S], M[j, s] being how much of stream j goes into s: softmax(z) of
    each row of what is left, plus ``floor``, whose columns and rows are divided by their sums (plus
    ``floor``) in turn, columns ``rounds`` times, rows one time less.
    """

    x: str
    out: str
    shares: str | None
    weight: Weight
    base: Weight
    scale: Weight
    num_streams: int
    eps: float
    floor: float
    magnitude: float = 1.0
    least_share: float = 0.0
    rounds: int = 0

    @property
    def num_mappings(self) -> int:
        """Numbers that are made of a token."""
        return self.base.num_columns

    @property
    def share_columns(self) -> int:
        """Those of ``shares``."""
        return self.num_mappings - self.num_streams


@dataclass(frozen=True, kw_only=True, slots=True)
class Expand:
    """Each stream s of x [T, S D] = shares[s] y + the sum over j of M[j, s] times stream j, in
    place, ``shares`` [T, S + S^2] having M behind its shares; where it is ``mixed`` no stream, the
    stream itself, and ``shares`` are [T, S]"""

    x: str
    y: str
    shares: str
    num_streams: int
    mixed: bool


StreamStep = Spread | Average | Collapse | Expand


def stream_elements(step: object) -> int:
    """What a token is multiplied by in such a step, without the sum that a block works on."""
    return step.weight.num_columns if isinstance(step, Collapse) else 0
