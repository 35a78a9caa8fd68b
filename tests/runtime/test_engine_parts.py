"""Models that also see or hear: the decoder answers rows of text, as the whole model does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Cohere2Config,
    Lfm2Config,
    Lfm3Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig

from freight.errors import ModelError
from freight.model.config import parse_config, read_config
from freight.model.decoder import count_parameters
from freight.model.families import FAMILIES, PARTS

from . import tiny

SIZES = tiny.SIZES
STEPS = 5
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GLM_VISION: dict[str, Any] = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
SIGLIP: dict[str, Any] = {**VISION, "model_type": "siglip_vision_model"}
SIGLIP_2: dict[str, Any] = {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16}
CLIP: dict[str, Any] = {**VISION, "model_type": "clip_vision_model"}
MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "mrope_section": [2, 3, 3],
}
HALF: dict[str, Any] = {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class Whole:
    """``family`` is that of the decoder, ``scale`` what transformers leaves out of its logits."""

    kind: str
    family: str
    text: PretrainedConfig
    vision: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0


def cohere2() -> Cohere2Config:
    kinds = ["sliding_attention", "full_attention"]
    return Cohere2Config(**SIZES, sliding_window=9, layer_types=kinds, pad_token_id=0)


def llama() -> LlamaConfig:
    return LlamaConfig(**SIZES, pad_token_id=0)


def qwen3_5() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    )


WHOLES: dict[str, Whole] = {
    # Cohere's own decoder scales its logits; vLLM does so here, too.
    "AyaVisionForConditionalGeneration": Whole(
        "aya_vision", "cohere2", cohere2(), SIGLIP, scale=0.0625
    ),
    "Cohere2VisionForConditionalGeneration": Whole(
        "cohere2_vision", "cohere2", cohere2(), SIGLIP, scale=0.0625
    ),
    "DeepseekVLForConditionalGeneration": Whole("deepseek_vl", "llama", llama(), SIGLIP),
    "Glm46VForConditionalGeneration": Whole(
        "glm46v",
        "glm4v_text",
        Glm4vTextConfig(**SIZES, rope_parameters=HALF, pad_token_id=0),
        {**GLM_VISION, "model_type": "glm4v_vision"},
    ),
    "Glm4vForConditionalGeneration": Whole(
        "glm4v",
        "glm4v_text",
        Glm4vTextConfig(**SIZES, rope_parameters=HALF, pad_token_id=0),
        GLM_VISION,
    ),
    "Glm4vMoeForConditionalGeneration": Whole(
        "glm4v_moe",
        "glm4v_moe_text",
        Glm4vMoeTextConfig(
            **{**SIZES, "num_hidden_layers": 3},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            rope_parameters=HALF,
            pad_token_id=0,
        ),
        GLM_VISION,
    ),
    "Idefics2ForConditionalGeneration": Whole(
        "idefics2",
        "mistral",
        MistralConfig(**SIZES, sliding_window=None, pad_token_id=0),
        VISION,
        {
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            }
        },
    ),
    "Idefics3ForConditionalGeneration": Whole(
        "idefics3", "llama", llama(), VISION, {"scale_factor": 2, "pad_token_id": 0}
    ),
    "InternVLForConditionalGeneration": Whole(
        "internvl",
        "qwen3",
        Qwen3Config(**SIZES, head_dim=16),
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        {"tie_word_embeddings": False},
    ),
    "Lfm2VlForConditionalGeneration": Whole(
        "lfm2_vl",
        "lfm2",
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_multiple_of=8),
        SIGLIP_2,
    ),
    "Lfm3VlForConditionalGeneration": Whole(
        "lfm3_vl",
        "lfm3",
        Lfm3Config(**{**SIZES, "num_hidden_layers": 5}, sliding_window=9, pad_token_id=1),
        SIGLIP_2,
    ),
    "LlavaForConditionalGeneration": Whole("llava", "llama", llama(), CLIP),
    "LlavaNextForConditionalGeneration": Whole(
        "llava_next", "mistral", MistralConfig(**SIZES, sliding_window=None), CLIP
    ),
    "LlavaOnevisionForConditionalGeneration": Whole(
        "llava_onevision", "qwen2", Qwen2Config(**SIZES), SIGLIP
    ),
    "MiniCPMV4_6ForConditionalGeneration": Whole(
        "minicpmv4_6", "qwen3_5", qwen3_5(), {**VISION, "model_type": "minicpmv4_6_vision"}
    ),
    "MiniCPMV4_7ForConditionalGeneration": Whole(
        "minicpmv4_7", "qwen3_5", qwen3_5(), {**VISION, "model_type": "minicpmv4_7_vision"}
    ),
    "Ovis2ForConditionalGeneration": Whole(
        "ovis2",
        "qwen2",
        Qwen2Config(**SIZES),
        {**VISION, "vocab_size": 40, "num_visual_indicator_tokens": 2},
        {"tie_word_embeddings": False, "hidden_size": 64, "vocab_size": tiny.VOCAB},
    ),
    "SmolVLMForConditionalGeneration": Whole(
        "smolvlm", "llama", llama(), VISION, {"scale_factor": 2, "pad_token_id": 0}
    ),
    "VideoLlama3ForConditionalGeneration": Whole(
        "video_llama_3", "qwen2", Qwen2Config(**SIZES), VISION
    ),
    "VipLlavaForConditionalGeneration": Whole(
        "vipllava", "llama", llama(), CLIP, {"vision_feature_layers": [-1]}
    ),
}
HEARING: dict[str, Any] = {
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "output_dim": 64,
        "downsample_hidden_size": 8,
        "num_mel_bins": 16,
    }
}
OMNI_VISION: dict[str, Any] = {
    **GLM_VISION,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
QWEN2_5_OMNI = Whole(
    "qwen2_5_omni",
    "qwen2",
    Qwen2_5OmniTextConfig(**SIZES, rope_parameters=MROPE),
    OMNI_VISION,
    HEARING,
)
OMNI: dict[str, Whole] = {
    "Qwen2_5OmniForConditionalGeneration": QWEN2_5_OMNI,
    "Qwen2_5OmniModel": QWEN2_5_OMNI,
    "Qwen3OmniMoeForConditionalGeneration": Whole(
        "qwen3_omni_moe",
        "qwen3_moe",
        Qwen3OmniMoeTextConfig(
            **SIZES,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            rope_parameters=MROPE,
        ),
        OMNI_VISION,
        HEARING,
    ),
}


def compare(
    directory: Path, prompts: list[list[int]], answers: list[tiny.Answer], scale: float = 1.0
) -> None:
    with tiny.engine(directory, prompts, STEPS, **tiny.ON_CPU) as engine:
        captured = tiny.capture_logits(engine)
        assert tiny.run(engine, prompts, STEPS) == tiny.tokens(answers)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mine = torch.stack([captured[row, len(prompt) + step] for step in range(STEPS)])
        torch.testing.assert_close(mine, answer.logits * scale, rtol=0, atol=1e-4)


def rename(directory: Path, prefix: str) -> None:
    """All tensors behind a prefix, as where the decoder is one part of several."""
    path = directory / "model.safetensors"
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def test_each_is_held_against_a_whole_model() -> None:
    assert {*PARTS} == {*WHOLES, *OMNI, "InternVLChatModel"}
    assert not {own for family in FAMILIES.values() for own in family.architectures} & {*PARTS}


@pytest.mark.parametrize("name", WHOLES)
def test_the_part_that_reads(name: str, tmp_path: Path) -> None:
    own = WHOLES[name]
    raw: dict[str, Any] = {"architectures": [name], "model_type": own.kind, **own.more}
    raw |= {"text_config": own.text.to_dict(), "vision_config": own.vision}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = tiny.make_model(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
    assert read_config(tmp_path).family == own.family
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS), own.scale)


@pytest.mark.parametrize("name", OMNI)
def test_the_part_that_thinks(name: str, tmp_path: Path) -> None:
    """Of a model that also hears and speaks; its tensors have the thinker's prefix."""
    own = OMNI[name]
    parts = {"text_config": own.text.to_dict(), "vision_config": own.vision, **own.more}
    thinker = {"model_type": f"{own.kind}_thinker", "tie_word_embeddings": False, **parts}
    (tmp_path / "config.json").write_text(json.dumps(thinker))
    model = tiny.make_model(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
    rename(tmp_path, "thinker.")
    raw = {"architectures": [name], "model_type": own.kind, "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).family == own.family
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS))


