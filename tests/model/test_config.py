"""config.json -> switches, against transformers' own reading of the same files."""

from __future__ import annotations

import json
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig, MiMoV2FlashConfig

from freight.entrypoints.bundled import bundled_path
from freight.errors import ModelError
from freight.model.config import DTYPE_BYTES, parse_config, read_config
from freight.model.decoder import build_programme, count_parameters, tensor_shapes
from freight.model.families import FAMILIES
from freight.model.layer_kinds import CompressedKeys
from freight.model.passing import carried
from freight.model.programme import Clip
from freight.model.query_growth import QueryGrowth

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SMALL}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SMALL}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, heads missing": {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    "llama, nulls": {**LLAMA, "head_dim": None, "rope_scaling": None, "attention_bias": False},
    "llama, wide heads": {**LLAMA, "head_dim": 16},
    "llama, biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, old dtype": {**LLAMA, "torch_dtype": "float16"},
    "llama, new dtype": {**LLAMA, "dtype": "bfloat16", "torch_dtype": "float16"},
    "llama, old rope": {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    "llama, new rope": {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}},
    "llama, old linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, both": {**LLAMA, "rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0}},
    "llama, no length": {
        **LLAMA,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "llama, no architecture": {k: v for k, v in LLAMA.items() if k != "architectures"},
    "llama, gelu": {**LLAMA, "hidden_act": "gelu", "rms_norm_eps": 1e-5},
    "mistral": MISTRAL,
    "mistral, no window": {**MISTRAL, "sliding_window": None},
    "mistral, window": {**MISTRAL, "sliding_window": 8, "head_dim": 8},
    "qwen2": QWEN2,
    "qwen2, window off": {**QWEN2, "sliding_window": 8, "max_window_layers": 1},
    "qwen2, window on": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen2, null window": {**QWEN2, "use_sliding_window": True, "sliding_window": None},
    "qwen2, layer types": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def oracle(raw: dict[str, Any], directory: Path) -> Any:
    (directory / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("raw", VARIANTS.values(), ids=VARIANTS)
def test_switches_equal_those_of_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
    model = oracle(raw, tmp_path)
    theirs, ours = model.config, read_config(tmp_path)
    attention = [layer.self_attn for layer in model.model.layers]

    assert ours.num_layers == len(attention)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == attention[0].head_dim
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.activation == {"silu": "silu", "gelu": "gelu"}[theirs.hidden_act]
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (attention[0].q_proj.bias is not None)
    assert ours.out_bias == (attention[0].o_proj.bias is not None)
    assert ours.mlp_bias == (model.model.layers[0].mlp.down_proj.bias is not None)
    assert ours.dtype == str(theirs.dtype or torch.float32).removeprefix("torch.")
    windows = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    assert ours.sliding_windows == tuple(
        windows if kind == "sliding_attention" else None for kind in kinds
    )


@pytest.mark.parametrize("raw", VARIANTS.values(), ids=VARIANTS)
def test_rope_equals_that_of_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = oracle(raw, tmp_path).config.rope_parameters, read_config(tmp_path).ropes[0]
    assert ours.kind == theirs["rope_type"]
    assert ours.theta == theirs["rope_theta"]
    assert ours.factor == theirs.get("factor")
    assert ours.low_freq_factor == theirs.get("low_freq_factor")
    assert ours.original_max_positions == theirs.get("original_max_position_embeddings")


@pytest.mark.parametrize("raw", VARIANTS.values(), ids=VARIANTS)
def test_names_and_counts_equal_the_model_s(raw: dict[str, Any], tmp_path: Path) -> None:
    model = oracle(raw, tmp_path)
    config = read_config(tmp_path)
    shapes = tensor_shapes(config)
    tensors = FAMILIES[config.family].tensors
    ours = {}
    for name, shape in shapes.items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        place = tensors[name.replace(f"layers.{layer}.", "layers.{i}.") if layer else name]
        assert isinstance(place, str)
        ours[place.format(i=layer)] = shape
    assert ours == {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert count_parameters(config) == sum(weight.numel() for weight in model.parameters())


def test_kv_bytes() -> None:
    config = parse_config(LLAMA)
    assert config.kv_bytes_per_token_per_layer() == 2 * 2 * 8 * 2
    assert config.kv_bytes_per_token(4) == 3 * 2 * 2 * 8 * 4
    assert DTYPE_BYTES[config.dtype] == 4


def test_windows_of_mistral_follow_layer_types() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = parse_config({**MISTRAL, "sliding_window": 8, "layer_types": kinds})
    assert config.sliding_windows == (None, 8, None)


def test_missing_keys_are_reported_together() -> None:
    with pytest.raises(ModelError) as caught:
        parse_config({"architectures": ["LlamaForCausalLM"]})
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert f"{key} is missing" in str(caught.value)


FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", **SMALL}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SMALL, "head_dim": 8}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**FALCON, "alibi": True}, "alibi is True, only False is supported"),
        ({**MOE, "num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({**MOE, "num_experts": 1 << 40}, "experts are given, at most 4096"),
        ({**MOE, "moe_intermediate_size": 0}, "the experts' width is 0"),
        ({**MOE, "mlp_only_layers": 3}, "0 of 3 layers say what MLP they have"),
        ({**MOE, "num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
    ],
    ids=str,
)
def test_a_family_s_own_limits(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(raw)
    assert words in str(caught.value)


def test_what_is_not_computed_is_not_to_be_corrected() -> None:
    with pytest.raises(ModelError) as caught:
        parse_config({**FALCON, "alibi": True})
    assert "Choose another model" in caught.value.advice
    with pytest.raises(ModelError) as caught:
        parse_config({**FALCON, "alibi": True, "num_hidden_layers": "3"})
    assert "alibi is True" in caught.value.limit and "'3'" in caught.value.limit
    assert "Correct config.json" in caught.value.advice


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["FooForCausalLM"]}, "Supported architectures are AXK1ForCausalLM, "),
        ({"architectures": 5}, "architecture 5"),
        ({"architectures": [], "model_type": "foo"}, "model_type 'foo'"),
        ({"num_attention_heads": 5}, "32 does not divide into 5 heads"),
        ({"num_key_value_heads": 3}, "4 query heads cannot be shared out over 3"),
        ({"head_dim": 7}, "7 elements of a head"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "num_heads is 0"),
        ({"num_attention_heads": -4, "head_dim": -8}, "-8 elements of a head"),
        ({"vocab_size": -1, "hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_act": "softplus"}, "'softplus' is not known, supported are silu"),
        ({"hidden_act": 3}, "hidden_act is 3"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "norm_eps is 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not known"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor is '2'"),
        ({"rope_scaling": 4}, "rope_scaling is 4"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "high_freq_factor is missing"),
        ({"rope_theta": -1.0}, "theta is -1.0"),
        ({"rope_parameters": {"full_attention": {}}}, "one flat set"),
        (
            {"rope_parameters": {"full_attention": {}}, "layer_types": [{}, []]},
            "one for each of the layer_types",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor has 1 entries, it needs 4",
        ),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config({**LLAMA, **change})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 0}, "window is below 1"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "1 attention windows"),
        ({"sliding_window": 4, "layer_types": ["other"] * 3}, "layer_types is"),
    ],
)
def test_senseless_windows_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config({**MISTRAL, **change})
    assert words in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
) | st.sampled_from([0, -1, 10**15, 10**400, 1e308])
ROPE_KEYS = ["type", "factor", "rope_theta", "short_factor", "truncate", "low_freq_factor"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_json_is_read_or_refused(data: st.DataObject) -> None:
    raw = {**data.draw(st.sampled_from([LLAMA, MISTRAL, QWEN2])), "rope_scaling": {**LLAMA3_ROPE}}
    more = ["architectures", "head_dim", "hidden_act", "dtype", "sliding_window", "layer_types"]
    keys = [*raw, *more, "use_sliding_window", "quantization_config"]
    raw |= data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=2))
    if isinstance(raw["rope_scaling"], dict):
        raw["rope_scaling"] |= data.draw(st.dictionaries(st.sampled_from(ROPE_KEYS), JSON))
    try:
        parse_config(raw)
    except ModelError as error:
        assert error.limit


