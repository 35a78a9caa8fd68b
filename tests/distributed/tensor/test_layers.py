"""Layers that lie in a file come back as they were, in their order, while others are computed."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.distributed.tensor import layers as own_layers
from freight.distributed.tensor.calls import Batch
from freight.distributed.tensor.layers import OnDisk, StoredLayers, is_kept, slots_bytes
from freight.distributed.tensor.model import TensorModel, load_model
from freight.distributed.tensor.vectors import Vectors
from freight.distributed.tensor.virtual import VirtualRanks
from freight.distributed.tensor.weights import Stored
from freight.errors import BudgetError, ModelError
from freight.model.checkpoint import resolve
from freight.model.config import read_config
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.runtime.compressed_files import kept_sources
from freight.runtime.options import EngineOptions

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS

STATIONARY, GATHERED = Cut(batch="yx"), Cut(gathered="xyz")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@st.composite
def parts(draw: st.DrawFn) -> torch.Tensor:
    """Numbers in any order of their dims, whole or every other row."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = torch.randint(0, 100, shape).to(draw(st.sampled_from(DTYPES)))
    turned = whole.permute(draw(st.permutations(range(len(shape)))))
    return turned[::2] if draw(st.booleans()) else turned


def stored(tensors: list[torch.Tensor]) -> Stored:
    named = {f"weight {i}": [tensor] for i, tensor in enumerate(tensors)}
    return Stored(parts=named, layouts={}, vectors=Vectors())


@settings(deadline=None, max_examples=40)
@given(
    tensors=st.lists(st.lists(parts(), min_size=1, max_size=3), min_size=1, max_size=5),
    data=st.data(),
)
def test_they_come_back_as_they_were(
    tensors: list[list[torch.Tensor]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sweep after sweep, with one or two of them in use at once."""
    kept, slots = data.draw(st.integers(0, len(tensors))), data.draw(st.integers(2, 3))
    directory = tmp_path_factory.mktemp("layers")
    sizes = [[part.nbytes for part in own] for own in tensors]
    on_disk = OnDisk(directory=directory, kept=kept, slots=slots)
    layers = StoredLayers(sizes, on_disk, torch.device("cpu"))
    for own in tensors:
        layers.append(stored(own))
    assert (len(layers.here), layers.num_away) == (kept, len(tensors) - kept)
    assert [*directory.iterdir()] == [], "the file goes with the process"
    most = max(own_layers.layer_bytes(own) for own in sizes)
    assert layers.slot_bytes <= slots_bytes([most], slots)

    def check(found: Stored, wanted: list[torch.Tensor]) -> None:
        for own, part in zip(found.parts.values(), wanted, strict=True):
            assert own[0].dtype == part.dtype and torch.equal(own[0], part)

    check(layers.read(0), tensors[0])
    for _ in range(3):
        used: list[tuple[int, Stored]] = []
        for place in range(len(tensors)):
            used.append((place, layers.take(place)))
            if len(used) == slots - 1:
                check(used[0][1], tensors[used[0][0]])
                layers.release(used.pop(0)[0])
        for place, own in used:
            check(own, tensors[place])
            layers.release(place)
    layers.close()


@given(count=st.integers(1, 100), data=st.data())
def test_those_that_are_kept_lie_evenly(count: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, count))
    here = [place for place in range(count) if is_kept(place, kept, count)]
    assert len(here) == kept
    gaps = {after - before for before, after in pairwise(here)}
    if kept:
        assert gaps <= {count // kept, -(-count // kept)}


def model_of(directory: Path, kept: int | None, ways: list[Cut], **changes: Any) -> TensorModel:
    on_disk = None
    if kept is not None:
        on_disk = OnDisk(directory=directory, kept=kept, slots=3 if GATHERED in ways else 2)
    ranks = VirtualRanks(Mesh.of(x=2, y=2, z=2))
    return load_model(directory, ranks, ways, dtype=torch.float32, on_disk=on_disk, **changes)


def logits_of(model: TensorModel, sweeps: int, ways: list[Cut]) -> list[torch.Tensor]:
    """Of sweeps of three calls: tokens of every other row, of the rest, and one more of these."""
    batch: Batch = model.begin(16, 40)
    even, odd = [*range(0, 16, 2)], [*range(1, 16, 2)]
    found = []
    for turn in range(sweeps):
        calls = []
        for number, (seats, width) in enumerate(((even, 3), (odd, 5), (odd, 1))):
            tokens = [[(7 * turn + 3 * seat + i) % 90 + 5 for i in range(width)] for seat in seats]
            way = ways[(turn + number) % len(ways)]
            calls.append(model.prepare(batch, tokens, way, seats))
        found += [own.logits for own in model.sweep(batch, calls)]
    return found


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "ways", "changes"),
    [
        ("llama", [STATIONARY], {}),
        ("llama", [STATIONARY, GATHERED], {}),
        ("falcon 7b", [STATIONARY, GATHERED], {}),
        ("mixtral", [STATIONARY, GATHERED], {}),
        ("llama", [STATIONARY, GATHERED], {"weight_bits": 4, "group_size": 32}),
    ],
)
def test_sweeps_make_the_logits_of_a_model_in_memory(
    name: str, ways: list[Cut], changes: dict[str, Any], kept: int, tmp_path: Path
) -> None:
    """To the bit; and what is read is each layer that is away, once for all calls of a sweep."""
    config = deepcopy(CONFIGS[name])
    config.num_hidden_layers = 4
    tiny.make_model(tmp_path, config=config)
    sources = {}
    if changes:
        own = read_config(tmp_path)
        options = EngineOptions(device="cpu", dtype="float32", **changes)
        sources = {"sources": kept_sources(own, resolve(own, tmp_path), options, print)}
    whole = model_of(tmp_path, None, ways, **sources)
    wanted = logits_of(whole, 3, ways)
    model = model_of(tmp_path, kept, ways, **sources)
    for own, other in zip(logits_of(model, 3, ways), wanted, strict=True):
        assert torch.equal(own, other)
    assert model.layers.num_away == 4 - kept
    model.layers.close()  # what had begun has been read
    away = [own for place, own in enumerate(whole.stored[:4]) if not is_kept(place, kept, 4)]
    sizes = [[part.nbytes for parts in own.values() for part in parts] for own in away]
    each = [own_layers.layer_bytes(own) for own in sizes]
    slots = min(3 if GATHERED in ways else 2, len(away) + 1)
    read = 3 * sum(each) + sum((each * slots)[:slots])  # what comes next, as far as there is room
    assert model.layers.traffic.moved["disk read"] <= read
    assert model.layers.traffic.moved["disk read"] >= 3 * sum(each)
    assert model.layers.traffic.moved["disk write"] == sum(each)
    assert Counter(model.executor.moved) == Counter(whole.executor.moved)


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_model(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(BudgetError, match="No space left") as refused:
        model_of(tmp_path, 0, [STATIONARY])
    assert "--disk-dir" in refused.value.advice


def test_a_disk_that_fails_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads tells the one that computes."""
    tiny.make_model(tmp_path)
    model = model_of(tmp_path, 0, [STATIONARY])
    logits_of(model, 1, [STATIONARY])

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", failing)
    with pytest.raises(ModelError, match="Input/output error"):
        logits_of(model, 3, [STATIONARY])
