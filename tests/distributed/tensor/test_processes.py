"""The same layouts on processes that send each other tensors: gloo on this machine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import freight.demo

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from .bed import CUTS
from .processes import run_ranks

STEPS = len(CUTS)


def test_every_layout_on_eight_processes(tmp_path: Path) -> None:
    """What each rank has is right, or it would have failed; all together have sent what the algebra
    counts, to the byte."""
    found = run_ranks("layouts", 8, tmp_path)
    assert len(found[0]) >= 50
    for ranks in zip(*found, strict=True):
        total: Counter = Counter()
        for _, own in ranks:
            total.update(own)
        assert not any(total.values()), (ranks[0][0], total)


def test_models_on_eight_processes(tmp_path: Path) -> None:
    """Llama, Falcon with one key head, Mixtral: tokens of transformers. The bundled model: those of
    the engine in one process. Ways change in every step."""
    asked, wanted = [], {}
    for name in ("llama", "falcon 7b", "mixtral"):
        reference = tiny.make_model(tmp_path / name, config=CONFIGS[name])
        prompts = tiny.prompts(5, 17)
        asked.append((str(tmp_path / name), prompts, STEPS))
        wanted[str(tmp_path / name)] = tiny.tokens(tiny.reference(reference, prompts, STEPS))
    demo = Path(freight.demo.__file__).parent / "model"
    prompts = tiny.prompts(4, 20, vocab=1000)
    asked.append((str(demo), prompts, STEPS))
    with tiny.engine(demo, prompts, STEPS, device="cpu") as engine:
        wanted[str(demo)] = tiny.run(engine, prompts, STEPS, ignore_eos=True)
    (tmp_path / "models.json").write_text(json.dumps(asked))
    for found in run_ranks("models", 8, tmp_path):
        assert {path: [list(row) for row in own] for path, own in found.items()} == wanted
