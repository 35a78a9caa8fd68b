"""Byte ranges from safetensors headers, against the safetensors library; damaged files refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from freight.errors import ModelError
from freight.model.checkpoint import TensorSource, open_checkpoint, resolve
from freight.model.config import ModelConfig, parse_config, read_config
from freight.model.decoder import tensor_shapes
from freight.model.families import FAMILIES, Family, Fused

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def load(source: TensorSource) -> torch.Tensor:
    with source.path.open("rb") as file:
        file.seek(source.offset)
        data = bytearray(file.read(source.num_bytes))
    return torch.frombuffer(data, dtype=getattr(torch, source.dtype)).view(source.shape)


def config_of(**changes: Any) -> ModelConfig:
    return parse_config({**RAW, **changes})


@pytest.fixture(scope="module", params=["10GB", "8KB"], ids=["one file", "shards"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers saves it."""
    directory = tmp_path_factory.mktemp("model")
    keys = {key: value for key, value in RAW.items() if key != "architectures"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**keys))
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=request.param)
    return directory


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one file that matches RAW and may be spoiled."""
    names = FAMILIES["llama"].tensors
    tensors = {}
    for name, shape in tensor_shapes(config_of()).items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        place = names[name.replace(f"layers.{layer}.", "layers.{i}.") if layer else name]
        assert isinstance(place, str)
        tensors[place.format(i=layer)] = torch.randn(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_bytes_equal_those_of_safetensors(saved: Path) -> None:
    files = sorted(saved.glob("*.safetensors"))
    theirs = {name: item for file in files for name, item in load_file(file).items()}
    ours = open_checkpoint(saved)
    assert ours.keys() == theirs.keys()
    for name, source in ours.items():
        assert torch.equal(load(source), theirs[name])


def test_resolve_finds_every_logical_tensor(saved: Path) -> None:
    config = read_config(saved)
    sources = resolve(config, saved)
    assert {name: source.shape for name, source in sources.items()} == tensor_shapes(config)
    by_name = open_checkpoint(saved)
    assert sources["layers.1.attention.k"] == by_name["model.layers.1.self_attn.k_proj.weight"]
    assert sources["head.weight"] == by_name["lm_head.weight"]


def test_tied_head_is_the_embedding(single: Path) -> None:
    sources = resolve(config_of(tie_word_embeddings=True), single)
    assert sources["head.weight"] == sources["embedding"]


@given(st.integers(0, 40), st.integers(0, 40))
def test_rows_are_the_rows(start: int, count: int) -> None:
    source = TensorSource(
        path=Path("x"), offset=100, num_bytes=40 * 6, dtype="bfloat16", shape=(40, 3)
    )
    count = min(count, 40 - start)
    part = source.rows(start, count)
    assert (part.offset, part.num_bytes) == (100 + start * 6, count * 6)
    assert part.shape == (count, 3)


def test_fused_tensors_are_cut_apart(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, config = FAMILIES["llama"], config_of()
    old = load_file(single / "model.safetensors")
    parts = ("attention.q", "attention.k", "attention.v")
    fused = {f"layers.{{i}}.{part}": Fused(tensor="layer.{i}.qkv", of=parts) for part in parts}
    family = Family(
        architectures=(), model_types=(), keys=llama.keys, tensors={**llama.tensors, **fused}
    )
    monkeypatch.setitem(FAMILIES, "llama", family)
    before = {name: item.clone() for name, item in old.items()}
    for layer in range(config.num_layers):
        names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        old[f"layer.{layer}.qkv"] = torch.cat([old.pop(name) for name in names])
    save_file(old, tmp_path / "model.safetensors")
    sources = resolve(config, tmp_path)
    for part in "qkv":
        expected = before[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert torch.equal(load(sources[f"layers.1.attention.{part}"]), expected)


def test_extra_tensors_are_ignored(single: Path) -> None:
    path = single / "model.safetensors"
    extra = {"rotary_emb.inv_freq": torch.ones(3), "ids": torch.ones(2, dtype=torch.int64)}
    save_file({**load_file(path), **extra}, path)
    assert "ids" not in resolve(config_of(), single)


def test_layers_that_the_configuration_lacks_are_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match="it has 2 layers, expected 1"):
        resolve(config_of(num_hidden_layers=1), saved)


def test_a_layer_that_guesses_is_no_layer_of_the_model(single: Path) -> None:
    """It has what other layers have, and more."""
    path = single / "model.safetensors"
    tensors = load_file(path)
    of_layer = [name for name in tensors if ".layers.1." in name]
    assert of_layer
    tensors |= {name.replace(".1.", ".2."): tensors[name].clone() for name in of_layer}
    save_file(tensors, path)
    with pytest.raises(ModelError, match="it has 3 layers, expected 2"):
        resolve(config_of(), single)
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.ones(2)}, path)
    assert resolve(config_of(), single)


def test_all_mismatches_come_together(single: Path) -> None:
    path = single / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.ones(41, 16)
    tensors["model.embed_tokens.weight"] = torch.ones(40, 16, dtype=torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(ModelError) as caught:
        resolve(config_of(), single)
    for words in (
        "model.norm.weight is missing",
        "model.layers.0.mlp.up_proj.weight is missing",
        "lm_head.weight has shape [41, 16], expected [40, 16]",
        "model.embed_tokens.weight is of type F8_E4M3",
    ):
        assert words in str(caught.value)


def test_a_long_list_is_cut(single: Path) -> None:
    with pytest.raises(ModelError, match="and 12 more"):
        resolve(config_of(num_hidden_layers=6), single)


def header_of(entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(**changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return header_of({"x": tensor}) + bytes(8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes"),
        (b"1234", "has 4 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", "git-lfs pointer"),
        (struct.pack("<Q", 1 << 60), "announces"),
        (struct.pack("<Q", 4) + b"{{{{", "header of model.safetensors is damaged"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "header of model.safetensors is damaged"),
        (header_of([1, 2]), "header of model.safetensors is damaged"),
        (header_of({"x": 3}), "header of model.safetensors is damaged"),
        (header_of({"x": {"dtype": "F32"}}), "header of model.safetensors is damaged"),
        (entry(shape=[3]), "8 bytes for a float32 tensor of shape [3]"),
        (entry(shape=[-2]), "a tensor of shape [-2]"),
        (entry(data_offsets=[-8, 0]), "at bytes -8 to 0"),
        (entry(data_offsets=[0, 8, 9]), "header of model.safetensors is damaged"),
        (entry(dtype=["F32"]), "header of model.safetensors is damaged"),
    ],
)
def test_damaged_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path)
    assert words in str(caught.value)


def test_a_truncated_file_names_both_sizes(single: Path) -> None:
    path = single / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelError) as caught:
        open_checkpoint(single)
    assert f"asks for {size} bytes, it has {size - 5}" in str(caught.value)


def index(content: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / "model.safetensors.index.json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (index({"weight_map": {"x": "b.safetensors"}}), "b.safetensors, which is not there"),
        (index({"weight_map": {"x": "a.safetensors"}}), "a.safetensors lacks x"),
        (index({"weight_map": {"x": "../a.safetensors"}}), "outside the model's directory"),
        (index({}), "is damaged (KeyError"),
        (index([1]), "is damaged (TypeError"),
        (index("{"), "is damaged (JSONDecodeError"),
    ],
)
def test_a_wrong_index_is_refused(spoil: Callable[[Path], None], words: str, single: Path) -> None:
    spoil(single)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(single)
    assert words in str(caught.value)


def test_absence_says_what_is_there_instead(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="It holds neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pickled \*.bin files only"):
        open_checkpoint(tmp_path)
