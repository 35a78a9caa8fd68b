"""What follows from a policy does not depend on the policies that were looked at before it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from unittest.mock import patch

import pytest

from freight.model.checkpoint import imagined_sources
from freight.model.config import ModelConfig, read_config
from freight.model.decoder import build_programme
from freight.model.programme import Programme
from freight.model.sources import TensorSource
from freight.plan.default import Planner
from freight.plan.forms import find_forms
from freight.plan.policy import Split
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.quantities import GIB

SPLITS = (Split(gpu=1.0), Split(gpu=0.3, cpu=0.5, disk=0.2), Split(cpu=1.0), Split(disk=1.0))


@cache
def parts_of(model: str) -> tuple[ModelConfig, Programme, dict[str, TensorSource]]:
    """What no planner changes: of many experts it takes a while."""
    file = resources.files("freight.model") / "configs" / f"{model}.json"
    with resources.as_file(file) as path:
        config = read_config(path)
    return config, build_programme(config), imagined_sources(config, "bfloat16")


def make_planner(model: str, tier: str) -> Planner:
    config, programme, sources = parts_of(model)
    return Planner(
        config=config,
        programme=programme,
        sources=sources,
        dtype="bfloat16",
        workload=Workload.of_alike(100, 300, 20),
        compute_tier=tier,  # type: ignore[arg-type]
        room={"gpu": 16 * GIB, "cpu": 64 * GIB, "disk": 500 * GIB},
        taken={},
        has_disk_dir=True,
        wishes=Wishes(),
    )


@pytest.mark.parametrize("model", ["opt-6.7b", "gemma-4-26b-a4b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_sizes_do_not_depend_on_what_was_derived_before(model: str, tier: str) -> None:
    _, programme, sources = parts_of(model)
    # Found from the model alone, it takes most of the time that a planner with many experts does.
    forms = find_forms(programme, sources)
    with patch("freight.plan.default.find_forms", return_value=forms):
        check_sizes(model, tier)


def check_sizes(model: str, tier: str) -> None:
    used = make_planner(model, tier)
    splits = SPLITS if tier == "gpu" else tuple(own for own in SPLITS if not own.gpu)
    for size, admission in ((8, "zigzag"), (32, "zigzag"), (32, "refill")):
        shape = used.shape(size, 2, admission)  # type: ignore[arg-type]
        for weights in splits:
            for embedding in (None, *splits):
                policy = replace(shape, weights=weights, embedding=embedding)
                afresh = make_planner(model, tier).derive(policy)
                assert used.derive(policy).geometry == afresh.geometry
                like = used.derive(shape).geometry
                assert used.derive(policy, like).geometry == afresh.geometry