SIZES_OF_ALL = {
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_embd"), 96),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
KEYS_OF_SOME = [
    *("head_dim", "layer_types", "rope_layers", "expert_layers", "rope_scaling"),
    *("rope_parameters", "sliding_window", "sliding_window_pattern", "no_rope_layers"),
    *("no_rope_layer_interval", "text_config", "mlp_layer_types", "first_k_dense_replace"),
    *("n_shared_experts", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_multiplier"),
    *("logits_scaling", "n_group", "topk_group", "topk_method", "num_experts"),
    *("num_local_experts", "n_routed_experts", "num_experts_per_tok", "rotary_dim"),
    *("partial_rotary_factor", "decoder_sparse_step", "mlp_only_layers", "use_qk_norm"),
    *("rope_local_base_freq", "quantization_config", "multi_query", "num_hidden_layers"),
    *("attention_chunk_size", "floor_scale", "moe_layers", "interleave_moe_layer_step"),
    *("max_position_embeddings", "intermediate_size_mlp", "attn_temperature_tuning"),
    *("index_topk", "global_attn_every_n_layers", "num_dense_layers", "mup_enabled"),
    *("prefix_dense_sliding_window_pattern", "shared_expert_combination_strategy"),
    *("layer_rope_theta", "shared_intermediate_size"),
    *("sparse_attention_config", "moe_layer_freq", "index_topk_blocks"),
    *("linear_key_head_dim", "linear_num_key_heads", "rope_theta", "linear_attn_config"),
    *("hybrid_override_pattern", "layers_block_type", "layer_parts", "time_step_limit"),
    *("attention_types", "attention_layers", "n_inner", "n_embd", "attn_config", "d_model"),
    *("router_jitter_noise", "qk_layernorm", "clip_qkv", "hidden_act", "hidden_activation"),
    *("scale_embedding", "use_post_norm", "embedding_multiplier", "seq_length", "n_head"),
    *("attn_layer_indices", "ssm_multipliers", "mlp_multipliers", "key_multiplier"),
    *("ssm_in_multiplier", "mamba_d_ssm", "mamba_rms_norm", "mamba_n_heads", "matrix_factors"),
]
LIKELY = st.sampled_from(
    [
        {"rope_type": "yarn", "factor": [1], "mscale_all_dim": "a"},
        {"llama_4_scaling_beta": 1, "original_max_position_embeddings": "a"},
        {"full_attention": {}, "sliding_attention": 5},
        {"quant_method": "mxfp4", "modules_to_not_convert": 5},
        {"type": "longrope", "short_mscale": [1], "long_mscale": [1]},
        {"clip_qkv": "a", "alibi": 1, "softmax_scale": 0},
        ["full_attention", "sliding_attention", "full_attention"],
        [[["global", "local"], 10**12], [["local"], -(10**12)]],
        [[["global", []], 1], "a"],
        [0, 1, 0],
        "LLLG",
        "M-*",
        ["mixer", "mlp", "both"],
    ]
)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(KEYS_OF_SOME), JSON | LIKELY, max_size=3),
)
def test_any_json_is_read_or_refused_as_any_family(family: str, changes: dict[str, Any]) -> None:
    raw = {**SIZES_OF_ALL, "model_type": FAMILIES[family].model_types[0], **changes}
    try:
        parse_config(raw)
    except ModelError as error:
        assert error.limit


def test_of_exaone_the_last_layer_sees_all() -> None:
    """By a pattern of letters."""
    raw = {**SIZES_OF_ALL, "num_hidden_layers": 6, "model_type": "exaone4"}
    found = parse_config({**raw, "sliding_window": 9, "sliding_window_pattern": "LLLG"})
    assert found.sliding_windows == (9, 9, 9, None, 9, None)
    assert [rope is None for rope in found.ropes] == [False, False, False, True, False, True]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\udcff"])
