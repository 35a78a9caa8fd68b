"""Weights with short exponents: the answers are those of transformers, whose weights are the same
numbers, under every kind of policy; fewer bytes move; what is kept is made once and believed only
if it is whole."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, MixtralConfig, PretrainedConfig, PreTrainedModel

from freight.errors import BudgetError, InputError
from freight.model.number_format import ExactCompression, ShortExponents, find_compressed
from freight.runtime import compressed_files
from freight.runtime.compressed_files import announcement, compressed_sources
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions

from . import tiny
from .test_engine_compressed import SIZES
from .test_engine_parity import GEMMA4_SMALL, gemma4
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 8


def make(directory: Path, config: PretrainedConfig | None = None, **more: Any) -> PreTrainedModel:
    """A model whose file has bfloat16, as float32 numbers of the same values."""
    return tiny.make_model(directory, config=config, dtype=torch.bfloat16, **more)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lossless")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    model = make(model_dir, **SIZES)
    return tiny.tokens(tiny.reference(model, PROMPTS, STEPS))


@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n])
def test_same_tokens_under_every_policy(
    name: str, model_dir: Path, expected: list[list[int]]
) -> None:
    options = {**POLICIES[name], "lossless": True, "compressed_dir": model_dir / "kept"}
    with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
        kept = engine.plan.layout.compressed
        assert kept and all(isinstance(own, ShortExponents) for own in kept.values())
        kinds = engine.programme.kinds
        matrices = {w.name for unit in kinds for w in unit.weights if w.is_matrix}
        assert matrices <= kept.keys()
        assert tiny.run(engine, PROMPTS, STEPS) == expected


def test_turned_matrices(tmp_path: Path) -> None:
    model = make(tmp_path, config=GPT2Config(**tiny.SIZES))
    expected = tiny.tokens(tiny.reference(model, PROMPTS, STEPS))
    options = {**tiny.ON_CPU, "lossless": True, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS, STEPS, **options) as engine:
        assert engine.plan.layout.compressed
        assert tiny.run(engine, PROMPTS, STEPS) == expected


def test_inputs_of_layers(tmp_path: Path) -> None:
    """Their table is shortened as the embedding's is, and looked up in wherever it is."""
    config = gemma4(**{**GEMMA4_SMALL, "hidden_size_per_layer_input": 32}, hidden_size=128)
    expected = tiny.tokens(tiny.reference(make(tmp_path, config), PROMPTS, STEPS))
    placed = tiny.with_keys_near(tiny.ON_SIM)
    options = {**placed, "lossless": True, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS, STEPS, **options) as engine:
        kept = engine.plan.layout.compressed
        assert {"head.weight", "embedding.inputs", "layers.0.inputs.gate"} <= kept.keys()
        assert tiny.run(engine, PROMPTS, STEPS) == expected


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_a_shared_table_and_experts(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.kernels import threads

    if kernels == "reference":
        monkeypatch.setattr(threads, "find_loops", lambda: None)
    config = MixtralConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        tie_word_embeddings=True,
    )
    model = make(tmp_path, config)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_SIM, "lossless": True, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        assert {"head.weight", "layers.0.router.weight"} <= engine.plan.layout.compressed.keys()
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


def test_fewer_bytes_move(model_dir: Path, expected: list[list[int]]) -> None:
    """In bfloat16, where what is read is what is kept."""
    read = {}
    for lossless in (False, True):
        options = {**POLICIES["cpu: weights on disk"], "compressed_dir": model_dir / "kept"}
        options |= {"dtype": "bfloat16", "lossless": lossless}
        with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
            tiny.run(engine, PROMPTS, STEPS)
            read[lossless] = engine.traffic.moved["disk read"]
    assert 0.7 < read[True] / read[False] < 0.9


def sources_of(directory: Path, said: list[str]) -> Any:
    from freight.model.checkpoint import resolve
    from freight.model.config import read_config

    config = read_config(directory / "model")
    return compressed_sources(
        config,
        resolve(config, directory / "model"),
        ExactCompression(),
        directory=directory / "kept",
        say=said.append,
    )


