"""Adapters beside a model: PEFT's own answers, with the adapter added as it runs, under every kind
of policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

from freight.entrypoints.adapter_model import directory_with_adapter
from freight.entrypoints.model_source import find_model
from freight.errors import InputError, ModelError
from freight.model.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from freight.model.checkpoint import resolve
from freight.model.config import read_config
from freight.runtime.compressed_files import compressed_sources

from . import tiny
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 5

# Of the two libraries beside each other, whose versions are others than either was made for.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, by its configuration or by what is different of the tiny Llama, and how its adapter
    was trained."""

    config: Callable[[], PretrainedConfig] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

CASES = {
    "attention": Case(adapter={"target_modules": ["q_proj", "v_proj"]}),
    "all": Case(adapter={"target_modules": "all-linear"}),
    "rslora": Case(adapter={"target_modules": ATTENTION, "use_rslora": True}),
    "dora": Case(adapter={"target_modules": [*ATTENTION, *MLP], "use_dora": True}),
    "patterns": Case(
        adapter={
            "target_modules": [*ATTENTION, *MLP],
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, "down_proj": 11},
        }
    ),
    "head": Case(adapter={"target_modules": ["q_proj", "lm_head"]}),
    "tied head": Case(
        model={"tie_word_embeddings": True}, adapter={"target_modules": ["q_proj", "lm_head"]}
    ),
    "table": Case(adapter={"target_modules": ["q_proj", "embed_tokens"]}),
    "tied table": Case(
        model={"tie_word_embeddings": True}, adapter={"target_modules": ["q_proj", "embed_tokens"]}
    ),
    "saved": Case(
        adapter={"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    ),
    "saved table": Case(
        adapter={"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]}
    ),
    "saved norms": Case(adapter={"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "biases": Case(
        config=lambda: Qwen2Config(**SMALL),
        adapter={"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    ),
    "turned": Case(
        config=lambda: GPT2Config(
            vocab_size=tiny.VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256
        ),
        adapter={"target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
    "fused": Case(
        config=lambda: Phi3Config(**SMALL, pad_token_id=0),
        adapter={"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    ),
    "multiquery": Case(
        config=lambda: FalconConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            multi_query=True,
            new_decoder_architecture=False,
            parallel_attn=True,
            bias=False,
        ),
        adapter={"target_modules": ["query_key_value", "dense_h_to_4h"]},
    ),
    "opt": Case(
        config=lambda: OPTConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            max_position_embeddings=256,
        ),
        adapter={"target_modules": ["q_proj", "v_proj", "fc1"]},
    ),
    "latents": Case(
        config=lambda: DeepseekV3Config(
            vocab_size=tiny.VOCAB,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            first_k_dense_replace=2,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        ),
        adapter={"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"]},
    ),
    "experts": Case(
        config=lambda: MixtralConfig(**SMALL, num_local_experts=6),
        adapter={"target_modules": ["q_proj", "v_proj"]},
    ),
}


def train(directory: Path, case: Case) -> PeftModel:
    """A model in ``directory``/base and a random adapter beside it, together as PEFT runs them."""
    config = None if case.config is None else case.config()
    model = tiny.make_model(directory / "base", config=config, **case.model)
    own = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **case.adapter}
    model.config.name_or_path = str(directory / "base")
    model.name_or_path = str(directory / "base")
    peft = get_peft_model(model, LoraConfig(**own))
    randomise(peft)
    peft.save_pretrained(directory / "adapter")
    return peft.eval()


def randomise(peft: PeftModel) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif parameter.requires_grad:
                parameter.normal_(mean=float("norm" in name), std=0.1)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_peft(name: str, tmp_path: Path) -> None:
    peft = train(tmp_path, CASES[name])
    expected = tiny.reference(peft, PROMPTS, STEPS)
    with peft.disable_adapter():
        plain = tiny.reference(peft, PROMPTS[:1], 1)[0]
    assert (plain.logits[0] - expected[0].logits[0]).abs().max() > 0.05
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    with tiny.engine(together, PROMPTS, STEPS) as engine:
        captured = tiny.capture_logits(engine)
        assert tiny.run(engine, PROMPTS, STEPS) == tiny.tokens(expected)
    for row, answer in enumerate(expected):
        for step in range(STEPS):
            found = captured[row, len(PROMPTS[row]) + step]
            torch.testing.assert_close(found, answer.logits[step], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_that_were_added(is_tied: bool, tmp_path: Path) -> None:
    """With an adapter that has the larger embedding whole, as PEFT saves it."""
    model = tiny.make_model(tmp_path / "base", tie_word_embeddings=is_tied)
    model.name_or_path = str(tmp_path / "base")
    model.resize_token_embeddings(tiny.VOCAB + 5, mean_resizing=False)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    randomise(peft)
    peft.save_pretrained(tmp_path / "adapter")
    prompts = [[tiny.VOCAB + 4, 3, tiny.VOCAB], *PROMPTS[:3]]
    expected = tiny.tokens(tiny.reference(peft.eval(), prompts, STEPS))
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    assert read_config(together).tied_embeddings == is_tied
    with tiny.engine(together, prompts, STEPS) as engine:
        assert tiny.run(engine, prompts, STEPS) == expected


def test_a_trained_table_for_more_tokens(tmp_path: Path) -> None:
    """Of a head that is the embedding: it has the new tokens, and nothing of what is added."""
    model = tiny.make_model(tmp_path / "base", tie_word_embeddings=True)
    model.name_or_path = str(tmp_path / "base")
    model.resize_token_embeddings(tiny.VOCAB + 5, mean_resizing=False)
    own = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    peft = get_peft_model(model, own)
    randomise(peft)
    peft.save_pretrained(tmp_path / "adapter")
    prompts = [[tiny.VOCAB + 4, 3, tiny.VOCAB], *PROMPTS[:3]]
    expected = tiny.tokens(tiny.reference(peft.eval(), prompts, STEPS))
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    with tiny.engine(together, prompts, STEPS) as engine:
        assert tiny.run(engine, prompts, STEPS) == expected


def kept_values(together: Path, directory: Path, name: str) -> torch.Tensor:
    """What a run reads of a tensor, flat."""
    config = read_config(together)
    sources = resolve(config, together)
    kept = compressed_sources(config, sources, None, directory=directory, say=lambda _: None)
    place = kept[name]
    with place.path.open("rb") as file:
        file.seek(place.offset)
        raw = bytearray(file.read(place.num_bytes))
    return torch.frombuffer(raw, dtype=getattr(torch, place.dtype))


def test_tables_that_are_there_as_they_were_and_as_they_were_trained(tmp_path: Path) -> None:
    """In another type, which is another place in the file."""
    tiny.make_model(tmp_path / "base", dtype=torch.bfloat16)
    name = "base_model.model.model.embed_tokens"
    trained, before = torch.randn(tiny.VOCAB, 64), torch.zeros(tiny.VOCAB, 64).bfloat16()
    for own, kind in ((trained, "float32"), (trained.bfloat16(), "bfloat16")):
        tensors = {
            f"{name}.modules_to_save.weight": own,
            f"{name}.original_module.weight": before,
            f"{name}.weight": own.clone(),
        }
        write_adapter(tmp_path / kind, tensors)
        together = directory_with_adapter(tmp_path / "base", tmp_path / kind)
        found = kept_values(together, tmp_path / "kept", "embedding")
        assert torch.equal(found, trained.bfloat16().flatten()), kind


def test_experts_that_it_has_whole(tmp_path: Path) -> None:
    """Stacked, and in another type than those that they stand for."""
    config = GptOssConfig(
        **{**SMALL, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    model = tiny.make_model(tmp_path / "base", config=config)
    tensors = {}
    with torch.no_grad():
        for name, own in model.named_parameters():
            if ".layers.1.mlp.experts." in name:
                own.copy_((own + 0.1 * torch.randn_like(own)).bfloat16())
                tensors[f"base_model.model.{name}"] = own.bfloat16()
    assert len(tensors) == 4
    write_adapter(tmp_path / "adapter", tensors)
    expected = tiny.tokens(tiny.reference(model, PROMPTS, STEPS))
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    with tiny.engine(together, PROMPTS, STEPS) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == expected


def test_square_matrices_lie_as_the_model_has_them(tmp_path: Path) -> None:
    """Whatever an adapter says of others."""
    peft = train(tmp_path, Case(adapter={"target_modules": ["q_proj", "o_proj"]}))
    path = tmp_path / "adapter" / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "fan_in_fan_out": True}))
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    with tiny.engine(together, PROMPTS, STEPS) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == tiny.tokens(tiny.reference(peft, PROMPTS, STEPS))


def test_what_is_kept_follows_the_scale(tmp_path: Path) -> None:
    """Also where a matrix is turned after the sum is made."""
    train(tmp_path, CASES["turned"])
    path, found = tmp_path / "adapter" / ADAPTER_CONFIG, []
    for alpha in (6, 9, 6):
        path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": alpha}))
        together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
        found.append(kept_values(together, tmp_path / "kept", "layers.0.attention.q"))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_sums_that_are_no_numbers(tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "base")
    for number in (torch.nan, 1e38):
        write_adapter(tmp_path / "adapter", {name: own * number for name, own in PAIR.items()})
        together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
        with pytest.raises(ModelError, match="makes numbers that are infinite, or none"):
            kept_values(together, tmp_path / "kept", "layers.0.attention.q")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftModel]:
    directory = tmp_path_factory.mktemp("adapter")
    return directory, train(directory, CASES["all"])


@pytest.mark.parametrize("name", ["cpu: odd mix", "cpu: all on disk", "sim: odd mix"])
def test_policies_change_nothing(name: str, trained: tuple[Path, PeftModel]) -> None:
    directory, peft = trained
    expected = tiny.tokens(tiny.reference(peft, PROMPTS, STEPS))
    together = directory_with_adapter(directory / "base", directory / "adapter")
    with tiny.engine(together, PROMPTS, STEPS, **POLICIES[name]) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == expected


@pytest.mark.parametrize(
    "options",
    [{"weight_bits": 4, "group_size": 32}, {"weight_bits": 8}, {"compute": "int8"}],
    ids=["4 bits", "8 bits", "int8"],
)
def test_compressed_weights_have_it(
    options: Mapping[str, Any], trained: tuple[Path, PeftModel], tmp_path: Path
) -> None:
    """As those of the model into which it was merged."""
    directory, _ = trained
    base = AutoModelForCausalLM.from_pretrained(directory / "base")
    merged = PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path)
    together = directory_with_adapter(directory / "base", directory / "adapter")
    found = []
    for model_dir in (together, tmp_path):
        with tiny.engine(model_dir, PROMPTS, STEPS, disk_dir=tmp_path, **options) as engine:
            found.append(tiny.run(engine, PROMPTS, STEPS))
    assert found[0] == found[1]


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    """Of weights of 16 bits, and what an adapter has saved in 32 becomes what it stands for."""
    case = CASES["saved norms"]
    train(tmp_path, case)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    own = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    base = load_file(tmp_path / "narrow" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    down, up = (own[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    summed = base[f"{name}.weight"].float() + 6 / 4 * (up @ down)
    together = directory_with_adapter(tmp_path / "narrow", tmp_path / "adapter")
    sources = resolve(read_config(together), together)
    kept = compressed_sources(
        read_config(together), sources, None, directory=tmp_path / "kept", say=lambda _: None
    )
    expected = {
        "layers.1.attention.q": summed.bfloat16(),
        "head.norm": own["base_model.model.model.norm.weight"].bfloat16(),
    }
    for logical, values in expected.items():
        place = kept[logical]
        with place.path.open("rb") as file:
            file.seek(place.offset)
            raw = bytearray(file.read(place.num_bytes))
        found = torch.frombuffer(raw, dtype=torch.bfloat16).view(values.shape)
        assert torch.equal(found, values), logical


def test_experts_of_a_checkpoint_that_names_each(tmp_path: Path) -> None:
    """As adapters were trained whose experts were modules of their own."""
    model = tiny.make_model(tmp_path / "base", config=CASES["experts"].config())  # type: ignore[misc]
    path = tmp_path / "base" / "model.safetensors"
    base = load_file(path)
    generator = torch.Generator().manual_seed(3)
    adapter, changed = {}, dict(base)
    for layer, expert, part in ((0, 1, "w1"), (0, 3, "w2"), (2, 0, "w3")):
        module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
        rows, columns = base[f"{module}.weight"].shape
        down = 0.2 * torch.randn(3, columns, generator=generator)
        up = 0.2 * torch.randn(rows, 3, generator=generator)
        adapter[f"base_model.model.{module}.lora_A.weight"] = down
        adapter[f"base_model.model.{module}.lora_B.weight"] = up
        changed[f"{module}.weight"] = base[f"{module}.weight"] + 2.0 * up @ down
    write_adapter(tmp_path / "adapter", adapter, lora_alpha=6)
    model.save_pretrained(tmp_path / "merged")
    save_file(changed, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    expected = tiny.tokens(tiny.reference(merged, PROMPTS, STEPS))
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    with tiny.engine(together, PROMPTS, STEPS) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == expected


def write_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], **said: Any) -> None:
    directory.mkdir(exist_ok=True)
    own = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, **said}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(own))
    save_file(dict(tensors), directory / ADAPTER_WEIGHTS)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{Q}.lora_A.weight": torch.ones(3, 64), f"{Q}.lora_B.weight": torch.ones(64, 3)}


@pytest.mark.parametrize(
    "tensors, said, expected",
    [
        (PAIR, {"peft_type": "IA3"}, "the peft_type IA3"),
        (PAIR, {"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        (PAIR, {"use_qalora": True}, "use_qalora True"),
        (PAIR, {"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        (PAIR, {"lora_alpha": "much"}, "of alpha 'much' and rank 3, is no number"),
        (PAIR, {"alpha_pattern": {"(": 1}}, "is no number"),
        (dict([*PAIR.items()][:1]), {}, "self_attn.q_proj has only one of its two matrices"),
        ({**PAIR, f"{Q}.lora_E": torch.ones(3)}, {}, "lora_E is nothing that is known"),
        ({**PAIR, f"{Q}.lora_A.weight": torch.ones(3, 60)}, {}, "a matrix of [64, 64] in the"),
        ({**PAIR, f"{Q}.lora_A.weight": torch.ones(2, 64)}, {}, "have no product"),
        ({Q.replace("q_proj", "x") + k[len(Q) :]: v for k, v in PAIR.items()}, {}, "no weight in"),
        ({**PAIR, f"{Q}.bias": torch.ones(64)}, {}, "the model has no layers.0.self_attn.q_proj.b"),
        (
            {**PAIR, f"{Q}.lora_magnitude_vector": torch.ones(9)},
            {"use_dora": True},
            "has lengths of shape [9]",
        ),
        ({**PAIR, f"{Q}.lora_magnitude_vector": torch.ones(64)}, {}, "has lengths, and use_dora"),
        (PAIR, {"use_dora": True}, "has no lengths, and use_dora is True"),
        ({}, {}, "it has no tensors"),
        ({**PAIR, f"{Q}.lora_A.default.weight": torch.ones(3, 64)}, {}, "it has two tensors"),
        (PAIR, {"task_type": "SEQ_CLS"}, "It has no score.weight"),
    ],
)
def test_adapters_that_cannot_be_added(
    tensors: Mapping[str, torch.Tensor], said: Mapping[str, Any], expected: str, tmp_path: Path
) -> None:
    tiny.make_model(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tensors, **said)
    together = directory_with_adapter(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(ModelError) as caught:
        resolve(read_config(together), together)
    assert expected in str(caught.value)


def test_what_is_no_adapter_or_has_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny.make_model(base)
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        find_model(str(base), str(base))
    for name in ("./nowhere", "", "a/b:Q4_K_M", str(base / "config.json")):
        with pytest.raises(InputError, match=f"--lora {re.escape(name or repr(name))} was given"):
            find_model(str(base), name)
    write_adapter(adapter, PAIR)
    with pytest.raises(ModelError, match="does not say which model"):
        find_model(str(adapter))
    for name in ("/not/here", "./nor/here"):
        write_adapter(adapter, PAIR, base_model_name_or_path=name)
        with pytest.raises(ModelError, match=f"trained on {name}, as it says, which cannot be f"):
            find_model(str(adapter))
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **more: asked.update({name: more["revision"]}) or str(base),
    )
    write_adapter(adapter, PAIR, base_model_name_or_path="a/model", revision="step-3")
    find_model(str(adapter))
    assert asked == {"a/model": "step-3"}
    (base / "broken.bin").symlink_to(base / "nothing")
    write_adapter(adapter, PAIR, base_model_name_or_path=str(base))
    together = find_model(str(adapter))
    assert together == find_model(str(base), str(adapter)) == find_model(str(together))
    with pytest.raises(InputError, match="is an adapter, or has one"):
        find_model(str(together), str(adapter))
    with (
        pytest.raises(InputError, match="Random weights were asked for with the adapter"),
        tiny.engine(together, PROMPTS, STEPS, dummy_seed=0),
    ):
        pass
    (adapter / ADAPTER_WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="Pickled files"):
        resolve(read_config(base), directory_with_adapter(base, adapter))