def test_unreadable_files_are_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_number_of_layers_takes_memory(family: str) -> None:
    """One too large is refused before anything is made of it."""
    kind = FAMILIES[family].model_types[0]
    raw = {**LLAMA, "architectures": [], "model_type": kind, "num_hidden_layers": 1 << 40}
    raw |= {"num_experts": 4, "ffn_dim": 64, "n_layer": 1 << 40, "ffn_hidden_size": 64}
    tracemalloc.start()
    with pytest.raises(ModelError, match="layers are given"):
        parse_config(raw)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 24


def test_where_positions_change_queries() -> None:
    """Rows of Llama 4 end there, or where a chunk does."""
    llama = {**SMALL, "architectures": ["Llama4ForCausalLM"], "num_local_experts": 4}
    llama |= {"max_position_embeddings": 10_485_760, "intermediate_size_mlp": 96}
    assert parse_config(llama).max_positions == 8191
    assert parse_config({**llama, "attention_chunk_size": 4096}).max_positions == 4096
    with pytest.raises(ModelError, match="max_position_embeddings is 'many'"):
        parse_config({**llama, "max_position_embeddings": "many"})
    plain = {**llama, "attn_temperature_tuning": False}
    assert parse_config(plain).max_positions == 8192
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384}
    rope |= {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    mistral = {**SMALL, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    mistral |= {"max_position_embeddings": 262_144, "rope_parameters": rope}
    mistral |= {"sliding_window": None}
    found = parse_config(mistral)
    assert found.max_positions == 262_144 and set(found.sliding_windows) == {None}
    assert found.query_growth == QueryGrowth(rate=0.1, span=16_384)
    assert found.for_rows(16_384).query_growth is None
    assert found.for_rows(16_385).query_growth == found.complete.query_growth == found.query_growth
    with pytest.raises(ModelError, match=r"queries grow by a rate of -1.0 every 16384 tokens"):
        parse_config({**mistral, "rope_parameters": {**rope, "llama_4_scaling_beta": -1}})
    del rope["llama_4_scaling_beta"]
    assert parse_config(mistral).query_growth is None


GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "vocab_size": 154_880,
    "max_position_embeddings": 202_752,
}


@pytest.mark.parametrize(
    "shared",
    [
        {"indexer_types": ["full", "shared"] * 39},
        {"index_topk_freq": 2},
        {"index_topk_pattern": "FS" * 39},
        {"index_topk_pattern": ["F", "S"] * 39},
    ],
)
def test_layers_share_what_an_indexer_chooses(shared: dict[str, Any]) -> None:
    raw = {**GLM_5, **shared}
    own = parse_config(raw)
    assert own.max_positions == 202_752
    assert own.latent is not None and own.latent.index is not None
    every = own.latent.index.shared
    assert len(every) == 78 and not every[0] and sum(every) in (38, 39)
    # In every other layer, but with offsets the second one chooses, too.
    assert every[2::2] == every[2:3] * 38 and every[3::2] == every[3:4] * 38
    assert carried(own.for_rows(4096))[-1] == ("chosen", 4096)
    assert carried(own.for_rows(2048)) == carried(parse_config(GLM_5))
    with pytest.raises(ModelError, match="index_topk is 'many'"):
        parse_config({**raw, "index_topk": "many"})


def test_choices_of_more_layers_than_there_are() -> None:
    own = parse_config({**GLM_5, "indexer_types": ["full", *["shared"] * 79]})
    assert own.latent is not None and own.latent.index is not None
    assert own.latent.index.shared == (False, *[True] * 77)


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ({"indexer_types": ["shared"] * 78}, "the first layer is to attend what one before it"),
        ({"index_topk_pattern": "FS"}, "2 of 78 layers say who chooses their keys"),
    ],
)
def test_choices_that_nobody_makes(shared: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parse_config({**GLM_5, **shared})


def test_rows_that_an_indexer_chooses_of_keep_a_state() -> None:
    config = parse_config(GLM_5)
    assert config.max_positions == 202_752
    assert config.for_rows(2048).recurrence is None
    assert config.for_rows(2048).num_attention_layers == 78
    long = config.for_rows(4096)
    assert long.num_attention_layers == 0 and long.num_recurrent_layers == 78
    # Of a token a key of 576 numbers, and one of 128 of the indexer.
    beside = -(-4096 * 128 // 576) * 576
    assert long.state_bytes_per_row() == 78 * 2 * (4096 * 576 + beside)
    assert long.complete is long
    with pytest.raises(ModelError, match="index_topk is 'many'"):
        parse_config({**GLM_5, "index_topk": "many"})
    with pytest.raises(ModelError, match="heads that choose are 32 wide, 64 are rotated"):
        parse_config({**GLM_5, "index_head_dim": 32})


V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "vocab_size": 129_280,
    "compress_ratios": [0, 4, 128, 4, 0],
}


def test_keys_of_deepseek_v4_by_layer() -> None:
    found = parse_config(V4)
    own = found.recurrence
    assert isinstance(own, CompressedKeys)
    assert (own.rates, own.doubled) == ((0, 4, 128, 4), (False, True, False, True))
    assert [rope and (rope.theta, rope.rotary_dim) for rope in found.ropes] == [
        (10_000.0, 64),
        *[(160_000.0, 64)] * 3,
    ]
    assert found.experts is not None and found.experts.by_token == (True, True, True, False)
    assert found.max_positions == 1_048_576
    short = found.for_rows(2048).recurrence
    assert isinstance(short, CompressedKeys) and short.index is None
    assert short.columns_shape == (127 + 512, 512) and short.matrix_shape == (2, 3, 512)
    long = found.for_rows(2052).recurrence
    assert isinstance(long, CompressedKeys) and long.index is not None
    assert long.columns_shape == (127 + 513 + 129, 512) and long.matrix_shape == (2, 3, 640)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compress_ratios": [8] * 4}, "are 8: None"),
        ({"layer_types": [["a"]] * 4}, r"are \['a'\]: None"),
        ({"layer_types": ["foo"] * 4, "compress_rates": {"foo": 7}}, "are foo: None"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "stand for no tokens"),
        ({"compress_rates": {"compressed_sparse_attention": "x"}}, "attention: 'x'"),
        ({"compress_ratios": [4] * 3}, "3 ropes are given for 4 layers"),
        ({"mlp_layer_types": ["dense"] * 4}, "given by 'dense'"),
        ({"mlp_layer_types": ["moe"] * 5}, "5 of 4 layers say whether tokens have experts"),
        ({"num_hash_layers": "x"}, "given by 'x'"),
        ({"sliding_window": 1}, "a window of 1 tokens"),
        ({"index_topk": 0}, "64 heads are to choose 0 keys"),
        ({"index_head_dim": 8}, "heads that choose are 8 wide"),
        ({"o_groups": 7}, "64 heads are no 7 groups"),
        ({"q_lora_rank": 0}, "a width of layers that keep keys is below 1"),
        ({"swiglu_limit": "a"}, "mlp_limits is 'a'"),
        ({"scoring_func": "x"}, "not by softmax, sigmoid or sqrtsoftplus"),
        ({"rope_parameters": [1]}, "must be one flat set"),
        ({"head_dim": 32, "partial_rotary_factor": 2.0}, "rotary width 64 exceeds head width 32"),
    ],
)
def test_senseless_layers_of_deepseek_v4_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**V4, **change})


