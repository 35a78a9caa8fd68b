"""Where weights lie, for random splits of a real checkpoint.

Held against the checkpoint as safetensors reads it: every row is somewhere once, shares are as
asked, and what the pieces bring into a slot is the weights, bit for bit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from freight.model.checkpoint import TensorSource, imagined_sources, resolve
from freight.model.compression import choose_formats, compressed_places
from freight.model.config import ModelConfig, parse_config, read_config
from freight.model.decoder import build_programme, tensor_shapes
from freight.model.number_format import Compression, Grouped
from freight.model.programme import Programme
from freight.plan.forms import BLOCK
from freight.plan.layout import UnitLayout, WeightLayout, lay_out
from freight.plan.parts import Part
from freight.plan.policy import Policy, Split
from freight.plan.ring import stream_model
from freight.quantities import align_up

from ..runtime import tiny

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A tiny model on disk, and its matrices as safetensors reads them."""

    config: ModelConfig
    programme: Programme
    sources: dict[str, TensorSource]
    tensors: dict[str, torch.Tensor]

    def matrix(self, name: str) -> torch.Tensor:
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            return self.tensors[f"model.layers.{layer}.{NAMES[rest]}.weight"]
        if name == "head.weight" and not self.config.tied_embeddings:
            return self.tensors["lm_head.weight"]
        return self.tensors["model.embed_tokens.weight"]


