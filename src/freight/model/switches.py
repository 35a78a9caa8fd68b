"""A model's structure as plain switches; what a switch means is the layer programme's business.

Knows no tensors, files or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freight.errors import ModelError
from freight.model.families import ACTIVATIONS
from freight.model.heads import Heads, OtherHeads
from freight.model.number_format import DTYPE_BYTES, Grouped
from freight.model.packing import Packing
from freight.model.rope_config import RopeConfig

__all__ = ["DTYPE_BYTES", "Experts", "Latent", "ModelConfig", "Recurrence", "refusal"]

_COUNTS: Final = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
    "embedding_size",
)
_FACTORS: Final = (
    "embedding_scale",
    "residual_scale",
    "logits_scale",
    "gate_limit",
    "gate_slope",
)
_CHOICES: Final = {
    "activation": tuple(sorted(set(ACTIVATIONS.values()))),
    "dtype": tuple(sorted(DTYPE_BYTES)),
    "norm": ("rms", "rms_plus_one", "layer"),
    "norm_place": ("before", "after", "both", "update"),
    "qk_norm": ("none", "per_head", "each_head", "whole", "rotated", "per_rotated_head"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """An MLP as ``num_experts`` small ones, of which each token takes ``per_token``.

    ``layers`` says for each layer whether it has them. Which a token takes goes by its ``scores``,
    "softmax" or "sigmoid" of the router's, which may have a bias (``has_bias``), and what is added
    to them for the choice alone (``has_corrections``); of ``num_groups`` of neighbours those count
    that are among the ``groups_per_token`` whose ``best_of_group``, one or two, are highest. With
    ``normalised`` the weights of a token's experts sum to one; all are multiplied by ``scale``.
    They weigh what an expert makes, or with ``weighs_input`` what it works on.
    Beside them is an MLP
    of width ``shared_size`` that all tokens take, where that is not 0, by a share of its own with
    ``shared_gate``. With ``beside_mlp`` it is the layer's own MLP: router, experts and MLP have a
    norm each before them, experts and MLP one behind, and their sum the layer's (Gemma 4). There
    the router's scores are divided by the root of the stream's width, and with ``has_gains`` an
    expert's weights are multiplied by a number of its own.
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
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    shared_size: int = 0
    shared_gate: bool = False
    weighs_input: bool = False
    beside_mlp: bool = False
    has_gains: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Keys and values of all heads as one vector of ``rank`` numbers for each token, beside a key
    that is rotated (DeepSeek-V2). Of a query ``key_width`` numbers meet what that becomes for a
    head, whose values have ``value_width``; queries are made of ``query_rank`` numbers, where there
    is such a rank."""

    rank: int
    key_width: int
    value_width: int
    query_rank: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Layers that keep a state for each row instead of its keys: ``layers`` says of each layer
    whether it is one. Of ``num_heads`` each has a matrix of ``key_width`` by ``value_width``
    numbers, written and read by keys and queries that ``num_key_heads`` make, by the ``rule``
    "delta" (the gated delta rule) or "scan" (Mamba-2); what makes these is convolved over the last
    ``taps`` tokens, ``has_bias`` says whether with a bias. By the rule "gates" there are no
    matrices, and what is convolved is the values alone, between two gates. With ``is_dealt``
    queries, keys, values and gates are one matrix, stacked by key head."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_heads: int
    key_width: int
    value_width: int
    taps: int
    rule: str
    has_bias: bool
    is_dealt: bool

    @property
    def mixed_columns(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_width + self.num_heads * self.value_width

    @property
    def matrix_bytes(self) -> int:
        """Those of a row in one layer, in float32."""
        return 4 * self.num_heads * self.key_width * self.value_width

    def state_bytes(self, bytes_per_element: int = 2) -> int:
        """What one row keeps in one layer: its matrices, and columns of its last tokens."""
        return self.matrix_bytes + (self.taps - 1) * self.mixed_columns * bytes_per_element


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The switches of one model. ``dtype`` is the checkpoint's, not that of the computation.

    ``sliding_windows`` has one entry per layer: how many of the last tokens, itself included, a
    token may look at, or None for all; ``ropes`` has how it rotates queries and keys, None where it
    does not. ``learned_positions`` are added to the embedding (their table begins
    ``position_offset`` rows before position 0). ``norm_place``: "before" what a block works on,
    "after" the stream that it has been added to, on its "update" alone, or "both" before and on the
    update. ``qk_norm``: queries and keys normalised "per_head" with one gain, "each_head" with its
    own, as a "whole", or where they are rotated, afterwards: "rotated" without a gain,
    "per_rotated_head" with one for all. ``parallel``: attention and MLP of a layer see the same
    input. ``fused_qkv``: query, key and value are one matrix, stacked by key/value head. Scores are
    divided by the root of ``attention_scalar`` (None: of the head's width); with
    ``attention_sinks`` each head has a score of its own that takes a share and gives nothing. Gates
    are x sigmoid(``gate_slope`` x), which what they gate comes to with one added, both no larger
    than ``gate_limit``, where there is one; else what ``activation`` says. All updates of the
    stream and logits are multiplied by ``residual_scale`` and ``logits_scale``.
    With a ``latent`` there is one key/value head as wide as what is rotated and the latent.
    Layers of a ``recurrence`` attend nothing, those of ``other_heads`` have heads of another size.
    With ``value_norm`` values are divided by their root mean square, head by head; with
    ``layer_scales`` a number of its own multiplies the stream behind each layer. With
    ``gated_attention`` the matrix of queries makes as many gates, head by head, whose sigmoids
    multiply what is attended.
    ``packing`` says how the checkpoint's matrices are quantised, where config.json does.

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
    parallel: bool
    shared_norm: bool
    activation: str
    gated_mlp: bool
    fused_qkv: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    gate_limit: float | None
    gate_slope: float
    tied_embeddings: bool
    attention_scalar: float | None
    attention_sinks: bool
    attention_softcap: float | None
    logits_softcap: float | None
    ropes: tuple[RopeConfig | None, ...]
    learned_positions: bool
    position_offset: int
    sliding_windows: tuple[int | None, ...]
    experts: Experts | None
    latent: Latent | None
    recurrence: Recurrence | None
    gated_attention: bool
    other_heads: OtherHeads | None
    value_norm: bool
    layer_scales: bool
    dtype: str
    packing: Packing | None = None
    kv_format: Grouped | None = None
    attended_share: float = 1.0

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise refusal(f"A model of the {self.family} family was described.", problems)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return float((self.attention_scalar or self.head_dim) ** -0.5)

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """The ways in which layers rotate, each once."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    @property
    def rotary_columns(self) -> int:
        """Elements of a head that are rotated, over all ways."""
        return sum(rope.rotary_dim for rope in self.rotations)

    @property
    def has_query_rank(self) -> bool:
        """Whether queries are made of fewer numbers first."""
        return self.latent is not None and self.latent.query_rank is not None

    def heads(self, layer: int) -> Heads:
        """Those of a layer."""
        own = self.other_heads
        is_other = own is not None and own.layers[layer]
        return own.heads if own and is_other else Heads(self.num_kv_heads, self.head_dim)

    @property
    def all_heads(self) -> tuple[Heads, ...]:
        """The sizes that heads have in layers, each once, of a stage those of the whole model: its
        pages are as large as the others'."""
        plain, own = Heads(self.num_kv_heads, self.head_dim), self.other_heads
        return tuple(dict.fromkeys((plain, plain if own is None else own.heads)))

    @property
    def widest_head(self) -> int:
        return max(heads.width for heads in self.all_heads)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer has keys and values; else it keeps a state."""
        return self.recurrence is None or not self.recurrence.layers[layer]

    @property
    def num_attention_layers(self) -> int:
        return sum(map(self.attends, range(self.num_layers)))

    @property
    def num_recurrent_layers(self) -> int:
        return self.num_layers - self.num_attention_layers

    def state_bytes_per_row(self, bytes_per_element: int = 2) -> int:
        """What a row keeps in all layers that attend nothing, however long it is."""
        own = self.recurrence
        each = 0 if own is None else own.state_bytes(bytes_per_element)
        return self.num_recurrent_layers * each

    def kv_bytes_per_token_per_layer(self, bytes_per_element: int = 2) -> int:
        """Keys and values that one token leaves in one layer, the largest where they differ: there
        is as much room in all."""
        return 2 * bytes_per_element * max(own.num_kv * own.width for own in self.all_heads)

    def kept_bytes_per_token_per_layer(self, bytes_per_element: int = 2) -> int:
        """What these are kept as."""
        return max(self._kept_bytes(heads, bytes_per_element) for heads in self.all_heads)

    def kept_bytes_per_token_in(self, layer: int, bytes_per_element: int = 2) -> int:
        """What keys and values that one token leaves in that layer are kept as."""
        return self._kept_bytes(self.heads(layer), bytes_per_element)

    def _kept_bytes(self, heads: Heads, bytes_per_element: int) -> int:
        own, width = self.kv_format, heads.width
        numbers = width * bytes_per_element if own is None else own.row_bytes(width)
        return 2 * heads.num_kv * numbers

    def attended_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """One token's queries in one layer, or what was attended for them, the most of all."""
        return self.num_heads * self.widest_head * bytes_per_element

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Keys and values that one token leaves in all layers, as they are kept."""
        return self.num_attention_layers * self.kept_bytes_per_token_per_layer(bytes_per_element)


def refusal(asked: str, problems: list[str]) -> ModelError:
    """What to raise where a description cannot be a model."""
    return ModelError(
        asked,
        f"What is wrong with it: {'; '.join(problems)}.",
        "Correct config.json, or fetch the model again from where it was published.",
    )


def _contradictions(config: ModelConfig) -> list[str]:
    small = [name for name in _COUNTS if getattr(config, name) < 1]
    problems = [f"{name} is {getattr(config, name)}, it must be at least 1" for name in small]
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        problems.append(
            f"{config.num_heads} query heads cannot be shared out over "
            f"{config.num_kv_heads} key/value heads"
        )
    widths = {(rope.rotary_dim, _width(config, i)) for i, rope in enumerate(config.ropes) if rope}
    problems += [
        f"rotary width {turned} exceeds head width {width}"
        for turned, width in sorted(widths)
        if turned > width
    ]
    positive = ("norm_eps", "attention_scalar", "attention_softcap", "logits_softcap")
    for name in (*positive, *_FACTORS):
        value = getattr(config, name)
        if value is not None and not value > 0:
            problems.append(f"{name} is {value}, it must be more than 0")
    for name, known in _CHOICES.items():
        if getattr(config, name) not in known:
            problems.append(
                f"{name} is {getattr(config, name)!r}, supported are {', '.join(known)}"
            )
    for what, given in (("attention windows", config.sliding_windows), ("ropes", config.ropes)):
        if len(given) != config.num_layers:
            problems.append(f"{len(given)} {what} are given for {config.num_layers} layers")
    if any(window is not None and window < 1 for window in config.sliding_windows):
        problems.append("an attention window is below 1")
    problems += _latent_problems(config)
    problems += _recurrence_problems(config)
    problems += _head_problems(config)
    return problems + ([] if config.experts is None else _expert_problems(config, config.experts))


def _width(config: ModelConfig, layer: int) -> int:
    """Of a layer's heads, also where not all layers say what theirs are."""
    own = config.other_heads
    return (
        own.head_dim if own is not None and any(own.layers[layer : layer + 1]) else config.head_dim
    )