def test_what_of_a_head_deepseek_v4_rotates() -> None:
    found = [
        parse_config({**V4, **change}).rotations[0].rotary_dim
        for change in (
            {"head_dim": 256},
            {"head_dim": 256, "qk_rope_head_dim": 64},
            {"partial_rotary_factor": 0.25},
            {"rope_parameters": {"main": {"partial_rotary_factor": 0.2}, "compress": {}}},
        )
    ]
    assert found == [32, 64, 128, 102]


def test_rows_of_minimax_m3_end_where_blocks_would_be_left_out() -> None:
    """By its own names, and those that it was published with."""
    raw = {**SIZES_OF_ALL, "architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
    raw |= {"head_dim": 128, "max_position_embeddings": 524_288, "rotary_dim": 64}
    blocks = {"sparse_block_size": 64, "sparse_topk_blocks": 8}
    found = parse_config({**raw, "sparse_attention_config": blocks, "moe_layer_freq": [0, 1, 1]})
    assert found.max_positions == 512
    assert found.experts is not None and found.experts.layers == (False, True, True)
    assert [rope.rotary_dim for rope in found.rotations] == [64]
    assert parse_config(raw).max_positions == 2048
    assert parse_config({**raw, "index_topk_blocks": 4}).max_positions == 512
    whole = parse_config({**raw, "partial_rotary_factor": 1.0})
    assert [rope.rotary_dim for rope in whole.rotations] == [128]
    with pytest.raises(ModelError, match="max_position_embeddings is 'all'"):
        parse_config({**raw, "index_topk_blocks": "all"})


MISTRAL_4: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "vocab_size": 131_072,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 1_048_576,
}
HUNYUAN_3: dict[str, Any] = {
    "architectures": ["HYV3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 13_312,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts": 192,
    "vocab_size": 120_832,
}
TRINITY_MINI: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "vocab_size": 200_192,
    "mup_enabled": True,
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "rope_theta": 10_000,
    "rope_scaling": None,
    "sliding_window": 2048,
    "global_attn_every_n_layers": 4,
}
YOUTU: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "q_lora_rank": 1536,
    "vocab_size": 128_256,
}


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        (GLM_5, 743_180_209_920),  # of 744 billion, of which the indexers are 0.7
        ({**MISTRAL_4, "architectures": ["Mistral4ForCausalLM"]}, 118_972_826_624),
        (HUNYUAN_3, 295_033_543_488),
        (YOUTU, 1_961_560_064),
        (TRINITY_MINI, 26_123_974_400),
    ],
    ids=["glm-5", "mistral-small-4", "hunyuan-3", "youtu-llm-2b", "trinity-mini"],
)
def test_numbers_of_parameters_are_the_published_ones(raw: dict[str, Any], parameters: int) -> None:
    assert count_parameters(parse_config(raw)) == parameters


def test_layers_of_a_kind_have_one_base_or_none() -> None:
    raw = {**SIZES_OF_ALL, "num_hidden_layers": 4, "architectures": ["GraniteSWAForCausalLM"]}
    raw |= {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    found = parse_config({**raw, "layer_rope_theta": [0, 9.0, 0, 9.0]})
    assert found.sliding_windows == (None, 128, 128, 128)
    assert [rope and rope.theta for rope in found.ropes] == [None, 9.0, None, 9.0]
    assert {rope and rope.theta for rope in parse_config(raw).ropes} == {7.0}
    with pytest.raises(ModelError, match="rope_theta is 'different'"):
        parse_config({**raw, "layer_rope_theta": [0, 9.0, 9.0, 8.0]})


def test_layers_of_command_a_plus() -> None:
    """Plain ones of the beginning rotate, whatever they see, where all of them see all."""
    raw = {**SIZES_OF_ALL, "num_hidden_layers": 7, "architectures": ["Cohere2MoeForCausalLM"]}
    raw |= {"first_k_dense_replace": 2, "sliding_window": 9, "num_shared_experts": 1}
    found = parse_config(raw)
    assert found.sliding_windows == (None, None, 9, 9, 9, None, 9)
    assert [rope is None for rope in found.ropes] == [False] * 5 + [True, False]
    other = parse_config({**raw, "prefix_dense_sliding_window_pattern": 2})
    assert other.sliding_windows[:2] == (9, None) and other.ropes[1] is None
    with pytest.raises(ModelError, match="expert_share is 'product'"):
        parse_config({**raw, "shared_expert_combination_strategy": "product"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"score_func": "softmax"}, "only 'sigmoid' is supported"),
        ({"num_shared_experts": 0}, "with that of an MLP"),
        ({"n_group": 2}, "n_group is 2"),
    ],
    ids=str,
)
def test_what_trinity_s_table_does_not_describe(change: dict[str, Any], words: str) -> None:
    found = parse_config(TRINITY_MINI)
    assert found.embedding_scale == 2048**0.5
    assert [rope is None for rope in found.ropes[:4]] == [False, False, False, True]
    assert found.sliding_windows[:4] == (2048, 2048, 2048, None)
    with pytest.raises(ModelError, match=words):
        parse_config({**TRINITY_MINI, **change})


