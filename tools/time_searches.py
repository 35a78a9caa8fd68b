"""How long searches over chips take: schemes, meshes and cuts, shortest paths.

    python tools/time_searches.py [--model CONFIG ...]

prints seconds of CPU and seconds that passed, each search once in one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from freight.entrypoints.partition.inputs import read_model
from freight.hardware.chip import find_chip
from freight.model.config import ModelConfig
from freight.partition.cost import Cost, Setting, Step
from freight.partition.planner import best_plan, prices_of, with_shortest_layers
from freight.partition.scheme_search import find_schemes
from freight.partition.schemes import LITERAL, PAPER
from freight.partition.shortest import best_route

_T = TypeVar("_T")
_STEPS = (
    Step(phase="decode", rows=64, new_tokens=1, past=2048),
    Step(phase="prefill", rows=512, new_tokens=2048),
)


def timed(what: str, search: Callable[[], _T]) -> _T:
    cpu_s, start_s = time.process_time(), time.perf_counter()
    found = search()
    taken = time.process_time() - cpu_s, time.perf_counter() - start_s
    print(f"{what:56} {taken[0]:6.2f} s CPU {taken[1]:6.2f} s", flush=True)
    return found


def time_schemes(name: str, config: ModelConfig, num_chips: int) -> None:
    for kind, rules in (("paper's restrictions", PAPER), ("eight rules", LITERAL)):
        wider = replace(rules, core_by_heads=False, all_to_all=True, gathered_keys=True)
        for more, own in (("", rules), (", more admitted", wider)):
            what = f"{name}, schemes, {kind}{more}"
            timed(what, lambda own=own: find_schemes(config, num_chips, own))  # type: ignore[misc]


def time_plan(name: str, config: ModelConfig, num_chips: int, step: Step) -> None:
    setting = Setting(chip=find_chip("h100"))

    def plan() -> Cost:
        (found,) = best_plan(config, num_chips, [(step, 1.0)], setting)
        return found

    own = timed(f"{name}, {num_chips} chips, {step.phase}: mesh and cuts", plan)
    if config.experts is None:
        sizes = own.layers[0][0].sizes
        timed(f"    path through an MLP on {own.mesh}", lambda: best_route(sizes, prices_of(own)))
        timed(f"    path through a layer on {own.mesh}", lambda: with_shortest_layers(own).layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="config.json or a bundled name")
    models = parser.parse_args().model or ["palm-540b", "llama-3-70b"]
    for name in ("llama-2-7b", "llama-2-70b"):
        time_schemes(name, read_model(name), 8)
    for name in models:
        for num_chips in (64, 1024):
            for step in _STEPS:
                time_plan(name, read_model(name), num_chips, step)


if __name__ == "__main__":
    main()