KINDS: dict[str, dict[str, Any]] = {
    "one file": {},
    "shards": {"max_shard_size": "60KB", "attention_bias": True},
    "bfloat16, tied": {"dtype": torch.bfloat16, "tie_word_embeddings": True},
    "odd rows": {"hidden_size": 60, "intermediate_size": 101, "vocab_size": 307, "head_dim": 18},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {
        kind: load(tmp_path_factory.mktemp("model"), changes) for kind, changes in KINDS.items()
    }


def load(directory: Path, changes: dict[str, Any]) -> Checkpoint:
    tiny.make_model(directory, **changes)
    config = read_config(directory)
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return Checkpoint(
        config=config,
        programme=build_programme(config),
        sources=resolve(config, directory),
        tensors=tensors,
    )


@st.composite
def splits(draw: st.DrawFn, has_gpu: bool) -> Split:
    cuts = sorted(draw(st.lists(st.floats(0, 1), min_size=2, max_size=2)))
    digits = draw(st.integers(0, 4))
    cuts = [round(cut, digits) for cut in cuts]
    gpu = cuts[0] if has_gpu else 0.0
    return Split(gpu=gpu, cpu=cuts[1] - gpu, disk=1 - cuts[1])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    tier: Any = draw(st.sampled_from(["cpu", "gpu"]))
    return Policy(
        compute_tier=tier,
        weights=draw(splits(tier == "gpu")),
        kv=Split(cpu=1.0),
        activations=Split(cpu=1.0),
        micro_batch_size=1,
        num_micro_batches=1,
        max_batch_tokens=1,
        piece_bytes=draw(st.sampled_from([4096, 8192, 20480, 4 << 20])),
    )


cases = given(kind=st.sampled_from([*KINDS]), policy=policies(), dtype=st.sampled_from([*DTYPES]))
quick = settings(deadline=None, max_examples=50)


def lay(checkpoint: Checkpoint, policy: Policy, dtype: str) -> WeightLayout:
    return lay_out(
        checkpoint.programme,
        checkpoint.sources,
        policy,
        dtype=dtype,
        tied_embeddings=checkpoint.config.tied_embeddings,
    )


def rows_of(parts: tuple[Part, ...]) -> Counter[tuple[str, int]]:
    """How often each row of each tensor occurs."""
    return Counter(
        (part.weight.name, part.weight.first_row + part.first_row + row)
        for part in parts
        for row in range(part.num_rows)
    )


@quick
@cases
def test_units_of_one_form_are_laid_out_alike(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """All that is reckoned from forms is what the units themselves add up to."""
    layout = lay(checkpoints[kind], policy, dtype)
    assert len(layout.forms) <= len(layout.units)
    for unit, form in zip(layout.units, layout.form_of, strict=True):
        own = layout.forms[form]
        for laid in (own, unit):
            assert laid.unit.kind == unit.unit.kind
        for size in ("slot_bytes", "host_bytes", "decoded_bytes"):
            assert getattr(own, size) == getattr(unit, size)
        for one, other in zip(own.pieces, unit.pieces, strict=True):
            assert (one.tier, one.num_bytes, one.slot_offset) == (
                other.tier,
                other.num_bytes,
                other.slot_offset,
            )
        shapes = [[(p.tier, p.num_elements) for p in laid.parts] for laid in (own, unit)]
        assert shapes[0] == shapes[1]
    pieces = [piece for unit in layout.all_units for piece in unit.pieces]
    for tier in ("cpu", "disk"):
        wanted, moved = layout.streamed_bytes(tier)
        assert wanted == sum(p.logical_bytes for p in pieces if p.tier == tier)
        assert moved == sum(p.num_bytes for p in pieces if p.tier == tier)


@quick
@cases
def test_every_row_once(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints[kind]
    layout = lay(checkpoint, policy, dtype)
    # The norm before the head is part of each chunk of it.
    norm = ("head.norm", 0)
    found = sum((rows_of(unit.parts) for unit in layout.units), Counter())
    found[norm] = min(found[norm], 1)
    expected = {
        (name, row)
        for name, shape in tensor_shapes(checkpoint.config).items()
        for row in range(shape[0] if len(shape) > 1 else 1)
        if name != "embedding"
    }
    assert found == Counter(expected)
    (table,) = layout.tables
    rows = sum(part.num_rows for part in table.parts)
    assert rows == checkpoint.config.vocab_size == len(rows_of(table.parts))


@quick
@cases
def test_shares_are_as_asked(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """Per unit within one row of the widest matrix; vectors stay where the arithmetic is."""
    layout = lay(checkpoints[kind], policy, dtype)
    (table,) = layout.tables
    stretches = [unit.parts for unit in layout.units] + [table.parts]
    for parts in stretches:
        vectors = [part for part in parts if not part.weight.is_matrix]
        assert all(part.tier == policy.compute_tier for part in vectors)
        matrices = [part for part in parts if part.weight.is_matrix]
        total = sum(part.num_elements for part in matrices)
        row = max(part.weight.num_columns for part in matrices)
        for tier in ("gpu", "cpu", "disk"):
            placed = sum(part.num_elements for part in matrices if part.tier == tier)
            if parts is not table.parts or not table.is_head:
                assert abs(placed - total * policy.weights.share(tier)) <= row + 1e-6 * total
    if policy.compute_tier == "cpu":
        assert not layout.streamed_bytes("cpu")[0]


@quick
@cases
def test_pieces_are_whole_blocks_and_nothing_twice(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints[kind]
    for unit in lay(checkpoint, policy, dtype).units:
        disk = [piece for piece in unit.pieces if piece.path is not None]
        assert all(piece.offset % BLOCK == piece.num_bytes % BLOCK == 0 for piece in disk)
        if policy.compute_tier == "cpu":
            assert all(piece.slot_offset % BLOCK == 0 for piece in disk)
        else:  # matrices lie where a device's products are fast, as far as the file lets them
            for stretch in (own for own in unit.stretches if own.path is not None):
                lead = stretch.wanted[0][0] - stretch.offset
                assert (stretch.slot_offset + lead) % 64 == 0
        assert all(0 < piece.num_bytes <= policy.piece_bytes for piece in unit.pieces)
        taken = sorted((p.slot_offset, p.slot_offset + p.num_bytes) for p in unit.pieces)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
        assert not taken or taken[-1][1] <= unit.slot_bytes
        wanted = sum(
            part.num_elements
            * checkpoint.sources[part.weight.name].num_bytes
            // checkpoint.matrix(part.weight.name).numel()
            for part in unit.parts
            if part.tier == "disk"
        )
        assert sum(piece.logical_bytes for piece in disk) == wanted
        # Each stretch of a file costs at most a block at both ends, and one between neighbours.
        num_parts = sum(part.tier == "disk" for part in unit.parts)
        assert sum(piece.num_bytes for piece in disk) <= wanted + 2 * BLOCK * num_parts


@quick
@cases
def test_disk_and_ram_bring_their_pieces_side_by_side(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """At any time both have brought the same share of theirs, but for half a piece of each."""
    layout = lay(checkpoints[kind], policy, dtype)
    for unit in layout.units:
        whole = {tier: unit.streamed_bytes(tier)[1] for tier in ("disk", "cpu")}
        if not all(whole.values()):
            continue
        come = dict.fromkeys(whole, 0)
        largest = {
            tier: max(piece.num_bytes for piece in unit.pieces if piece.tier == tier)
            for tier in whole
        }
        slack = sum(largest[tier] / whole[tier] for tier in whole) / 2 + 1e-9
        for piece in unit.pieces:
            come[piece.tier] += piece.num_bytes
            behind = come["disk"] / whole["disk"] - come["cpu"] / whole["cpu"]
            assert abs(behind) <= slack
    told = stream_model(layout, policy).units
    for number, unit in enumerate(layout.all_units):
        ran = [(own.tier, own.num_bytes, own.slot_offset) for own in unit.pieces]
        assert ran == [(own.tier, own.num_bytes, own.offset) for own in told[number].pieces]


@quick
@cases
def test_pieces_bring_the_weights_bit_for_bit(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints[kind]
    for unit in lay(checkpoint, policy, dtype).units:
        slot = bytearray(b"\xee" * unit.slot_bytes)
        host = host_stretch(checkpoint, unit)
        for piece in unit.pieces:
            data = host if piece.path is None else piece.path.read_bytes()
            data = data[piece.offset : piece.offset + piece.num_bytes]
            slot[piece.slot_offset : piece.slot_offset + len(data)] = data
        for streamed in unit.streamed:
            expected = raw(rows(checkpoint, streamed.part).to(getattr(torch, streamed.dtype)))
            begin = streamed.slot_offset
            assert slot[begin : begin + len(expected)] == expected, streamed
        is_foreign = any(s.dtype != s.part.dtype for s in unit.streamed)
        assert not is_foreign or unit.decoded_bytes > 0


@quick
@cases
def test_only_what_the_computation_cannot_hold_is_cast(
    kind: str, policy: Policy, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """Numbers of half the width stay as they are; vectors are in the compute dtype."""
    checkpoint = checkpoints[kind]
    for unit in lay(checkpoint, policy, dtype).units:
        for part in unit.parts:
            own = checkpoint.sources[part.weight.name].dtype
            is_kept = part.weight.is_matrix and dtype == "float32"
            assert part.dtype == (own if is_kept else dtype), part


def host_stretch(checkpoint: Checkpoint, unit: UnitLayout) -> bytes:
    """The unit's part of the cpu tier: as it is kept, each part from a cache line on."""
    stretch = b""
    for part in (s.part for s in unit.streamed if s.part.tier == "cpu"):
        data = raw(rows(checkpoint, part).to(DTYPES[part.dtype]))
        stretch += data + bytes(align_up(len(data), 64) - len(data))
    assert len(stretch) == unit.host_bytes
    return stretch


def rows(checkpoint: Checkpoint, part: Part) -> torch.Tensor:
    first = part.weight.first_row + part.first_row
    return checkpoint.matrix(part.weight.name)[first : first + part.num_rows]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_unit_is_read_in_few_requests(checkpoints: dict[str, Checkpoint]) -> None:
    """All on disk: tensors that are neighbours in a file come in one piece."""
    policy = Policy(
        compute_tier="cpu",
        weights=Split(disk=1.0),
        kv=Split(cpu=1.0),
        activations=Split(cpu=1.0),
        micro_batch_size=1,
        num_micro_batches=1,
        max_batch_tokens=1,
    )
    layout = lay(checkpoints["one file"], policy, "float32")
    assert all(len(unit.pieces) <= 2 for unit in layout.units)


@quick
@given(size=st.sampled_from([32, 64, 128]), policy=policies())
def test_groups_across_rows_are_never_cut(
    size: int, policy: Policy, checkpoints: dict[str, Checkpoint]
) -> None:
    """Of matrices with more and with less than 1024 rows, and of a head in chunks."""
    small = checkpoints["one file"].config
    width = {"hidden_size": 576, "embedding_size": 576}
    config = replace(small, **width, intermediate_size=1440, vocab_size=8256)
    sources = imagined_sources(config, "bfloat16")
    formats = choose_formats(config, sources, Compression(bits=4, group_size=size, across=True))
    layout = lay_out(
        build_programme(config),
        compressed_places(sources, formats, Path("weights.bin")),
        policy,
        dtype="bfloat16",
        tied_embeddings=False,
    )
    heads = {unit.unit.name for unit in layout.units if unit.unit.kind == "head"}
    assert len(heads) > 1
    for unit in layout.units:
        for part in (part for part in unit.parts if part.weight.is_matrix):
            own = part.compressed
            assert isinstance(own, Grouped) and own.across
            assert sources[part.weight.name].shape[0] % own.group_size == 0
            first = part.weight.first_row + part.first_row
            assert first % own.group_size == part.num_rows % own.group_size == 0
            factors = 2 * 16 * part.num_elements // own.group_size
            assert 8 * part.num_bytes == 4 * part.num_elements + factors


@pytest.mark.parametrize("vocab", [1024, 1036, 1061, 5000])
@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_no_row_is_left_over(vocab: int, tier: str) -> None:
    """A large matrix is cut between tiles, and ends where it ends."""
    config = parse_config({**SIZES, "vocab_size": vocab})
    split = Split(gpu=0.3, cpu=0.7) if tier == "gpu" else Split(cpu=1.0)
    policy = Policy(
        compute_tier="gpu" if tier == "gpu" else "cpu",
        weights=split,
        kv=split,
        activations=split,
        micro_batch_size=1,
        num_micro_batches=1,
        max_batch_tokens=8,
    )
    layout = lay_out(
        build_programme(config),
        imagined_sources(config, "float32"),
        policy,
        dtype="float32",
        tied_embeddings=False,
    )
    assert layout.tier_bytes()["disk"] == 0