def _head_problems(config: ModelConfig) -> list[str]:
    own = config.other_heads
    if own is None:
        return []
    problems = own.problems(config.num_layers, config.num_heads)
    others = config.fused_qkv or config.gated_attention or config.qk_norm != "per_head"
    if others or config.latent is not None or config.recurrence is not None:
        problems.append("layers with heads of another size have plain projections, normed by head")
    return problems


def _latent_problems(config: ModelConfig) -> list[str]:
    latent = config.latent
    if latent is None:
        return []
    widths = (latent.rank, latent.key_width, latent.value_width, latent.query_rank or 1)
    problems = [] if min(widths) > 0 else ["a width of latent attention is below 1"]
    turned = {None if rope is None else rope.rotary_dim for rope in config.ropes}
    if config.num_kv_heads != 1 or turned != {config.head_dim - latent.rank}:
        problems.append("keys of latents are not one head of a latent and what is rotated")
    if config.fused_qkv or config.qk_norm != "none" or config.attention_sinks:
        problems.append("latent attention has projections and norms of its own, and no sinks")
    return problems


def _recurrence_problems(config: ModelConfig) -> list[str]:
    own = config.recurrence
    if own is None:
        return []
    key_width = 1 if own.rule == "gates" else own.key_width
    widths = (own.num_key_heads, own.num_heads, key_width, own.value_width)
    problems = [] if min(widths) > 0 else ["a width of recurrent layers is below 1"]
    if own.rule not in ("delta", "scan", "gates"):
        problems.append(f"recurrent layers go by {own.rule!r}, not by delta, scan or gates")
    if own.taps < 2:
        problems.append(f"convolutions are over {own.taps} tokens, they must be over 2 at least")
    if own.num_key_heads > 0 and own.num_heads % own.num_key_heads:
        problems.append(
            f"{own.num_heads} recurrent heads cannot share {own.num_key_heads} of queries and keys"
        )
    if len(own.layers) != config.num_layers:
        problems.append(f"{len(own.layers)} of {config.num_layers} layers say whether they attend")
    if config.parallel or config.latent is not None:
        problems.append("recurrent layers have neither parallel blocks nor latents beside them")
    return problems


