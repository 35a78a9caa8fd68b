"""Tiny GGUF files, written by the gguf package as llama.cpp's converter would write them.

Names are the package's own map. The converter weaves the rows of queries and keys for the llama
architecture and adds one to Gemma's gains. Types that the package cannot make get any blocks; what
they mean, by the package, is put into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PretrainedConfig, PreTrainedModel

Array = np.ndarray[Any, Any]

_MADE = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)


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
    else:
        raw[:, :4] = scales.view(np.uint8)
    return raw.reshape(shape[0], -1)


def _describe(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What a converter says of a model's shape."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", 0))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", 0):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_experts(
    writer: gguf.GGUFWriter, theirs: str, parameter: torch.nn.Parameter, x: Array
) -> None:
    """Stacked [experts, rows, columns]; transformers has gate and up as one."""
    layer, is_down = theirs.split(".")[2], theirs.endswith("down_proj")
    parts = {"down": x} if is_down else dict(zip(("gate", "up"), np.split(x, 2, 1), strict=True))
    meant = []
    for part, own in parts.items():
        raw = gguf.quants.quantize(np.ascontiguousarray(own), Kind.Q8_0)
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=Kind.Q8_0)
        meant.append(gguf.quants.dequantize(raw, Kind.Q8_0).reshape(own.shape))
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.concatenate(meant, 1)))


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
) -> PreTrainedModel:
    """Write ``model`` in the types that ``kind_of`` gives for names such as "blk.0.attn_q.weight",
    vectors in float32, and put into it what they mean."""
    config = model.config
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), architecture)
    _describe(writer, config)
    describe(writer)
    dice = np.random.default_rng(0)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for theirs, parameter in model.named_parameters():
        if tied and theirs == "lm_head.weight":
            continue
        x = parameter.detach().float().numpy()
        if ".experts." in theirs:
            _write_experts(writer, theirs, parameter, x)
            continue
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        num_heads = heads.get(name.split(".")[2]) if name.startswith("blk") else None
        woven = num_heads if architecture == "llama" else None
        plus = 1.0 if architecture == "gemma2" and "norm" in name else 0.0
        x = weave(x, woven) if woven else x + np.float32(plus)
        kind = kind_of(name) if x.ndim > 1 else Kind.F32
        made = kind in _MADE
        raw = gguf.quants.quantize(x, kind) if made else random_blocks(kind, x.shape, dice)
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
        with np.errstate(all="ignore"):  # of types that are not read, scales may be no numbers
            meant = gguf.quants.dequantize(raw, kind).reshape(x.shape)
        meant = unweave(meant, woven) if woven else meant - np.float32(plus)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(meant)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
