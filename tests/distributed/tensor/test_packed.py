"""Weights that ranks keep, move and multiply as integers in groups: the tokens of one machine with
the same integers, the bytes that they take, and what of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.demo import MODEL_DIR
from freight.distributed.ranks import Ranks
from freight.distributed.tensor.choice import plan_ways
from freight.distributed.tensor.fitting import TensorOptions
from freight.distributed.tensor.model import TensorModel, load_model
from freight.distributed.tensor.packed import mean_bytes
from freight.distributed.tensor.planning import build_cut_engine
from freight.distributed.tensor.rates import Rates
from freight.distributed.tensor.reading import CheckpointReader, DummyReader
from freight.distributed.tensor.virtual import VirtualRanks
from freight.distributed.tensor.ways import Way
from freight.kernels.grouped import CompressedRows, dequantise, quantise
from freight.model.checkpoint import imagined_sources, resolve
from freight.model.compression import choose_formats, compressed_places
from freight.model.config import read_config
from freight.model.number_format import Compression, Grouped, find_compressed
from freight.model.sources import TensorSource
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC, EXCHANGED
from freight.runtime.compressed_files import compressed_sources
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions

from ...runtime import test_engine_gguf as gguf
from ...runtime import test_engine_levels as levels
from ...runtime import test_engine_packed as quantised
from ...runtime import tiny
from ...runtime.test_engine_parity import falcon, gemma2, gpt_neox, llama, mixtral, opt, phi3
from ..pipeline.stages import on_ranks
from .bed import CUTS, greedy
from .test_planning import OPTIONS, mixed, told

STEPS = 7
EIGHT = Mesh.of(x=2, y=2, z=2)
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CONFIGS = {
    "llama": llama(**WIDE),
    "tied": llama(**WIDE, tie_word_embeddings=True),
    "multi-head": llama(**{**WIDE, "num_key_value_heads": 8}),
    "phi3": phi3(**WIDE),
    "gemma2": gemma2(**{**WIDE, "head_dim": 32}),
    "gpt-neox": gpt_neox(**WIDE),
    "falcon 7b": falcon(**{**WIDE, "ffn_hidden_size": 512}),
    "falcon 40b": falcon(
        **{**WIDE, "ffn_hidden_size": 512}, new_decoder_architecture=True, num_kv_heads=2
    ),
    "mixtral": mixtral(**WIDE),
    "opt": opt(**{**WIDE, "ffn_dim": 512, "word_embed_proj_dim": 256}),
}


def kept(directory: Path, compression: Compression | None) -> Mapping[str, TensorSource]:
    """The tensors as a run with this compression finds them."""
    config = read_config(directory)
    sources = resolve(config, directory)
    return compressed_sources(
        config, sources, compression, directory=directory / "kept", say=lambda _: None
    )


def load(directory: Path, mesh: Mesh, ways: Sequence[Way], **changes: Any) -> TensorModel:
    return load_model(directory, VirtualRanks(mesh), ways, dtype=torch.float32, **changes)


def integers(model: TensorModel) -> dict[str, int]:
    """In how many layers, or ends, each weight is kept as integers."""
    found: dict[str, int] = {}
    for own in model.stored:
        for name, parts in own.items():
            found[name] = found.get(name, 0) + (parts[0].dtype == torch.uint8)
    return found


def answers(directory: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Of one machine."""
    where = {"compressed_dir": directory / "kept"}
    with tiny.engine(directory, prompts, STEPS, **where, **options) as engine:
        return tiny.run(engine, prompts, STEPS)


@pytest.mark.parametrize(("bits", "size"), [(4, 64), (8, 32)])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_the_same_integers_on_one_machine(
    name: str, bits: int, size: int, tmp_path: Path
) -> None:
    """Each step is computed in another way than the one before it: weights are gathered whole, in
    part and not at all, along their rows and their columns."""
    tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts = tiny.prompts(5, 17, vocab=300)
    sources = kept(tmp_path, Compression(bits=bits, group_size=size))
    model = load(tmp_path, EIGHT, CUTS, sources=sources)
    found = [*zip(*greedy(model, prompts, STEPS, CUTS), strict=True)]
    wanted = answers(tmp_path, prompts, weight_bits=bits, group_size=size)
    assert [list(own) for own in found] == wanted
    layers = model.config.num_layers
    plain = {"embedding", "router", *(["head"] if model.config.tied_embeddings else [])}
    for weight, count in integers(model).items():
        assert count == (0 if weight in plain else 1 if weight == "head" else layers), weight


