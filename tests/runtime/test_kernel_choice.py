"""Which Triton kernels are chosen: those that find what their references find, and a run's answers
with all of them are those without. In Triton's interpreter where there is no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.kernels.cuda.choice import NO_KERNELS, Kernels, kernels_of
from freight.model.number_format import (
    Compressed,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    ShortExponents,
)
from freight.model.programme import Attend
from freight.model.recurrent_steps import Convolve, DeltaRule
from freight.model.weight import Weight
from freight.runtime import engine as engine_module
from freight.runtime.kernel_choice import try_kernels

from ..kernels.triton_bed import DEVICE, in_use, loaded
from . import tiny
from .test_engine_recurrence import CONFIGS

STEP = Attend(
    q="q",
    k="k",
    v="v",
    out="out",
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    scale=0.2,
    window=100,
    softcap=20.0,
    kv_format=Grouped(bits=4, group_size=32),
)
PLAIN = replace(STEP, kv_format=None, window=None)
DECAYS = Weight(name="decay", out_dims=(), in_dims=("R",), num_rows=1, num_columns=4)
RECURRENCES: list[Convolve | DeltaRule] = [
    Convolve(x="x", weight=replace(DECAYS, num_columns=3 * 192), width=3),
    DeltaRule(
        x="x",
        a="a",
        b="b",
        out="out",
        decay=DECAYS,
        bias=DECAYS,
        num_key_heads=2,
        num_heads=4,
        key_width=16,
        value_width=32,
    ),
]
WEIGHTS: list[Compressed | None] = [
    None,
    Grouped(bits=8, group_size=32, wide=True),
    Grouped(bits=4, group_size=64, across=True),
    ShortExponents(spare=0),
    MicroFloats(),
    EightFloats(),
    LevelFloats(levels="e2m1", group_size=16, in_bytes=True),
    LevelFloats(levels="nf4", group_size=64),
]


def tried(kernels: Kernels, *steps: Attend) -> tuple[Kernels, list[str]]:
    said: list[str] = []
    chosen = try_kernels(
        DEVICE,
        torch.float32,
        kernels,
        weights=WEIGHTS,
        steps=steps or [STEP, PLAIN],
        recurrences=() if steps else RECURRENCES,
        has_experts=not steps,
        say=said.append,
    )
    assert kernels_of(DEVICE) == NO_KERNELS
    return chosen, said


def test_all_are_chosen() -> None:
    chosen, said = tried(loaded())
    assert said == []
    assert chosen == loaded()


def test_what_is_not_wanted_is_not_tried() -> None:
    """A run that keeps plain keys appends them plain."""
    chosen, said = tried(loaded(), PLAIN)
    assert said == []
    unwanted = "append", "convolve", "recur", "multiply_sets"
    assert chosen == replace(loaded(), **dict.fromkeys(unwanted))


@pytest.mark.parametrize(
    "name",
    [field.name for field in fields(Kernels)],
)
@pytest.mark.parametrize("fault", ["raises", "finds other numbers"])
def test_what_does_not_work_is_left_out(name: str, fault: str) -> None:
    kernel: Callable[..., Any] = getattr(loaded(), name)

    def broken(*inputs: Any, **more: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no such instruction\nin line 7")
        found = kernel(*inputs, **more)
        # What it was to write, wherever that is.
        changed = {"make_plain": lambda: inputs[2], "append": lambda: inputs[0].raw}
        changed |= {"append_plain": changed["append"], "rotate": lambda: inputs[0]}
        changed |= {"normalise": lambda: inputs[1], "convolve": changed["rotate"]}
        changed |= {"recur": lambda: inputs[7], "multiply_sets": changed["make_plain"]}
        for other in ("exponents", "micro", "eights", "levels"):
            changed[f"make_{other}_plain"] = changed["make_plain"]
        out = changed.get(name, lambda: inputs[4] if found is None else found)()
        out.add_(1)
        return found

    beside = "normalise" if name == "rotate" else "rotate"
    some = replace(NO_KERNELS, **{beside: getattr(loaded(), beside)})
    chosen, said = tried(replace(some, **{name: broken}))
    assert chosen == some
    wanted = "fails: RuntimeError: no such instruction" if fault == "raises" else fault
    assert len(said) == 1 and said[0].endswith(wanted)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a device tests/gpu does the same")
@pytest.mark.parametrize("kind", ["plain", "compressed", "recurrent"])
def test_a_run_with_all_kernels_answers_as_without(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of the simulated device are the CPU's, where the interpreter works."""
    compressed = kind == "compressed"
    if kind == "recurrent":
        tiny.make_model(tmp_path, config=CONFIGS["qwen3.5"])
    else:
        tiny.make_model(tmp_path, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    prompts = tiny.prompts(4, 20)
    options: dict[str, Any] = {**tiny.ON_SIM, "compressed_dir": tmp_path / "kept"}
    if compressed:
        options |= {"kv_bits": 4, "weight_bits": 4}
    with tiny.engine(tmp_path, prompts, 3, **options) as engine:
        wanted = tiny.run(engine, prompts, 3)
    of_either = ("attend", "normalise", "rotate")
    of_kind: tuple[str, ...] = (
        ("make_plain", "multiply", "append") if compressed else ("append_plain",)
    )
    if kind == "recurrent":
        of_kind = (*of_kind, "convolve", "recur")
    counts = dict.fromkeys((*of_either, *of_kind), 0)

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def work(*inputs: Any, **more: Any) -> Any:
            counts[name] += 1
            return kernel(*inputs, **more)

        return work

    kernels = Kernels(**{name: counted(name, getattr(loaded(), name)) for name in counts})
    monkeypatch.setattr(engine_module, "choose_kernels", lambda *_, **__: None)
    with in_use(kernels), tiny.engine(tmp_path, prompts, 3, **options) as engine:
        assert tiny.run(engine, prompts, 3) == wanted
    assert all(counts.values())