def test_of_one_architecture_the_part_that_reads_says_which_family_it_is() -> None:
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    found = parse_config({**whole, "text_config": {**MISTRAL_4, "model_type": "mistral4"}})
    assert found.family == "mistral4" and found.max_positions == 1_048_576
    older = {**SMALL, "model_type": "ministral3"}
    assert parse_config({**whole, "text_config": older}).family == "mistral"
    with pytest.raises(ModelError, match="text_model is 'other'"):
        parse_config({**whole, "text_config": {**SMALL, "model_type": "other"}})


def test_mistral_large_4_by_its_sizes_alone() -> None:
    """Of 1 T parameters; one of four layers rotates nothing."""
    text = {"model_type": "mistral_large4_text"}
    raw = {"architectures": ["MistralLarge4ForConditionalGeneration"], "text_config": text}
    config = parse_config(raw)
    assert round(count_parameters(config.complete), -9) == 1_050_000_000_000
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 18
    own = {**text, "kv_source_layers": [*range(72)], "no_rope_layers": [1, 0] * 36}
    config = parse_config({**raw, "text_config": own})
    assert [rope is None for rope in config.ropes] == [False, True] * 36
    own["kv_source_layers"][3] = 1
    with pytest.raises(ModelError, match=r"kv_source_layers is .*only None is supported"):
        parse_config({**raw, "text_config": own})


GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100_352,
    "tie_word_embeddings": True,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
}
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 163_840,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "model_max_length": 1_048_576,
    "tie_word_embeddings": False,
}
LING_3: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 157_184,
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "expert_swiglu_limit_list": [0, 0],
    "moe_shared_expert_intermediate_size": 768,
    "num_shared_experts": 1,
    "rope_parameters": {"rope_theta": 6e6, "partial_rotary_factor": 0.5},
}
FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 1.0,
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "vocab_size": 32_784,
}
LFM2: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65_536,
}


@pytest.mark.parametrize(
    ("raw", "parameters", "num_attending"),
    [
        (FALCON_H1, 521_411_104, 36),
        (
            {
                "architectures": ["BambaForCausalLM"],
                "attn_layer_indices": [9, 18, 27],
                "attn_rotary_emb": 64,
                "hidden_size": 4096,
                "intermediate_size": 14_336,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
                "mamba_n_heads": 128,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128_256,
            },
            9_780_235_392,
            3,
        ),
        (
            {
                **GRANITE_4,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "shared_intermediate_size": 8192,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "mamba_n_heads": 64,
            },
            3_191_396_096,
            4,
        ),
        (
            {
                **LFM2,
                "architectures": ["Lfm2ForCausalLM"],
                "num_hidden_layers": 16,
                "block_ff_dim": 12_288,
                "full_attn_idxs": [2, 5, 8, 10, 12, 14],
                "tie_embedding": True,
            },
            1_170_340_608,
            6,
        ),
        (KIMI_LINEAR, 49_122_681_728, 7),
        ({**LING_3, "num_hidden_layers": 42}, 124_414_211_552, 7),
    ],
    ids=[
        *("falcon-h1-0.5b", "bamba-9b", "granite-4.0-h-micro", "lfm2-1.2b"),
        *("kimi-linear-48b-a3b", "ling-3.0-flash"),
    ],
)
def test_models_with_states_have_the_published_number_of_parameters(
    raw: dict[str, Any], parameters: int, num_attending: int
) -> None:
    """Layers and widths by the names that they were published with."""
    config = parse_config(raw)
    assert count_parameters(config) == parameters
    assert config.num_attention_layers == num_attending


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_ffn_dim_multiplier": float("nan")}, "intermediate_size is nan"),
        ({"block_ffn_dim_multiplier": "x"}, "intermediate_size is 'x'"),
        ({"layer_types": ["conv", "sliding_attention"] * 8}, "must list linear_attention"),
        ({"layer_types": ["conv"] * 3}, "3 of 16 layers"),
        ({"conv_L_cache": 1}, "over 1 tokens"),
        ({"conv_bias": True}, "conv_bias is True"),
    ],
)
def test_senseless_layers_with_states_are_refused(change: dict[str, Any], words: str) -> None:
    raw = {**LFM2, "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 16, **change}
    raw.setdefault("layer_types", ["conv", "full_attention"] * 8)
    with pytest.raises(ModelError, match=words):
        parse_config(raw)


OLMO_HYBRID: dict[str, Any] = {"architectures": ["OlmoHybridForCausalLM"], **SMALL}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_allow_neg_eigval": "x"}, "strength is 'x'"),
        ({"layer_types": ["full_attention"] * 3}, "norms are placed by kind"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"linear_num_key_heads": 3}, "cannot share 3"),
        ({"linear_num_key_heads": "x"}, "linear_num_key_heads is 'x'"),
        ({"rope_parameters": 3}, "one flat set"),
    ],
)
def test_senseless_hybrids_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**OLMO_HYBRID, **change})


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None}, None),
        ({"rope_parameters": None}, None),
        ({"rope_parameters": None, "rope_theta": 3e4}, 3e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4),
    ],
)
def test_hybrids_rotate_unless_the_base_is_null(
    change: dict[str, Any], theta: float | None
) -> None:
    ropes = parse_config({**OLMO_HYBRID, **change}).ropes
    assert {rope and rope.theta for rope in ropes} == {theta}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"linear_attn_config": 5}, "linear_num_heads is .5."),
        ({"linear_attn_config": {"kda_layers": [1, 28]}}, "must list linear_attention"),
        ({"linear_attn_config": {"kda_layers": 3}}, "must list linear_attention"),
        ({"linear_head_dim": 0}, "width of recurrent layers is below 1"),
    ],
)
def test_senseless_layers_of_kimi_are_refused(change: dict[str, Any], words: str) -> None:
    raw = {**KIMI_LINEAR, "num_hidden_layers": 27, "layer_types": None}
    if "linear_head_dim" in change:
        del raw["linear_attn_config"]
    with pytest.raises(ModelError, match=words):
        parse_config({**raw, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_group_size": 5}, "must list linear_attention"),
        ({"expert_swiglu_limit_list": [0, 7.0]}, "expert_swiglu_limit_list is"),
        ({"no_kda_lora": False}, "no_kda_lora is False"),
        ({"kda_lower_bound": 5.0}, "bounded by -5.0"),
        ({"kda_lower_bound": "x"}, "rate_bound is 'x'"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "'head_wise'"),
    ],
)
def test_senseless_layers_of_ling_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**LING_3, "num_hidden_layers": 42, **change})


