"""Costs of whole models, padding, what fits, and the search among meshes and cuts."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import pytest

from freight.errors import BudgetError, InputError
from freight.hardware.chip import find_chip
from freight.model.config import ModelConfig, parse_config
from freight.model.decoder import count_parameters, tensor_shapes
from freight.model.families import FAMILIES
from freight.partition.cost import Cost, Setting, Step, parameters_of_token
from freight.partition.efficiency import Efficiency, Phase
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.planner import (
    best_plan,
    candidates,
    cuts,
    meshes,
    with_shortest_layers,
)

from .test_schemes import bundled

H100 = Setting(chip=find_chip("h100"))


def decode(rows: int = 64, past: int = 1000) -> Step:
    return Step(phase="decode", rows=rows, new_tokens=1, past=past)


def mixtral(**more: object) -> ModelConfig:
    return parse_config(
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **more,
        }
    )


def test_meshes_are_all_boxes_once() -> None:
    shapes = [tuple(size for _, size in mesh.axes) for mesh in meshes(12)]
    assert len(shapes) == len(set(shapes))
    assert all(x * y * z == 12 for x, y, z in shapes)
    for x in (1, 2, 3, 4, 6, 12):
        for y in (1, 2, 3, 4, 6, 12):
            if 12 % (x * y) == 0:
                z = 12 // x // y
                assert (x, y, z) in shapes or (x, z, y) in shapes
    with pytest.raises(InputError):
        next(meshes(0))


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "palm-8b", "opt-30b"])
def test_weights_of_all_chips_are_the_models(name: str) -> None:
    """All but the norms, biases and learned positions, plus what was padded."""
    config = bundled(name)
    for mesh in (Mesh.of(x=1, y=1, z=1), Mesh.of(x=2, y=2, z=2)):
        own = Cost(config, mesh, Cut(), decode(8), H100)
        kept = own.weight_bytes * mesh.num_chips / 2.0
        padded = count_parameters(own.padding.config)
        assert kept == pytest.approx(padded, rel=2e-3) and kept <= padded


def test_keys_of_all_chips_are_the_models() -> None:
    config, step = bundled("llama-2-70b"), decode(64, 999)
    whole = config.kv_bytes_per_token() * 64 * 1000
    by_heads = Cost(config, Mesh.of(x=1, y=8, z=1), Cut(), step, H100)
    by_both = Cost(config, Mesh.of(x=2, y=1, z=8), Cut(batch="x"), step, H100)
    copied = Cost(config, Mesh.of(x=2, y=1, z=8), Cut(), step, H100)
    assert by_heads.kv_bytes * 8 == by_both.kv_bytes * 16 == whole
    assert copied.kv_bytes * 8 == whole


def test_windows_bound_keys() -> None:
    config = replace(bundled("llama-2-7b"), sliding_windows=(128, None) * 16)
    mesh = Mesh.of(x=1, y=1, z=1)
    own = Cost(config, mesh, Cut(), decode(1, 999), H100)
    per_token = config.kv_bytes_per_token_per_layer()
    assert own.kv_bytes == 16 * per_token * (128 + 1000)


def test_time_is_the_sum_of_its_lines() -> None:
    config, mesh = bundled("palm-62b"), Mesh.of(x=2, y=2, z=4)
    setting = Setting(chip=find_chip("tpu-v4"))
    own = Cost(config, mesh, Cut(batch="zyx"), decode(), setting)
    moves = computed = 0.0
    for _, count, lines in own.lines():
        moves += count * sum(line.waited_s for line in lines)
        computed += count * sum(line.seconds for line in lines if not line.num_bytes)
    assert moves == pytest.approx(own.waited_s) == pytest.approx(own.link_s)
    rates = own.efficiency
    assert computed == pytest.approx(own.compute_s / rates.compute, rel=0.01)
    fixed = rates.layer_s * config.num_layers
    rest = own.compute_s / rates.compute + own.memory_s / rates.memory + fixed
    assert own.seconds == pytest.approx(moves + rest)
    assert own.dollars_per_token is None
    rented = replace(own, setting=replace(setting, chip=setting.chip.at(3.6)))
    assert rented.dollars_per_token == pytest.approx(own.chip_seconds_per_token * 1e-3)
    assert own.chip_seconds_per_token == pytest.approx(16 * own.seconds / 64)


def test_overlap_hides_moves_behind_their_products() -> None:
    """All of a move at most, and no more than its product takes; an exchange has none."""
    config, mesh = bundled("palm-540b"), Mesh.of(x=4, y=4, z=4)
    step = Step(phase="prefill", rows=64, new_tokens=512)
    plain = {key: Efficiency() for key in H100.efficiencies}
    full = {key: Efficiency(overlap=1.0) for key in H100.efficiencies}
    setting = Setting(chip=find_chip("tpu-v4"), efficiencies=plain)
    own = Cost(config, mesh, Cut(batch="zyx"), step, setting)
    hidden = replace(own, setting=replace(setting, efficiencies=full))
    exchanged = sum(
        line.seconds * count
        for _, count, lines in own.lines()
        for line in lines
        if line.what.startswith("all-to-all of")
    )
    assert exchanged <= hidden.waited_s < 0.5 * own.waited_s
    assert hidden.seconds == pytest.approx(own.seconds - own.waited_s + hidden.waited_s)


def test_fewer_bits_are_read_faster_and_gathered_first() -> None:
    config, mesh = bundled("palm-540b"), Mesh.of(x=4, y=4, z=4)
    step = Step(phase="prefill", rows=64, new_tokens=512)
    cut = Cut(gathered="xyz")
    whole, half = (
        Cost(config, mesh, cut, step, replace(H100, weight_bytes=size)) for size in (2.0, 1.0)
    )
    assert half.weight_bytes == whole.weight_bytes / 2
    gathered = [line for _, _, lines in whole.lines() for line in lines if "mlp in" in line.what]
    thinner = [line for _, _, lines in half.lines() for line in lines if "mlp in" in line.what]
    assert sum(line.num_bytes for line in thinner) == sum(own.num_bytes for own in gathered) / 2


@pytest.mark.parametrize("experts", ["", "z", "zy"])
def test_experts_are_priced(experts: str) -> None:
    """All of them are kept, and the arithmetic is that of those chosen."""
    config, mesh = mixtral(), Mesh.of(x=2, y=2, z=4)
    own = Cost(config, mesh, Cut(experts=experts), decode(64), H100)
    assert own.weight_bytes * 16 / 2 == pytest.approx(count_parameters(config), rel=2e-3)
    chosen = 3 * 2 * 4096 * 14336
    layer = own.layers[0][0]
    names = ("experts in", "experts out")
    done = sum(step.flops for step in layer.computes if set(step.operands) & set(names))
    assert done * 16 == pytest.approx(2 * 64 * chosen)


def test_model_flops_are_of_the_experts_that_a_token_chooses() -> None:
    """arXiv 2401.04088: of 47B parameters a token uses 13B. Exactly: all tensors but those of the
    experts from the third on."""
    config = mixtral()
    used = sum(
        prod(shape)
        for name, shape in tensor_shapes(config).items()
        if not re.search(r"\.experts\.[2-9]\.", name)
    )
    assert parameters_of_token(config) == used == pytest.approx(13e9, rel=0.02)
    own = Cost(config, Mesh.of(x=1, y=8, z=1), Cut(), decode(64), H100)
    peak = 8 * H100.chip.dense_flops * own.seconds
    assert own.mfu == pytest.approx(2 * used * 64 / peak, rel=1e-12)
    plain = bundled("llama-2-7b")
    assert parameters_of_token(plain) == count_parameters(plain)


def test_experts_that_no_token_chose_are_not_read() -> None:
    """One token of Mixtral reads two of eight; many tokens read all."""
    config, mesh = mixtral(), Mesh.of(x=1, y=1, z=1)
    setting = replace(H100, usable=1000.0)
    one, many = (Cost(config, mesh, Cut(), decode(rows, 1), setting) for rows in (1, 512))
    mlp = 32 * 8 * 3 * 4096 * 14336
    whole = count_parameters(config) - config.vocab_size * 4096
    rate = H100.chip.memory_bytes_per_s
    read = [(own.memory_s * rate - own.kv_bytes) / 2 for own in (one, many)]
    assert read == pytest.approx([whole - 0.75 * mlp, whole], rel=1e-3)


def test_heads_grow_by_half_at_most() -> None:
    """Past that the width of heads is cut: 48 heads on 256 chips are padded to 64 only, whose
    projections lie on all chips all the same."""
    config, step = bundled("palm-540b"), decode(512)
    own = Cost(config, Mesh.of(x=4, y=16, z=4), Cut(batch="zyx"), step, H100)
    assert own.padding.notes == ("48 heads padded to 64",)
    layer = own.layers[0][0]
    assert str(layer.weights["queries in"]) == "E_x H_zy D"
    exchanged = {str(t.move) for t in layer.transfers if t.value == "queries"}
    assert "all-to-all over x (D to B)" in exchanged
    assert layer.stored_elements * 256 == sum(
        layer.sizes["E"] * width for width in (3 * layer.sizes["F"], 2 * 64 * 256, 2 * 256)
    )


def test_the_search_finds_the_least() -> None:
    config, step = bundled("llama-2-70b"), decode(32)
    (found,) = best_plan(config, 8, [(step, 1.0)], H100)
    every = [*candidates(config, meshes(8), step, H100)]
    assert found.even_seconds == min(own.even_seconds for own in every)
    assert len({(own.mesh, own.cut) for own in every}) == len(every) > 20
    (fixed,) = best_plan(config, 8, [(step, 1.0)], H100, Mesh.of(x=8, y=1, z=1))
    assert fixed.mesh == Mesh.of(x=8, y=1, z=1)


OWN: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024},
    "gemma2": {"query_pre_attn_scalar": 128, "sliding_window": 1024},
    "gemma4": {"hidden_size_per_layer_input": 0},
    "opt": {"ffn_dim": 16384, "word_embed_proj_dim": 4096},
    "gpt_neox": {"use_parallel_residual": True},
    "falcon": {"multi_query": True, "parallel_attn": True, "alibi": False},
    "palm": {"n_embd": 4096},
    "gpt2": {"n_inner": 16384},
    "gpt_bigcode": {"n_inner": 24576},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "intermediate_size": 16384},
    "qwen2_moe": {"num_experts": 8},
    "hunyuan_v1_moe": {"num_experts": 8},
    "minicpm": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "granitemoeshared": {"shared_intermediate_size": 1024},
    "mpt": {"d_model": 4096},
    "biogpt": {"intermediate_size": 16384},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "nemotron_h": {"hybrid_override_pattern": "*-*-"},
    "lfm2_moe": {"full_attn_idxs": [1, 3]},
    "bailing_hybrid": {"layer_group_size": 4},
}
UNKNOWN = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "nemotron_h"),
    *("deepseek_v32", "glm_moe_dsa", "mistral4", "youtu", "afmoe"),
    *("minicpm3", "bamba", "bloom", "falcon_h1", "mpt"),
    *("granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("kimi_linear", "bailing_hybrid", "olmo_hybrid", "gemma4", "mimo_v2_flash"),
    *("hy_v4", "glm5_next", "deepseek_v4", "laguna", "lfm3", "step3p5", "axk1"),
    "mistral_large4",
}
"""Of which no layouts are known."""


@pytest.mark.parametrize("family", sorted(UNKNOWN))
def test_layers_of_other_kinds_are_refused(family: str) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 32, "vocab_size": 32000}
    config = parse_config({"model_type": family, **sizes, **OWN.get(family, {})})
    step = Step(phase="decode", rows=32, new_tokens=1, past=2000)
    with pytest.raises(InputError, match="no layout is known"):
        best_plan(config, 8, [(step, 1.0)], H100)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNKNOWN))
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_family_is_planned(family: str, phase: Phase) -> None:
    """With a path through its layers that takes no longer, unless they have experts."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes |= {"vocab_size": 32000, "max_position_embeddings": 4096}
    config = parse_config({"model_type": family, **sizes, **OWN.get(family, {})})
    new, past = (512, 0) if phase == "prefill" else (1, 2000)
    step = Step(phase=phase, rows=32, new_tokens=new, past=past)
    (own,) = best_plan(config, 8, [(step, 1.0)], H100)
    # All but norms, biases and learned positions.
    assert own.weight_bytes * 8 / 2 == pytest.approx(count_parameters(config), rel=0.02)
    if config.experts is not None:
        with pytest.raises(InputError, match="experts"):
            with_shortest_layers(own)
        return
    path = with_shortest_layers(own)
    assert 0.7 * own.seconds < path.seconds <= own.seconds * (1 + 1e-12)
    assert [count for _, count in path.layers] == [count for _, count in own.layers]
    assert path.weight_bytes == own.weight_bytes