def test_layers_that_are_alike_have_one_format(tmp_path: Path) -> None:
    """What has most to spare says it for all of its kind, and for no other kind."""
    model = tiny.make_model(tmp_path / "model", **SIZES)
    with torch.no_grad():
        layer = model.model.layers[1].mlp.up_proj.weight
        layer[3, ::2] *= 2.0 ** -torch.arange(64.0)
    model.bfloat16().save_pretrained(tmp_path / "model")
    formats = {name: place.dtype for name, place in sources_of(tmp_path, []).items()}
    assert formats["layers.0.mlp.up"] == formats["layers.1.mlp.up"]
    spare = {name: getattr(find_compressed(own), "spare", None) for name, own in formats.items()}
    assert spare["layers.0.mlp.up"] >= 50 > spare["layers.0.mlp.gate"]


def test_made_once_and_made_anew_when_damaged(tmp_path: Path) -> None:
    make(tmp_path / "model", **SIZES)
    said: list[str] = []
    places = sources_of(tmp_path, said)
    path = next(p.path for p in places.values() if p.path.name == "weights.bin")
    before, note = path.read_bytes(), path.with_name("index.json").read_text()
    assert len(said) == 1 and "nothing lost" in said[0]
    assert sources_of(tmp_path, said) == places
    assert len(said) == 1  # kept
    own = json.loads(note)
    damages = [
        {**own, "spared": {kind: most + 64 for kind, most in own["spared"].items()}},
        {**own, "spared": {}},
        {**own, "spared": 7},
        {name: value for name, value in own.items() if name != "spared"},
    ]
    for number, damage in enumerate(damages, 2):
        path.with_name("index.json").write_text(json.dumps(damage))
        assert sources_of(tmp_path, said) == places
        assert len(said) == number
        assert path.read_bytes() == before
    path.write_bytes(before[:-4096])
    sources_of(tmp_path, said)
    assert path.read_bytes() == before


def test_other_types_stay_as_they_are_and_it_is_said(tmp_path: Path) -> None:
    from freight.model.checkpoint import resolve
    from freight.model.config import read_config

    model = tiny.make_model(tmp_path, **SIZES)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:3], STEPS))
    said: list[str] = []
    options = EngineOptions(
        dtype="float32",
        lossless=True,
        compressed_dir=tmp_path / "kept",
        disk_dir=tmp_path,
        **tiny.ON_CPU,
    )
    work = tiny.workload(PROMPTS[:3], STEPS)
    with closing(build_engine(tmp_path, options=options, workload=work, say=said.append)) as engine:
        assert tiny.run(engine, PROMPTS[:3], STEPS) == answers
    assert any("they stay as they are" in text for text in said)
    config = read_config(tmp_path)
    wanted = resolve(config, tmp_path), ExactCompression()
    assert announcement(config, *wanted, directory=tmp_path / "kept") is None
    assert not (tmp_path / "kept").exists()


def test_a_disk_without_room_is_told_before_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "model", **SIZES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    monkeypatch.setattr(compressed_files, "look_for_spared", None)
    with pytest.raises(BudgetError, match="are free there"):
        sources_of(tmp_path, [])


def test_numbers_that_would_take_as_much_stay_plain(tmp_path: Path) -> None:
    """Found when all are looked at, and noted."""
    model = tiny.make_model(tmp_path / "model", **SIZES)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0 ** torch.randint(-40, 40, weight.shape))
    model.bfloat16().save_pretrained(tmp_path / "model")
    said: list[str] = []
    for _ in range(2):
        places = sources_of(tmp_path, said)
        assert {place.dtype for place in places.values()} == {"bfloat16"}
    assert len(said) == 1


def test_random_weights(tmp_path: Path) -> None:
    """Written, shortened, and read from there: the same as without."""
    tiny.make_model(tmp_path, **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    found = []
    for more in ({}, {"lossless": True}):
        options = {**POLICIES["cpu: weights on disk"], "dummy_seed": 3, **more}
        with tiny.engine(tmp_path, PROMPTS, STEPS, **options) as engine:
            found.append(tiny.run(engine, PROMPTS, STEPS))
            assert bool(engine.plan.layout.compressed) == bool(more)
    assert found[0] == found[1]


@pytest.mark.parametrize("other", [{"weight_bits": 4}, {"compute": "int8"}])
def test_not_with_what_changes_numbers(other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="Leave one of the two out"):
        EngineOptions(lossless=True, **other)