def test_ling_rotates_what_it_says_and_has_a_bound_unless_it_says_none() -> None:
    found = parse_config({**LING_3, "num_hidden_layers": 12})
    assert {rope and (rope.rotary_dim, rope.theta, rope.pairs) for rope in found.ropes} == {
        (64, 6e6, True)
    }
    assert found.recurrence is not None and found.recurrence.rate_bound == 5.0
    found = parse_config({**LING_3, "num_hidden_layers": 12, "kda_safe_gate": False})
    assert found.recurrence is not None and found.recurrence.rate_bound is None


def test_kimi_rotates_nothing_and_has_groups_where_they_are_used() -> None:
    found = parse_config({**KIMI_LINEAR, "num_expert_group": 8, "topk_group": 4})
    assert set(found.ropes) == {None} and found.attention_scale == 192**-0.5
    assert found.experts is not None and found.recurrence is not None
    assert (found.experts.num_groups, found.experts.groups_per_token) == (8, 4)
    found = parse_config({**KIMI_LINEAR, "num_expert_group": 8, "use_grouped_topk": False})
    assert found.experts is not None and found.experts.num_groups == 1


def test_no_layer_attends_where_none_is_listed() -> None:
    raw = {**LFM2, "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 3}
    assert parse_config({**raw, "full_attn_idxs": []}).num_attention_layers == 0
    assert parse_config(raw).num_attention_layers == 3


GEMMA4: dict[str, Any] = {
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262_144,
}
GEMMA4_31B: dict[str, Any] = {
    **GEMMA4,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
}
GEMMA4_26B: dict[str, Any] = {
    **GEMMA4,
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}


def gemma4(text: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}


@pytest.mark.parametrize(
    ("text", "billions", "of_others"),
    [(GEMMA4_31B, 30.7, (4, 512)), (GEMMA4_26B, 25.2, (2, 512))],
    ids=["31b", "26b-a4b"],
)
def test_gemma_4_has_the_published_number_of_parameters(
    text: dict[str, Any], billions: float, of_others: tuple[int, int], tmp_path: Path
) -> None:
    config = parse_config(gemma4(text))
    assert round(count_parameters(config) / 1e9, 1) == billions
    assert config.heads(4) == (text["num_key_value_heads"], 256)
    assert config.heads(5) == of_others
    whole, window = config.ropes[5], config.ropes[4]
    assert whole is not None and window is not None
    assert (whole.kind, whole.rotary_dim, whole.share) == ("proportional", 512, 0.25)
    assert (window.kind, window.rotary_dim, window.theta) == ("default", 256, 10_000.0)
    # As newer versions of transformers write it, too.
    saved = Gemma4TextConfig(**text)
    saved.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in raw and "05" in raw["per_layer_config"]
    assert parse_config(gemma4({**raw, "dtype": "float32"})) == config


@pytest.mark.parametrize(
    ("name", "billions", "looked_up", "keys"),
    [("gemma-4-e2b", 4.6, 2.3, [13, 14]), ("gemma-4-e4b", 7.5, 2.8, [22, 23])],
)
def test_of_small_gemmas_half_is_looked_up_and_later_layers_attend_others_keys(
    name: str, billions: float, looked_up: float, keys: list[int]
) -> None:
    """5.1 and 8 billion were published, with what sees and hears."""
    path = bundled_path(name)
    assert path is not None
    config = read_config(path)
    shapes = tensor_shapes(config)
    assert round(count_parameters(config) / 1e9, 1) == billions
    assert round(prod(shapes["embedding.inputs"]) / 1e9, 1) == looked_up
    first = config.num_attention_layers
    assert sorted({*config.key_layers[first:]}) == keys == [first - 2, first - 1]
    window, whole = (config.sliding_windows[layer] for layer in keys)
    assert (window, whole) == (512, None)
    wide = shapes[f"layers.{first}.mlp.gate"][0] / shapes["layers.0.mlp.gate"][0]
    assert wide == (2 if name == "gemma-4-e2b" else 1)
    assert not any(f"layers.{first}.attention.{own}" in shapes for own in ("k", "v", "k_norm"))


def test_gemma_4_unified_has_no_inputs_of_layers() -> None:
    text = {k: v for k, v in GEMMA4_31B.items() if k != "hidden_size_per_layer_input"}
    assert parse_config(gemma4({**text, "model_type": "gemma4_text"})).layer_inputs == 256
    unified = {**gemma4(text), "architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    unified |= {"text_config": {**text, "model_type": "gemma4_unified_text"}}
    assert parse_config(unified) == parse_config(gemma4(GEMMA4_31B))


def test_of_gemma_4_only_proportional_rotations_leave_some_of_a_head() -> None:
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    window, whole = parse_config(gemma4({**GEMMA4_31B, "rope_parameters": ropes})).rotations
    assert (window.rotary_dim, whole.rotary_dim, whole.share) == (256, 512, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size_per_layer_input": "x"}, "hidden_size_per_layer_input is 'x'"),
        ({"hidden_size_per_layer_input": -8}, "-8 inputs are given for each layer"),
        (
            {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 1000},
            "vocab_size_per_layer_input is 1000",
        ),
        ({"num_kv_shared_layers": 60}, "60 of 60 layers are to attend others' keys"),
        ({"num_kv_shared_layers": -1}, "-1 of 60 layers"),
        ({"num_kv_shared_layers": 56}, "keys of others like them, and there are none"),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers is 'x'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_global_key_value_heads": 3}, "32 query heads cannot share 3"),
        ({"global_head_dim": 0}, "0 elements of a head"),
        ({"layer_types": ["sliding_attention"] * 3}, "3 of 60 layers"),
        ({"layer_types": "x"}, "layer_types is 'x'"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config is"),
        ({"per_layer_config": {"5": {"sliding_window": 9}}}, "per_layer_config is"),
        ({"per_layer_config": "x"}, "per_layer_config is 'x'"),
        ({"hidden_size": "x"}, "hidden_size is 'x'"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters is"),
    ],
)
def test_what_gemma_4_is_not_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config(gemma4({**GEMMA4_31B, **change}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp_multipliers": [1.0]}, "mlp.gate is"),
        ({"ssm_multipliers": [1.0, 2.0, "a", 1.0, 1.0]}, "recurrence.keys is 'a'"),
        ({"key_multiplier": -0.5}, "what attention.k makes is multiplied by -0.5"),
        ({"key_multiplier": float("nan")}, "attention.k is nan"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit is"),
    ],
)
def test_factors_that_are_none_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**FALCON_H1, **change})


def test_factors_of_what_goes_into_a_part_are_those_of_its_matrices() -> None:
    changes = {"ssm_in_multiplier": 2.0, "ssm_multipliers": [1.0, 0.5, 1.0, 1.0, 3.0]}
    found = parse_config({**FALCON_H1, **changes, "key_multiplier": 0.5})
    scanned = {"gate": 2.0, "keys": 2.0, "queries": 2.0, "a": 6.0}
    wanted = {f"recurrence.{name}": factor for name, factor in scanned.items()}
    assert dict(found.factors) == {"attention.k": 0.5, **wanted}
    assert found.num_attention_layers == found.num_recurrent_layers == 36


def mimo(**changes: Any) -> dict[str, Any]:
    path = bundled_path("mimo-v2-flash")
    assert path is not None
    return {**json.loads(path.read_text()), **changes}


def test_mimo_has_the_published_number_of_parameters_and_layers_of_two_kinds(
    tmp_path: Path,
) -> None:
    config = parse_config(mimo())
    assert round(count_parameters(config) / 1e9) == 309
    assert (config.heads(5), config.heads(6)) == ((4, 192), (8, 192))
    assert config.sliding_windows[:7] == (None, 129, 129, 129, 129, None, 129)
    assert (config.has_sinks(5), config.has_sinks(6), config.value_width) == (False, True, 128)
    whole, window = config.ropes[5], config.ropes[6]
    assert whole is not None and window is not None
    assert (whole.theta, window.theta) == (5e6, 1e4)
    assert whole.rotary_dim == window.rotary_dim == 64
    # As transformers writes it, too, which names layers and counts a token itself in its window.
    MiMoV2FlashConfig(max_position_embeddings=262_144).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "layer_types" in raw and "hybrid_layer_pattern" not in raw
    assert parse_config({**raw, "dtype": "bfloat16"}) == config


def step(**changes: Any) -> dict[str, Any]:
    path = bundled_path("step-3.5-flash")
    assert path is not None
    return {**json.loads(path.read_text()), **changes}


def test_step_has_the_published_number_of_parameters_and_layers_of_two_kinds() -> None:
    config = parse_config(step())
    assert round(count_parameters(config) / 1e9) == 197
    assert (config.query_heads(4), config.query_heads(5)) == (64, 96)
    assert config.heads(4) == config.heads(5) == (8, 128)
    assert config.sliding_windows[:6] == (None, 512, 512, 512, None, 512)
    whole, window = config.ropes[4], config.ropes[5]
    assert whole is not None and window is not None
    assert (whole.theta, whole.rotary_dim, whole.kind) == (5e6, 64, "llama3")
    assert (window.theta, window.rotary_dim, window.kind) == (1e4, 128, "default")
    assert config.experts is not None and [*config.experts.layers] == [False] * 3 + [True] * 42
    assert config.mlp_limits == (*[None] * 43, 16.0, 16.0)
    assert config.experts.limits == (*[None] * 43, 7.0, 7.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_other_setting": {"num_attention_groups": 4}}, "'num_attention_groups': 4"),
        ({"attention_other_setting": {"head_dim": 64}}, "'head_dim': 64"),
        ({"attention_other_setting": [96]}, "attention_other_setting is"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"rope_parameters": 5}, "rope_parameters is 5"),
        ({"rope_scaling": "llama3"}, "rope_parameters is 'llama3'"),
        ({"layer_types": [[1]] * 45}, "layer_types is"),
        ({"moe_layers_enum": "3-44"}, "0 of 45 layers say what MLP"),
        ({"mlp_layer_types": "sparse"}, "1 of 45 layers say what MLP"),
        ({"swiglu_limits": 7.0}, "swiglu_limits is 7.0"),
        ({"swiglu_limits_shared": {"43": 7.0}}, "swiglu_limits_shared is"),
        ({"attention_other_setting": {"num_attention_heads": 36}}, "36 query heads cannot be"),
        ({"num_attention_heads": 36}, "36 query heads cannot share 8"),
        ({"num_attention_heads": "x"}, "other_num_heads is 'x'"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types is"),
        ({"use_rope_layers": [True, False]}, "use_rope_layers is"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation is 'softmax'"),
        ({"zero_centered": False}, "zero_centered is False"),
        ({"layer_types": ["full_attention"]}, "1 attention windows are given for 45"),
        ({"layer_types": ["conv"] * 45}, "layer_types is"),
        ({"rope_theta": [1e4]}, "rope_theta is 'missing'"),
        ({"swiglu_limits": [0.1] * 45}, "a limit of 0.1"),
        ({"swiglu_limits": ["x"] * 45}, "limits is 'x'"),
        ({"swiglu_limits_shared": [7.0] * 3}, "3 limits of gates are given for 45"),
    ],
)
def test_what_step_is_not_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config(step(**change))


LAGUNA: dict[str, Any] = {
    "model_type": "laguna",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 100_352,
    "max_position_embeddings": 262_144,
    "gating": "per-head",
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
    "mlp_layer_types": ["dense", *["sparse"] * 39],
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "moe_routed_scaling_factor": 2.5,
    "sliding_window": 512,
    "tie_word_embeddings": False,
}
"""XS 2, of 33 billion parameters."""


def test_laguna_has_the_published_number_of_parameters_and_layers_of_two_kinds() -> None:
    config = parse_config(LAGUNA)
    assert round(count_parameters(config) / 1e9) == 33
    assert (config.query_heads(0), config.query_heads(1)) == (48, 64)
    assert (config.sliding_windows[0], config.sliding_windows[1]) == (None, 512)
    ropes = [rope.rotary_dim for rope in config.rotations]
    assert (config.attention_gates, config.gate_function, ropes) == ("heads", "softplus", [64, 128])
    alike = parse_config({**LAGUNA, "num_attention_heads_per_layer": [48] * 40, "gating": False})
    assert (alike.other_heads, alike.attention_gates) == (None, "apart")
    own = dict.fromkeys(("layer_types", "mlp_layer_types", "num_attention_heads_per_layer"))
    plain = parse_config({**LAGUNA, **own})
    assert (plain.other_heads, plain.num_window_layers) == (None, 0)
    assert plain.experts == config.experts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads_per_layer": [48, 64] * 3}, "only None is supported"),
        ({"num_attention_heads_per_layer": [48]}, "only None is supported"),
        ({"mlp_layer_types": "dense"}, "0 of 40 layers say what MLP"),
        ({"num_attention_heads_per_layer": [48, 64, 72, 64] * 10}, "only None is supported"),
        ({"num_attention_heads_per_layer": 48}, "only None is supported"),
        ({"num_attention_heads_per_layer": [48, 60] * 20}, "60 query heads cannot share 8"),
        ({"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping is 3.0"),
        ({"moe_apply_router_weight_on_input": True}, "weight_on_input is True"),
        ({"mlp_layer_types": ["dense"]}, "1 of 40 layers say what MLP"),
    ],
)
def test_what_laguna_is_not_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**LAGUNA, **change})


