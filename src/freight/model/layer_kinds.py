"""Switches of what only some models have in their layers: experts, latents, states. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Final

__all__ = [
    "CHOSEN",
    "CompressedKeys",
    "Experts",
    "Index",
    "KeptLatents",
    "Latent",
    "Recurrence",
    "Streams",
]

CHOSEN: Final = "chosen"
"""The value that passes from a layer that chooses keys to those that attend the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """An MLP as ``num_experts`` small ones, of which each token takes ``per_token``.

    ``layers`` says for each layer whether it has them. Which a token takes goes by its ``scores``,
    "softmax" or "sigmoid" of the router's or the root of its softplus ("sqrtsoftplus"), which may
    have a bias (``has_bias``), and what is added to them for the choice alone
    (``has_corrections``), which may go by what the router says before these are taken
    (``by_logits``); of ``num_groups`` of neighbours those count that are among the
    ``groups_per_token`` whose ``best_of_group``, one or two, are highest. With ``normalised`` the
    weights of a token's experts sum to one; all are multiplied by ``scale``. They weigh what an
    expert makes, or with ``weighs_input`` what it works on. With a ``margin`` experts are chosen
    one by one, each weighed against those near it (see ``Route``). Beside them is an MLP of width
    ``shared_size`` that all tokens take, where that is not 0, by a share of its own with
    ``shared_gate``, or times ``shared_scale``. With ``beside_mlp`` it is the layer's own MLP:
    router, experts and MLP have a norm each before them, experts and MLP one behind, and their sum
    the layer's (Gemma 4). There the router's scores are divided by the root of the stream's width,
    and with ``has_gains`` an expert's weights are multiplied by a number of its own. With a
    ``latent_size`` the experts work on so many numbers: a matrix makes them of what that MLP works
    on, and another one brings what they make together into the stream. Gates and what they gate are
    kept between a layer's number among ``limits`` and its negative, where it has one. Layers that
    are ``by_token`` have a table of the experts of each token, whose weights alone go by scores.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]
    scores: str = "softmax"
    scale: float = 1.0
    has_bias: bool = False
    has_corrections: bool = False
    by_logits: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    shared_size: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    weighs_input: bool = False
    margin: float | None = None
    beside_mlp: bool = False
    has_gains: bool = False
    latent_size: int = 0
    limits: tuple[float | None, ...] = ()
    by_token: tuple[bool, ...] = ()

    def is_by_token(self, layer: int) -> bool:
        return bool(self.by_token) and self.by_token[layer]

    def limit(self, layer: int) -> float | None:
        return self.limits[layer] if self.limits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What chooses ``num_chosen`` of a row's keys for each query: by ``num_heads`` heads of so many
    numbers, and keys of its own, whose norm has the epsilon ``eps``. ``pairs`` says whether
    neighbours of these are rotated, ``turns_last`` whether their last ones are, not the first.
    With ``of_stream`` its queries are made of what the layer works on, by a norm of their own, and
    not of the narrow ones. Layers that are ``shared`` choose nothing: they attend what the one
    before has chosen; no layer is where nothing is said of them."""

    num_heads: int
    width: int
    num_chosen: int
    pairs: bool = True
    turns_last: bool = False
    of_stream: bool = False
    eps: float = 1e-6
    shared: tuple[bool, ...] = ()

    def is_shared(self, layer: int) -> bool:
        return bool(self.shared) and self.shared[layer]

    def of_layers(self, cut: slice) -> Index:
        return replace(self, shared=self.shared[cut])

    def problems(self, turned: int) -> list[str]:
        """What cannot be, where so many numbers of a head are ``turned``."""
        problems = []
        if not self.eps > 0:
            problems.append(f"the norm of keys that choose has an epsilon of {self.eps}")
        if min(self.num_heads, self.num_chosen) < 1:
            problems.append(f"{self.num_heads} heads are to choose {self.num_chosen} keys")
        if self.width < max(turned, 1):
            problems.append(f"heads that choose are {self.width} wide, {turned} are rotated")
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Keys and values of all heads as one vector of ``rank`` numbers for each token, beside a key
    that is rotated, where any is (DeepSeek-V2). Of a query ``key_width`` numbers meet what that
    becomes for a head, whose values have ``value_width``; queries are made of ``query_rank``
    numbers, where there is such a rank. Norms of both have the epsilon ``eps``. An ``index``
    chooses of a row's keys where it has more than that chooses. With ``alone_unturned`` layers that
    rotate nothing have no key beside the latent, which all of a query's numbers meet: there are
    zeros in its place."""

    rank: int
    key_width: int
    value_width: int
    query_rank: int | None
    eps: float = 1e-6
    index: Index | None = None
    alone_unturned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """The residual stream as ``count`` streams (hyper-connections, 2409.19606): a block works on a
    weighted sum of them, and what it makes goes into each by a share, up to ``magnitude``, to which
    ``least_share`` is added; to weights ``floor`` is. With ``rounds`` streams are mixed as well, by
    a matrix that so many rounds bring near a doubly stochastic one (2512.24880); without each stays
    as it is. The head works on a sum whose weights it makes itself if it ``weighs_last``, else on
    their mean."""

    count: int
    floor: float
    magnitude: float
    least_share: float
    rounds: int
    weighs_last: bool

    @property
    def share_columns(self) -> int:
        """Numbers of a token by which a block's update goes into the streams."""
        return self.count * (1 + self.count * (self.rounds > 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Layers that keep a state for each row instead of its keys: ``layers`` says of each layer
    whether it is one. Of ``num_heads`` each has a matrix of ``key_width`` by ``value_width``
    numbers, written and read by keys and queries that ``num_key_heads`` make, by the ``rule``
    "delta" (the gated delta rule) or "scan" (Mamba-2); what makes these is convolved over the last
    ``taps`` tokens, ``has_bias`` says whether with a bias. By the rule "gates" there are no
    matrices, and what is convolved is the values alone, between two gates. With ``is_dealt``
    queries, keys, values and gates are one matrix, stacked by key head; with ``is_apart``
    queries, keys and values are made and convolved by weights of their own. By the delta rule a
    token corrects at most the share ``strength``: above one, what was there may change its sign.
    Where it decays ``by_row`` each row of a matrix has a rate of its own (Kimi Linear), and gates
    count by their sigmoids; both are made of ``rate_rank`` numbers, where there is such a rank.
    Logarithms of what is left are no further below 0 than ``rate_bound``, where there is one.
    What is read has a norm of its own where it ``is_normed``, with ``read_eps``, or as others where
    that is None. A recurrence that ``is_beside`` attention works on the same as that, in layers
    that have both."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_heads: int
    key_width: int
    value_width: int
    taps: int
    rule: str
    has_bias: bool
    is_dealt: bool
    is_apart: bool = False
    strength: float = 1.0
    by_row: bool = False
    rate_rank: int | None = None
    rate_bound: float | None = None
    read_eps: float | None = None
    is_normed: bool = True
    is_beside: bool = False

    @property
    def mixed_columns(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_width + self.num_heads * self.value_width

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Of what a row has in one layer, in float32."""
        return self.num_heads, self.key_width, self.value_width

    @property
    def columns_shape(self) -> tuple[int, int]:
        """Of what it has of its last tokens, in the type that is computed with."""
        return self.taps - 1, self.mixed_columns

    @property
    def matrix_bytes(self) -> int:
        return 4 * prod(self.matrix_shape)

    def state_bytes(self, bytes_per_element: int = 2) -> int:
        """What one row keeps in one layer: its matrices, and columns of its last tokens."""
        return self.matrix_bytes + prod(self.columns_shape) * bytes_per_element

    def of_layers(self, cut: slice) -> Recurrence:
        return replace(self, layers=self.layers[cut])


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedKeys:
    """Layers whose keys, which are their values, are kept for each row as a state (DeepSeek-V4):
    those of the last ``window`` tokens, one head of ``width`` for all queries; and of all before,
    where a layer's number among ``rates`` is not 0, one key for so many tokens, ``doubled`` where
    these and as many before them are its sources. Rows have no more than ``longest`` tokens.
    Queries are made of ``query_rank`` numbers; what heads attend becomes ``out_rank`` numbers for
    each of ``groups`` of heads before it goes into the stream. An ``index`` chooses of the keys of
    layers that are ``doubled``, where rows can have more than it chooses. ``layers`` says of each
    layer that it is one."""

    layers: tuple[bool, ...]
    rates: tuple[int, ...]
    doubled: tuple[bool, ...]
    window: int
    width: int
    query_rank: int
    groups: int
    out_rank: int
    longest: int
    index: Index | None = None

    is_beside: ClassVar[bool] = False
    """It is what its layers attend."""

    def for_rows(self, longest: int) -> CompressedKeys:
        """The same for rows of no more tokens than that, without what these do not need."""
        longest = min(longest, self.longest)
        pairs = zip(self.rates, self.doubled, strict=True)
        most = max((longest // rate for rate, twice in pairs if rate and twice), default=0)
        index = None if self.index is None or most <= self.index.num_chosen else self.index
        return replace(self, longest=longest, index=index)

    def most_keys(self, layer: int) -> int:
        """Of a row in one layer, those that stand for several tokens each."""
        rate = self.rates[layer]
        return self.longest // rate if rate else 0

    def chooses(self, layer: int) -> bool:
        return self.index is not None and self.rates[layer] > 0 and self.doubled[layer]

    def _columns(self, layer: int) -> int:
        """Behind the window: compressed keys, and those of an index side by side."""
        count = self.most_keys(layer)
        if self.index is None or not self.chooses(layer):
            return count
        return count - (-count * self.index.width // self.width)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Of the sums that the next compressed key is made of, and the one after that: in float32,
        of each number the highest gate so far, the sum of gates and what they weigh; beside them
        those of an index."""
        return 2, 3, self.width + (0 if self.index is None else self.index.width)

    @property
    def columns_shape(self) -> tuple[int, int]:
        """The most keys: of the window before a token, and compressed ones."""
        own = (self._columns(layer) for layer in range(len(self.rates)))
        return self.window - 1 + max(own, default=0), self.width

    @property
    def matrix_bytes(self) -> int:
        return 4 * prod(self.matrix_shape)

    def state_bytes(self, bytes_per_element: int = 2) -> int:
        """What one row keeps in one layer."""
        return self.matrix_bytes + prod(self.columns_shape) * bytes_per_element

    def most_numbers(self, num_heads: int) -> int:
        """That are made of a row's keys for a query of so many heads."""
        heads = num_heads + (0 if self.index is None else self.index.num_heads)
        return self.columns_shape[0] * (self.width + heads)

    def of_layers(self, cut: slice) -> CompressedKeys:
        own = {name: getattr(self, name)[cut] for name in ("layers", "rates", "doubled")}
        return replace(self, **own)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLatents:
    """Latents that are kept for each row as a state, one key of so many numbers for a token and one
    of the ``index`` beside it: of rows of up to ``longest`` tokens, more than that chooses. Layers
    that choose nothing have room for such keys, too."""

    layers: tuple[bool, ...]
    width: int
    longest: int
    index: Index

    is_beside: ClassVar[bool] = False
    matrix_shape: ClassVar[tuple[int, int, int]] = (0, 0, 0)
    matrix_bytes: ClassVar[int] = 0

    @property
    def columns_shape(self) -> tuple[int, int]:
        """Keys, and those of the index side by side."""
        return self.longest - (-self.longest * self.index.width // self.width), self.width

    def state_bytes(self, bytes_per_element: int = 2) -> int:
        """What one row keeps in one layer."""
        return prod(self.columns_shape) * bytes_per_element

    def most_numbers(self, num_heads: int) -> int:
        """That are made of a row's keys for a query of so many heads."""
        return self.longest * (self.width + self.index.width + 2 * num_heads + self.index.num_heads)

    @property
    def chosen_columns(self) -> int:
        """Numbers of a token in which a layer leaves what it has chosen, for others: two for each
        key, as wide as one of its place at least. Of a stage as many as of the whole model."""
        return 2 * self.index.num_chosen * bool(self.index.shared)

    def of_layers(self, cut: slice) -> KeptLatents:
        return replace(self, layers=self.layers[cut], index=self.index.of_layers(cut))
