"""Integer products: the answers are those of a model whose linear maps are a numpy formula.

Held against transformers in float32, its linear maps replaced by codes, exact sums and scales;
under every kind of policy alike, for an approximation must not depend on where bytes lie.

A product of integers is exact, but what goes into it is not: where the last bit of an attention
turns a code, logits move by about as much as by the approximation itself. So a few rows may leave
the oracle's, and only at a token that the oracle finds about as good as its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, OPTConfig, PreTrainedModel

from freight.errors import InputError
from freight.model.number_format import PerRow
from freight.runtime import device
from freight.runtime.device import ComputeDevice, choose_compute, computes_int8
from freight.runtime.options import EngineOptions

from . import tiny
from .test_engine_policies import POLICIES

STEPS = 8
PROMPTS = tiny.prompts(13, 24)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is fast at it, also while another process keeps this one busy."""
    monkeypatch.setattr(device, "computes_int8", lambda dtype: True)


def codes_and_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(x / np.where(scale > 0, scale, 1)).astype(np.int32)
    return codes, scale


def reference(model: PreTrainedModel) -> list[tiny.Answer]:
    """The oracle's answers, every linear map but a router's, one of rows that are no multiple of 4,
    and a head that shares the table that rows are looked up in."""
    plain = torch.nn.functional.linear
    table = model.get_input_embeddings().weight
    num_experts = getattr(model.config, "num_local_experts", 0)
    model.config._experts_implementation = "eager"

    def linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight is table or weight.shape[0] == num_experts or weight.shape[1] % 4:
            return plain(x, weight, bias)
        codes, scales = codes_and_scales(x.reshape(-1, x.shape[-1]).numpy())
        own_codes, own_scales = codes_and_scales(weight.numpy())
        y = (codes @ own_codes.T).astype(np.float32) * scales * own_scales.T
        y = y if bias is None else y + bias.numpy()
        return torch.from_numpy(y).view(*x.shape[:-1], -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        return tiny.reference(model, PROMPTS, STEPS)


MARGIN = 0.5
"""How far plain logits of these models are from those of integer products; they are 1.8 wide."""


def check_answers(found: list[list[int]], answers: list[tiny.Answer]) -> None:
    """Equal rows, but for a few that part at a token that is about as good."""
    parted = 0
    for ids, answer in zip(found, answers, strict=True):
        pairs = zip(ids, answer.token_ids, answer.logits, strict=True)
        for own, best, logits in pairs:
            if own != best:
                assert logits[best] - logits[own] < MARGIN
                parted += 1
                break
    assert parted <= len(answers) // 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("integers")


@pytest.fixture(scope="module")
def answers(model_dir: Path) -> list[tiny.Answer]:
    return reference(tiny.make_model(model_dir, **SIZES))


@pytest.fixture(scope="module")
def first_found() -> list[list[list[int]]]:
    """The answers of the policy that ran first."""
    return []


def run(model_dir: Path, **options: Any) -> list[list[int]]:
    own = {"compute": "int8", "compressed_dir": model_dir / "kept", **options}
    with tiny.engine(model_dir, PROMPTS, STEPS, **own) as engine:
        assert PerRow() in engine.plan.layout.compressed.values()
        return tiny.run(engine, PROMPTS, STEPS)


@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n])
def test_same_tokens_under_every_policy(
    name: str, model_dir: Path, answers: list[tiny.Answer], first_found: list[list[list[int]]]
) -> None:
    found = run(model_dir, **POLICIES[name])
    check_answers(found, answers)
    first_found.append(found)
    assert found == first_found[0]


