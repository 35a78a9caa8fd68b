"""What is common to llama.cpp's architectures: what is said of one, and where a file has the
logical tensors, by the names of gguf's ``constants.py`` and ``tensor_mapping.py``.

Plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from freight.model.families import Fused, OneOf, Place, Stacked
from freight.model.gguf import GgufFile

__all__ = [
    "COMMON_NORM",
    "GATE_UP",
    "LATE_NAMES",
    "NORMS_BEHIND",
    "SHARED",
    "TENSORS",
    "WOVEN",
    "Architecture",
    "Numbers",
    "with_places",
]

Numbers = Mapping[str, Any]
"""What a file says under its architecture's own name, without that name."""


def _nothing(file: GgufFile, own: Numbers) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """``families``: those that it serves. ``tensors``: logical name -> its place in the file. The
    rows of ``woven`` tensors lie with the halves of each head woven together; with ``plus_one``
    the gains of norms have one added, but ``plain_norms``; of ``negated`` tensors the file has
    minus the exponentials. With ``deals_heads`` those that keep a state lie so that the first of
    each key head come first; with ``joins_heads`` rates of each key head lie together, or all that
    is made for one. Files that say one of ``refuses`` are of other models.

    For files that come alone: ``classes`` has what a config.json would call the model, by a number
    of the file that is there and not zero, the last of them; "" is always. Where there is none, a
    config.json must lie beside the file; one that ``describes_itself`` is read by its own numbers
    all the same, for it is not made as the model's family is. ``says``, and of the rotation
    ``says_of_rope``: what it would say that the file does not; ``spells``: what has to be made of
    more than one of the file's numbers; ``demands``: numbers that it may not say otherwise. Its
    models ``may_have_experts``; those that say ``has_unlike_layers`` list their numbers of heads or
    widths of MLPs.
    """

    families: tuple[str, ...]
    tensors: Mapping[str, Place]
    woven: tuple[str, ...] = ()
    plus_one: bool = False
    plain_norms: tuple[str, ...] = ()
    negated: tuple[str, ...] = ()
    deals_heads: bool = False
    joins_heads: bool = False
    refuses: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    says_of_rope: Mapping[str, Any] = field(default_factory=dict)
    spells: Callable[[GgufFile, Numbers], Mapping[str, Any]] = _nothing
    demands: Mapping[str, Any] = field(default_factory=dict)
    describes_itself: bool = False
    may_have_experts: bool = False
    has_unlike_layers: bool = False


_LAYER_TENSORS: Final = {
    "attention.norm": "attn_norm.weight",
    "attention.norm_bias": "attn_norm.bias",
    "attention.q_norm": "attn_q_norm.weight",
    "attention.k_norm": "attn_k_norm.weight",
    "attention.sinks": "attn_sinks.weight",
    "attention.gates": "attn_gate.weight",
    "attention.out": "attn_output.weight",
    "attention.out_bias": "attn_output.bias",
    "attention.post_norm": "post_attention_norm.weight",
    "mlp.norm": "ffn_norm.weight",
    "mlp.norm_bias": "ffn_norm.bias",
    "mlp.gate": "ffn_gate.weight",
    "mlp.up": "ffn_up.weight",
    "mlp.down": "ffn_down.weight",
    "mlp.gate_bias": "ffn_gate.bias",
    "mlp.up_bias": "ffn_up.bias",
    "mlp.down_bias": "ffn_down.bias",
    "mlp.post_norm": "post_ffw_norm.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared.share": "ffn_gate_inp_shexp.weight",
    "recurrence.mixed": "attn_qkv.weight",
    "recurrence.gate": "attn_gate.weight",
    "recurrence.a": "ssm_alpha.weight",
    "recurrence.b": "ssm_beta.weight",
    "recurrence.convolution": "ssm_conv1d.weight",
    "recurrence.convolution_bias": "ssm_conv1d.bias",
    "recurrence.decay": "ssm_a",
    "recurrence.decay_bias": "ssm_dt.bias",
    "recurrence.skip": "ssm_d",
    "recurrence.read_norm": "ssm_norm.weight",
    "recurrence.out": "ssm_out.weight",
}
# Queries, keys and values, and experts' gates and values, may lie together: the converter has
# options for it.
TENSORS: Final[dict[str, Place]] = {
    "embedding": "token_embd.weight",
    **{f"layers.{{i}}.{own}": f"blk.{{i}}.{theirs}" for own, theirs in _LAYER_TENSORS.items()},
    **{
        f"layers.{{i}}.attention.{name}{bias}": OneOf(
            first=f"blk.{{i}}.attn_{name}.{end}",
            otherwise=Fused(
                tensor=f"blk.{{i}}.attn_qkv.{end}",
                of=tuple(f"attention.{part}{bias}" for part in ("q", "k", "v")),
            ),
        )
        for name in ("q", "k", "v")
        for bias, end in (("", "weight"), ("_bias", "bias"))
    },
    "layers.{i}.router.corrections": OneOf(
        first="blk.{i}.exp_probs_b.bias", otherwise="blk.{i}.exp_probs_b"
    ),
    **{
        f"layers.{{i}}.experts.{{e}}.{part}{bias}": OneOf(
            first=Stacked(tensor=f"blk.{{i}}.ffn_{part}_exps.{end}"),
            otherwise=Stacked(tensor=f"blk.{{i}}.ffn_gate_up_exps.{end}", parts=2, part=number),
        )
        for number, part in enumerate(("gate", "up"))
        for bias, end in (("", "weight"), ("_bias", "bias"))
    },
    "layers.{i}.experts.{e}.down": Stacked(tensor="blk.{i}.ffn_down_exps.weight"),
    "layers.{i}.experts.{e}.down_bias": Stacked(tensor="blk.{i}.ffn_down_exps.bias"),
    "head.norm": "output_norm.weight",
    "head.norm_bias": "output_norm.bias",
    "head.weight": "output.weight",
    "head.bias": "output.bias",
}
WOVEN: Final = ("attention.q", "attention.k", "attention.q_bias", "attention.k_bias")


def with_places(**places: Place) -> dict[str, Place]:
    """The usual names, but for some of a layer: attention_norm stands for "attention.norm"."""
    return TENSORS | {
        f"layers.{{i}}.{name.replace('_', '.', 1)}": place for name, place in places.items()
    }


GATE_UP: Final = Fused(tensor="blk.{i}.ffn_up.weight", of=("mlp.gate", "mlp.up"))
SHARED: Final = Fused(tensor="blk.{i}.ffn_up_shexp.weight", of=("shared.gate", "shared.up"))
# One norm for both parts of a layer, side by side.
COMMON_NORM: Final = with_places(mlp_norm="blk.{i}.attn_norm.weight")
# What others call the norm of what attention returns is before the MLP.
LATE_NAMES: Final = with_places(mlp_norm="blk.{i}.post_attention_norm.weight")
# Norms of what the parts return alone.
NORMS_BEHIND: Final = with_places(
    attention_norm="blk.{i}.post_attention_norm.weight", mlp_norm="blk.{i}.post_ffw_norm.weight"
)