def test_intern_vl_as_its_makers_publish_it(tmp_path: Path) -> None:
    """transformers has it by another name: here the decoder stands for the whole."""
    text = Qwen3Config(**SIZES, head_dim=16)
    model = tiny.make_model(tmp_path, config=text)
    rename(tmp_path, "language_model.")
    raw = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
    raw |= {"llm_config": text.to_dict(), "vision_config": VISION}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).family == "qwen3"
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS))


def test_what_the_whole_says_of_all_holds_for_its_part() -> None:
    text = LlamaConfig(**SIZES).to_dict()
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    packed = {"quant_method": "fp8", "fmt": "e4m3"}
    config = parse_config({**raw, "quantization_config": packed, "tie_word_embeddings": True})
    assert config.packing is not None and config.tied_embeddings
    config = parse_config(raw)
    assert config.packing is None and not config.tied_embeddings


def test_what_a_part_switches_off_is_off() -> None:
    """As in Pixtral's decoder: null is no number that was left out."""
    raw: dict[str, Any] = {"architectures": ["LlavaForConditionalGeneration"]}
    text = {"model_type": "mistral", "sliding_window": None}
    assert not any(parse_config({**raw, "text_config": text}).sliding_windows)
    assert any(parse_config({**raw, "text_config": {"model_type": "mistral"}}).sliding_windows)
    both = {**raw, "sliding_window": 64, "text_config": text}
    assert set(parse_config(both).sliding_windows) == {64}


