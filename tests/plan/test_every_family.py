"""Plans for models of every family, on a device, with keys elsewhere: each can be priced, whoever
attends."""

from __future__ import annotations

import json

import pytest

from freight.hardware.storage import find_machine
from freight.model.checkpoint import imagined_sources
from freight.model.config import parse_config
from freight.model.decoder import build_programme
from freight.plan.default import Planner
from freight.plan.policy import Split
from freight.plan.search import Search
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.quantities import GIB, MIB

from ..runtime.test_engine_parity import CONFIGS

HALF = Split(cpu=0.5, disk=0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_takes_can_be_told(name: str) -> None:
    raw = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    raw = {key: value for key, value in raw.items() if key != "architectures" or value}
    config = parse_config(raw)
    is_near = config.sharing is not None  # keys that several layers attend stay there
    shares = (0.0,) if is_near else (0.0, 1.0)
    for share in shares:
        planner = Planner(
            config=config,
            programme=build_programme(config),
            sources=imagined_sources(config, "float16"),
            dtype="float16",
            workload=Workload.of_alike(64, 40, 16),
            compute_tier="gpu",
            room={"gpu": 256 * MIB, "cpu": 1 * GIB},
            taken={},
            has_disk_dir=True,
            wishes=Wishes(weights=HALF, kv=None if is_near else HALF, cpu_attention=share),
        )
        told = Search(planner=planner, machine=find_machine("t4")).price(planner.plan()).forecast
        assert told.seconds > 0
        lanes = {"compute", "disk read", "host to device"}
        lanes |= set() if is_near else {"disk write", "device to host"}
        assert told.utilisation().keys() >= lanes
        assert ("cpu attention" in told.utilisation()) == bool(share)
