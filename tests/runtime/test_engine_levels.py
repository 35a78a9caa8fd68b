"""Checkpoints whose codes of 4 bits stand for the levels of a table: what is computed with is what
their formats mean, bit for bit, and the tokens are those of transformers with such weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, PretrainedConfig, PreTrainedModel

from freight.errors import InputError, ModelError
from freight.model.checkpoint import imagined_sources, resolve
from freight.model.compression import announced_formats, packed_formats
from freight.model.config import read_config
from freight.model.number_format import LevelFloats, MicroFloats

from . import tiny
from .test_engine_packed import NAMES, plain_tensors
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 5
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FOURS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
Tensors = dict[str, torch.Tensor]


def nearest(weight: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return (weight[..., None] - levels).abs().argmin(dim=-1)


def nvfp4(weight: torch.Tensor, *, divided: bool) -> tuple[torch.Tensor, Tensors]:
    """What its numbers become, and how they are kept: with scales of sixteen as floats of 8 bits,
    and what multiplies or divides all of them."""
    rows, columns = weight.shape
    factor = weight.abs().max() / (6 * 448)
    given = 1 / factor if divided else factor
    factor = 1 / given if divided else given
    groups = weight.view(rows, -1, 16)
    scales = (groups.abs().amax(dim=-1) / 6 / factor).to(torch.float8_e4m3fn)
    wide = (scales.float() * factor)[..., None]
    codes = nearest(groups / wide.clamp(min=1e-12), FOURS)
    plain = (FOURS[codes] * wide).view(rows, columns)
    flat = codes.view(rows, columns).to(torch.uint8)
    kept = flat[:, ::2] | flat[:, 1::2] << 4
    if divided:
        parts = {"weight_packed": kept, "weight_scale": scales}
        return plain, {**parts, "weight_global_scale": given.view(1)}
    return plain, {"weight": kept, "weight_scale": scales, "weight_scale_2": given}


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    rows, columns = weight.shape
    groups = weight.view(rows, -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(dim=-1))) - 2
    wide = (2.0**exponents)[..., None]
    codes = nearest(groups / wide, FOURS)
    flat = codes.view(rows, columns).to(torch.uint8)
    kept = flat[:, ::2] | flat[:, 1::2] << 4
    parts = {"weight_packed": kept, "weight_scale": (exponents + 127).to(torch.uint8)}
    return (FOURS[codes] * wide).view(rows, columns), parts


def bitsandbytes(weight: torch.Tensor, kind: str, *, nested: bool) -> tuple[torch.Tensor, Tensors]:
    """Blocks of 64 of the flat matrix, the first of two codes in the upper half of a byte."""
    levels = NF4 if kind == "nf4" else torch.cat([FP4, -FP4])
    blocks = weight.reshape(-1, 64)
    most = blocks.abs().amax(dim=-1)
    state = {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape)}
    parts: Tensors = {"weight.absmax": most, "weight.quant_map": levels}
    if nested:
        table, offset = torch.linspace(-1, 1, 256), float(most.mean())
        parts_of = (most - offset).split(256)
        nested_most = torch.stack([part.abs().max() for part in parts_of])
        codes = torch.cat(
            [nearest(part / own, table) for part, own in zip(parts_of, nested_most, strict=True)]
        )
        state |= {"nested_blocksize": 256, "nested_offset": offset}
        parts |= {
            "weight.absmax": codes.to(torch.uint8),
            "weight.nested_absmax": nested_most,
            "weight.nested_quant_map": table,
        }
        each = nested_most.repeat_interleave(256)[: len(codes)]
        most = table[codes] * each + torch.tensor(offset)
    codes = nearest(blocks / most[:, None], levels)
    flat = codes.view(-1).to(torch.uint8)
    parts["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = told
    return (levels[codes] * most[:, None]).view(weight.shape), parts


@dataclass(frozen=True, kw_only=True)
class Way:
    said: dict[str, Any]
    keep: Callable[[torch.Tensor], tuple[torch.Tensor, Tensors]]
    becomes: LevelFloats | MicroFloats


def compressed_tensors(stored: str, size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": size, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    own = {"quant_method": "compressed-tensors", "format": stored, "ignore": ["lm_head"]}
    return {**own, "config_groups": {"group_0": group}}


def in_blocks(kind: str) -> dict[str, Any]:
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
    return {**own, "bnb_4bit_quant_type": kind, "llm_int8_skip_modules": ["lm_head"]}


NVFP4 = LevelFloats(levels="e2m1", group_size=16, in_bytes=True)
MODEL_OPTIMIZER = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
WAYS = {
    "modelopt": Way(
        said=MODEL_OPTIMIZER, keep=lambda own: nvfp4(own, divided=False), becomes=NVFP4
    ),
    "compressed-tensors": Way(
        said=compressed_tensors("nvfp4-pack-quantized", 16),
        keep=lambda own: nvfp4(own, divided=True),
        becomes=NVFP4,
    ),
    "mxfp4": Way(
        said=compressed_tensors("mxfp4-pack-quantized", 32), keep=mxfp4, becomes=MicroFloats()
    ),
    "nf4": Way(
        said=in_blocks("nf4"),
        keep=lambda own: bitsandbytes(own, "nf4", nested=False),
        becomes=LevelFloats(levels="nf4", group_size=64),
    ),
    "nf4, nested": Way(
        said=in_blocks("nf4"),
        keep=lambda own: bitsandbytes(own, "nf4", nested=True),
        becomes=LevelFloats(levels="nf4", group_size=64),
    ),
    "fp4": Way(
        said=in_blocks("fp4"),
        keep=lambda own: bitsandbytes(own, "fp4", nested=True),
        becomes=LevelFloats(levels="fp4", group_size=64),
    ),
}


def make(directory: Path, way: Way, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """A model whose layers' matrices are kept so, and with what that means."""
    model = tiny.make_model(directory, config=config, **({} if config else SIZES))
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                plain, kept = way.keep(module.weight)
                module.weight.copy_(plain)
                del tensors[f"{name}.weight"]
                tensors |= {f"{name}.{part}": own.clone() for part, own in kept.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = way.said
    (directory / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("name", WAYS)
def test_values_and_tokens(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    model = make(tmp_path / "model", way)
    found = plain_tensors(tmp_path / "model", tmp_path / "kept")
    assert len(found) == 2 * len(NAMES)
    for layer, block in enumerate(model.model.layers):
        for own, theirs in NAMES.items():
            wanted = block.get_submodule(theirs).weight
            assert torch.equal(found[f"layers.{layer}.{own}"], wanted), own
    # What a plan without the weights takes from config.json alone is what they are.
    config = read_config(tmp_path / "model")
    packed_as = packed_formats(resolve(config, tmp_path / "model"))
    assert set(packed_as.values()) == {way.becomes.name}
    assert announced_formats(config, imagined_sources(config, "float32")) == packed_as
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    for policy in ("cpu: odd mix", "cpu: all on disk", "sim: odd mix"):
        options = {**POLICIES[policy], "compressed_dir": tmp_path / "kept"}
        with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **options) as engine:
            assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


@pytest.mark.parametrize("name", ["modelopt", "nf4, nested"])
def test_matrices_that_are_several(name: str, tmp_path: Path) -> None:
    config = Phi3Config(**{**tiny.SIZES, **SIZES, "pad_token_id": 0})
    model = make(tmp_path / "model", WAYS[name], config)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_CPU, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def test_bits_that_they_have_already(tmp_path: Path) -> None:
    make(tmp_path / "model", WAYS["modelopt"])
    with (
        pytest.raises(InputError, match="quantised already"),
        tiny.engine(tmp_path / "model", PROMPTS[:5], STEPS, weight_bits=4),
    ):
        pass


def change(directory: Path, changes: Callable[[Tensors], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    changes(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "name, part, becomes, expected",
    [
        ("modelopt", "weight_scale_2", None, "q_proj.weight_scale_2 is missing"),
        ("modelopt", "weight_scale", torch.zeros(128, 8), "must be [128, 8] of F8_E4M3"),
        ("modelopt", "pre_quant_scale", torch.ones(128), "multiplies what the matrix meets"),
        ("modelopt", "weight_scale_2", torch.tensor(torch.inf), "scales that are infinite"),
        ("compressed-tensors", "weight_global_scale", torch.zeros(1), "scales that are infinite"),
        ("nf4", "weight.absmax", None, "weight.absmax is missing"),
        ("nf4", "weight.absmax", torch.full((256,), torch.nan), "scales that are infinite"),
        ("nf4", "weight.absmax", torch.ones(128 * 128 // 256), "blocks of 256 do not fill"),
        ("nf4", "weight", torch.zeros(8, 4, dtype=torch.uint8), "has half as many bytes"),
        ("nf4", "weight.quant_map", NF4.flip(0), "stands for other numbers"),
        ("nf4, nested", "weight.nested_quant_map", None, "nested_quant_map is missing"),
        (
            "nf4, nested",
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor([123], dtype=torch.uint8),
            "scales that are infinite",
        ),
    ],
)
def test_what_cannot_be_read(
    name: str, part: str, becomes: torch.Tensor | None, expected: str, tmp_path: Path
) -> None:
    make(tmp_path / "model", WAYS[name])

    def changes(tensors: Tensors) -> None:
        tensors.pop(f"{Q}.{part}", None)
        if becomes is not None:
            tensors[f"{Q}.{part}"] = becomes

    change(tmp_path / "model", changes)
    with pytest.raises(ModelError) as caught:
        plain_tensors(tmp_path / "model", tmp_path / "kept")
    assert expected in str(caught.value)
