"""Checkpoints that are quantised already: what is computed with is what their formats mean, bit for
bit, and the tokens are those of transformers with such weights, under every kind of policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from freight.entrypoints.compress import compress_ahead
from freight.errors import InputError, ModelError
from freight.kernels.grouped import CompressedRows, dequantise
from freight.memory.disk import Traffic
from freight.memory.tier import host_arena
from freight.model.checkpoint import imagined_sources, resolve
from freight.model.compression import announced_formats, packed_formats
from freight.model.config import read_config
from freight.model.number_format import EightFloats, MicroFloats, RowFormat, find_compressed
from freight.quantities import align_up
from freight.runtime import device
from freight.runtime.compressed_files import compressed_sources
from freight.runtime.loaders import CheckpointFiles, bounce_bytes
from freight.runtime.options import EngineOptions

from . import packed, tiny
from .test_engine_parity import deepseek
from .test_engine_policies import POLICIES, PROMPTS
from .test_engine_recurrence import deepseek_v4, without_attention

STEPS = 6
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How matrices are quantised and packed, and what config.json says of it."""

    config: dict[str, Any]
    turn: Callable[[packed.Quantised], packed.Tensors]
    quantise: dict[str, Any] = field(default_factory=dict)

    def __call__(self, weight: torch.Tensor) -> tuple[packed.Quantised, packed.Tensors]:
        own = packed.quantise(weight, **self.quantise)
        return own, self.turn(own)


def awq(group_size: int, **more: Any) -> Way:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return Way(
        config={**config, "zero_point": True, **more},
        turn=packed.awq,
        quantise={"bits": 4, "group_size": group_size},
    )


def gptq(bits: int, group_size: int, *, symmetric: bool, version: int = 1, **more: Any) -> Way:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Way(
        config={**config, "desc_act": False, **more},
        turn=lambda own: packed.gptq(own, less=2 - version),
        quantise={"bits": bits, "group_size": group_size, "symmetric": symmetric},
    )


def compressed(
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    dtype: torch.dtype = torch.float16,
    packs_zeros: bool = True,
    **more: Any,
) -> Way:
    is_channel = group_size == -1
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if is_channel else "group",
        "group_size": None if is_channel else group_size,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, **more}
    return Way(
        config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
        turn=lambda own: packed.compressed_tensors(own, symmetric, packs_zeros),
        quantise={
            "bits": bits,
            "group_size": group_size,
            "symmetric": symmetric,
            "dtype": dtype,
        },
    )


