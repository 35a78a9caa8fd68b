"""Compressed weights: the answers are those of a model whose matrices went there and back.

Held against transformers in float32, whose matrices are replaced by what a numpy oracle makes of
them; under every kind of policy alike, for an approximation must not depend on where bytes lie.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.pytorch_utils import Conv1D

from freight.errors import InputError, ModelError
from freight.model.config import read_config
from freight.model.number_format import Compression, Grouped
from freight.plan.default import Planner
from freight.plan.policy import Policy
from freight.runtime.compressed_files import compressed_sources
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions

from . import tiny
from .test_engine_parity import (
    GEMMA4_EXPERTS,
    GEMMA4_SMALL,
    afmoe,
    deepseek,
    gemma4,
    glm4_moe,
    laguna,
)
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 8
DIMS = ("input", "output")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def there_and_back(x: np.ndarray, bits: int, group_size: int, dim: str = "input") -> np.ndarray:
    """Min-max quantisation of each row in groups, or of each column, scale and minimum in
    float16."""
    if dim == "output":
        return there_and_back(x.T, bits, group_size).T
    while x.shape[1] % group_size:
        group_size //= 2
    if group_size < 16:
        return x  # it stays plain
    groups = x.astype(np.float32).reshape(x.shape[0], -1, group_size)
    lowest = groups.min(-1, keepdims=True).astype(np.float16)
    span = np.maximum(groups.max(-1, keepdims=True) - lowest.astype(np.float32), 0)
    levels = np.float32(2**bits - 1)
    scale = (span / levels).astype(np.float16).astype(np.float32)
    lowest = lowest.astype(np.float32)
    codes = np.rint((groups - lowest) / np.where(scale > 0, scale, 1)).clip(0, levels)
    return (np.where(scale > 0, codes, 0) * scale + lowest).reshape(x.shape)


def compress(
    model: PreTrainedModel, bits: int, group_size: int, dim: str = "input"
) -> PreTrainedModel:
    """Every matrix but those that rows are looked up in, and what is beside these."""
    beside = "per_layer_model_projection"
    routers = (DeepseekV3TopkRouter, Glm4MoeTopkRouter, LagunaTopKRouter, Qwen3MoeTopKRouter)
    kinds = (torch.nn.Linear, *routers)
    matrices = [
        own.weight
        for name, own in model.named_modules()
        if isinstance(own, kinds) and not name.endswith(beside)
    ]
    matrices += [own.weight.t() for own in model.modules() if isinstance(own, Conv1D)]
    matrices += [own for own in model.parameters() if own.dim() == 3]  # experts, one by one
    with torch.no_grad():
        for matrix in matrices:
            if matrix is not tied(model):
                rows = matrix.reshape(-1, matrix.shape[-1]).numpy()
                found = there_and_back(rows, bits, group_size, dim)
                matrix.copy_(torch.from_numpy(found).view(matrix.shape))
    return model


def tied(model: PreTrainedModel) -> torch.Tensor | None:
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    return model.get_input_embeddings().weight if is_tied else None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[list[int]]]:
    """By the dimension that groups run along."""
    found = {}
    for dim in DIMS:
        model = compress(tiny.make_model(model_dir, **SIZES), 4, 64, dim)
        found[dim] = tiny.tokens(tiny.reference(model, PROMPTS, STEPS))
    assert found["input"] != found["output"]
    return found


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n])
def test_same_tokens_under_every_policy(
    name: str, dim: str, model_dir: Path, expected: dict[str, list[list[int]]]
) -> None:
    options = {**POLICIES[name], "weight_bits": 4, "group_dim": dim}
    options["compressed_dir"] = model_dir / "kept"
    with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
        kept = engine.plan.layout.compressed.values()
        assert {isinstance(own, Grouped) and own.across for own in kept} == {dim == "output"}
        assert tiny.run(engine, PROMPTS, STEPS) == expected[dim]


@pytest.mark.parametrize(
    ("bits", "group_size"), [(3, 64), (4, 32), (4, 128), (8, 64)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_bits_and_groups(
    bits: int,
    group_size: int,
    dim: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from freight.kernels import threads

    if kernels == "reference":
        monkeypatch.setattr(threads, "find_loops", lambda: None)
    model = compress(tiny.make_model(tmp_path, **SIZES), bits, group_size, dim)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**tiny.ON_CPU, "weight_bits": bits, "group_size": group_size, "group_dim": dim}
    options["compressed_dir"] = tmp_path / "kept"
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_units_that_lie_across_the_end_of_the_ring(
    device: str, dim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share scales stay together there."""
    candidates = Planner._candidates

    def changed(self: Planner) -> Iterator[Policy]:
        return (replace(policy, piece_bytes=4096) for policy in candidates(self))

    monkeypatch.setattr(Planner, "_candidates", changed)
    model = compress(tiny.make_model(tmp_path, **SIZES), 4, 64, dim)
    answers = tiny.tokens(tiny.reference(model, PROMPTS[:5], STEPS))
    options = {**POLICIES[f"{device}: odd mix"], "weight_bits": 4, "group_dim": dim}
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
    "norms of what experts make": afmoe(head_dim=32, moe_intermediate_size=64),
    "heads of two numbers, with a gate each": laguna(
        head_dim=32,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_attention_heads_per_layer=[4, 6, 4, 6],
    ),
    "turned": GPT2Config(**tiny.SIZES),
    "a bias of the head": PhiConfig(**{**tiny.SIZES, "intermediate_size": 128}),
    "an MLP beside experts": glm4_moe(moe_intermediate_size=64),
    "latents": deepseek(
        DeepseekV3Config,
        n_group=1,
        topk_group=1,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=64,
    ),
    "heads of two sizes, experts beside an MLP": gemma4(
        **{**GEMMA4_EXPERTS, "moe_intermediate_size": 64}, head_dim=32, global_head_dim=48
    ),
    "keys of others, and inputs of layers": gemma4(
        **{**GEMMA4_SMALL, "hidden_size_per_layer_input": 64}, head_dim=32, global_head_dim=48
    ),
    "experts one behind the other": Qwen3MoeConfig(
        **{**tiny.SIZES, "head_dim": 32},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str, dim: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    more: dict[str, Any] = {"tie_word_embeddings": True} if config is None else {}
    made = tiny.make_model(tmp_path, config=config, **more)
    answers = tiny.tokens(tiny.reference(compress(made, 4, 64, dim), PROMPTS[:5], STEPS))
    options = {**tiny.ON_SIM, "weight_bits": 4, "group_dim": dim}
    options["compressed_dir"] = tmp_path / "kept"
    if read_config(tmp_path).sharing is not None:
        options = tiny.with_keys_near(options)
    with tiny.engine(tmp_path, PROMPTS[:5], STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS[:5], STEPS) == answers


@pytest.mark.parametrize("dim", DIMS)
def test_groups_that_do_not_fit_are_smaller_and_said(dim: str, tmp_path: Path) -> None:
    """A head in two chunks, whose rows 64 divides and 128 does not, and an inner width of 96."""
    vocab = 1088
    made = tiny.make_model(tmp_path, vocab_size=vocab, intermediate_size=96, num_hidden_layers=1)
    prompts = tiny.prompts(5, 40, vocab=vocab)
    answers = tiny.tokens(tiny.reference(compress(made, 4, 128, dim), prompts, STEPS))
    options = {**tiny.ON_SIM, "weight_bits": 4, "group_size": 128, "group_dim": dim}
    said: list[str] = []
    built = build_engine(
        tmp_path,
        options=EngineOptions(
            dtype="float32", disk_dir=tmp_path, compressed_dir=tmp_path / "kept", **options
        ),
        workload=tiny.workload(prompts, STEPS),
        say=said.append,
    )
    with closing(built) as engine:
        heads = [unit for unit in engine.programme.units if unit.kind == "head"]
        assert len(heads) > 1
        assert tiny.run(engine, prompts, STEPS) == answers
    smaller = {"mlp.up": 32, "head.weight": 64} if dim == "output" else {"mlp.down": 32}
    (fit,) = [text for text in said if text.startswith("128 does not divide all matrices: ")]
    for name, size in smaller.items():
        assert f"{name} has groups of {size}" in fit


def prepare(
    model_dir: Path, kept: Path, said: list[str], *, across: bool = False
) -> dict[str, Any]:
    from freight.model.checkpoint import resolve
    from freight.model.config import read_config

    config = read_config(model_dir)
    sources = resolve(config, model_dir)
    wanted = Compression(bits=4, group_size=64, across=across)
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
    assert "once" in said[0] and all("is damaged" in text for text in said[1:])


def test_every_byte_counts_where_the_file_was_touched(tmp_path: Path) -> None:
    """Behind what is looked at each time, too; what was touched but is whole is kept."""
    tiny.make_model(tmp_path / "model", **SIZES)
    kept, said = tmp_path / "kept", []
    places = prepare(tmp_path / "model", kept, said)
    made = [p for p in places.values() if p.path.name == "weights.bin"]
    path = made[0].path
    before = path.read_bytes()
    for place in made:
        damaged = bytearray(before)
        damaged[place.offset + place.num_bytes - 1] ^= 1
        path.write_bytes(damaged)
        said.clear()
        prepare(tmp_path / "model", kept, said)
        assert len(said) == 1 and path.read_bytes() == before
    os.utime(path, ns=(1, 1))
    prepare(tmp_path / "model", kept, said)
    assert len(said) == 1
    assert json.loads((path.parent / "index.json").read_text())["written"] == 1


def test_what_is_kept_of_another_checkpoint_is_not_taken(tmp_path: Path) -> None:
    kept, own = tmp_path / "kept", []
    for name in ("one", "two"):
        tiny.make_model(tmp_path / name, **SIZES)
        places = prepare(tmp_path / name, kept, [])
        own.append(next(p.path.parent for p in places.values() if p.path.name == "weights.bin"))
    right = (own[0] / "weights.bin").read_bytes()
    shutil.rmtree(own[0])
    shutil.copytree(own[1], own[0])
    said: list[str] = []
    prepare(tmp_path / "one", kept, said)
    assert len(said) == 1 and (own[0] / "weights.bin").read_bytes() == right


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    """The second waits for the first, and takes what it has made."""
    tiny.make_model(tmp_path / "model", **SIZES)
    kept = tmp_path / "kept"
    kept.mkdir()
    other = os.open(kept, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)  # as a process has it that is at work
    said: list[str] = []
    second = threading.Thread(target=prepare, args=(tmp_path / "model", kept, said))
    second.start()
    while not said:
        time.sleep(0.01)
    assert "waiting for another process" in said[0]
    prepare_elsewhere = tmp_path / "elsewhere"
    prepare(tmp_path / "model", prepare_elsewhere, [])
    for made in prepare_elsewhere.iterdir():
        shutil.copytree(made, kept / made.name)
    os.close(other)
    second.join()
    assert len(said) == 1


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
    assert "Pass --weight-bits 4, or --lossless." in capsys.readouterr().err
    said: list[str] = []
    for dim in DIMS:
        assert main(["compress", *flags, "--weight-bits", "4", "--group-dim", dim]) == 0
        assert Path(capsys.readouterr().out.strip(), "weights.bin").is_file()
        prepare(tmp_path / "model", tmp_path / "kept", said, across=dim == "output")
    assert not said


def test_other_groups_are_kept_beside(tmp_path: Path) -> None:
    """Of as many bytes, so that only what they are kept by tells them apart."""
    tiny.make_model(tmp_path / "model", **SIZES)
    kept, said = tmp_path / "kept", []
    made = [prepare(tmp_path / "model", kept, said, across=own) for own in (False, True)]
    assert len(list(kept.iterdir())) == len(said) == 2
    one, other = ({name: own[name].num_bytes for name in own} for own in made)
    assert one == other
    for own in (True, False):
        prepare(tmp_path / "model", kept, said, across=own)
    assert len(said) == 2


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
