"""A model's structure as plain switches; what a switch means is the layer programme's business.

Knows no tensors, files or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from freight.errors import ModelError
from freight.model.heads import Heads, OtherHeads, Sharing
from freight.model.layer_kinds import (
    CompressedKeys,
    Experts,
    KeptLatents,
    Latent,
    Recurrence,
    Streams,
)
from freight.model.number_format import DTYPE_BYTES, Grouped
from freight.model.packing import Packing
from freight.model.query_growth import QueryGrowth
from freight.model.readout import STREAM, Readout
from freight.model.rope_config import RopeConfig
from freight.model.slope_steps import SLOPE_COLUMNS

__all__ = ["DTYPE_BYTES", "ModelConfig", "refusal"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The switches of one model. ``dtype`` is the checkpoint's, not that of the computation.

    ``sliding_windows`` has one entry per layer: how many of the last tokens, itself included, a
    token may look at, or None for all; ``ropes`` has how it rotates queries and keys, None where it
    does not. ``learned_positions`` are added to the embedding (their table begins
    ``position_offset`` rows before position 0). With a ``slope_span`` scores sink with the distance
    instead, by slopes down to 2^-``slope_span``, and heads have columns more than what projects
    them (``slope_steps``). ``embedding_norm``: embeddings are normalised. ``norm_place``: "before"
    what a block works on, "after" the stream that it has been added to, on its "update" alone,
    "both" before and on the update, "experts" before and on the update of experts alone, or
    "by_kind": before in layers that keep a state, on the update in others. ``qk_norm``: queries and
    keys normalised "per_head" with one gain (and with ``qk_norm_bias`` one bias), "each_head" with
    its own, as a "whole", or where they are rotated, afterwards: "rotated" without a gain,
    "per_rotated_head" with one for all. ``parallel``: attention and MLP of a layer see the same
    input. ``fused_qkv``: query, key and value are one
    matrix, stacked by key/value head, or with ``qkv_blocks`` as queries, values and keys of each
    block of heads; they are kept between -``qkv_limit`` and that, where there is one. Scores are
    divided by the root of ``attention_scalar`` (None: of the head's width); with
    ``attention_sinks`` each head has a score of its own that takes a share and gives nothing, or
    with ``window_sinks`` those of layers that have a window. Values may be narrower than keys,
    ``value_width``; they are kept with zeros behind them. Gates
    are x sigmoid(``gate_slope`` x), which what they gate comes to with one added, both no larger
    than ``gate_limit``, where there is one; else what ``activation`` says, and where ``mlp_limits``
    have a number for a layer both are kept between it and its negative in the MLP there, or the one
    beside its experts; with ``limits_first`` the gate is kept below it, before its function. All
    updates of the stream and logits are multiplied by ``residual_scale`` and ``logits_scale``.
    With a ``latent`` there is one key/value head as wide as what is rotated and the latent. Layers
    of a ``recurrence`` keep a state of each row instead of pages of keys, those of ``other_heads``
    have heads of another size. With ``value_norm`` values are divided by their root mean square,
    head by head; with ``layer_scales`` a number of its own multiplies the stream behind each layer.
    What is attended is multiplied by ``attention_gates``: "queries" are as many as these, made by
    their matrix, head by head; "apart" has a matrix of its own make as many, "heads" one for each
    head; there are "none" else. They count by ``gate_function``, "sigmoid" or "softplus".
    With ``layer_inputs`` each layer adds to the stream what so many numbers of the token make of
    it, which are its own: a table of their own has those of all layers, and to them comes what a
    matrix makes of the embedding. Some layers may attend the keys of others, by ``sharing``.
    ``parts`` says of each layer what it has: a "mixer", which attends or keeps a state, an "mlp",
    with or without experts, or "both", as all have where it is None. ``factors`` multiply what
    matrices of a layer make, by their names.
    With ``streams`` the residual stream is several; queries may grow with their position.
    ``packing`` says how the checkpoint's matrices are quantised, where config.json does. A
    ``readout`` stands in place of the rows of the vocabulary that make logits; ``embedding`` is
    what it is where embeddings are asked for.

    The last two are approximations that a user asks for: ``kv_format`` is what keys and values are
    kept as, None for the type that is computed with; of the keys that a single query sees, the
    share ``attended_share`` with the highest scores count.
    Raises ModelError with every contradiction at once.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    embedding_size: int
    embedding_scale: float | None
    residual_scale: float | None
    logits_scale: float | None
    norm: str
    norm_place: str
    norm_eps: float
    norm_bias: bool
    final_norm: bool
    qk_norm: str
    qk_norm_bias: bool
    parallel: bool
    shared_norm: bool
    activation: str
    gated_mlp: bool
    fused_qkv: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_bias: bool
    qkv_limit: float | None
    qkv_blocks: int | None
    gate_limit: float | None
    gate_slope: float
    tied_embeddings: bool
    attention_scalar: float | None
    attention_sinks: bool
    window_sinks: bool
    value_width: int | None
    attention_softcap: float | None
    logits_softcap: float | None
    ropes: tuple[RopeConfig | None, ...]
    learned_positions: bool
    slope_span: float | None
    embedding_norm: bool
    position_offset: int
    sliding_windows: tuple[int | None, ...]
    experts: Experts | None
    latent: Latent | None
    recurrence: Recurrence | CompressedKeys | KeptLatents | None
    attention_gates: str
    gate_function: str
    other_heads: OtherHeads | None
    value_norm: bool
    layer_scales: bool
    layer_inputs: int | None
    sharing: Sharing | None
    dtype: str
    mlp_limits: tuple[float | None, ...] = ()
    limits_first: bool = False
    streams: Streams | None = None
    query_growth: QueryGrowth | None = None
    parts: tuple[str, ...] | None = None
    factors: tuple[tuple[str, float], ...] = ()
    packing: Packing | None = None
    readout: Readout | None = None
    embedding: Readout = STREAM
    kv_format: Grouped | None = None
    attended_share: float = 1.0

    @property
    def head_size(self) -> int:
        """Numbers that the head makes of a token."""
        if self.readout is None:
            return self.vocab_size
        return len(self.readout.labels) or self.hidden_size

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return float((self.attention_scalar or self.projected_width) ** -0.5)

    @property
    def projected_width(self) -> int:
        """How wide heads are before columns for slopes are beside them."""
        return self.head_dim - (0 if self.slope_span is None else SLOPE_COLUMNS)

    @property
    def gates_attention(self) -> bool:
        """Whether what is attended is multiplied by gates."""
        return self.attention_gates != "none"

    @property
    def has_centred_norms(self) -> bool:
        """Whether they take the mean away."""
        return self.norm.startswith("layer")

    @cached_property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """The ways in which layers rotate, each once."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    @cached_property
    def rotary_columns(self) -> int:
        """Elements of a head that are rotated, over all ways."""
        return sum(rope.rotary_dim for rope in self.rotations)

    @property
    def has_query_rank(self) -> bool:
        """Whether queries are made of fewer numbers first."""
        return self.latent is not None and self.latent.query_rank is not None

    @property
    def norms_sum(self) -> bool:
        """Whether what the experts of a layer make is normalised together, with what the MLP beside
        them makes, before it goes into the stream."""
        experts, is_behind = self.experts, self.norm_place in ("both", "update", "experts")
        return experts is not None and is_behind and not experts.beside_mlp

    @property
    def closes_experts(self) -> bool:
        """Whether what experts make goes into the stream at once, after the last of them."""
        return self.norms_sum or (self.experts is not None and self.streams is not None)

    @property
    def experts_see_stream(self) -> bool:
        """Whether experts work on the stream as it is: what they make is aside meanwhile."""
        return self.experts is not None and self.norm_place == "update"

    @property
    def input_columns(self) -> int:
        """Numbers of a token that all layers have as inputs of their own."""
        return self.num_layers * (self.layer_inputs or 0)

    @property
    def beside(self) -> str:
        """Of these the one with attention's update of a parallel block."""
        return "aside" if self.experts is None else "sum"

    def heads(self, layer: int) -> Heads:
        """Of keys and values, those of a layer."""
        own = self._others(layer)
        return Heads(self.num_kv_heads, self.head_dim) if own is None else own.heads

    def query_heads(self, layer: int) -> int:
        own = self._others(layer)
        return self.num_heads if own is None else own.num_heads

    @property
    def most_query_heads(self) -> int:
        own = self.other_heads
        return self.num_heads if own is None else max(self.num_heads, own.num_heads)

    def _others(self, layer: int) -> OtherHeads | None:
        own = self.other_heads
        return own if own is not None and own.layers[layer] else None

    @property
    def queries_per_key(self) -> float:
        """Query heads that share one of keys, in the mean of layers that attend."""
        own = [i for i in range(self.num_layers) if self.attends(i)]
        keys = sum(self.heads(i).num_kv for i in own)
        return sum(map(self.query_heads, own)) / keys if keys else 1.0

    def for_rows(self, longest: int) -> ModelConfig:
        """The same for rows of no more tokens than that: what they do not need is left out, weights
        among it. Latents of which keys are chosen are a state."""
        own, index = self.recurrence, None if self.latent is None else self.latent.index
        if isinstance(own, CompressedKeys):
            return replace(self, recurrence=own.for_rows(longest))
        if self.query_growth is not None and not self.query_growth.changes(longest):
            return replace(self, query_growth=None).for_rows(longest)
        if index is None or own is not None or longest <= index.num_chosen:
            return self
        layers = (True,) * self.num_layers
        kept = KeptLatents(layers=layers, width=self.head_dim, longest=longest, index=index)
        return replace(self, recurrence=kept)

    @property
    def complete(self) -> ModelConfig:
        """The same for rows of any length, with all weights that these may need."""
        return self.for_rows(self.max_positions)

    def of_layers(self, layers: range) -> ModelConfig:
        """The same model of these layers alone, which are numbered from 0 there."""
        experts, recurrence, others = self.experts, self.recurrence, self.other_heads
        cut = slice(layers.start, layers.stop)
        latent = self.latent
        return replace(
            self,
            num_layers=len(layers),
            latent=latent and replace(latent, index=latent.index and latent.index.of_layers(cut)),
            sliding_windows=self.sliding_windows[cut],
            ropes=self.ropes[cut],
            mlp_limits=self.mlp_limits[cut],
            experts=experts
            and replace(
                experts,
                layers=experts.layers[cut],
                limits=experts.limits[cut],
                by_token=experts.by_token[cut],
            ),
            recurrence=recurrence and recurrence.of_layers(cut),
            parts=self.parts and self.parts[cut],
            other_heads=others and replace(others, layers=others.layers[cut]),
        )

    def mlp_limit(self, layer: int) -> float | None:
        return self.mlp_limits[layer] if self.mlp_limits else None

    @cached_property
    def all_heads(self) -> tuple[Heads, ...]:
        """The sizes that heads have in layers, each once, of a stage those of the whole model: its
        pages are as large as the others'."""
        plain, own = Heads(self.num_kv_heads, self.head_dim), self.other_heads
        return tuple(dict.fromkeys((plain, plain if own is None else own.heads)))

    def has_sinks(self, layer: int) -> bool:
        has_window = self.sliding_windows[layer] is not None
        return self.attention_sinks and (has_window or not self.window_sinks)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def expert_likelihood(self, num_tokens: float) -> float:
        """How likely any of so many tokens is to need an expert, were they chosen by chance."""
        own = self.experts
        return 1.0 if own is None else 1.0 - (1.0 - own.per_token / own.num_experts) ** num_tokens

    def has_mlp(self, layer: int) -> bool:
        """Whether it has an MLP, or experts."""
        return self.parts is None or self.parts[layer] != "mixer"

    def keeps_state(self, layer: int) -> bool:
        return self.recurrence is not None and self.recurrence.layers[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer attends keys and values, its own or another's."""
        has_mixer = self.parts is None or self.parts[layer] != "mlp"
        return has_mixer and (self.attends_aside or not self.keeps_state(layer))

    @cached_property
    def attends_aside(self) -> bool:
        """Whether what is attended stays beside the stream: the unit after works on that as it was,
        and adds both."""
        return self.parallel or (self.recurrence is not None and self.recurrence.is_beside)

    def norm_place_in(self, layer: int) -> str:
        """Where the norms of one layer are."""
        if self.norm_place != "by_kind":
            return self.norm_place
        return "update" if self.attends(layer) else "before"

    @cached_property
    def key_layers(self) -> tuple[int | None, ...]:
        """By layer, the one whose keys it attends; None where it attends nothing."""
        own, windows = self.sharing, self.sliding_windows
        found: list[int | None] = []
        last: dict[bool, int] = {}
        for layer in range(self.num_layers):
            if not self.attends(layer):
                found.append(None)
                continue
            if own is None or layer < own.first:
                last[windows[layer] is None] = layer
            found.append(last[windows[layer] is None])
        return tuple(found)

    @cached_property
    def keeping(self) -> tuple[bool, ...]:
        """Which layers have keys and values of their own."""
        return tuple(layer == own for layer, own in enumerate(self.key_layers))

    @cached_property
    def num_attention_layers(self) -> int:
        """Those that have keys and values."""
        return sum(self.keeping)

    def has_window(self, layer: int) -> bool:
        """Whether nobody attends more than the last of a layer's keys, and it alone does."""
        return self._windowed[layer]

    @cached_property
    def _windowed(self) -> tuple[bool, ...]:
        alone = (self.key_layers.count(layer) == 1 for layer in range(self.num_layers))
        windows = zip(alone, self.sliding_windows, strict=True)
        return tuple(is_alone and window is not None for is_alone, window in windows)

    @cached_property
    def num_window_layers(self) -> int:
        return sum(map(self.has_window, range(self.num_layers)))

    @cached_property
    def widest_window(self) -> int | None:
        """The most tokens that a layer with a window attends; None where there is none."""
        windows = (self.sliding_windows[i] for i in range(self.num_layers) if self.has_window(i))
        return max((window for window in windows if window is not None), default=None)

    @cached_property
    def num_recurrent_layers(self) -> int:
        return sum(map(self.keeps_state, range(self.num_layers)))

    def state_bytes_per_row(self, bytes_per_element: int = 2) -> int:
        """What a row keeps in all layers that have states."""
        own = self.recurrence
        each = 0 if own is None else own.state_bytes(bytes_per_element)
        return self.num_recurrent_layers * each

    def kv_bytes_per_token_per_layer(self, bytes_per_element: int = 2) -> int:
        """Keys and values that one token leaves in one layer, the largest where they differ: there
        is as much room in all."""
        most = max(own.num_kv * own.width for own in self.all_heads)
        return self.num_key_parts * bytes_per_element * most

    @property
    def keys_alone(self) -> bool:
        """Whether keys are their values, too: latents are, beside what is rotated of them."""
        return self.latent is not None

    @property
    def num_key_parts(self) -> int:
        """Keys and values, or keys."""
        return 1 if self.keys_alone else 2

    def kept_bytes_per_token_per_layer(self, bytes_per_element: int = 2) -> int:
        """What these are kept as."""
        return max(self._kept_bytes(heads, bytes_per_element) for heads in self.all_heads)

    def kept_bytes_per_token_in(self, layer: int, bytes_per_element: int = 2) -> int:
        """What keys and values that one token leaves in that layer are kept as."""
        return self._kept_bytes(self.heads(layer), bytes_per_element)

    def _kept_bytes(self, heads: Heads, bytes_per_element: int) -> int:
        own, width = self.kv_format, heads.width
        numbers = width * bytes_per_element if own is None else own.row_bytes(width)
        return self.num_key_parts * heads.num_kv * numbers

    def attended_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """One token's queries in one layer, or what was attended for them, the most of all."""
        widths = [self.num_heads * self.head_dim]
        if (own := self.other_heads) is not None:
            widths.append(own.num_heads * own.head_dim)
        return max(widths) * bytes_per_element

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Keys and values that one token leaves in all layers, as they are kept: with as much room
        in all, but where they stay with what computes."""
        if self.sharing is None:
            each = self.kept_bytes_per_token_per_layer(bytes_per_element)
            return self.num_attention_layers * each
        kept = [i for i, keeps in enumerate(self.keeping) if keeps]
        return sum(self.kept_bytes_per_token_in(i, bytes_per_element) for i in kept)


def refusal(asked: str, problems: list[str]) -> ModelError:
    """What to raise where a description cannot be a model."""
    return ModelError(
        asked,
        f"What is wrong with it: {'; '.join(problems)}.",
        "Correct config.json, or fetch the model again from where it was published.",
    )
