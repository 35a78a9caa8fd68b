"""What config.json says of quantised checkpoints: read, or refused by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.errors import ModelError
from freight.model.packing import Packing, read_packing

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def read(config: Any) -> Packing | None:
    return read_packing({"quantization_config": config}, "config.json")


def test_what_is_read() -> None:
    assert read_packing({}, "config.json") is None
    assert read(AWQ) == Packing(scheme="awq", bits=4, group_size=128)
    assert read({**AWQ, "group_size": -1, "version": "GEMM"}) == Packing(
        scheme="awq", bits=4, group_size=None
    )
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}
    assert read(old) == Packing(scheme="awq", bits=4, group_size=64)
    assert read(GPTQ) == Packing(scheme="gptq", bits=4, group_size=128, zero_shift=1)
    newer = {**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8}
    assert read(newer) == Packing(scheme="gptq", bits=8, group_size=128)
    found = read(COMPRESSED)
    assert found is not None
    assert (found.bits, found.group_size, found.symmetric) == (4, 32, True)
    channel = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    found = read({**COMPRESSED, "config_groups": {"a": {**GROUP, "weights": channel}}})
    assert found is not None
    assert (found.bits, found.group_size, found.symmetric) == (8, None, False)


def eights(**own: Any) -> dict[str, Any]:
    """Of compressed-tensors, as FP8-dynamic checkpoints have it."""
    stored = own.pop("format", "float-quantized")
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, **own}
    tokens = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    return {**COMPRESSED, "format": stored, "config_groups": {"group_0": group}}


def in_bytes(**own: Any) -> dict[str, Any]:
    """Of compressed-tensors, as W8A8 checkpoints have it."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, **own}
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    return {**COMPRESSED, "format": "int-quantized", "config_groups": {"group_0": group}}


def test_numbers_in_bytes() -> None:
    found = read(in_bytes())
    assert found is not None and found.skips("lm_head")
    by_rows = Packing(scheme="int-quantized", bits=8, group_size=None, symmetric=True)
    assert found == replace(by_rows, skipped=found.skipped)
    assert read({**in_bytes(strategy="tensor"), "ignore": []}) == by_rows
    groups = in_bytes(strategy="group", group_size=64, symmetric=False)
    assert read({**groups, "ignore": []}) == replace(by_rows, group_size=64, symmetric=False)


def test_floats_of_8_bits() -> None:
    """Scales of rows or of matrices show by their shapes; tokens and keys stay plain."""
    by_rows = Packing(scheme="fp8", bits=8, group_size=None)
    found = read({**eights(), "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert found is not None and found.skips("lm_head")
    assert found == replace(by_rows, skipped=found.skipped)
    assert read({**eights(strategy="tensor"), "ignore": []}) == by_rows
    blocks = eights(strategy="block", block_structure=[128, 128])
    assert read({**blocks, "ignore": None}) == replace(by_rows, group_size=128)
    static = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    assert read(static) == replace(by_rows, skipped=("lm_head",))
    assert read({**static, "weight_block_size": [128, 128]}) == replace(
        by_rows, group_size=128, skipped=("lm_head",)
    )
    rows = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]}
    assert read(rows) == replace(by_rows, skipped=("self_attn",))
    nvidia = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_*", "x"]}
    found = read(nvidia)
    assert found is not None and found == replace(by_rows, skipped=found.skipped)
    assert found.skips("lm_head") and found.skips("x")
    assert not found.skips("a.x") and not found.skips("x.y")


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
MODEL_OPTIMIZER = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_*"]}


def fours(stored: str, size: int, **own: Any) -> dict[str, Any]:
    """Of compressed-tensors, floats of 4 bits, met by tokens of 4 bits, which stay plain here."""
    weights = {"num_bits": 4, "type": "float", "group_size": size, **own}
    tokens = {"num_bits": 4, "type": "float", "group_size": size, "dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    return {**COMPRESSED, "format": stored, "config_groups": {"group_0": group}}


def test_levels() -> None:
    """Codes for the numbers of a table; bitsandbytes leaves the head plain, said or not."""
    nvfp4 = Packing(scheme="nvfp4", bits=4, group_size=16, levels="e2m1")
    found = read(MODEL_OPTIMIZER)
    assert found is not None and found == replace(nvfp4, skipped=found.skipped)
    assert found.skips("lm_head") and not found.skips("model.layers.0.mlp.up_proj")
    assert read({**fours("nvfp4-pack-quantized", 16), "ignore": []}) == nvfp4
    inner = {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4"}}
    assert read(inner) == nvfp4
    micro = {**fours("mxfp4-pack-quantized", 32), "ignore": [], "kv_cache_scheme": {"num_bits": 8}}
    assert read(micro) == Packing(scheme="mxfp4", bits=4, group_size=32)
    blocks = read(BITSANDBYTES)
    assert blocks is not None and blocks.levels == "fp4" and blocks.skips("lm_head")
    own = {**BITSANDBYTES, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["o_proj"]}
    blocks = read(own)
    assert blocks is not None and blocks.levels == "nf4" and blocks.skips("self_attn.o_proj")


def test_modules_that_stay() -> None:
    compressed, awq = read(COMPRESSED), read({**AWQ, "modules_to_not_convert": ["o_proj"]})
    assert compressed is not None and awq is not None
    assert compressed.skips("lm_head") and not compressed.skips("model.lm_head_norm")
    assert compressed.skips("model.layers.3.mlp.gate")
    assert not compressed.skips("model.layers.3.mlp.gate_proj")
    assert awq.skips("model.layers.0.self_attn.o_proj")
    gptq = read({**GPTQ, "dynamic": {r"-:.*\.mlp\..*": {}}})
    assert gptq is not None
    assert gptq.skips("model.layers.0.mlp.up_proj") and not gptq.skips("model.layers.0.self_attn")


def compressed(**group: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, **group}}}


