"""Dummy weights: the same however they are split, and a file that transformers loads."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from freight.errors import BudgetError, InputError
from freight.model import dummy
from freight.model.checkpoint import resolve
from freight.model.config import parse_config
from freight.model.decoder import count_parameters, tensor_shapes
from freight.model.dummy import DUMMY_STD, dummy_rows, write_dummy_checkpoint

RAW: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


WHOLE: dict[int, torch.Tensor] = {}


def made(name: str, start: int, seed: int, *shape: int) -> torch.Tensor:
    out = torch.full(shape, float("nan"))
    dummy_rows(name, start, seed, out)
    return out


# 300,000 wide: two rows would pass the block size; 1,200,000: one row passes the pool.
@pytest.mark.parametrize(("num_rows", "width"), [(40_000, 33), (5, 300_000), (3, 1_200_000)])
@given(data=st.data())
def test_rows_are_the_same_however_split(num_rows: int, width: int, data: st.DataObject) -> None:
    whole = WHOLE.setdefault(width, made("layers.3.mlp.up", 0, 7, num_rows, width))
    first = data.draw(st.integers(0, num_rows - 1))
    count = min(data.draw(st.integers(1, 4)), num_rows - first)
    part = made("layers.3.mlp.up", first, 7, count, width)
    assert torch.equal(part, whole[first : first + count])


def test_a_long_stretch_crosses_blocks() -> None:
    whole = made("x", 0, 1, 40_000, 33)
    parts = [made("x", 0, 1, 15_000, 33), made("x", 15_000, 1, 25_000, 33)]
    assert torch.equal(torch.cat(parts), whole)


def test_values_are_normal_and_differ_by_seed_name_and_block() -> None:
    values = made("a", 0, 0, 4096, 512)
    assert abs(values.mean().item()) < 1e-3
    assert abs(values.std().item() / DUMMY_STD - 1) < 0.01
    inside = (values.abs() < DUMMY_STD).float().mean().item()
    assert abs(inside - 0.6827) < 0.005
    assert not torch.equal(values[:1024], values[1024:2048])
    assert not torch.equal(values[:8], made("b", 0, 0, 8, 512))
    assert not torch.equal(values[:8], made("a", 0, 1, 8, 512))


def test_norms_are_ones_and_types_agree() -> None:
    assert torch.equal(made("layers.0.mlp.norm", 0, 0, 5), torch.ones(5))
    half = torch.empty(4, 6, dtype=torch.bfloat16)
    dummy_rows("a", 2, 0, half)
    assert torch.equal(half, made("a", 2, 0, 4, 6).to(torch.bfloat16))


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_was_written(tied: bool, tmp_path: Path) -> None:
    raw = {**RAW, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw)
    path = write_dummy_checkpoint(config, tmp_path, seed=3)
    assert [item.name for item in tmp_path.glob("*.safetensors*")] == [path.name]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.bfloat16

    weights = model.state_dict()
    expected = torch.empty(24, 16, dtype=torch.bfloat16)
    dummy_rows("layers.1.mlp.up", 0, 3, expected)
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], expected)
    assert torch.equal(weights["model.norm.weight"], torch.ones(16, dtype=torch.bfloat16))
    assert weights["model.layers.0.self_attn.q_proj.bias"].abs().max() > 0
    shapes = {name: source.shape for name, source in resolve(config, tmp_path).items()}
    assert shapes == tensor_shapes(config)


RECURRENT: dict[str, Any] = {
    **{key: value for key, value in RAW.items() if key not in ("architectures", "model_type")},
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "pad_token_id": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"])
def test_tensors_have_the_dims_of_those_who_published_them(kind: str, tmp_path: Path) -> None:
    """Convolutions, and experts in one."""
    (tmp_path / "config.json").write_text(json.dumps({**RECURRENT, "model_type": kind}))
    write_dummy_checkpoint(parse_config({**RECURRENT, "model_type": kind}), tmp_path, seed=4)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]


V4: dict[str, Any] = {
    **{key: value for key, value in RAW.items() if key not in ("architectures", "model_type")},
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "num_hash_layers": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def test_what_else_has_more_dims_is_written_with_them(tmp_path: Path) -> None:
    """Maps of residual streams, biases by place, and tables of experts, of which all are there."""
    (tmp_path / "config.json").write_text(json.dumps(V4))
    path = write_dummy_checkpoint(parse_config(V4), tmp_path, seed=4)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    table = load_file(path)["model.layers.0.ffn.gate.tid2eid"]
    assert table.shape == (40, 3)
    assert sorted(set(table.flatten().tolist())) == [0, 1, 2, 3, 4, 5]


def test_turned_matrices_are_written_as_they_are_published(tmp_path: Path) -> None:
    raw = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw)
    write_dummy_checkpoint(config, tmp_path, seed=4)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    shapes = {name: source.shape for name, source in resolve(config, tmp_path).items()}
    assert shapes == tensor_shapes(config)


def test_small_batches_and_flushes_write_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(RAW)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    once = write_dummy_checkpoint(config, tmp_path / "a", dtype="float32").read_bytes()
    monkeypatch.setattr(dummy, "_WRITE_BYTES", 200)
    monkeypatch.setattr(dummy, "_FLUSH_BYTES", 1000)
    assert write_dummy_checkpoint(config, tmp_path / "b", dtype="float32").read_bytes() == once
    assert len(once) > count_parameters(config) * 4


def test_weights_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(InputError, match="holds weights already"):
        write_dummy_checkpoint(parse_config(RAW), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_a_place_that_cannot_take_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(RAW)
    with pytest.raises(InputError, match="no such directory"):
        write_dummy_checkpoint(config, tmp_path / "nowhere")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dummy, "_flush", fail)
        with pytest.raises(InputError, match="No space left"):
            write_dummy_checkpoint(config, tmp_path)
    assert not list(tmp_path.iterdir())

    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(free=10))
    with pytest.raises(BudgetError, match="10 B is free"):
        write_dummy_checkpoint(config, tmp_path)
