"""Tiny GGUF files, written by the gguf package as llama.cpp's converter would write them.

Names are the package's own map. The converter weaves the rows of queries and keys for some
architectures, adds one to some gains, stacks experts and takes apart what lies together. Types that
the package cannot make get any blocks; what they mean, by the package, is put into the model.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

Array = np.ndarray[Any, Any]

_WOVEN: Final = (
    "llama",
    "granite",
    "granitemoe",
    "granitehybrid",
    "smollm3",
    "arcee",
    "olmo",
    "minicpm",
)
_PLUS_ONE: Final = (
    *("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"),
    "step35",
)
_NAME: Final = "general.architecture"
_WITH_STATED_SUMS: Final = ("glm4moe", "dots1")
_WITH_PATTERN: Final = ("exaone4", "olmo2", "gemma4", "step35")
_MADE: Final = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q8_0,
    Kind.MXFP4,
)


def weave(x: Array, num_heads: int) -> Array:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    halves = x.reshape(num_heads, 2, x.shape[0] // num_heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def unweave(x: Array, num_heads: int) -> Array:
    pairs = x.reshape(num_heads, x.shape[0] // num_heads // 2, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def random_blocks(kind: Kind, shape: tuple[int, ...], dice: np.random.Generator) -> Array:
    """Blocks of a K type with any codes, of values about as large as a tiny model's."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = shape[0] * shape[1] // values
    raw = dice.integers(0, 256, (blocks, size), dtype=np.uint8)
    scales = dice.uniform(0.5e-3, 1e-3, (blocks, 2)).astype(np.float16)
    if kind == Kind.Q6_K:
        raw[:, 192:208] = dice.integers(0, 20, (blocks, 16)).astype(np.int8).view(np.uint8)
        raw[:, 208:] = scales[:, :1].view(np.uint8)
    elif kind == Kind.Q2_K:
        raw[:, 80:] = scales.view(np.uint8)
    elif kind == Kind.Q3_K:
        raw[:, 108:] = scales[:, :1].view(np.uint8)
    elif kind == Kind.IQ1_M:
        parts = (scales[:, :1].view(np.uint16) >> np.array([0, 4, 8, 12], dtype=np.uint16)) & 15
        raw[:, 49::2] = (raw[:, 49::2] & 15) | (parts << 4).astype(np.uint8)
    elif kind.name.startswith("IQ"):
        raw[:, :2] = scales[:, :1].view(np.uint8)
    else:
        raw[:, :4] = scales.view(np.uint8)
    return raw.reshape(shape[0], -1)