@pytest.mark.parametrize(("whole", "part"), [(True, False), (False, True), (None, True)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_whether_the_head_is_the_embedding_the_checkpoint_shows(
    whole: bool | None, part: bool, is_tied: bool, tmp_path: Path
) -> None:
    """Whole and part contradict each other where one was left as its class has it."""
    text = Qwen2Config(**SIZES, tie_word_embeddings=is_tied)
    model = tiny.make_model(tmp_path, config=text)
    rename(tmp_path, "language_model.")
    raw: dict[str, Any] = {"architectures": ["LlavaOnevisionForConditionalGeneration"]}
    raw["text_config"] = {**text.to_dict(), "tie_word_embeddings": part}
    raw |= {} if whole is None else {"tie_word_embeddings": whole}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).tied_embeddings == is_tied
    prompts = tiny.prompts(4, 40)
    compare(tmp_path, prompts, tiny.reference(model, prompts, STEPS))


def test_a_head_that_repeats_the_embedding_is_that(tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=Qwen2Config(**SIZES, tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    for change, is_tied in ((0.0, True), (1.0, False)):
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += change
        path = tmp_path / "model.safetensors"
        save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})
        assert read_config(tmp_path).tied_embeddings == is_tied


def test_what_a_part_leaves_out_is_what_its_class_has() -> None:
    """As LLaVA 1.5 was published: of a part what is as always is not written."""
    text = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    }
    raw = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    config = parse_config({**raw, "torch_dtype": "float16", "text_config": text})
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (4096, 32, 32064)
    assert config.dtype == "float16" and config.norm_eps == 1e-05
    assert count_parameters(config) == pytest.approx(6.74e9, rel=0.01)
    for kind, own in (("mistral", MistralConfig()), ("qwen2", Qwen2Config())):
        config = parse_config({**raw, "text_config": {"model_type": kind}})
        assert config.hidden_size == own.hidden_size and config.vocab_size == own.vocab_size
        assert config.intermediate_size == own.intermediate_size
        assert config.num_kv_heads == own.num_key_value_heads
        assert config.num_layers == own.num_hidden_layers
    with pytest.raises(ModelError, match="hidden_size is missing"):
        parse_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "of architecture LlavaForConditionalGeneration"),
        ({"model_type": "unheard_of"}, "of no architecture and model_type 'unheard_of'"),
        ({"architectures": ["BertLMHeadModel"]}, "architecture BertLMHeadModel"),
    ],
)
def test_parts_that_nobody_knows(text: object, words: str) -> None:
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    with pytest.raises(ModelError, match=words):
        parse_config(raw)
