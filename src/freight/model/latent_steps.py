"""Steps of attention over latents (DeepSeek-V2, 2405.04434, section 2.1), as data.

All heads share one key, whose first R columns are rotated and whose other C are the latent, which
is their value, too: the whole key is attended as one, and what its first columns give is not used.
What would make keys and values of each head of it, one matrix [N (P + U), C] of P rows for keys and
U for values of each head, is taken into queries and into what was attended.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.weight import Weight

__all__ = [
    "AbsorbKeys",
    "ExpandValues",
    "JoinLatent",
    "LatentStep",
    "SplitLatent",
    "latent_elements",
    "latent_sizes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLatent:
    """latent [T, C], turned [T, R] = the columns of x"""

    x: str
    latent: str
    turned: str
    latent_width: int
    turned_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinLatent:
    """out [T, R + C] = turned and x, side by side; zeros and x where nothing is turned"""

    x: str
    turned: str | None
    out: str
    latent_width: int
    turned_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsorbKeys:
    """out [T, N, R + C] = of each head's query in x [T, N, P + R] the last R, and the first P times
    the head's rows for keys; zeros in place of R where a query has no more than P"""

    x: str
    out: str
    weight: Weight
    num_heads: int
    key_width: int
    value_width: int
    turned_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandValues:
    """out [T, N, U] = the last C of what each head attended, x [T, N, R + C], times its rows for
    values, transposed"""

    x: str
    out: str
    weight: Weight
    num_heads: int
    key_width: int
    value_width: int
    turned_width: int


LatentStep = SplitLatent | JoinLatent | AbsorbKeys | ExpandValues


def latent_elements(step: object) -> int:
    """Of the weights that a step multiplies each head's part of a token by."""
    if isinstance(step, AbsorbKeys):
        return step.num_heads * step.key_width * step.weight.num_columns
    if isinstance(step, ExpandValues):
        return step.num_heads * step.value_width * step.weight.num_columns
    return 0


def latent_sizes(
    head_dim: int, rank: int, key_width: int, value_width: int, query_rank: int | None
) -> dict[str, int]:
    """Dims by their letters, of heads whose keys are a latent and what is turned: "f" is "B" of
    layers that turn nothing and whose latents are alone."""
    turned = head_dim - rank
    return {
        "C": rank,
        "A": rank + turned,
        "W": key_width + turned,
        "B": key_width + value_width,
        "f": key_width + turned + value_width,
        "U": value_width,
        "Q": query_rank or 0,
    }