@pytest.mark.parametrize(
    ("config", "way"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (8 bits)"),
        ({**BITSANDBYTES, "bnb_4bit_quant_type": "int4"}, "bitsandbytes (int4)"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8 (blocks of [64, 64])"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt (NVFP4_AWQ)"),
        ({**MODEL_OPTIMIZER, "group_size": 32}, "modelopt (NVFP4)"),
        ({**BITSANDBYTES, "bnb_4bit_quant_storage": "bfloat16"}, "(bnb_4bit_quant_storage bfloat"),
        (fours("nvfp4-pack-quantized", 32), "(nvfp4-pack-quantized, of floats of 4 bits)"),
        (fours("mxfp4-pack-quantized", 32, symmetric=False), "with zero points)"),
        ({"quant_method": "modelopt"}, "modelopt (None)"),
        (eights(format="int-quantized"), "compressed-tensors (int-quantized)"),
        (in_bytes(num_bits=4), "compressed-tensors (4 bits)"),
        (in_bytes(strategy="block"), "(one scale for each block)"),
        (eights(strategy="group"), "(one scale for each group)"),
        (eights(strategy="block", block_structure=[64, 64]), "(one scale for each block)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 (e5m2)"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "nvfp4"}, "nvfp4"),
        ({"load_in_8bit": True}, "an unnamed way"),
        ("awq", "quantization_config 'awq'"),
        ({**AWQ, "version": "gemv"}, "awq (gemv)"),
        ({**AWQ, "version": "marlin"}, "awq (marlin)"),
        ({**AWQ, "backend": "llm-awq"}, "awq (llm-awq)"),
        ({**AWQ, "bits": 3}, "awq (3 bits)"),
        ({**GPTQ, "bits": 2}, "gptq (2 bits)"),
        ({**GPTQ, "bits": True}, "gptq (True bits)"),
        ({**GPTQ, "is_marlin_format": True}, "gptq (marlin)"),
        ({**GPTQ, "checkpoint_format": "bitblas"}, "gptq (bitblas)"),
        ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, "gptq (dynamic"),
        ({**GPTQ, "group_size": 0}, "gptq, in a form that is not known"),
        ({"quant_method": "gptq"}, "gptq, in a form that is not known"),
        ({**COMPRESSED, "format": "float-quantized"}, "compressed-tensors (float-quantized)"),
        ({**COMPRESSED, "format": "marlin-24"}, "compressed-tensors (marlin-24)"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "(kv_cache_scheme)"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (compressed(input_activations={"num_bits": 8}), "(quantised activations)"),
        (compressed(weights={**WEIGHTS, "type": "float"}), "(pack-quantized, of floats of 4 bits)"),
        (compressed(weights={**WEIGHTS, "strategy": "block"}), "(one scale for each block)"),
        (compressed(weights={**WEIGHTS, "num_bits": 3}), "compressed-tensors (3 bits)"),
        ({**COMPRESSED, "config_groups": {}}, "(0 different schemes)"),
        ({**COMPRESSED, "ignore": ["re:("]}, "compressed-tensors, in a form that is not known"),
    ],
)
def test_other_ways_are_named(config: Any, way: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(config)
    assert "is quantised with" in caught.value.asked and way in caught.value.asked
    assert "Freight reads AWQ" in caught.value.limit and caught.value.advice


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
KEYS = sorted({*AWQ, *GPTQ, *COMPRESSED, "dynamic", "checkpoint_format", "sparsity_config"})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from([AWQ, GPTQ, COMPRESSED]),
    more=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2),
    weights=st.dictionaries(st.sampled_from(sorted(WEIGHTS)), JSON, max_size=2),
)
def test_any_json_is_read_or_refused(base: Any, more: Any, weights: Any) -> None:
    config = {**base, **compressed(weights={**WEIGHTS, **weights})} | {**base, **more}
    try:
        found = read(config)
    except ModelError:
        return
    assert found is None or found.bits in (4, 8)