# What is said of a model's shape: the configuration's name, and the writer's method.
_NUMBERS: Final = (
    ("max_position_embeddings", "context_length"),
    ("num_hidden_layers", "block_count"),
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "head_count"),
    ("num_key_value_heads", "head_count_kv"),
    ("rms_norm_eps", "layer_norm_rms_eps"),
    ("layer_norm_eps", "layer_norm_eps"),
    ("norm_epsilon", "layer_norm_eps"),
    ("norm_eps", "layer_norm_eps"),
    ("sliding_window", "sliding_window"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("clip_qkv", "clamp_kqv"),
    ("attention_multiplier", "attention_scale"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
    ("logit_scale", "logit_scale"),
    ("num_local_experts", "expert_count"),
    ("num_experts", "expert_count"),
    ("n_routed_experts", "expert_count"),
    ("moe_num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("top_k_experts", "expert_used_count"),
    ("moe_k", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ("shared_intermediate_size", "expert_shared_feed_forward_length"),
    ("share_expert_dim", "expert_shared_feed_forward_length"),
    ("n_shared_experts", "expert_shared_count"),
    ("moe_num_shared_experts", "expert_shared_count"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("moe_layer_start_index", "leading_dense_block_count"),
    ("num_dense_layers", "leading_dense_block_count"),
    ("moe_layer_interval", "interleave_moe_layer_step"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("moe_router_scaling_factor", "expert_weights_scale"),
    ("n_group", "expert_group_count"),
    ("topk_group", "expert_group_used_count"),
)


def _describe(writer: gguf.GGUFWriter, config: PretrainedConfig, architecture: str) -> None:
    raw, said = config.to_dict(), dict[str, Any]()
    for theirs, method in _NUMBERS:
        if raw.get(theirs) is not None:
            said.setdefault(method, raw[theirs])
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if architecture == "gemma4":
        width = _describe_unlike_layers(writer, raw, said)
    if architecture.startswith("lfm2") or architecture == "granitehybrid":
        attends = [kind == "full_attention" for kind in raw["layer_types"]]
        said["head_count_kv"] = [said["head_count_kv"] * one for one in attends]
    if architecture == "step35":
        _describe_step(writer, raw, said)
    for method, value in said.items():
        getattr(writer, f"add_{method}")(value)
    writer.add_key_length(width)
    writer.add_value_length(width)
    if architecture in _WITH_PATTERN and said.get("sliding_window"):
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in raw["layer_types"]])
    if architecture in _WITH_STATED_SUMS:
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
    _describe_rotation(writer, raw["rope_parameters"], width)
    if architecture.startswith("lfm2"):
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
        writer.add_ssm_state_size(raw["mamba_d_state"])
        writer.add_ssm_group_count(raw["mamba_n_groups"])
        writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
        writer.add_ssm_inner_size(raw["mamba_d_head"] * raw["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(False)
    if architecture.startswith(("qwen35", "qwen3next")):
        writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(raw["linear_key_head_dim"])
        writer.add_ssm_group_count(raw["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
        writer.add_ssm_inner_size(raw["linear_value_head_dim"] * raw["linear_num_value_heads"])
        writer.add_full_attention_interval(4)


def _describe_unlike_layers(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], said: dict[str, Any]
) -> int:
    """Of layers that see all, and the others; the width of the first ones' heads."""
    writer.add_key_length_swa(raw["head_dim"])
    writer.add_value_length_swa(raw["head_dim"])
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(raw["num_kv_shared_layers"])
    own = raw["per_layer_config"]
    usual = said["head_count_kv"]
    counts = [
        own.get(str(i), {}).get("num_key_value_heads", usual) for i in range(said["block_count"])
    ]
    said["head_count_kv"] = counts
    if raw["use_double_wide_mlp"]:
        first = said["block_count"] - raw["num_kv_shared_layers"]
        usual = said["feed_forward_length"]
        widths = [usual * (1 + (i >= first)) for i in range(said["block_count"])]
        said["feed_forward_length"] = widths
    width: int = next(iter(own.values()))["head_dim"]
    return width


def _describe_step(writer: gguf.GGUFWriter, raw: Mapping[str, Any], said: dict[str, Any]) -> None:
    """Lists go on for a layer that guesses, which sees all; so does the count of layers."""
    kinds = [*raw["layer_types"], "full_attention"]
    heads = {
        "full_attention": raw["num_attention_heads"],
        "sliding_attention": raw["num_sliding_attention_heads"],
    }
    said["block_count"] = len(kinds)
    said["head_count"] = [heads[kind] for kind in kinds]
    said["head_count_kv"] = [raw["num_key_value_heads"]] * len(kinds)
    writer.add_nextn_predict_layers(1)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_swiglu_clamp_exp([*(limit or 0.0 for limit in raw["swiglu_limits"]), 0.0])
    writer.add_swiglu_clamp_shexp([*(limit or 0.0 for limit in raw["swiglu_limits_shared"]), 0.0])
    own = raw["rope_parameters"]["full_attention"]
    if own["rope_type"] == "llama3":
        factors = _llama3_factors(own, raw["head_dim"])
        writer.add_tensor("rope_freqs.weight", factors, raw_dtype=Kind.F32)


def _llama3_factors(own: Mapping[str, Any], width: int) -> Array:
    """What frequencies are divided by, with ones behind for what is not rotated."""
    turned, length = (
        int(width * own["partial_rotary_factor"]),
        own["original_max_position_embeddings"],
    )
    frequencies = own["rope_theta"] ** -(np.arange(0, turned, 2) / turned)
    low, high = own["low_freq_factor"], own["high_freq_factor"]
    smooth = np.clip((length * frequencies / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    factors = 1 / ((1 - smooth) / own["factor"] + smooth)
    return np.concatenate([factors, np.ones((width - turned) // 2)]).astype(np.float32)


def _describe_rotation(writer: gguf.GGUFWriter, parameters: Any, width: int) -> None:
    windows = parameters.get("sliding_attention", {})
    own = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(own["rope_theta"])
    if windows.get("rope_theta"):
        writer.add_rope_freq_base_swa(windows["rope_theta"])
    if own["rope_type"] not in ("proportional", "llama3"):
        writer.add_rope_dimension_count(int(width * (own.get("partial_rotary_factor") or 1.0)))
    if own["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(own["rope_type"]))
        writer.add_rope_scaling_factor(own["factor"])
    if own["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(own["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(own["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(own["beta_slow"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor of the file; ``put`` takes what it means."""

    name: str
    x: Array
    put: Callable[[Array], None]


_EXPERT: Final = re.compile(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight")
_STACKED: Final = re.compile(
    r".*layers\.(\d+)\.(?:\w+\.)*"
    r"(experts\.gate_up_proj|experts\.down_proj|input_linear|output_linear)(_bias)?(\.weight)?"
)
_PARTS: Final = {"w1": "gate", "w2": "down", "w3": "up"}
_NAMED_LIKE: Final = {"laguna": "step35"}
"""Architectures that the package does not have yet, whose files have the names of others."""
# What the package's map does not have.
_RENAMED: Final = (
    ("self_attn.sinks", "attn_sinks.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("layer_scalar", "layer_output_scale.weight"),
    (".A_log", "ssm_a"),
    (".dt_bias", "ssm_dt.bias"),
    ("mamba.D", "ssm_d"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
    ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
    ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
    ("linear_attn.in_proj_ba.weight", "ssm_ba.weight"),
    ("linear_attn.in_proj_qkvz.weight", "ssm_in.weight"),
    ("linear_attn.out_proj.weight", "ssm_out.weight"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("moe.router_bias", "exp_probs_b.bias"),
    ("mlp.experts.e_score_correction_bias", "exp_probs_b.bias"),
)


def _entries(
    theirs: Mapping[str, Array],
    meant: dict[str, Array],
    config: Any,
    architecture: str,
    *,
    fuses: bool,
) -> Iterator[Entry]:
    known = _NAMED_LIKE.get(architecture, architecture)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    raw = config.to_dict()
    heads = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    experts: dict[str, dict[int, str]] = {}
    for name, x in theirs.items():
        if name.startswith(("vision_model", "vit_large_projector")):  # lies in a file of its own
            meant[name] = x
            continue
        one, stacked = _EXPERT.fullmatch(name), _STACKED.fullmatch(name)
        if one:
            part = one[3].removesuffix("_proj")
            place = f"blk.{one[1]}.ffn_{_PARTS.get(part, part)}_exps.weight"
            experts.setdefault(place, {})[int(one[2])] = name
        elif stacked and "shared_mlp" not in name:
            turned = architecture == "gpt-oss"
            yield from _stacks(name, x, meant, stacked, turned, architecture == "gemma4")
        elif name.endswith("shared_mlp.input_linear.weight"):
            yield from _halves(name, x, meant)
        elif name.endswith("kv_b_proj.weight"):
            yield from _latents(name, x, meant, config)
        elif name.endswith("in_proj_qkvz.weight") and not fuses:
            yield from _key_heads(name, x, meant, config)
        elif (
            ".linear_attn." in name
            and architecture != "qwen3next"
            and not name.endswith("linear_attn.norm.weight")
        ):
            yield _state(_name(name, names), name, x, meant, config)
        else:
            own = _name(name, names)
            yield _plain(own, name, x, meant, heads, architecture)
    for place, members in experts.items():
        order = [members[expert] for expert in range(len(members))]

        def put_all(x: Array, order: list[str] = order) -> None:
            meant.update(zip(order, x, strict=True))

        yield Entry(name=place, x=np.stack([theirs[name] for name in order]), put=put_all)


_TOGETHER: Final = {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv"} | {
    f"ffn_{part}_exps": "ffn_gate_up_exps" for part in ("gate", "up")
}


def _fused(entries: Iterator[Entry]) -> Iterator[Entry]:
    waiting: dict[str, list[Entry]] = {}
    for entry in entries:
        *block, part, end = entry.name.split(".")
        if part in _TOGETHER:
            waiting.setdefault(".".join([*block, _TOGETHER[part], end]), []).append(entry)
        else:
            yield entry
    for name, members in waiting.items():
        members = sorted(members, key=lambda own: [*_TOGETHER].index(own.name.split(".")[2]))
        rows = int("exps" in name)
        borders = np.cumsum([own.x.shape[rows] for own in members])[:-1]

        def put(x: Array, members: Any = members, borders: Any = borders, rows: int = rows) -> None:
            for own, part in zip(members, np.split(x, borders, rows), strict=True):
                own.put(part)

        yield Entry(name=name, x=np.concatenate([own.x for own in members], rows), put=put)


def _name(name: str, names: Any) -> str:
    for end, own in _RENAMED:
        if name.endswith(end):
            layer = name.split("layers.")[1].split(".")[0]
            return f"blk.{layer}.{own}"
    name = name.replace("model.language_model.", "model.")
    found: str = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return found


def _plain(
    own: str, name: str, x: Array, meant: dict[str, Array], heads: Mapping[str, int], kind: str
) -> Entry:
    num_heads = heads.get(own.split(".")[2]) if own.startswith("blk") else None
    woven = num_heads if kind in _WOVEN else None
    plus = np.float32(kind in _PLUS_ONE and own.endswith("norm.weight") and "ssm" not in own)
    shape, negated = x.shape, own.endswith("ssm_a")

    def put(x: Array) -> None:
        x = np.log(-x) if negated else unweave(x, woven) if woven else x - plus
        meant[name] = x.reshape(shape)

    x = -np.exp(x) if negated else weave(x, woven) if woven else x + plus
    is_taps = x.ndim == 3 and x.shape[1] == 1
    return Entry(name=own, x=x.squeeze(1) if is_taps else x, put=put)


def _halves(name: str, x: Array, meant: dict[str, Array]) -> Iterator[Entry]:
    """Of an MLP beside experts, gates and values."""
    layer = name.split("layers.")[1].split(".")[0]
    half, meant[name] = len(x) // 2, np.empty_like(x)
    for part, where in (("gate", slice(half)), ("up", slice(half, None))):

        def put(x: Array, where: slice = where) -> None:
            meant[name][where] = x

        yield Entry(name=f"blk.{layer}.ffn_{part}_shexp.weight", x=x[where], put=put)


def _latents(name: str, x: Array, meant: dict[str, Array], config: Any) -> Iterator[Entry]:
    """What makes keys of latents is turned around, a head at a time."""
    layer = name.split("layers.")[1].split(".")[0]
    wide, rank = config.qk_nope_head_dim, x.shape[1]
    heads = x.reshape(config.num_attention_heads, -1, rank)
    whole = np.empty_like(heads)
    meant[name] = whole.reshape(x.shape)

    def put_keys(x: Array) -> None:
        whole[:, :wide] = x.swapaxes(1, 2)

    def put_values(x: Array) -> None:
        whole[:, wide:] = x

    keys = heads[:, :wide].swapaxes(1, 2)
    yield Entry(name=f"blk.{layer}.attn_k_b.weight", x=keys, put=put_keys)
    yield Entry(name=f"blk.{layer}.attn_v_b.weight", x=heads[:, wide:], put=put_values)


def _key_heads(name: str, x: Array, meant: dict[str, Array], config: Any) -> Iterator[Entry]:
    """Queries, keys and values of all key heads, and gates of all, which lie by key head."""
    layer = name.split("layers.")[1].split(".")[0]
    groups, columns = config.linear_num_key_heads, x.shape[-1]
    each = config.linear_num_value_heads // groups * config.linear_value_head_dim
    widths = [config.linear_key_head_dim] * 2 + [each] * 2
    meant[name] = np.empty_like(x)
    whole = meant[name].reshape(groups, -1, columns)
    parts = np.split(x.reshape(groups, -1, columns), np.cumsum(widths)[:-1], axis=1)
    for own, where in (("attn_qkv", slice(3)), ("attn_gate", slice(3, None))):

        def put(x: Array, where: slice = where) -> None:
            begin = sum(widths[: where.start or 0])
            for width in widths[where]:
                some, x = np.split(x, [groups * width])
                whole[:, begin : begin + width] = some.reshape(groups, width, columns)
                begin += width

        some = np.concatenate([part.reshape(-1, columns) for part in parts[where]])
        yield Entry(name=f"blk.{layer}.{own}.weight", x=some, put=put)


def _state(own: str, name: str, x: Array, meant: dict[str, Array], config: Any) -> Entry:
    """Value heads are dealt out: the first of each key head come first."""
    groups, count = config.linear_num_key_heads, config.linear_num_value_heads
    each, shape = count // groups, x.shape
    first = 2 * groups * config.linear_key_head_dim
    first *= own.endswith(("attn_qkv.weight", "ssm_conv1d.weight"))
    by_column, negated = own.endswith("ssm_out.weight"), own.endswith("ssm_a")

    def exchange(x: Array, sizes: tuple[int, int]) -> Array:
        x = x.T if by_column else x
        heads = x[first:].reshape(*sizes, -1, *x.shape[1:]).swapaxes(0, 1)
        x = np.concatenate([x[:first], heads.reshape(-1, *x.shape[1:])])
        return x.T if by_column else x

    def put(x: Array) -> None:
        x = exchange(x.reshape(shape), (each, groups))
        meant[name] = np.log(-x) if negated else x

    x = exchange(-np.exp(x) if negated else x, (groups, each))
    return Entry(name=own, x=x.squeeze(), put=put)


def _stacks(
    name: str,
    x: Array,
    meant: dict[str, Array],
    found: re.Match[str],
    turned: bool,
    fused: bool,
) -> Iterator[Entry]:
    """Of experts that lie in one tensor, [experts, rows, columns]; gates and values of gpt-oss take
    turns, and its columns are rows."""
    is_bias = bool(found[3])
    if turned and not is_bias:
        x = x.swapaxes(1, 2)
    is_both = found[2] in ("experts.gate_up_proj", "input_linear")
    end = "bias" if is_bias else "weight"
    if not is_both or fused:
        part = "gate_up" if is_both else "down"
        pieces = {part: (slice(None),)}
    elif turned:
        pieces = {"gate": (slice(None), slice(0, None, 2)), "up": (slice(None), slice(1, None, 2))}
    else:
        half = x.shape[1] // 2
        pieces = {"gate": (slice(None), slice(half)), "up": (slice(None), slice(half, None))}
    whole = np.empty_like(x)
    meant[name] = whole.swapaxes(1, 2) if turned and not is_bias else whole
    for part, where in pieces.items():

        def put(x: Array, where: Any = where) -> None:
            whole[where] = x

        yield Entry(name=f"blk.{found[1]}.ffn_{part}_exps.{end}", x=x[where], put=put)


def describe_tokenizer(writer: gguf.GGUFWriter, content: Mapping[str, Any], pre: str) -> None:
    """What a converter says of the tokenizer.json of a byte-level BPE."""
    model, special = content["model"], {token["id"] for token in content["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    kind_of: Callable[[str], Kind],
    describe: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    *,
    fuses: bool = False,
) -> PreTrainedModel:
    """Write ``model`` in the types that ``kind_of`` gives for names such as "blk.0.attn_q.weight",
    vectors in float32, and put into it what they mean; with ``fuses`` queries, keys and values as
    one tensor, and experts' gates and values, as the converter does if it is asked to, and all
    that a key head of a state has, as it did once."""
    config, dice = model.config.get_text_config(), np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), architecture)
    _describe(writer, config, architecture)
    describe(writer)
    meant: dict[str, Array] = {}
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        published = load_file(f"{directory}/model.safetensors")
        theirs = {name: tensor.float().numpy() for name, tensor in published.items()}
        if getattr(config, "tie_word_embeddings", False):
            theirs.pop("lm_head.weight", None)
        entries = _entries(theirs, meant, config, architecture, fuses=fuses)
        for entry in _fused(entries) if fuses else entries:
            kind = _kind(kind_of, entry)
            x = np.ascontiguousarray(entry.x.squeeze() if entry.x.shape[0] == 1 else entry.x)
            made = kind in _MADE
            raw = gguf.quants.quantize(x, kind) if made else random_blocks(kind, x.shape, dice)
            writer.add_tensor(entry.name, raw, raw_shape=raw.shape, raw_dtype=kind)
            with np.errstate(all="ignore"):  # of types that are not read, scales may be no numbers
                entry.put(gguf.quants.dequantize(raw, kind).reshape(x.shape))
        values = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in meant.items()}
        save_file(values, f"{directory}/model.safetensors", metadata={"format": "pt"})
        loaded = type(model).from_pretrained(directory, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _kind(kind_of: Callable[[str], Kind], entry: Entry) -> Kind:
    """Of what is narrow only some types fit the columns."""
    kept = (
        "bias",
        "norm.weight",
        "conv1d.weight",
        "conv.weight",
        "ssm_a",
        "alpha.weight",
        "beta.weight",
    )
    if entry.x.ndim < 2 or entry.name.endswith(kept):
        return Kind.F32
    kind = kind_of(entry.name)
    fits = entry.x.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    if not fits or (entry.x.ndim > 2 and kind not in (Kind.MXFP4, Kind.F32)):
        return Kind.Q8_0
    return kind


def split_gguf(path: Path, count: int) -> None:
    """The same beside it in so many files, of which the first has what is said of the model."""
    whole = gguf.GGUFReader(path)
    for number in range(count):
        name = path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf")
        writer = gguf.GGUFWriter(str(name), "" if number else _said(whole, _NAME))
        writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, number)
        writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, count)
        for field in () if number else whole.fields.values():
            if "." in field.name and field.name != _NAME:
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        for tensor in whole.tensors[number::count]:
            writer.add_tensor(
                tensor.name,
                tensor.data,
                raw_shape=tensor.data.shape,
                raw_dtype=tensor.tensor_type,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _said(file: gguf.GGUFReader, key: str) -> str:
    field = file.get_field(key)
    assert field is not None
    text: str = field.contents()
    return text