def test_without_compiled_loops(
    model_dir: Path, answers: list[tiny.Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.kernels import threads

    with_loops = run(model_dir, **tiny.ON_CPU)
    monkeypatch.setattr(threads, "find_loops", lambda: None)
    assert run(model_dir, **tiny.ON_CPU) == with_loops
    check_answers(with_loops, answers)


def test_they_are_not_those_of_plain_products(model_dir: Path, answers: list[tiny.Answer]) -> None:
    with tiny.engine(model_dir, PROMPTS, STEPS, **tiny.ON_CPU) as engine:
        assert not engine.plan.layout.compressed
        assert tiny.run(engine, PROMPTS, STEPS) != tiny.tokens(answers)


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
    "rows that are no multiple of 4 stay plain": None,
    "experts": MixtralConfig(**tiny.SIZES, num_local_experts=6, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
def test_families(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if name == "tied head":
        changes = {"tie_word_embeddings": True}
    if name == "rows that are no multiple of 4 stay plain":
        changes = {"intermediate_size": 90}
    model = tiny.make_model(tmp_path, config=CONFIGS[name], **changes)
    check_answers(run(tmp_path, **options), reference(model))


def test_random_weights(tmp_path: Path) -> None:
    """They are made, and made integers, as those of a checkpoint."""
    tiny.make_model(tmp_path)
    options = {"dummy_seed": 3, "compute": "int8"}
    found = []
    for name in ("cpu: all in memory", "sim: odd mix"):
        with tiny.engine(tmp_path, PROMPTS, STEPS, **POLICIES[name], **options) as engine:
            assert engine.plan.layout.compressed
            found.append(tiny.run(engine, PROMPTS, STEPS))
    assert found[0] == found[1]


def test_a_sweep_brings_a_byte_for_a_weight(model_dir: Path, answers: list[tiny.Answer]) -> None:
    """And a scale for a row; a tensor begins on a block, and ends in one."""
    options = {**POLICIES["cpu: weights on disk"], "compute": "int8"}
    with tiny.engine(
        model_dir, PROMPTS, STEPS, compressed_dir=model_dir / "kept", **options
    ) as engine:
        layout, config = engine.plan.layout, engine.config
        D, F, V, H = 128, 192, tiny.VOCAB, config.head_dim
        shapes = [(4 * H, D), (2 * H, D), (2 * H, D), (D, 4 * H), (F, D), (F, D), (D, F)]
        sizes = [rows * (columns + 4) for rows, columns in [*shapes * 2, (V, D)]]
        wanted, moved = layout.streamed_bytes("disk")
        assert wanted == sum(sizes)
        assert moved == sum(-(-size // 4096) * 4096 for size in sizes)
        # Half of what bfloat16 takes, and a scale for each row.
        plain = sum(2 * rows * columns for rows, columns in [*shapes * 2, (V, D)])
        assert wanted < 0.52 * plain + 4096
        before = engine.traffic.wanted["disk read"]
        tiny.run(engine, PROMPTS[:1], 1)
        rows = engine.traffic.wanted["disk read"] - before - wanted
        assert 0 < rows <= len(PROMPTS[0]) * V * D  # of the embedding's table, near ones together


# -- where it is not done ----------------------------------------------------------------------


def test_a_cpu_that_is_not_faster_computes_plainly_and_says_so(
    model_dir: Path, answers: list[tiny.Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from freight.entrypoints.compress import compress_ahead
    from freight.runtime.engine import build_engine

    asked: list[str] = []
    monkeypatch.setattr(device, "computes_int8", asked.append)
    said: list[str] = []
    options = EngineOptions(
        device="cpu", dtype="float32", compute="int8", compressed_dir=tmp_path / "kept"
    )
    compress_ahead(options, model_dir, said.append)
    workload = tiny.workload(PROMPTS, STEPS)
    engine = build_engine(model_dir, options=options, workload=workload, say=said.append)
    try:
        assert not engine.plan.layout.compressed
        plain = tiny.run(engine, PROMPTS, STEPS)
    finally:
        engine.close()
    with tiny.engine(model_dir, PROMPTS, STEPS, device="cpu") as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == plain
    assert len(said) == 1 and "not faster" in said[0] and "computing in float32" in said[0]
    assert set(asked) == {"float32"} and not (tmp_path / "kept").exists()


def test_the_probe_wants_exact_sums_and_a_faster_product(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        computes_int8.cache_clear()
        seconds = {torch.int8: 1.0, torch.float32: 2.0, torch.bfloat16: 0.5}
        monkeypatch.setattr(
            device, "_is_faster", lambda own, other, times: seconds[own] * times < seconds[other]
        )
        assert computes_int8("float32") and not computes_int8("bfloat16")
        computes_int8.cache_clear()

        def cut_off(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """As where signed codes are made unsigned ones, and pairs added in 16 bits."""
            wide, rows = x.int()[:, None] + 128, y.t().int()[None]
            pairs = (wide * rows).unflatten(-1, (-1, 2)).sum(-1)
            sums = pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * rows.sum(-1)
            return sums.int()

        monkeypatch.setattr(device, "_PROBE_SIZE", 64)
        monkeypatch.setattr(device, "_PROBE_ROWS", 8)
        assert computes_int8("float32")
        computes_int8.cache_clear()
        monkeypatch.setattr(torch, "_int_mm", cut_off)
        assert not computes_int8("float32")
    finally:
        computes_int8.cache_clear()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        EngineOptions(compute="int8", weight_bits=8)
    assert "--weight-bits 8" in caught.value.asked and "Leave one" in caught.value.advice
    with pytest.raises(InputError, match="--compute int4 was given"):
        EngineOptions(compute="int4")
    cuda = ComputeDevice(kind="cuda", torch_device=torch.device("cpu"))
    with pytest.raises(InputError, match="A CUDA device computes"):
        choose_compute("int8", cuda, "float32", print)
    assert choose_compute("plain", cuda, "float32", print) == "plain"