def test_lfm3_has_the_published_number_of_parameters_and_layers_of_three_kinds() -> None:
    """As a configuration that says nothing is read."""
    config = parse_config({"model_type": "lfm3"})
    assert round(count_parameters(config) / 1e9, 1) == 1.7
    kinds = [config.keeps_state(i) for i in range(5)], config.sliding_windows[:5]
    assert kinds == ([True, True, False, True, False], (None, None, None, None, 256))
    whole, window = config.ropes[2], config.ropes[4]
    assert whole is not None and window is not None and config.ropes[3] is None
    assert (whole.kind, whole.theta, whole.share) == ("proportional", 1e6, 0.5)
    assert (window.kind, window.theta, config.gate_function) == ("default", 1e4, "sigmoid")


def test_a_stage_has_the_limits_and_heads_of_its_layers() -> None:
    config = parse_config(step()).of_layers(range(40, 45))
    assert config.mlp_limits == (None, None, None, 16.0, 16.0)
    assert config.experts is not None
    assert config.experts.limits == (None, None, None, 7.0, 7.0)
    assert [config.query_heads(layer) for layer in range(5)] == [64, 96, 96, 96, 64]
    assert config.queries_per_key == pytest.approx((2 * 64 + 3 * 96) / 5 / 8)
    clips = [step for unit in build_programme(config).units for step in unit.steps]
    assert sum(isinstance(step, Clip) for step in clips) == 2 * 2 * (288 + 1)