def in_bytes(strategy: str, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Way:
    """As W8A8 checkpoints are, whose tokens stay plain here."""
    has_one_scale = strategy == "tensor"
    own = compressed(8, 64 if strategy == "group" else -1, symmetric=symmetric, dtype=dtype)
    (group,) = own.config["config_groups"].values()
    group["weights"]["strategy"] = strategy
    group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token"}
    return replace(
        own,
        config={**own.config, "format": "int-quantized"},
        turn=lambda codes: packed.in_bytes(codes, symmetric, has_one_scale),
        quantise={**own.quantise, "has_one_scale": has_one_scale},
    )


WAYS = {
    "awq": awq(64),
    "awq, rows": awq(-1),
    "gptq": gptq(4, 128, symmetric=False),
    "gptq, symmetric": gptq(4, 32, symmetric=True),
    "gptq, version 2": gptq(4, 64, symmetric=False, version=2),
    "gptq, 8 bits": gptq(8, 64, symmetric=False),
    "gptq, rows": gptq(8, -1, symmetric=True),
    "compressed-tensors": compressed(4, 128, symmetric=True),
    "compressed-tensors, asymmetric": compressed(4, 32, symmetric=False),
    "compressed-tensors, plain zeros": compressed(4, 64, symmetric=False, packs_zeros=False),
    "compressed-tensors, bfloat16": compressed(4, 64, symmetric=True, dtype=torch.bfloat16),
    "compressed-tensors, 8 bits": compressed(8, -1, symmetric=True),
    "compressed-tensors, 8 bits, asymmetric": compressed(8, 128, symmetric=False),
    "bytes": in_bytes("channel"),
    "bytes, asymmetric": in_bytes("channel", symmetric=False),
    "bytes, groups": in_bytes("group"),
    "bytes, one scale": in_bytes("tensor"),
    "bytes, float16": in_bytes("channel", dtype=torch.float16),
}


def make(directory: Path, way: Way) -> PreTrainedModel:
    dtype = way.quantise.get("dtype", torch.float16)
    model = tiny.make_model(directory, dtype=dtype, **SIZES)
    return packed.rewrite(model, directory, way.config, way)


def plain_tensors(directory: Path, kept: Path) -> dict[str, torch.Tensor]:
    """What is converted, as the engine's loops make it plain, by logical names."""
    config = read_config(directory)
    sources = compressed_sources(
        config,
        resolve(config, directory),
        None,
        directory=kept,
        say=lambda _: None,
    )
    size = bounce_bytes(sources)
    files = CheckpointFiles(sources, Traffic(), host_arena(align_up(size, 4096)).take(size, "test"))
    found = {}
    for name, source in sources.items():
        if source.path.name != "weights.bin":
            continue
        own = find_compressed(source.dtype)
        found[name] = torch.empty(source.shape)
        if own is None:
            files.fill(name, 0, torch.atleast_2d(found[name]))
            continue
        assert isinstance(own, RowFormat)
        rows, columns = source.shape
        raw = torch.empty(rows, own.row_bytes(columns), dtype=torch.uint8)
        files.fill(name, 0, raw)
        dequantise(CompressedRows(raw=raw, columns=columns, number_format=own), found[name])
    files.close()
    return found


NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@pytest.mark.parametrize("name", WAYS)
def test_values_and_tokens(name: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", WAYS[name])
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    assert len(found) == 2 * len(NAMES)
    for layer, block in enumerate(model.model.layers):
        for own, theirs in NAMES.items():
            wanted = block.get_submodule(theirs).weight
            assert torch.equal(found[f"layers.{layer}.{own}"], wanted), own
    # What a plan without the weights takes from config.json alone is what they are.
    config = read_config(tmp_path / "model")
    packed_as = packed_formats(resolve(config, tmp_path / "model"))
    assert announced_formats(config, imagined_sources(config, "float32")) == packed_as
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_CPU, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **options) as engine:
        assert len(engine.plan.layout.compressed) == len(NAMES)  # layers are alike
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def make_gpt_oss(directory: Path, *, in_fours: bool) -> PreTrainedModel:
    """Experts as transformers writes them, turned; or in MXFP4, with what its converter makes of
    random fours and exponents."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "head_dim": 24}
    config = GptOssConfig(**{**tiny.SIZES, **sizes, "num_experts_per_tok": 2, "sliding_window": 9})
    model = tiny.make_model(directory, config=config)
    if not in_fours:
        return model
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(directory / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            shape = (4, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
            scales[0, 0], scales[0, 1] = 0, 126  # the smallest that there is
            base = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[base]
            tensors |= {f"{base}_blocks": blocks, f"{base}_scales": scales}
            plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(experts, name).data.copy_(plain)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (directory / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("in_fours", [False, True], ids=["turned", "mxfp4"])
def test_experts_whose_rows_take_turns(in_fours: bool, tmp_path: Path) -> None:
    model = make_gpt_oss(tmp_path / "model", in_fours=in_fours)
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    biases = ("gate_bias", "up_bias")
    assert len(found) == 2 * 4 * (3 + len(biases))
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        for number in range(4):
            both, bias = experts.gate_up_proj[number].t(), experts.gate_up_proj_bias[number]
            wanted = {"gate": both[::2], "up": both[1::2], "down": experts.down_proj[number].t()}
            wanted |= {"gate_bias": bias[::2], "up_bias": bias[1::2]}
            for name, own in wanted.items():
                key = f"layers.{layer}.experts.{number}.{name}"
                assert torch.equal(found[key], own), key
    config = read_config(tmp_path / "model")
    formats = packed_formats(resolve(config, tmp_path / "model"))
    formats = {name: own for name, own in formats.items() if find_compressed(own)}
    assert announced_formats(config, imagined_sources(config, "float32")) == formats
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    for options in (tiny.ON_CPU, tiny.ON_SIM):
        own = {**options, "compressed_dir": tmp_path / "kept"}
        with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **own) as engine:
            assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def make_fp8(
    directory: Path, config: PretrainedConfig, scale_dtype: torch.dtype
) -> PreTrainedModel:
    """Blocks of 128 by 128 that share a scale, the last ones smaller; heads and routers stay."""
    model = tiny.make_model(directory, config=config)
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or name == "lm_head":
                continue
            scales = torch.zeros([-(-size // 128) for size in module.weight.shape])
            codes = torch.zeros(module.weight.shape, dtype=torch.float8_e4m3fn)
            for row, column in product(*map(range, scales.shape)):
                block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
                own = (module.weight[block].abs().max() / 448).to(scale_dtype)
                scales[row, column] = own
                codes[block] = (module.weight[block] / own).to(torch.float8_e4m3fn)
                module.weight[block] = codes[block].float() * own
            tensors[f"{name}.weight"] = codes
            tensors[f"{name}.weight_scale_inv"] = scales.to(scale_dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    block = {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    raw["quantization_config"] = {"quant_method": "fp8", **block}
    (directory / "config.json").write_text(json.dumps(raw))
    return model


FP8_MODELS = {
    "qwen3": Qwen3Config(
        **{**tiny.SIZES, "hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
    ),
    "deepseek-v3": deepseek(DeepseekV3Config, n_group=1, topk_group=1, hidden_size=192),
}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FP8_MODELS)
def test_fp8(name: str, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_fp8(tmp_path / "model", FP8_MODELS[name], scale_dtype)
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    own = model.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(found["layers.1.attention.out"], own)
    config = read_config(tmp_path / "model")
    formats = packed_formats(resolve(config, tmp_path / "model"))
    if config.experts is None:  # transformers writes stacked experts as they are
        assert announced_formats(config, imagined_sources(config, "float32")) == formats
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    for options in (tiny.ON_CPU, tiny.ON_SIM):
        chosen = {**options, "compressed_dir": tmp_path / "kept"}
        with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **chosen) as engine:
            assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


FOURS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
RENAMED = {
    r"^model\.": "",
    r"^embed_tokens": "embed",
    r"^hc_head\.hc_": "hc_head_",
    r"\.attn\.norm": ".attn.kv_norm",
}


def publish_deepseek_v4(directory: Path, config: PretrainedConfig) -> PreTrainedModel:
    """As it is published: matrices in FP8 with powers of two for blocks, those of experts in fours,
    by names of their own; compressors, routers, embedding and head stay. transformers reads what
    these mean from plain weights."""
    tiny.make_model(directory / "plain", config=config)
    tensors = load_file(directory / "plain" / "model.safetensors")
    generator, published = torch.Generator().manual_seed(4), dict[str, torch.Tensor]()
    for name, own in tensors.items():
        base = name.removesuffix(".weight")
        if ".experts." in name:
            rows, groups = own.shape[0], own.shape[1] // 32
            codes = torch.randint(0, 16, own.shape, generator=generator)
            scales = torch.randint(122, 126, (rows, groups), generator=generator).to(torch.uint8)
            published[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
            published[f"{base}.scale"] = scales.view(torch.float8_e8m0fnu)
            powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
            tensors[name] = FOURS[codes] * powers.repeat_interleave(32, dim=1)
        elif re.search(r"\.(w[qo]_[ab]|attn\.wkv|shared_experts\.w\d)\.weight$", name):
            scales = torch.zeros([-(-size // 128) for size in own.shape])
            for row, column in product(*map(range, scales.shape)):
                block = own[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
                scales[row, column] = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448))
                codes = (block / scales[row, column]).to(torch.float8_e4m3fn)
                block.copy_(codes.float() * scales[row, column])
            wide = scales.repeat_interleave(128, 0)[: len(own)].repeat_interleave(128, 1)
            published[name] = (own / wide[:, : own.shape[1]]).to(torch.float8_e4m3fn)
            published[f"{base}.scale"] = scales.to(torch.float8_e8m0fnu)
        else:
            published[name] = own
    save_file(tensors, directory / "plain" / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(directory / "plain", attn_implementation="eager")
    for old, new in RENAMED.items():
        published = {re.sub(old, new, name): own for name, own in published.items()}
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "plain" / "config.json").read_text())
    raw = {name: own for name, own in raw.items() if name not in ("layer_types", "compress_rates")}
    raw["compress_ratios"] = [128, 4, 0, 4, 0]
    raw |= {"compress_rate_hca": 8, "expert_dtype": "fp4"}
    block = {"fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    raw["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
    (directory / "config.json").write_text(json.dumps(raw))
    return model.eval()


def test_deepseek_v4_as_it_is_published(tmp_path: Path) -> None:
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    kinds += ["sliding_attention", "compressed_sparse_attention"]
    sizes = {"hidden_size": 192, "q_lora_rank": 136, "moe_intermediate_size": 64}
    config = deepseek_v4(layer_types=kinds, **sizes)
    model = publish_deepseek_v4(tmp_path / "model", config)
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(found["layers.1.experts.2.down"], experts.down_proj[2])
    own = model.model.layers[1].self_attn
    assert torch.equal(found["layers.1.recurrence.q"], own.q_b_proj.weight)
    assert torch.equal(found["layers.1.recurrence.groups"], own.o_a_proj.weight)
    read = read_config(tmp_path / "model")
    formats = packed_formats(resolve(read, tmp_path / "model"))
    assert announced_formats(read, imagined_sources(read, "float32")) == formats
    kinds_of = {name.split(".", 2)[-1]: find_compressed(own) for name, own in formats.items()}
    assert kinds_of["experts.5.up"] == MicroFloats() and kinds_of["shared.up"] == EightFloats()
    assert "recurrence.sources" not in kinds_of
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    for options in (tiny.ON_CPU, tiny.ON_SIM):
        chosen = {**without_attention(options), "compressed_dir": tmp_path / "kept"}
        with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **chosen) as engine:
            assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": None}, "weight_scale is missing"),
        ({"scale": torch.ones(2, 1)}, "blocks of 128 make it [2, 2]"),
        ({"code": 0x7F}, "infinite or not numbers"),
    ],
    ids=str,
)
def test_fp8_that_is_wrong(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_fp8(tmp_path / "model", FP8_MODELS["qwen3"], torch.float32)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    if "code" in change:
        codes = tensors[name].view(torch.uint8)
        codes[3, 5] = change["code"]
    elif change["scale"] is None:
        del tensors[f"{name}_scale_inv"]
    else:
        tensors[f"{name}_scale_inv"] = change["scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(words)):
        plain_tensors(tmp_path / "model", tmp_path / "kept")


EIGHTS = {"num_bits": 8, "type": "float"}
FP8_WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "FP8-dynamic": (
        "rows",
        "weight_scale",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**EIGHTS, "strategy": "channel"},
                    "input_activations": {**EIGHTS, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "static": ("matrix", "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "by its inverse": ("one of one", "weight_scale_inv", {"quant_method": "fp8"}),
    "fbgemm": ("rows", "weight_scale", {"quant_method": "fbgemm_fp8"}),
    "modelopt": (
        "matrix",
        "weight_scale",
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    ),
}


def make_fp8_with(
    directory: Path, config: PretrainedConfig, scaled: str, name: str, given: dict[str, Any]
) -> PreTrainedModel:
    """Scales of rows or of whole matrices, and of tokens, which nobody reads."""
    model = tiny.make_model(directory, config=config)
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for module_name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or module_name == "lm_head":
                continue
            weight = module.weight
            most = (
                weight.abs().amax(dim=1, keepdim=True) if scaled == "rows" else weight.abs().max()
            )
            scales = (most / 448).to(torch.bfloat16)
            codes = (weight / scales.float()).to(torch.float8_e4m3fn)
            weight.copy_(codes.float() * scales.float())
            tensors[f"{module_name}.weight"] = codes
            shape = (1,) if scaled == "one of one" else scales.shape
            tensors[f"{module_name}.{name}"] = scales.reshape(shape).contiguous()
            tensors[f"{module_name}.input_scale"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    if given["quant_method"] == "modelopt":
        beside = {"producer": {"name": "modelopt"}, "quantization": {**given}}
        del beside["quantization"]["quant_method"]
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    else:
        raw["quantization_config"] = given
    (directory / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("way", FP8_WAYS)
def test_fp8_with_scales_of_rows_and_of_matrices(way: str, tmp_path: Path) -> None:
    config = FP8_MODELS["qwen3"]
    model = make_fp8_with(tmp_path / "model", config, *FP8_WAYS[way])
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    attention = model.model.layers[1].self_attn
    assert torch.equal(found["layers.1.attention.out"], attention.o_proj.weight)
    assert torch.equal(found["layers.1.attention.k"], attention.k_proj.weight)
    own = read_config(tmp_path / "model")
    formats = packed_formats(resolve(own, tmp_path / "model"))
    assert announced_formats(own, imagined_sources(own, "float32")) == formats
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_SIM, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def test_fp8_in_fused_matrices(tmp_path: Path) -> None:
    """Queries, keys and values begin at different rows of one matrix, which has scales by rows."""
    config = Phi3Config(
        **{**tiny.SIZES, "hidden_size": 192, "intermediate_size": 320}, pad_token_id=0
    )
    model = make_fp8_with(tmp_path / "model", config, *FP8_WAYS["FP8-dynamic"])
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    whole = model.model.layers[0].self_attn.qkv_proj.weight
    own = [found[f"layers.0.attention.{name}"] for name in "qkv"]
    assert torch.equal(torch.cat(own), whole)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:4], STEPS))
    options = {**tiny.ON_CPU, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path / "model", PROMPTS[:4], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:4], STEPS) == answers


@pytest.fixture(scope="module")
def awq_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("awq")


@pytest.fixture(scope="module")
def awq_tokens(awq_dir: Path) -> list[list[int]]:
    return tiny.tokens(tiny.reference(make(awq_dir, WAYS["awq"]), PROMPTS, STEPS))


@pytest.mark.parametrize(
    "name",
    [
        "cpu: all in memory",
        "cpu: all on disk, one block",
        "cpu: odd mix",
        "sim: weights on cpu",
        "sim: all on disk",
        "sim: odd mix",
        "sim: attention on both",
    ],
)
def test_same_tokens_under_every_policy(
    name: str, awq_dir: Path, awq_tokens: list[list[int]]
) -> None:
    options = {**POLICIES[name], "compressed_dir": awq_dir / "kept"}
    with tiny.engine(awq_dir, PROMPTS, STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == awq_tokens


def test_without_numba_the_reference_is_used(
    awq_dir: Path, awq_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.kernels import threads

    monkeypatch.setattr(threads, "find_loops", lambda: None)
    options = {**tiny.ON_SIM, "compressed_dir": awq_dir / "kept"}
    with tiny.engine(awq_dir, PROMPTS, STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == awq_tokens


@pytest.mark.parametrize("way", ["awq", "gptq, 8 bits", "compressed-tensors, asymmetric"])
def test_stacked_projections_and_modules_that_stay(way: str, tmp_path: Path) -> None:
    config = Phi3Config(
        **{**tiny.SIZES, **SIZES}, pad_token_id=0, tie_word_embeddings=False, sliding_window=None
    )
    model = tiny.make_model(tmp_path, config=config)
    own = WAYS[way]
    packed.rewrite(model, tmp_path, own.config, own, stays=lambda name: "layers.1.mlp" in name)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_SIM, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        names = engine.plan.layout.compressed
        assert "layers.0.mlp.gate" in names and "layers.1.mlp.gate" not in names
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def convert(directory: Path, kept: Path, said: list[str]) -> Path:
    """Where the conversion is kept."""
    config = read_config(directory)
    places = compressed_sources(
        config,
        resolve(config, directory),
        None,
        directory=kept,
        say=said.append,
    )
    return next(place.path for place in places.values() if place.path.name == "weights.bin")


def test_converted_once_and_anew_when_damaged_or_different(tmp_path: Path) -> None:
    make(tmp_path / "model", WAYS["gptq"])
    kept: Path = tmp_path / "kept"
    said: list[str] = []
    path = convert(tmp_path / "model", kept, said)
    whole = path.read_bytes()
    assert convert(tmp_path / "model", kept, said) == path and len(said) == 1
    for damage in (whole[:-4096], b"\xff" * 64 + whole[64:]):
        path.write_bytes(damage)
        assert convert(tmp_path / "model", kept, said) == path
        assert path.read_bytes() == whole
    left = path.parent.with_name(f"{path.parent.name}.12345")
    path.parent.rename(left)  # as a process leaves it that is killed while it writes
    convert(tmp_path / "model", kept, said)
    assert path.read_bytes() == whole and not left.exists() and len(said) == 4
    # The same files, by another config.json: other zero points.
    raw = json.loads((tmp_path / "model/config.json").read_text())
    raw["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (tmp_path / "model/config.json").write_text(json.dumps(raw))
    other = convert(tmp_path / "model", kept, said)
    assert other != path and other.read_bytes() != whole


def spoil(directory: Path, change: Callable[[packed.Tensors], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


BASE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("way", "change", "words"),
    [
        ("awq", lambda t: t.pop(f"{BASE}.qzeros"), "qzeros is missing"),
        ("gptq", lambda t: t.pop(f"{BASE}.scales"), "scales is missing"),
        (
            "gptq",
            lambda t: t.update({f"{BASE}.scales": t[f"{BASE}.scales"].repeat(2, 1)}),
            "scales has shape [2, 256], groups of 128 make it [1, 256]",
        ),
        (
            "awq",
            lambda t: t.update({f"{BASE}.qweight": t[f"{BASE}.qweight"][:64].clone()}),
            "qweight has shape [64, 32]",
        ),
        (
            "compressed-tensors",
            lambda t: t.update({f"{BASE}.weight_packed": t[f"{BASE}.weight_packed"].short()}),
            "weight_packed is of type I16, it must be I32",
        ),
        (
            "compressed-tensors, asymmetric",
            lambda t: t.pop(f"{BASE}.weight_zero_point"),
            "weight_zero_point is missing",
        ),
        (
            "compressed-tensors",
            lambda t: t.pop(f"{BASE}.weight_packed"),
            f"{BASE}.weight is missing",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    way: str, change: Callable[[packed.Tensors], Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path, WAYS[way])
    spoil(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        resolve(read_config(tmp_path), tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("way", "change", "words"),
    [
        ("gptq", lambda t: t[f"{BASE}.g_idx"].copy_(t[f"{BASE}.g_idx"].flip(0)), None),
        (
            "gptq, 8 bits",
            lambda t: t[f"{BASE}.g_idx"].copy_(t[f"{BASE}.g_idx"].flip(0)),
            "desc_act",
        ),
        ("awq", lambda t: t[f"{BASE}.scales"].fill_(float("inf")), "infinite"),
        (
            "compressed-tensors",
            lambda t: t.update({f"{BASE}.weight_scale": torch.full((256, 1), 1 / 3)}),
            "more digits",
        ),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused(
    way: str, change: Callable[[packed.Tensors], Any], words: str | None, tmp_path: Path
) -> None:
    make(tmp_path / "model", WAYS[way])
    spoil(tmp_path / "model", change)
    if words is None:  # one group: there is no other order
        convert(tmp_path / "model", tmp_path / "kept", [])
        return
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "model", tmp_path / "kept", [])
    assert words in str(caught.value)
    assert not any((tmp_path / "kept").iterdir())


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("asked", [{"weight_bits": 4}, {"compute": "int8"}])
def test_another_compression_on_top_is_refused(
    asked: dict[str, Any], is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By runs and ahead of them, whatever products the machine would make."""
    make(tmp_path, WAYS["awq"])
    monkeypatch.setattr(device, "computes_int8", lambda dtype: is_fast)
    options = {**tiny.ON_CPU, **asked}
    with pytest.raises(InputError, match="quantised already") as caught:
        tiny.engine(tmp_path, PROMPTS, STEPS, **options).__enter__()
    assert caught.value.asked.startswith("--weight-bits 4" if "weight_bits" in asked else "--comp")
    with pytest.raises(InputError, match="quantised already"):
        compress_ahead(EngineOptions(device="cpu", **asked), tmp_path, lambda _: None)


@pytest.mark.parametrize("way", ["gptq, version 2", "compressed-tensors"])
def test_experts(way: str, tmp_path: Path) -> None:
    """Each expert's matrices are packed; the router stays as it is."""
    sizes = {**tiny.SIZES, **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    tiny.make_model(tmp_path, config=MixtralConfig(**sizes, sliding_window=None))
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if ".experts." in name or "_proj.weight" in name]:
        own, parts = WAYS[way](tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": x for part, x in parts.items()}
        plain[name] = own.plain
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "plain/config.json").write_text(json.dumps(raw))
    described = {**raw, "quantization_config": WAYS[way].config}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager")
    answers = tiny.tokens(tiny.reference(model.eval(), PROMPTS[:5], STEPS))
    options = {**tiny.ON_SIM, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        names = engine.plan.layout.compressed
        assert "layers.0.experts.3.down" in names or "layers.0.experts.0.down" in names
        assert not any("router" in name for name in names)
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers
