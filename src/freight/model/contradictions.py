"""What switches cannot be, by themselves or together."""

from __future__ import annotations

from typing import Final

from freight.model.families import ACTIVATIONS
from freight.model.kept_config import kept_problems
from freight.model.layer_kinds import CompressedKeys, Experts, KeptLatents
from freight.model.number_format import DTYPE_BYTES
from freight.model.query_growth import QueryGrowth
from freight.model.slope_steps import MOST_POSITIONS
from freight.model.switches import ModelConfig

__all__ = ["contradictions"]

_LARGE: Final = 1e30
"""Numbers beyond are none that a model was trained with."""
_MOST_ROUNDS: Final = 1000
_LEAST_LIMIT: Final = 0.3
"""Functions before gates make nothing below its negative."""
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
    "qkv_limit",
    "slope_span",
)
_CHOICES: Final = {
    "activation": (*sorted(set(ACTIVATIONS.values())), "xielu"),
    "dtype": tuple(sorted(DTYPE_BYTES)),
    "norm": ("rms", "rms_plus_one", "layer", "layer_plus_one", "layer_bare"),
    "norm_place": ("before", "after", "both", "update", "experts", "by_kind"),
    "attention_gates": ("none", "queries", "apart", "heads"),
    "gate_function": ("sigmoid", "softplus"),
    "qk_norm": ("none", "per_head", "each_head", "whole", "rotated", "per_rotated_head"),
}


def contradictions(config: ModelConfig) -> list[str]:
    """All that is wrong with a description, in words."""
    is_read = config.readout is None or bool(config.readout.labels) or config.final_norm
    small = [name for name in _COUNTS if getattr(config, name) < 1]
    problems = [f"{name} is {getattr(config, name)}, it must be at least 1" for name in small]
    problems += [] if is_read else ["embeddings are read behind a last norm, and it has none"]
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
    problems += [
        f"what {name} makes is multiplied by {factor}, it must be more than 0"
        for name, factor in config.factors
        if not factor > 0
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
    if config.qk_norm_bias and config.qk_norm != "per_head":
        problems.append("norms of queries and keys have biases only where all heads share one")
    if config.qkv_blocks is not None and (
        config.qkv_blocks < 1
        or config.num_heads % config.qkv_blocks
        or config.num_kv_heads != config.num_heads
    ):
        problems.append(f"{config.num_heads} heads are not {config.qkv_blocks} equal blocks")
    if config.slope_span is not None and config.max_positions > MOST_POSITIONS:
        problems.append(f"{config.max_positions} positions are more than keys carry")
    is_stacked = config.fused_qkv or config.qkv_blocks is not None
    others = config.gates_attention, config.latent is not None, config.other_heads is not None
    if config.slope_span is not None and (any(others) or config.qkv_blocks is not None):
        problems.append("scores that sink with the distance have no gates or latents beside them")
    if config.gates_attention and is_stacked:
        problems.append("gates of what is attended are not stacked with queries, keys and values")
    if config.attends_aside and (
        config.norm_place != "before" or config.residual_scale is not None
    ):
        problems.append(
            "parts side by side have norms before them, and updates that are not scaled"
        )
    problems += _latent_problems(config)
    problems += _recurrence_problems(config)
    if config.norm_place == "by_kind" and (config.recurrence is None or config.experts is not None):
        problems.append(
            "norms are placed by kind in plain layers alone, of which some keep a state"
        )
    if config.norm_place == "experts" and config.experts is None:
        problems.append("norms are to be of what experts make, and there are none")
    problems += _part_problems(config)
    problems += _head_problems(config)
    problems += _value_problems(config)
    problems += _sharing_problems(config)
    problems += _limit_problems(config)
    problems += [] if config.query_growth is None else _growth_problems(config, config.query_growth)
    problems += _stream_problems(config)
    if config.layer_inputs is not None and config.layer_inputs < 1:
        problems.append(f"{config.layer_inputs} inputs are given for each layer")
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
    problems = own.problems(config.num_layers)
    is_stacked = config.fused_qkv or config.attention_gates == "queries"
    if (
        is_stacked
        or config.qk_norm not in ("none", "per_head")
        or config.latent is not None
        or config.recurrence is not None
    ):
        problems.append("layers with heads of another size have plain projections, normed by head")
    if own.keys_are_values and config.qk_norm != "per_head":
        problems.append("keys that are values are normed by head")
    return problems


def _value_problems(config: ModelConfig) -> list[str]:
    """Of values that are narrower than keys."""
    own = config.value_width
    if own is None:
        return []
    narrowest = min(heads.width for heads in config.all_heads)
    problems = []
    if not 0 < own < narrowest:
        problems.append(f"values are {own} wide, and the keys that they are kept with {narrowest}")
    is_stacked = config.fused_qkv or config.qkv_blocks is not None
    others = config.gates_attention, config.value_norm, config.slope_span is not None, is_stacked
    keys_are_values = config.other_heads is not None and config.other_heads.keys_are_values
    if any(others) or config.latent is not None or keys_are_values:
        problems.append("values that are narrower than keys have plain projections of their own")
    return problems


def _limit_problems(config: ModelConfig) -> list[str]:
    """Of gates that are kept between numbers."""
    experts = config.experts
    given = [config.mlp_limits, () if experts is None else experts.limits]
    problems = [
        f"{len(limits)} limits of gates are given for {config.num_layers} layers"
        for limits in given
        if len(limits) not in (0, config.num_layers)
    ]
    small = {limit for limits in given for limit in limits if limit is not None}
    problems += [
        f"gates have a limit of {limit}, it must be {_LEAST_LIMIT} or more, or before a function 0"
        for limit in sorted(small)
        if not _LARGE > limit >= (0 if config.limits_first else _LEAST_LIMIT)
    ]
    if any(given) and (config.gate_limit is not None or not config.gated_mlp):
        problems.append("gates have limits by layer, and one for all or no gates")
    return problems


def _stream_problems(config: ModelConfig) -> list[str]:
    """Of a residual stream that is several."""
    own = config.streams
    if own is None:
        return []
    problems = []
    if own.count < 1 or not 0 <= own.rounds <= _MOST_ROUNDS:
        problems.append(f"there are {own.count} residual streams, mixed in {own.rounds} rounds")
    if not (0 < own.floor <= 1 and 0 < own.magnitude < _LARGE and 0 <= own.least_share <= 1):
        problems.append("residual streams have weights and shares that are no numbers above 0")
    experts = config.experts
    others = (
        config.norm_place != "before",
        config.attends_aside,
        config.residual_scale is not None,
        config.layer_inputs is not None,
        config.layer_scales,
        bool(config.factors),
        experts is not None and (experts.beside_mlp or bool(experts.latent_size)),
    )
    if any(others):
        problems.append(
            "residual streams are entered by blocks with a norm before them, one after the other, "
            "whose updates are not scaled"
        )
    return problems


def _sharing_problems(config: ModelConfig) -> list[str]:
    """Of layers that attend the keys of others."""
    own = config.sharing
    if own is None:
        return []
    num_layers, windows = config.num_layers, config.sliding_windows
    if not 0 < own.first < num_layers:
        return [f"{num_layers - own.first} of {num_layers} layers are to attend others' keys"]
    problems = [] if own.mlp_size > 0 else [f"the MLPs of these layers are {own.mlp_size} wide"]
    kinds = [(window is None, _width(config, i)) for i, window in enumerate(windows)]
    are_alike = len({*kinds}) == len({has_none for has_none, _ in kinds})
    if not are_alike or not {*kinds[own.first :]} <= {*kinds[: own.first]}:
        problems.append("layers are to attend keys of others like them, and there are none")
    stacked = config.fused_qkv, config.qkv_blocks is not None, config.parallel
    others = config.gates_attention, config.value_width is not None, config.parts is not None
    kinds_of_keys = config.slope_span, config.latent, config.recurrence
    if any((*stacked, *others)) or any(own is not None for own in kinds_of_keys):
        problems.append("layers that attend others' keys have plain projections of queries alone")
    return problems


def _growth_problems(config: ModelConfig, own: QueryGrowth) -> list[str]:
    others = config.slope_span, config.sharing
    kept = isinstance(config.recurrence, CompressedKeys)
    if any(other is not None for other in others) or config.gates_attention or kept:
        return [*own.problems(), "queries that grow are neither gated nor of others' keys"]
    return own.problems()


def _latent_problems(config: ModelConfig) -> list[str]:
    latent = config.latent
    if latent is None:
        return []
    widths = (latent.rank, latent.key_width, latent.value_width, latent.query_rank or 1)
    problems = [] if min(widths) > 0 else ["a width of latent attention is below 1"]
    if latent.index is not None:
        problems += latent.index.problems(config.head_dim - latent.rank)
        stated = len(latent.index.shared)
        if stated not in (0, config.num_layers):
            problems.append(f"{stated} of {config.num_layers} layers say who chooses their keys")
        if latent.query_rank is None and not latent.index.of_stream:
            problems.append("what chooses keys takes queries of fewer numbers, and there are none")
    if not latent.eps > 0:
        problems.append(f"norms of latents have an epsilon of {latent.eps}")
    turned = {None if rope is None else rope.rotary_dim for rope in config.ropes}
    width = config.head_dim - latent.rank
    if config.num_kv_heads != 1 or width < 0 or not turned <= {width, None}:
        problems.append("keys of latents are not one head of a latent and what is rotated")
    if config.fused_qkv or config.qk_norm != "none":
        problems.append("latent attention has projections and norms of its own")
    if config.attention_gates == "queries":
        problems.append("what is attended over latents has gates apart from queries, or none")
    return problems


def _recurrence_problems(config: ModelConfig) -> list[str]:
    own = config.recurrence
    if own is None:
        return []
    if isinstance(own, KeptLatents):
        return []
    if isinstance(own, CompressedKeys):
        turned = max((rope.rotary_dim for rope in config.rotations), default=0)
        others = (
            config.parallel,
            config.gates_attention,
            config.qk_norm != "none",
            config.latent is not None,
            config.fused_qkv,
            config.value_width is not None,
            config.slope_span is not None,
            not all(config.ropes),
        )
        problems = kept_problems(own, config.num_layers, config.num_heads, turned)
        if any(others):
            problems.append("keys that are kept as a state have norms and rotations of their own")
        return problems
    key_width = 1 if own.rule == "gates" else own.key_width
    rank = 1 if own.rate_rank is None else own.rate_rank
    widths = (own.num_key_heads, own.num_heads, key_width, own.value_width, rank)
    problems = [] if min(widths) > 0 else ["a width of recurrent layers is below 1"]
    if own.rule not in ("delta", "scan", "gates"):
        problems.append(f"recurrent layers go by {own.rule!r}, not by delta, scan or gates")
    if own.rule != "delta" and (own.is_apart or own.by_row or own.strength != 1):
        problems.append(f"the rule {own.rule!r} has neither rates of rows nor weights apart")
    if own.is_dealt and (own.is_apart or own.by_row):
        problems.append("what recurrent layers make is stacked by head, and apart as well")
    if not own.by_row and (own.rate_rank is not None or own.rate_bound is not None):
        problems.append("rates of heads have neither a rank nor a bound")
    if own.rate_bound is not None and not 0 < own.rate_bound <= 80:
        problems.append(f"rates are bounded by {own.rate_bound}, it must be between 0 and 80")
    if not 0 < own.strength <= 2:
        problems.append(f"a token corrects {own.strength} times what it finds, it can be 2 at most")
    if own.read_eps is not None and not own.read_eps > 0:
        problems.append(f"the norm of what is read has an epsilon of {own.read_eps}")
    if own.taps < 2:
        problems.append(f"convolutions are over {own.taps} tokens, they must be over 2 at least")
    if own.num_key_heads > 0 and own.num_heads % own.num_key_heads:
        problems.append(
            f"{own.num_heads} recurrent heads cannot share {own.num_key_heads} of queries and keys"
        )
    if len(own.layers) != config.num_layers:
        problems.append(f"{len(own.layers)} of {config.num_layers} layers say whether they attend")
    if config.parallel:
        problems.append("recurrent layers have no parallel blocks beside them")
    return problems


def _part_problems(config: ModelConfig) -> list[str]:
    parts = config.parts
    if parts is None:
        return []
    if any(part not in ("both", "mixer", "mlp") for part in parts):
        return [f"parts of layers are {parts!r}, each must be both, mixer or mlp"]
    if len(parts) != config.num_layers:
        return [f"{len(parts)} of {config.num_layers} layers say what parts they have"]
    lacking = {
        "mlp": () if config.recurrence is None else config.recurrence.layers,
        "mixer": () if config.experts is None else config.experts.layers,
    }
    problems = [
        f"a layer of one part, its {part}, is said to have what the other one does"
        for part, others in lacking.items()
        if any(own == part and is_so for own, is_so in zip(parts, others, strict=False))
    ]
    return problems + (["layers of one part cannot be parallel blocks"] if config.parallel else [])


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
    if experts.scores not in ("softmax", "sigmoid", "sqrtsoftplus"):
        problems.append(
            f"experts are chosen by {experts.scores!r}, not by softmax, sigmoid or sqrtsoftplus"
        )
    if len(experts.by_token) not in (0, config.num_layers):
        problems.append(
            f"{len(experts.by_token)} of {config.num_layers} layers say whether tokens have experts"
        )
    if any(experts.by_token) and experts.margin is not None:
        problems.append("experts are given by tokens, and chosen one by one")
    if experts.num_groups < 1 or experts.num_experts % experts.num_groups:
        problems.append(f"{experts.num_experts} experts are no {experts.num_groups} groups")
    elif not 1 <= experts.groups_per_token <= experts.num_groups:
        problems.append(f"{experts.groups_per_token} of {experts.num_groups} groups are chosen")
    elif experts.num_experts < experts.best_of_group * experts.num_groups > experts.best_of_group:
        problems.append("a group has one expert, where the two best of each are looked at")
    if experts.margin is not None and (experts.margin <= 0 or experts.has_corrections):
        problems.append("experts near each other need a margin above 0, and no corrections")
    if not experts.scale > 0:
        problems.append(f"the experts' weights are multiplied by {experts.scale}")
    if experts.shared_size < 0:
        problems.append(f"the width of the MLP beside the experts is {experts.shared_size}")
    if config.activation == "xielu":
        problems.append("experts and activations with weights cannot be combined")
    if config.norm_place == "after":
        problems.append("experts have norms before them, or of what they make")
    if config.experts_see_stream:
        if experts.shared_size or experts.latent_size:
            problems.append("where updates alone have norms, experts have nothing beside them")
    elif config.norms_sum and (experts.shared_size < 1 or experts.shared_gate):
        problems.append(
            "what experts make is normalised only with that of an MLP that has no share"
        )
    if config.norms_sum and config.residual_scale is not None:
        problems.append("what experts make together is not scaled")
    if experts.beside_mlp and (experts.shared_size or config.norm_place != "both"):
        problems.append("experts beside a layer's own MLP have norms before them and behind")
    if config.layer_scales and not experts.beside_mlp:
        problems.append("layers that end with experts have no scale")
    if not experts.shared_scale > 0:
        problems.append(f"the MLP beside the experts counts {experts.shared_scale} times")
    if experts.shared_scale != 1 and (experts.shared_gate or config.norms_sum):
        problems.append("the MLP beside the experts has a factor and another way to be added")
    if experts.shared_scale != 1 and config.residual_scale is not None:
        problems.append("the MLP beside the experts has two factors")
    if experts.latent_size < 0 or (experts.latent_size and not experts.shared_size):
        problems.append(
            "experts that work on latents have a width of these, and an MLP beside them"
        )
    if experts.latent_size and (config.norms_sum or config.attends_aside or config.has_query_rank):
        problems.append("experts that work on latents are in plain layers")
    return problems