@pytest.mark.parametrize("kinds", [[[1]], [{}], "conv", 5])
def test_senseless_layers_of_lfm3_are_refused(kinds: object) -> None:
    with pytest.raises(ModelError, match="layer_types is"):
        parse_config({"model_type": "lfm3", "layer_types": kinds})


def test_of_mimo_layers_that_see_all_may_have_sinks_too() -> None:
    config = parse_config(mimo(add_full_attention_sink_bias=True))
    assert config.has_sinks(0) and config.has_sinks(1)
    config = parse_config(
        mimo(add_swa_attention_sink_bias=False, v_head_dim=192, swa_v_head_dim=192)
    )
    assert not config.has_sinks(0) and not config.has_sinks(1)
    assert config.value_width is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim is 128"),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads is 32"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"hybrid_layer_pattern": [0, 1]}, "2 attention windows are given for 48"),
        ({"moe_layer_freq": [0, 1]}, "2 of 48 layers say what MLP"),
        ({"v_head_dim": 200, "swa_v_head_dim": 200}, "values are 200 wide, and the keys"),
        ({"v_head_dim": 0, "swa_v_head_dim": 0}, "values are 0 wide"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads is 'x'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is"),
    ],
)
def test_what_mimo_is_not_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config(mimo(**change))