def _expert_problems(config: ModelConfig, experts: Experts) -> list[str]:
    problems = []
    if not 1 <= experts.per_token <= experts.num_experts:
        problems.append(f"{experts.per_token} of {experts.num_experts} experts are to be chosen")
    if experts.intermediate_size < 1:
        problems.append(f"the experts' width is {experts.intermediate_size}")
    if len(experts.layers) != config.num_layers:
        problems.append(
            f"{len(experts.layers)} of {config.num_layers} layers say what MLP they have"
        )
    if experts.best_of_group not in (1, 2):
        problems.append(f"a group counts by its {experts.best_of_group} best, not by one or two")
    if experts.scores not in ("softmax", "sigmoid"):
        problems.append(f"experts are chosen by {experts.scores!r}, not by softmax or sigmoid")
    if experts.num_groups < 1 or experts.num_experts % experts.num_groups:
        problems.append(f"{experts.num_experts} experts are no {experts.num_groups} groups")
    elif not 1 <= experts.groups_per_token <= experts.num_groups:
        problems.append(f"{experts.groups_per_token} of {experts.num_groups} groups are chosen")
    elif experts.num_experts < experts.best_of_group * experts.num_groups > experts.best_of_group:
        problems.append("a group has one expert, where the two best of each are looked at")
    if not experts.scale > 0:
        problems.append(f"the experts' weights are multiplied by {experts.scale}")
    if experts.shared_size < 0:
        problems.append(f"the width of the MLP beside the experts is {experts.shared_size}")
    if config.parallel:
        problems.append("experts and parallel blocks cannot be combined")
    if experts.beside_mlp and (experts.shared_size or config.norm_place != "both"):
        problems.append("experts beside a layer's own MLP have norms before them and behind")
    if config.layer_scales and not experts.beside_mlp:
        problems.append("layers that end with experts have no scale")
    return problems
