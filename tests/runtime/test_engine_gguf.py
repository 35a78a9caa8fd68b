"""GGUF files beside a config.json: tokens are those of transformers with what the file means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    Step3p7Config,
)

from freight.entrypoints.model_source import find_model
from freight.errors import ModelError
from freight.model.checkpoint import resolve
from freight.model.config import read_config
from freight.runtime import device

from . import gguf_files, tiny
from .gguf_files import write_gguf
from .test_engine_compressed import compress
from .test_engine_packed import NAMES, plain_tensors
from .test_engine_parity import vision
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 6
SIZES: dict[str, Any] = {
    **tiny.SIZES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "pad_token_id": None,
}
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 4,
    "routed_scaling_factor": 1.5,
}


KINDS = ["conv", "full_attention", "conv", "conv"]
STATES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def layers(count: int) -> dict[str, Any]:
    return {**SIZES, "num_hidden_layers": count}


def gemma4(**changes: Any) -> PretrainedConfig:
    """Every other layer sees all, with wider heads."""
    given: dict[str, Any] = {
        **layers(4),
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "pad_token_id": 0,
    }
    return Gemma4TextConfig(**{**given, **changes})


SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 128,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}
CONFIGS: dict[str, tuple[str, PretrainedConfig]] = {
    "llama": ("llama", LlamaConfig(**SIZES)),
    "llama, biases and tied head": (
        "llama",
        LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    ),
    "mistral": ("llama", MistralConfig(**SIZES, sliding_window=8)),
    "qwen2": ("qwen2", Qwen2Config(**SIZES)),
    "qwen3": ("qwen3", Qwen3Config(**SIZES, head_dim=128)),
    "mixtral": (
        "llama",
        MixtralConfig(
            **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, head_dim=64
        ),
    ),
    "qwen3_moe": (
        "qwen3moe",
        Qwen3MoeConfig(
            **SIZES,
            head_dim=64,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        ),
    ),
    "phi3": ("phi3", Phi3Config(**SIZES, sliding_window=None, tie_word_embeddings=False)),
    "gemma": ("gemma", GemmaConfig(**SIZES, head_dim=64)),
    "gemma2": ("gemma2", Gemma2Config(**SIZES, head_dim=128, sliding_window=8)),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **layers(8),
            head_dim=128,
            query_pre_attn_scalar=128,
            sliding_window=9,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "gemma4": ("gemma4", gemma4(num_global_key_value_heads=1, final_logit_softcapping=30.0)),
    "gemma4, experts": (
        "gemma4",
        gemma4(
            attention_k_eq_v=False,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=64,
        ),
    ),
    "gemma4, keys of others": (
        "gemma4",
        gemma4(
            **SMALL,
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            attention_k_eq_v=False,
        ),
    ),
    "gemma4, inputs of layers": ("gemma4", gemma4(**SMALL)),
    "gpt_oss": (
        "gpt-oss",
        GptOssConfig(
            **{**SIZES, "intermediate_size": 64},
            head_dim=64,
            sliding_window=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "qwen2_moe": (
        "qwen2moe",
        Qwen2MoeConfig(
            **SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=256,
        ),
    ),
    "qwen3_5": ("qwen35", Qwen3_5TextConfig(**layers(4), **STATES, head_dim=64)),
    "qwen3_5_moe": (
        "qwen35moe",
        Qwen3_5MoeTextConfig(
            **layers(4),
            **STATES,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=256,
        ),
    ),
    "qwen3_next": (
        "qwen3next",
        Qwen3NextConfig(
            **layers(4),
            **STATES,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=256,
        ),
    ),
    "lfm2": (
        "lfm2",
        Lfm2Config(**layers(4), layer_types=KINDS, block_auto_adjust_ff_dim=False, norm_eps=1e-5),
    ),
    "lfm2_moe": (
        "lfm2moe",
        Lfm2MoeConfig(
            **layers(4),
            layer_types=KINDS,
            norm_eps=1e-5,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        ),
    ),
    "granite_4": (
        "granitehybrid",
        GraniteMoeHybridConfig(
            **{**layers(4), "intermediate_size": 64},
            **FACTORS,
            layer_types=["linear_attention", "full_attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=256,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_state=16,
            position_embedding_type="nope",
        ),
    ),
    "laguna": (
        "laguna",
        LagunaConfig(
            **{**layers(4), "pad_token_id": 1},
            head_dim=64,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention"] * 2,
            num_attention_heads_per_layer=[4, 6, 4, 6],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=256,
        ),
    ),
    "deepseek_v3": (
        "deepseek2",
        DeepseekV3Config(
            **{**layers(3), "num_key_value_heads": 4},
            **EXPERTS,
            kv_lora_rank=128,
            q_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=64,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        ),
    ),
    "granite": ("granite", GraniteConfig(**SIZES, **FACTORS)),
    "granite_moe": (
        "granitemoe",
        GraniteMoeConfig(
            **{**SIZES, "intermediate_size": 64},
            **FACTORS,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "smollm3": ("smollm3", SmolLM3Config(**layers(4))),
    "glm4": ("glm4", Glm4Config(**SIZES, head_dim=64, attention_bias=True)),
    "glm4_moe": (
        "glm4moe",
        Glm4MoeConfig(**SIZES, **EXPERTS, head_dim=64, attention_bias=True, use_qk_norm=True),
    ),
    "dots1": ("dots1", Dots1Config(**SIZES, **EXPERTS, first_k_dense_replace=1)),
    "olmo": ("olmo", OlmoConfig(**SIZES, clip_qkv=0.75)),
    "olmo2": ("olmo2", Olmo2Config(**SIZES)),
    "olmo3": ("olmo2", Olmo3Config(**layers(4), sliding_window=8)),
    "olmoe": (
        "olmoe",
        OlmoeConfig(**{**SIZES, "intermediate_size": 64}, num_experts=4, num_experts_per_tok=2),
    ),
    "cohere": ("command-r", CohereConfig(**SIZES, logit_scale=0.25)),
    "cohere, norms of heads": (
        "command-r",
        CohereConfig(**SIZES, logit_scale=0.25, use_qk_norm=True),
    ),
    "cohere2": ("cohere2", Cohere2Config(**layers(4), logit_scale=0.25, sliding_window=8)),
    "seed_oss": ("seed_oss", SeedOssConfig(**SIZES, head_dim=64)),
    "ernie4_5": ("ernie4_5", Ernie4_5Config(**SIZES, head_dim=64)),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        Ernie4_5_MoeConfig(
            **layers(3), moe_num_experts=4, moe_k=2, moe_intermediate_size=64, use_bias=False
        ),
    ),
    "exaone4": ("exaone4", Exaone4Config(**layers(4), sliding_window=8)),
    "hunyuan": ("hunyuan-dense", HunYuanDenseV1Config(**SIZES, head_dim=64)),
    "nemotron": ("nemotron", NemotronConfig(**SIZES)),
    "arcee": ("arcee", ArceeConfig(**SIZES)),
    "starcoder2": ("starcoder2", Starcoder2Config(**SIZES, sliding_window=4096)),
    "stablelm": ("stablelm", StableLmConfig(**SIZES, use_qkv_bias=True)),
    "phi": ("phi2", PhiConfig(**SIZES)),
}


def mixed(name: str) -> Kind:
    """As in files of llama.cpp called Q4_K_M, more or less."""
    if "gate_inp" in name:
        return Kind.F32
    if "token_embd" in name or "output.weight" == name or "attn_v" in name:
        return Kind.Q6_K
    return Kind.Q4_K


def of(kind: Kind) -> Callable[[str], Kind]:
    return lambda _: kind


def prepare(
    directory: Path,
    name: str,
    kind_of: Callable[[str], Kind],
    describe: Callable[[Any], None] = lambda _: None,
    *,
    fuses: bool = False,
) -> list[list[int]]:
    """Write config.json and a GGUF file; the answers of transformers."""
    architecture, config = CONFIGS[name]
    model = tiny.make_model(directory, config=config)
    (directory / "model.safetensors").unlink()
    write_gguf(model, directory / "tiny.gguf", architecture, kind_of, describe, fuses=fuses)
    return tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))


def answer(directory: Path, kept: Path, **options: Any) -> list[list[int]]:
    own = find_model(str(directory))
    with tiny.engine(own, PROMPTS[:5], STEPS, **options, compressed_dir=kept) as engine:
        return tiny.run(engine, PROMPTS[:5], STEPS)


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(name: str, tmp_path: Path) -> None:
    answers = prepare(tmp_path, name, mixed)
    for options in (tiny.ON_CPU, tiny.ON_SIM):
        if "keys of others" in name:
            options = tiny.with_keys_near(options)
        assert answer(tmp_path, tmp_path / "kept", **options) == answers


@pytest.mark.parametrize(
    "kind",
    [
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"),
        *("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
        *("IQ3_XXS", "IQ3_S"),
    ],
)
def test_types(kind: str, tmp_path: Path) -> None:
    answers = prepare(tmp_path, "llama", of(Kind[kind]))
    assert answer(tmp_path, tmp_path / "kept", **tiny.ON_SIM) == answers


@pytest.mark.parametrize("is_older", [False, True])
def test_minicpm(is_older: bool, tmp_path: Path) -> None:
    """Granite's factors, by which scores are scaled as usual; without them, those of all models."""
    width = SIZES["hidden_size"]
    factors = {**FACTORS, "attention_multiplier": (width / SIZES["num_attention_heads"]) ** -0.5}
    if is_older:
        factors |= {"embedding_multiplier": 12.0, "logits_scaling": width / 256}
        factors["residual_multiplier"] = 1.4 / SIZES["num_hidden_layers"] ** 0.5
    model = tiny.make_model(tmp_path, config=GraniteConfig(**SIZES, **factors))
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()

    def forget(writer: Any) -> None:
        for name in ("embedding_scale", "residual_scale", "logit_scale"):
            del writer.kv_data[0][f"minicpm.{name}"]

    describe = forget if is_older else lambda _: None
    write_gguf(model, tmp_path / "tiny.gguf", "minicpm", mixed, describe)
    found = read_config(find_model(str(tmp_path)))
    assert found.residual_scale == pytest.approx(factors["residual_multiplier"])
    assert found.logits_scale == pytest.approx(1 / factors["logits_scaling"])
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    assert answer(tmp_path, tmp_path / "kept", **tiny.ON_CPU) == answers


