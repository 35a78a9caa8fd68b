"""Steps of an MLP that is made of experts, and of shares that a token has of something, as data."""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.weight import Weight

__all__ = ["Clear", "Combine", "Dispatch", "ExpertStep", "Route", "Weigh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The experts of each token: those with the ``num_chosen`` highest of softmax(``sharpness`` x),
    or sigmoid of that, or the root of its softplus, with these as their weights, which are made to
    sum to one where ``normalised``, times ``scale``, and each expert's ``gains``. ``corrections``
    are added for the choice alone, which goes by x itself with ``by_logits``; of ``num_groups``
    groups the ``groups_chosen`` with the highest sum of their ``best_of_group`` highest count. With
    a ``margin`` each is weighed by its share, in softmax(x), of those that are left when it is
    chosen and are no farther from it than this part of its score, or of their own size where that
    is more (SparseMixer, https://arxiv.org/abs/2409.12136). With a ``table`` [V, n] experts are
    those that it has for the token."""

    x: str
    num_chosen: int
    normalised: bool
    scores: str = "softmax"
    scale: float = 1.0
    corrections: Weight | None = None
    sharpness: float = 1.0
    gains: Weight | None = None
    num_groups: int = 1
    groups_chosen: int = 1
    best_of_group: int = 2
    margin: float | None = None
    by_logits: bool = False
    table: Weight | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weigh:
    """x = x * function(y), in place; y is as wide as x, or has one for each of equal parts of it.
    The function is the "sigmoid" or the "softplus"."""

    x: str
    y: str
    function: str = "sigmoid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """out = the rows of x whose tokens have chosen this expert, times their weights for it where it
    ``weighs``"""

    x: str
    out: str
    weighs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Combine:
    """The chosen rows of x += y, times their weights for this expert where it ``weighs``"""

    x: str
    y: str
    weighs: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Clear:
    """x = 0, in place"""

    x: str


ExpertStep = Clear | Route | Weigh | Dispatch | Combine