@pytest.mark.parametrize("name", ["modelopt", "nf4, nested", "mxfp4", "fp8"])
def test_floats_of_few_bits_become_plain(name: str, tmp_path: Path) -> None:
    """Of rows that are read whole."""
    if name == "fp8":
        quantised.make_fp8(tmp_path, quantised.FP8_MODELS["qwen3"], torch.float32)
    else:
        levels.make(tmp_path, levels.WAYS[name])
    prompts, sources = tiny.prompts(5, 17, vocab=300), kept(tmp_path, None)
    model = load(tmp_path, EIGHT, CUTS, sources=sources)
    found = [*zip(*greedy(model, prompts, STEPS, CUTS), strict=True)]
    assert [list(own) for own in found] == answers(tmp_path, prompts)
    assert not any(integers(model).values())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_schemes_take_turns(num_ranks: int, tmp_path: Path) -> None:
    """Some use a part of a weight that others use whole."""
    tiny.make_model(tmp_path, config=CONFIGS["multi-head"])
    prompts, schemes = tiny.prompts(3, 11), [*DYNAMIC.values(), *EXCHANGED.values()]
    sources = kept(tmp_path, Compression(bits=4, group_size=64))
    model = load(tmp_path, Mesh.of(x=num_ranks), schemes, sources=sources)
    found = [*zip(*greedy(model, prompts, STEPS, schemes), strict=True)]
    assert [list(own) for own in found] == answers(tmp_path, prompts, weight_bits=4)
    assert integers(model)["attention out"] == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_gathered_takes_the_bytes_of_integers(bits: int, tmp_path: Path) -> None:
    """A number is moved, and kept, as its code and a 64th of a scale and a minimum."""
    tiny.make_model(tmp_path, config=CONFIGS["llama"])
    prompts, way = tiny.prompts(4, 9), Cut(gathered="xyz")
    sources = kept(tmp_path, Compression(bits=bits, group_size=64))
    moved, held = [], []
    for changes in ({}, {"sources": sources}):
        model = load(tmp_path, EIGHT, [way], **changes)
        assert len([*greedy(model, prompts, 4, [way])]) == 4
        moved.append(model.executor.moved["all-gather", "weights"])
        held.append(model.weights_held)
    table = tiny.VOCAB * 256
    # The embedding stays in 32 bits; each of four steps gathers it on 8 ranks, of which 7 send.
    embedding = 4 * 4 * table * 7
    assert (moved[1] - embedding) * 4 == (moved[0] - embedding) * (bits / 8 + 4 / 64)
    assert (held[1] - 4 * table / 8) * 4 == (held[0] - 4 * table / 8) * (bits / 8 + 4 / 64)
    assert mean_bytes(sources, 4) == bits / 8 + 4 / 64


def test_weights_whose_groups_a_cut_would_split_stay_plain(tmp_path: Path) -> None:
    """48 of 192 columns in groups of 64 on each rank of four; and 24 of 96 in groups of 32, where a
    third more would have to be added."""
    config = llama(**{**WIDE, "intermediate_size": 96, "head_dim": 24})
    tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(3, 9)
    sources = kept(tmp_path, Compression(bits=4, group_size=64))
    mesh = Mesh.of(x=1, y=2, z=2)
    model = load(tmp_path, mesh, [Cut()], sources=sources)
    found = [*zip(*greedy(model, prompts, STEPS, [Cut()]), strict=True)]
    assert [list(own) for own in found] == answers(tmp_path, prompts, weight_bits=4)
    counts = integers(model)
    assert (counts["mlp out"], counts["attention out"], counts["mlp in"]) == (0, 0, 2)
    assert model.packed.kept_plain() == ["attention out", "mlp out"]


