"""Steps of layers whose keys are kept as a state of each row (DeepSeek-V4, sections 2.3.1 and
2.3.2 of its report), as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freight.model.layer_kinds import CompressedKeys
from freight.model.rope_config import RopeConfig
from freight.model.weight import Weight

__all__ = [
    "AttendChosen",
    "AttendKept",
    "ChooseKept",
    "ChooseKeys",
    "Compress",
    "KeptStep",
    "ProjectGroups",
    "kept_sizes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compress:
    """Of so many (``rate``) tokens of the row one key, which is its value too: of each number the
    sum of what the tokens have in x [T, W], weighed by the softmax of ``gates`` [T, W] plus
    ``bias`` [rate, W], by the token's place; then the norm ``weight``, and its last numbers rotated
    by the first token's position. W is its width; where it is ``doubled`` twice that, and the first
    half of what tokens have goes into the key after theirs, the second into their own. A row has
    ``most_keys`` of them at most."""

    x: str
    gates: str
    bias: Weight
    weight: Weight
    rate: int
    doubled: bool
    eps: float
    rope: RopeConfig
    max_positions: int
    most_keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChooseKept:
    """Of compressed keys a query attends the ``num_chosen`` with the highest sum over heads n of
    weights[n] max(0, q[n] k), of q [T, N W], ``weights`` [T, N] and keys k [W] that are compressed
    likewise."""

    q: str
    weights: str
    num_heads: int
    width: int
    num_chosen: int
    compress: Compress


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendKept:
    """out [T, N H] = softmax(scale q k^T) k of q [T, N H] over keys k of one head, which are the
    values: the row's last ``window`` of kv [T, H], and all compressed ones that tokens up to the
    query's have completed, ``compress`` says how, or those of them that are chosen. Of ``sinks``
    [N] each head has a score beside its keys' of a value that is zero."""

    q: str
    kv: str
    out: str
    num_heads: int
    width: int
    window: int
    scale: float
    sinks: Weight
    compress: Compress | None
    choose: ChooseKept | None = None

    @property
    def compressors(self) -> tuple[Compress, ...]:
        """All ways in which it compresses."""
        own = () if self.compress is None else (self.compress,)
        return own if self.choose is None else (*own, self.choose.compress)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChooseKeys:
    """Of a row's keys a query attends those with the highest sum over heads n of
    weights[n] max(0, q[n] k), of q [T, N W], ``weights`` [T, N], and k [T, W] of each of the row's
    tokens so far (DeepSeek-V3.2)."""

    q: str
    k: str
    weights: str
    num_heads: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendChosen:
    """out [T, N H] = softmax(scale q k^T) k of q [T, N H] over keys of one head, which are the
    values, of the row's tokens so far, k [T, H] among them: the ``num_chosen`` that ``index``
    chooses, whose places it leaves in ``chosen`` [T, C], where that is given, as whole numbers of
    four bytes; without an index those that a layer before has left there. A row has ``most_keys``
    at most. ``sinks`` as there."""

    q: str
    k: str
    out: str
    num_heads: int
    width: int
    scale: float
    sinks: Weight | None
    num_chosen: int
    most_keys: int
    index: ChooseKeys | None
    chosen: str | None = None

    @property
    def index_numbers(self) -> int:
        """Of a key that is chosen by, and of each of its heads' queries."""
        return 0 if self.index is None else self.index.width

    @property
    def index_heads(self) -> int:
        return 0 if self.index is None else self.index.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectGroups:
    """Of x [T, G I] each of G equal parts times rows of its own of the weight [G O, I], transposed:
    out [T, G O]"""

    x: str
    out: str
    weight: Weight
    num_groups: int


KeptStep = AttendKept | AttendChosen | ProjectGroups


def kept_sizes(own: CompressedKeys, num_heads: int) -> Mapping[str, int]:
    """Dims: Q numbers that queries are made of; g groups of heads, of j columns each, which become
    o; a tokens that one key stands for, b where its sources are twice as many; of an indexer l
    heads, t wide."""
    pairs = [*zip(own.rates, own.doubled, strict=False)]
    return {
        "Q": own.query_rank,
        "g": own.groups,
        "j": num_heads * own.width // max(own.groups, 1),
        "o": own.out_rank,
        "l": 0 if own.index is None else own.index.num_heads,
        "t": 0 if own.index is None else own.index.width,
        "a": max((rate for rate, is_doubled in pairs if not is_doubled), default=0),
        "b": max((rate for rate, is_doubled in pairs if is_doubled), default=0),
    }
