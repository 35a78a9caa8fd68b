"""Compressed weights: the answers are those of a model whose matrices went there and back.

Held against transformers in float32, whose matrices are replaced by what a numpy oracle makes of
them; under every kind of policy alike, for an approximation must not depend on where bytes lie.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, OPTConfig, PreTrainedModel

from freight.errors import InputError, ModelError
from freight.model.number_format import Compression
from freight.runtime.compressed_files import compressed_sources

from . import tiny
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 8
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def there_and_back(x: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """Min-max quantisation of each row in groups, scale and minimum in float16."""
    while x.shape[1] % group_size:
        group_size //= 2
    groups = x.astype(np.float32).reshape(x.shape[0], -1, group_size)
    lowest = groups.min(-1, keepdims=True).astype(np.float16)
    span = np.maximum(groups.max(-1, keepdims=True) - lowest.astype(np.float32), 0)
    levels = np.float32(2**bits - 1)
    scale = (span / levels).astype(np.float16).astype(np.float32)
    lowest = lowest.astype(np.float32)
    codes = np.rint((groups - lowest) / np.where(scale > 0, scale, 1)).clip(0, levels)
    return (np.where(scale > 0, codes, 0) * scale + lowest).reshape(x.shape)


def compress(model: PreTrainedModel, bits: int, group_size: int) -> PreTrainedModel:
    """Every matrix but those that rows are looked up in."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.weight is not tied(model):
                found = there_and_back(module.weight.numpy(), bits, group_size)
                module.weight.copy_(torch.from_numpy(found))
    return model


def tied(model: PreTrainedModel) -> torch.Tensor | None:
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    return model.get_input_embeddings().weight if is_tied else None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    model = compress(tiny.make_model(model_dir, **SIZES), 4, 64)
    return tiny.tokens(tiny.reference(model, PROMPTS, STEPS))


@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n])
def test_same_tokens_under_every_policy(
    name: str, model_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    options = {**POLICIES[name], "weight_bits": 4, "compressed_dir": model_dir / "kept"}
    with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
        assert engine.plan.layout.compressed
        assert tiny.run(engine, PROMPTS, STEPS) == expected


@pytest.mark.parametrize(
    ("bits", "group_size"), [(3, 64), (4, 32), (4, 128), (8, 64)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_bits_and_groups(
    bits: int, group_size: int, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.kernels import threads

    if kernels == "reference":
        monkeypatch.setattr(threads, "find_loops", lambda: None)
    model = compress(tiny.make_model(tmp_path, **SIZES), bits, group_size)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_CPU, "weight_bits": bits, "group_size": group_size}
    options["compressed_dir"] = tmp_path / "kept"
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


CONFIGS = {
    "tied head": None,
    "biases and learned positions": OPTConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
    ),
    "fused projections": GPTNeoXConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    more: dict[str, Any] = {"tie_word_embeddings": True} if config is None else {}
    made = tiny.make_model(tmp_path, config=config, **more)
    answers = tiny.tokens(tiny.reference(compress(made, 4, 64), PROMPTS[:5], STEPS))
    options = {**tiny.ON_SIM, "weight_bits": 4, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def prepare(model_dir: Path, kept: Path, said: list[str]) -> dict[str, Any]:
    from freight.model.checkpoint import resolve
    from freight.model.config import read_config

    config = read_config(model_dir)
    sources = resolve(config, model_dir)
    wanted = Compression(bits=4, group_size=64)
    return compressed_sources(config, sources, wanted, directory=kept, say=said.append)


def test_made_once_and_made_anew_when_damaged(tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "model", **SIZES)
    kept, said = tmp_path / "kept", []
    places = prepare(tmp_path / "model", kept, said)
    path = next(p.path for p in places.values() if p.path.name == "weights.bin")
    before = path.read_bytes()
    assert len(said) == 1 and len(before) % 4096 == 0
    prepare(tmp_path / "model", kept, said)
    assert len(said) == 1  # kept
    for damage in (before[:-4096], b"\xff" * 64 + before[64:], b""):
        path.write_bytes(damage)
        prepare(tmp_path / "model", kept, said)
        assert path.read_bytes() == before
    (path.parent / "index.json").write_text("{")
    prepare(tmp_path / "model", kept, said)
    assert path.read_bytes() == before and json.loads((path.parent / "index.json").read_text())
    assert len(said) == 5


def test_what_was_interrupted_is_begun_anew(tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "model", **SIZES)
    kept, said = tmp_path / "kept", []
    places = prepare(tmp_path / "model", kept, said)
    own = next(p.path.parent for p in places.values() if p.path.name == "weights.bin")
    whole = (own / "weights.bin").read_bytes()
    left = own.with_name(f"{own.name}.12345")
    own.rename(left)  # as a process leaves it that is killed while it writes
    (left / "weights.bin").write_bytes(whole[:5000])
    (left / "index.json").unlink()
    prepare(tmp_path / "model", kept, said)
    assert (own / "weights.bin").read_bytes() == whole and not left.exists()


def test_the_command_makes_what_a_run_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from freight.entrypoints.cli import main

    tiny.make_model(tmp_path / "model", **SIZES)
    flags = ["--model", str(tmp_path / "model"), "--compressed-dir", str(tmp_path / "kept")]
    assert main(["compress", *flags]) in (1, 2)
    assert "Pass --weight-bits 4." in capsys.readouterr().err
    assert main(["compress", *flags, "--weight-bits", "4"]) == 0
    assert Path(capsys.readouterr().out.strip(), "weights.bin").is_file()
    said: list[str] = []
    prepare(tmp_path / "model", tmp_path / "kept", said)
    assert not said


def test_another_checkpoint_has_others(tmp_path: Path) -> None:
    kept, said = tmp_path / "kept", []
    for name in ("one", "two"):
        tiny.make_model(tmp_path / name, **SIZES)
        prepare(tmp_path / name, kept, said)
    assert len(list(kept.iterdir())) == len(said) == 2


def test_what_cannot_be_compressed(tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model", **SIZES)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up"):
        prepare(tmp_path / "model", tmp_path / "kept", [])
    assert not any((tmp_path / "kept").iterdir())
    for more in ({"weight_bits": 5}, {"weight_bits": 4, "group_size": 48}):
        with pytest.raises(InputError, match="There are 4 and 8 bits"):
            tiny.engine(tmp_path / "model", PROMPTS, STEPS, **tiny.ON_CPU, **more).__enter__()