def write_step(directory: Path) -> PreTrainedModel:
    """The part that reads, alone; lists go on for a layer that guesses."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    whole = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    whole |= {"original_max_position_embeddings": 32, "rope_theta": 5e3}
    config = Step3p7Config(
        text_config={
            **layers(3),
            "pad_token_id": 1,
            "head_dim": 64,
            "layer_types": kinds,
            "moe_intermediate_size": 64,
            "moe_router_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_sliding_attention_heads": 6,
            "rope_parameters": {
                "full_attention": {**whole, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "share_expert_dim": 256,
            "sliding_window": 9,
            "swiglu_limits": [None, None, 0.4],
            "swiglu_limits_shared": [0.5, 0.4, None],
        },
        vision_config=vision(),
    )
    model = tiny.make_model(directory, config=config)
    for name in ("model.safetensors", "config.json"):
        (directory / name).unlink()
    return write_gguf(model, directory / "tiny.gguf", "step35", mixed)


def test_step(tmp_path: Path) -> None:
    model = write_step(tmp_path)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    for options in (tiny.ON_CPU, tiny.ON_SIM):
        assert answer(tmp_path, tmp_path / "kept", **options) == answers


def test_factors_for_more_than_is_rotated_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older converters wrote them for whole heads: those that turn half of one are others."""

    def of_whole_heads(own: Any, width: int) -> Any:
        return np.full(width // 2, 2.0, np.float32)

    monkeypatch.setattr(gguf_files, "_llama3_factors", of_whole_heads)
    write_step(tmp_path)
    with pytest.raises(ModelError, match="short_factor has 32 entries, it needs 16"):
        read_config(find_model(str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["llama, biases and tied head", "mixtral", "gpt_oss", "gemma4", "qwen3_next"]
)
def test_what_lies_together(name: str, tmp_path: Path) -> None:
    def kind_of(tensor: str) -> Kind:
        return Kind.F32 if tensor.endswith("ffn_gate_inp_shexp.weight") else Kind.Q8_0

    answers = prepare(tmp_path, name, kind_of, fuses=True)
    assert answer(tmp_path, tmp_path / "kept", **tiny.ON_CPU) == answers


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published."""
    answers = prepare(tmp_path, "gpt_oss", lambda name: Kind.MXFP4 if "exps" in name else Kind.Q8_0)
    for options in (tiny.ON_CPU, tiny.ON_SIM):
        assert answer(tmp_path, tmp_path / "kept", **options) == answers


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_what_is_not_quantised_can_be_compressed(kind: str, tmp_path: Path) -> None:
    """Rows that are woven in the file are put in order first."""
    architecture, config = CONFIGS["llama, biases and tied head"]
    model = tiny.make_model(tmp_path, config=config)
    (tmp_path / "model.safetensors").unlink()
    write_gguf(model, tmp_path / "tiny.gguf", architecture, of(Kind[kind]))
    answers = tiny.tokens(tiny.reference(compress(model, 4, 64), PROMPTS[:5], STEPS))
    assert answer(tmp_path, tmp_path / "kept", **tiny.ON_SIM, weight_bits=4) == answers


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_short_exponents_where_there_is_bfloat16(kind: str, tmp_path: Path) -> None:
    """Woven rows, too; of F16 these are put in order, and nothing else is made."""
    answers = prepare(tmp_path, "llama, biases and tied head", of(Kind[kind]))
    options = {**tiny.ON_SIM, "lossless": True, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        kept = engine.plan.layout.compressed
        assert ("layers.0.attention.q" in kept) == (kind == "BF16") == bool(kept)
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def test_what_is_not_quantised_can_be_made_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of the same weights in safetensors."""
    monkeypatch.setattr(device, "computes_int8", lambda dtype: True)
    architecture, config = CONFIGS["llama, biases and tied head"]
    model = tiny.make_model(tmp_path, config=config)
    options = {**tiny.ON_SIM, "compute": "int8"}
    answers = answer(tmp_path, tmp_path / "kept", **options)
    (tmp_path / "model.safetensors").unlink()
    write_gguf(model, tmp_path / "tiny.gguf", architecture, of(Kind.F32))
    assert answer(tmp_path, tmp_path / "kept", **options) == answers


@pytest.fixture(scope="module")
def mixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def mixed_tokens(mixed_dir: Path) -> list[list[int]]:
    return prepare(mixed_dir, "llama, biases and tied head", mixed)


@pytest.mark.parametrize(
    "name",
    [
        "cpu: all in memory",
        "cpu: all on disk",
        "cpu: odd mix, K=5",
        "sim: all on the device",
        "sim: weights on cpu",
        "sim: weights on disk",
        "sim: odd mix, K=7",
    ],
)
def test_same_tokens_wherever_the_compressed_table_lies(
    name: str, mixed_dir: Path, mixed_tokens: list[list[int]]
) -> None:
    assert answer(mixed_dir, mixed_dir / "kept", **POLICIES[name]) == mixed_tokens


def add_tokens(writer: Any) -> None:
    writer.add_token_list([str(number) for number in range(tiny.VOCAB)])


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_values_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """The reader of transformers, which nobody here wrote, finds the same values in the file."""
    prepare(tmp_path, architecture, mixed, describe=add_tokens)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    found = plain_tensors(tmp_path, tmp_path / "kept")
    assert torch.equal(found["embedding"], theirs.model.embed_tokens.weight)
    for layer, block in enumerate(theirs.model.layers):
        for own, name in NAMES.items():
            assert torch.equal(found[f"layers.{layer}.{own}"], block.get_submodule(name).weight)
        if architecture == "gemma2":
            wanted = block.post_feedforward_layernorm.weight
            assert torch.equal(found[f"layers.{layer}.mlp.post_norm"], wanted)


def test_groups_of_two_heads_are_refused(tmp_path: Path) -> None:
    """Of heads that keep a state, in another order."""
    config = Qwen3_5TextConfig(**layers(4), **{**STATES, "linear_value_head_dim": 16}, head_dim=64)
    model = tiny.make_model(tmp_path, config=config)
    (tmp_path / "model.safetensors").unlink()
    write_gguf(model, tmp_path / "tiny.gguf", "qwen35", of(Kind.Q8_0))
    with pytest.raises(
        ModelError, match=r"recurrence\.out has groups of 32 columns, and heads of 16"
    ):
        resolve(read_config(tmp_path), tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "cut short: its header asks for"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "damaged, cut short"),
        (lambda path: path.write_bytes(b""), "damaged, cut short"),
        (lambda path: path.write_bytes(b"GGML" + path.read_bytes()[4:]), "not begin with GGUF"),
        (
            lambda path: path.write_bytes(b"GGUF\x00\x00\x00\x03" + path.read_bytes()[8:]),
            "its version is",
        ),
        (lambda path: path.with_name("b.gguf").touch(), "2 GGUF files"),
    ],
)
def test_damaged_files_are_refused(
    spoil: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    prepare(tmp_path, "llama", of(Kind.Q8_0))
    spoil(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError) as caught:
        resolve(read_config(tmp_path), tmp_path)
    assert words in str(caught.value)


def test_other_types_and_models_are_named(tmp_path: Path) -> None:
    prepare(tmp_path, "qwen2", lambda name: Kind.TQ2_0 if "ffn_up" in name else Kind.Q8_0)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight is of type TQ2_0, which is not"):
        resolve(read_config(tmp_path), tmp_path)
    CONFIGS["llama"][1].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="It holds a model of architecture qwen2"):
        resolve(read_config(tmp_path), tmp_path)
