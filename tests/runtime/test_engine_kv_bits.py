"""Compressed keys and values, and sparse attention: the answers of a model that attends so.

Held against transformers in float32, whose attention is given keys and values that went there and
back through a numpy oracle; under every kind of policy alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from freight.errors import InputError
from freight.kernels import paged
from freight.plan.page_sizes import fitting_page_tokens
from freight.runtime.options import EngineOptions

from . import tiny
from .test_engine_compressed import there_and_back
from .test_engine_packed import WAYS
from .test_engine_packed import make as quantised
from .test_engine_policies import POLICIES, PROMPTS

STEPS = 8
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
Attention = Callable[..., tuple[torch.Tensor, Any]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    tiny.make_model(directory, **SIZES)
    return directory


def approximate(plain: Attention, kv_bits: int | None, group_size: int, share: float) -> Attention:
    """transformers' attention over keys and values as they would be kept."""

    def kept(x: torch.Tensor) -> torch.Tensor:
        if kv_bits is None:
            return x
        rows = x.reshape(-1, x.shape[-1]).numpy()
        return torch.from_numpy(there_and_back(rows, kv_bits, group_size)).view(x.shape)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        **more: Any,
    ) -> tuple[torch.Tensor, Any]:
        key, value = kept(key), kept(value)
        if share == 1 or query.shape[2] > 1:
            return plain(module, query, key, value, mask, scaling=scaling, **more)
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        keep = max(1, math.ceil(share * key.shape[2]))
        least = scores.topk(keep, dim=-1).values[..., -1:]
        weights = scores.masked_fill(scores < least, float("-inf")).softmax(-1)
        found = weights @ value.repeat_interleave(groups, 1)
        return found.transpose(1, 2).contiguous(), weights

    return attend


def expected(
    directory: Path, kv_bits: int | None, group_size: int = 64, share: float = 1.0, **sizes: Any
) -> list[list[int]]:
    model = tiny.make_model(directory, **{**SIZES, **sizes})
    return answers_of(model, kv_bits, group_size, share)


def answers_of(
    model: PreTrainedModel, kv_bits: int | None, group_size: int, share: float
) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        changed = approximate(modeling_llama.eager_attention_forward, kv_bits, group_size, share)
        patch.setattr(modeling_llama, "eager_attention_forward", changed)
        return tiny.tokens(tiny.reference(model, PROMPTS, STEPS))


@pytest.fixture(scope="module")
def in_4_bits(model_dir: Path) -> Iterator[list[list[int]]]:
    yield expected(model_dir, 4)


@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n])
def test_same_tokens_under_every_policy(
    name: str, model_dir: Path, in_4_bits: list[list[int]]
) -> None:
    with tiny.engine(model_dir, PROMPTS, STEPS, **POLICIES[name], kv_bits=4) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == in_4_bits


@pytest.mark.parametrize("placed", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize(
    ("kv_bits", "group_size", "share"),
    [(8, 32, 1.0), (4, 128, 0.2), (None, 64, 0.1), (None, 64, 0.5)],
)
def test_bits_and_shares(
    kv_bits: int | None,
    group_size: int,
    share: float,
    kernels: str,
    placed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "reference":
        monkeypatch.setattr(paged, "find_loops", lambda: None)
    answers = expected(tmp_path, kv_bits, group_size, share)
    options = {"kv_bits": kv_bits, "group_size": group_size, "sparse_attention": share}
    with tiny.engine(tmp_path, PROMPTS, STEPS, **placed, **options) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == answers


@pytest.mark.parametrize("name", ["awq", "compressed-tensors"])
def test_of_a_checkpoint_that_is_quantised(name: str, tmp_path: Path) -> None:
    """Weights with scales of their own widths, keys and values beside them in groups."""
    answers = answers_of(quantised(tmp_path, WAYS[name]), 8, 64, 1.0)
    options = {**tiny.ON_SIM, "kv_bits": 8, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, PROMPTS, STEPS, **options) as engine:
        assert tiny.run(engine, PROMPTS, STEPS) == answers


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["of 20", "of 40"])
def test_heads_that_groups_do_not_divide(heads: tuple[int, int], tmp_path: Path) -> None:
    sizes = {"hidden_size": 80, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    width = 80 // heads[0]
    answers = expected(tmp_path, 4, width, **sizes)
    said: list[str] = []
    from freight.runtime.engine import build_engine

    options = EngineOptions(**tiny.ON_CPU, dtype="float32", disk_dir=tmp_path, kv_bits=4)
    engine = build_engine(
        tmp_path, options=options, workload=tiny.workload(PROMPTS, STEPS), say=said.append
    )
    assert tiny.run(engine, PROMPTS, STEPS) == answers
    engine.close()
    told = f"keys and values in groups of {width}: 64 does not divide a head of {width}"
    assert said == [told]


def test_pages_take_what_they_say(model_dir: Path) -> None:
    """Of 4 bits 36 bytes a head and token where float32 takes 256, but for what fills a block."""
    used = {}
    for kv_bits in (None, 4):
        options = {**POLICIES["cpu: all in memory"], "kv_bits": kv_bits}
        with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
            geometry, policy = engine.plan.geometry, engine.plan.policy
            used[kv_bits] = geometry.usage["cpu"]["KV cache"]
            tokens = fitting_page_tokens(engine.config, 40, 4)
            size = engine.config.kept_bytes_per_token_per_layer(4) * policy.page_tokens
            assert size <= geometry.page_bytes < size + 4096 and geometry.page_bytes % 4096 == 0
            assert tokens in (16, 32, 64, 128, 256)
            assert engine.config.kept_bytes_per_token_per_layer(4) == (72 if kv_bits else 512)
    assert used[4] < used[None] / 2


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(InputError, match="above 0 and at most 1"):
        EngineOptions(sparse_attention=share)


@pytest.mark.parametrize(("kv_bits", "group_size"), [(2, 64), (16, 64), (4, 48)])
def test_formats_that_there_are_not(kv_bits: int, group_size: int) -> None:
    with pytest.raises(InputError, match=r"4 and 8 bits, 3 as .* groups of 32, 64, 128"):
        EngineOptions(kv_bits=kv_bits, group_size=group_size)


def test_groups_of_nothing() -> None:
    for compute in ("plain", "int8"):
        with pytest.raises(InputError, match="--group-size 32 was given without --weight-bits"):
            EngineOptions(group_size=32, compute=compute)
    assert EngineOptions(group_size=32, kv_bits=4, compute="int8").kv_bits == 4


def test_there_and_back_is_idle_on_what_is_exact() -> None:
    """The oracle itself: numbers that are codes already stay."""
    exact = np.tile(np.arange(16, dtype=np.float32), (2, 4))
    assert np.array_equal(there_and_back(exact, 4, 64), exact)
