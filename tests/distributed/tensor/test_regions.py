"""What stands between moves, compiled: the same values, bytes and tokens as step by step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from freight.distributed.tensor import regions
from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.looped import Stage, stages
from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.regions import Region, Regions, in_regions, names_of
from freight.distributed.tensor.virtual import VirtualRanks
from freight.errors import InputError
from freight.partition.layout import Mesh
from freight.partition.sharded import Compute

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from ..forks import Forks
from .bed import CUTS, Case, cases, check, greedy, schemes

FOUR = Mesh.of(x=2, y=2, z=1)
CASES = [*cases(FOUR, some=True), *schemes(4)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch.compiler.reset()


def flat(pieces: list[regions.Piece]) -> Iterator[Stage]:
    for piece in pieces:
        if isinstance(piece, Region):
            yield from piece.steps
        else:
            yield piece


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("looped", [False, True])
def test_steps_stay_in_order_and_nothing_is_missed(case: Case, looped: bool) -> None:
    own = case.own
    steps = stages(own) if looped else list(own.steps)
    pieces = in_regions(steps, own.outputs)
    for before, after in zip(steps, flat(pieces), strict=True):
        assert names_of(before) == names_of(after)
    known = {*own.inputs, *own.weights}
    for piece in pieces:
        if isinstance(piece, Region):
            assert len(piece.steps) > 1 and known >= {*piece.inputs}
            known |= {*piece.outputs}
        else:
            assert isinstance(piece, Compute) is False or known >= {*piece.operands}
            known |= {*names_of(piece)}
    assert known >= {*own.outputs}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_are_traced_whole(case: Case) -> None:
    """Without a compiler behind it, which takes seconds for each."""
    differences = check(VirtualRanks(case.own.mesh), case, regions=Regions("eager"))
    assert not any(differences.values()), differences


@pytest.mark.parametrize("name", ["opt", "gpt-neox, serial", "qwen2", "gemma2", "mixtral"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of models with biases, gains of their own, caps and experts; the layers share what is
    compiled, and each step is computed in another way."""
    reference = tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts, steps = tiny.prompts(3, 11, vocab=300), 4
    model = load_model(tmp_path, VirtualRanks(FOUR), CUTS[:3], dtype=torch.float32)
    model.executor = Executor(model.executor.ranks, regions=Regions("eager"))
    found = [*zip(*greedy(model, prompts, steps, CUTS[:3]), strict=True)]
    assert [list(own) for own in found] == tiny.tokens(tiny.reference(reference, prompts, steps))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_code_makes_the_same_numbers() -> None:
    (case,) = [own for own in CASES if own.name == "Megatron attention, Megatron MLP"]
    differences = check(VirtualRanks(case.own.mesh), case, regions=Regions())
    assert not any(differences.values()), differences


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"no C\+\+ compiler"):
        regions.warm_up_compiler()


@pytest.mark.parametrize("split", [[], ["--split", "layers"]])
def test_it_is_about_cut_tensors(
    split: list[str], rows: Path, forks: Forks, tmp_path: Path
) -> None:
    command = ["-m", "freight", "run", str(rows), "--model", "demo", "--torch-compile"]
    command += ["--output", str(tmp_path / "answers.jsonl"), *split]
    if split:
        status, told = forks.finish(2, command)
    else:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        status, told = done.returncode, done.stderr
    assert status and "--torch-compile was given" in told and "Traceback" not in told