@pytest.mark.parametrize("kind", [llama, mixtral])
def test_an_mlp_is_padded_to_whole_groups(kind: Callable[..., Any], tmp_path: Path) -> None:
    """224 of 448 columns would be three and a half groups: a rank has four, the second one three of
    them and one of zeros."""
    tiny.make_model(tmp_path, config=kind(**{**WIDE, "intermediate_size": 448}))
    prompts = tiny.prompts(3, 9)
    sources = kept(tmp_path, Compression(bits=4, group_size=64))
    model = load(tmp_path, Mesh.of(x=2), [Cut(width="", inner="x")], sources=sources)
    found = [*zip(*greedy(model, prompts, STEPS, model.ways), strict=True)]
    assert [list(own) for own in found] == answers(tmp_path, prompts, weight_bits=4)
    assert model.packed.kept_plain() == []


ROWS, COLUMNS = 70, 192
KINDS = [Grouped(bits=4, group_size=64), Grouped(bits=8, group_size=32)]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.lists(st.integers(-1, ROWS - 1), min_size=1, max_size=12),
    groups=st.lists(st.integers(-1, 2), min_size=1, max_size=4),
)
def test_any_rows_and_groups_are_read_as_they_are(
    kind: Grouped, rows: list[int], groups: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a file, and made up: the numbers of the integers that are read are those that are read
    plain, which are those of the whole matrix."""
    size = kind.group_size
    columns = np.concatenate(
        [np.arange(size) + size * own if own >= 0 else np.full(size, -1) for own in groups]
    )
    path = tmp_path_factory.mktemp("rows") / "file"
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(ROWS, COLUMNS, generator=generator)
    raw = quantise(plain, kind)
    path.write_bytes(b"abc" + raw.numpy().tobytes())
    source = TensorSource(
        path=path, offset=3, num_bytes=raw.numel(), dtype=kind.name, shape=(ROWS, COLUMNS)
    )
    reader = CheckpointReader({"m": source})
    whole = torch.empty(ROWS, COLUMNS)
    dequantise(CompressedRows(raw=raw, columns=COLUMNS, number_format=kind), whole)
    chosen = np.array(rows)
    read = reader.packed("m", chosen, columns)
    assert reader.bytes_read == read.shape[1] * sum(own >= 0 for own in rows) * (
        sum(own >= 0 for own in groups)
    ) // len(groups)
    found = torch.empty(len(rows), len(columns))
    dequantise(CompressedRows(raw=read, columns=len(columns), number_format=kind), found)
    wanted = whole[chosen.clip(0)][:, columns.clip(0)]
    wanted[chosen < 0] = 0
    wanted[:, columns < 0] = 0
    assert torch.equal(found, wanted)
    assert torch.equal(reader.matrix("m", chosen, columns), wanted)
    reader.close()


def test_random_weights_are_those_of_one_machine(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    config, compression = read_config(tmp_path), Compression(bits=4, group_size=64)
    plain = imagined_sources(config, "float32")
    sources = compressed_places(plain, choose_formats(config, plain, compression), tmp_path / "no")
    prompts = tiny.prompts(3, 9)
    model = load(tmp_path, EIGHT, CUTS, sources=sources, dummy_seed=3)
    found = [*zip(*greedy(model, prompts, STEPS, CUTS), strict=True)]
    wanted = answers(tmp_path, prompts, weight_bits=4, dummy_seed=3)
    assert [list(own) for own in found] == wanted
    reader = DummyReader(config, sources, 3, "float32")
    name = "layers.1.mlp.down"
    own = find_compressed(sources[name].dtype)
    assert isinstance(own, Grouped)
    rows, columns = np.array([5, -1, 6]), np.arange(64, 192)
    out = torch.empty(3, 128)
    raw = reader.packed(name, rows, columns)
    dequantise(CompressedRows(raw=raw, columns=128, number_format=own), out)
    assert torch.equal(out, reader.matrix(name, rows, columns))
    assert not out[1].any() and out[0].any()


def test_plans_count_what_integers_take(tmp_path: Path) -> None:
    """Weights that fit as integers alone are refused as they are."""
    sizes = {**WIDE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    llama(**sizes).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    plain = imagined_sources(config, "float32")
    formats = choose_formats(config, plain, Compression(bits=4, group_size=64))
    sources = compressed_places(plain, formats, tmp_path / "no")
    rates = Rates(flops=1e11, memory_bytes_per_s=1e10, link_bytes_per_s=1e9, collective_s=1e-4)
    work = tiny.workload(tiny.prompts(8, 16), 8)
    planned = {}
    for name, own in (("plain", None), ("integers", sources)):
        options = TensorOptions(memory_bytes=1 << 40, sources=own)
        planned[name] = plan_ways(config, 2, rates, work, torch.float32, options).footprint
    table = tiny.VOCAB * 1024 * 4 / 2
    assert planned["integers"].weights < 0.16 * planned["plain"].weights + table
    assert planned["integers"].total < 0.5 * planned["plain"].total
    model = load(tmp_path, Mesh.of(x=2), [Cut(width="", inner="x")], sources=sources, dummy_seed=1)
    assert model.weights_held <= planned["integers"].weights <= 1.1 * model.weights_held


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_in_16_bits_stay_so(name: str, tmp_path: Path) -> None:
    """Where 32 are computed with; they are gathered so, and the tokens are those of one machine."""
    tiny.make_model(tmp_path, config=CONFIGS[name], dtype=torch.bfloat16)
    prompts = tiny.prompts(5, 17, vocab=300)
    model = load(tmp_path, EIGHT, CUTS)
    found = [*zip(*greedy(model, prompts, STEPS, CUTS), strict=True)]
    assert [list(own) for own in found] == answers(tmp_path, prompts)
    kinds = {own: parts[0].dtype for layer in model.stored for own, parts in layer.items()}
    assert {own for own, kind in kinds.items() if kind != torch.bfloat16} <= {"router"}
    assert model.weight_bytes == 2


CHECKPOINTS = ["awq", "gptq, 8 bits", "compressed-tensors, asymmetric", "gptq, rows"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantised_checkpoints_are_cut(name: str, tmp_path: Path) -> None:
    quantised.make(tmp_path, quantised.WAYS[name])
    prompts = tiny.prompts(3, 9)
    model = load(tmp_path, Mesh.of(x=2), [Cut(width="", inner="x")], sources=kept(tmp_path, None))
    found = [*zip(*greedy(model, prompts, STEPS, model.ways), strict=True)]
    assert [list(own) for own in found] == answers(tmp_path, prompts)
    assert integers(model)["mlp in"] == 2


GGUF = ["llama, biases and tied head", "mixtral", "gemma3", "gpt_oss", "qwen2_moe", "granite"]
GGUF += ["granite_moe", "smollm3", "glm4", "glm4_moe", "dots1", "olmo", "olmo2", "olmo3", "olmoe"]


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files_are_cut(name: str, tmp_path: Path) -> None:
    """Matrices of several types, a quantised table, rows that are woven in the file."""
    wanted = gguf.prepare(tmp_path, name, gguf.mixed)
    model = load(tmp_path, Mesh.of(x=2), [Cut(width="", inner="x")], sources=kept(tmp_path, None))
    steps = greedy(model, gguf.PROMPTS[:5], gguf.STEPS, model.ways)
    assert [[*own] for own in zip(*steps, strict=True)] == wanted
    assert sum(integers(model).values()) > 0


def ask(directory: Path, options: EngineOptions, ranks: Ranks, stages: int = 1) -> list[Any]:
    requests, work = mixed()
    engine = build_cut_engine(directory, options=options, workload=work, ranks=ranks, stages=stages)
    found = [*engine.run(iter(requests if not ranks.rank else ()))]
    engine.summary()
    return told(found)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_those_of_one_machine_whatever_is_asked(bits: int, tmp_path: Path) -> None:
    """The whole way, from flags to answers, on two ranks and in two stages of two."""
    requests, work = mixed()
    options = replace(OPTIONS, weight_bits=bits, compressed_dir=tmp_path)
    one = build_engine(MODEL_DIR, options=options, workload=work)
    wanted = told([*one.run(iter(requests))])
    one.close()
    first, second = on_ranks(2, lambda ranks: ask(MODEL_DIR, options, ranks))
    assert first == wanted
    assert second == []
    first, *others = on_ranks(4, lambda ranks: ask(MODEL_DIR, options, ranks, stages=2))
    assert first == wanted
    assert others == [[]] * 3