def test_phases_share_a_mesh() -> None:
    config = bundled("palm-62b")
    setting = Setting(chip=find_chip("tpu-v4"))
    prefill = Step(phase="prefill", rows=64, new_tokens=1024)
    steps = [(prefill, 1.0), (decode(64, 1024), 64.0)]
    both = best_plan(config, 16, steps, setting)
    assert both[0].mesh == both[1].mesh
    total = sum(own.even_seconds * times for own, (_, times) in zip(both, steps, strict=True))
    for mesh in meshes(16):
        alone = best_plan(config, 16, steps, setting, mesh)
        taken = sum(own.even_seconds * times for own, (_, times) in zip(alone, steps, strict=True))
        assert total <= taken


def test_cuts_differ() -> None:
    config = bundled("palm-62b")
    assert len([*cuts(Mesh.of(x=1, y=1, z=1), config)]) == 1
    every = [*cuts(Mesh.of(x=2, y=2, z=2), config)]
    assert len(set(every)) == len(every) == 4 + 3 + 3 + 2 + 2 + 1
    assert any(cut.experts for cut in cuts(Mesh.of(x=2, y=2, z=2), mixtral()))


def test_what_does_not_fit_says_what_would() -> None:
    config = bundled("llama-2-70b")
    with pytest.raises(BudgetError, match="fewer rows") as caught:
        best_plan(config, 2, [(decode(512, 4000), 1.0)], H100)
    assert "keys and values" in str(caught.value) and "chips" in caught.value.advice
    with pytest.raises(BudgetError, match="Take about 2 chips"):
        best_plan(config, 1, [(decode(1, 10), 1.0)], H100)
    (found,) = best_plan(config, 4, [(decode(1, 10), 1.0)], H100)
    assert found.memory_bytes <= found.room_bytes


def test_what_does_not_divide_is_padded_or_refused() -> None:
    config = bundled("llama-2-7b")  # 32 heads of 128, an MLP of 11008
    own = Cost(config, Mesh.of(x=3, y=1, z=3), Cut(), decode(64), H100)
    with pytest.raises(InputError, match="cannot be padded"):
        _ = own.padding
    own = Cost(bundled("llama-2-13b"), Mesh.of(x=1, y=16, z=1), Cut(), decode(64), H100)
    assert own.padding.notes == ("40 heads padded to 48",)
    assert own.padding.config.num_kv_heads == 48
    with pytest.raises(InputError, match="cannot be padded"):
        best_plan(config, 7, [(decode(), 1.0)], H100)
    # A tenth row has no chip of its own.
    assert all(
        own.cut.rows == "" or own.step.rows % own.mesh.size(own.cut.rows) == 0
        for own in candidates(config, meshes(8), decode(9), H100)
    )
    for wrong in ({"rows": 0}, {"new_tokens": 0}, {"past": -1}):
        with pytest.raises(InputError):
            replace(decode(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="overlap of 2"):
        Efficiency(overlap=2)
    with pytest.raises(InputError, match=r"compute of 1\.5"):
        Efficiency(compute=1.5)
