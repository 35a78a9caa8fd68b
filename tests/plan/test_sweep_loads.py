"""What sweeps are reckoned to take, against the clock on which each of them runs."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import pytest

from freight.hardware.curve import Curve
from freight.hardware.machine import Machine
from freight.hardware.storage import find_machine
from freight.model.config import read_config
from freight.model.decoder import build_programme
from freight.plan.policy import Split, Tier
from freight.plan.samples import Sampler, continuous_story, roll
from freight.plan.search import Choice
from freight.plan.sweep_loads import sweep_loads
from freight.plan.wishes import Wishes
from freight.quantities import GIB

from .test_search import machine_for_which_only, search

ROOM: dict[Tier, int] = {"gpu": 400 * GIB, "cpu": 400 * GIB, "disk": 500 * GIB}
FRICTION = 0.1
"""What is added of the work of all parts; here one part works."""


def loads_and_clock(
    choice: Choice, machine: Machine, model: str, rows: int
) -> tuple[list[float], list[float]]:
    """Of every sweep but the first, before which nothing is loaded: its load, and its seconds."""
    file = resources.files("freight.model") / "configs" / f"{model}.json"
    with resources.as_file(file) as path:
        config = read_config(path)
    sampler = Sampler(
        plan=choice.plan,
        machine=machine,
        config=config,
        programme=build_programme(config),
        dtype="bfloat16",
        is_rough=True,
    )
    rolled = roll(choice.plan, rows)
    loads = sweep_loads(rolled, choice.plan, machine, sampler.cost)
    every = range(len(rolled))
    seconds = sampler.sample(continuous_story(rolled, every), every).seconds
    return loads[1:], [seconds[i] for i in every[1:]]


def behind_a_link(rate: float) -> Machine:
    """Everything but what comes to the device takes next to no time."""
    machine = machine_for_which_only("nothing", 1.0)
    link = replace(machine.links["host to device"], bytes_per_s=Curve.constant(rate))
    return replace(machine, links={**machine.links, "host to device": link})


@pytest.mark.parametrize(
    ("machine", "kv", "shared", "slack"),
    [
        (machine_for_which_only("attended", 1e9), Split(gpu=1.0), 0, 0.01),
        (machine_for_which_only("attended", 1e9), Split(gpu=1.0), 384, 0.01),
        (machine_for_which_only("products", 1e13), Split(gpu=1.0), 0, 0.03),
        (behind_a_link(1e9), Split(cpu=1.0), 0, 0.05),
        (behind_a_link(1e9), Split(gpu=0.5, cpu=0.5), 0, 0.05),
    ],
)
def test_a_load_is_what_the_part_that_works_takes(
    machine: Machine, kv: Split, shared: int, slack: float
) -> None:
    """Whatever it is: keys on the device, or such as enough rows share, products, or what comes."""
    wishes = Wishes(
        weights=Split(gpu=1.0),
        kv=kv,
        cpu_attention=0.0,
        micro_batch_size=32,
        num_micro_batches=2,
        admission="refill",
    )
    choice = search(
        "llama-2-7b", machine, ROOM, rows=192, shape=(416, 16), wishes=wishes, shared_tokens=shared
    )
    loads, seconds = loads_and_clock(choice, machine, "llama-2-7b", 192)
    assert max(seconds) > 2 * min(seconds)  # there is something to tell
    for load, own_s in zip(loads, seconds, strict=True):
        assert load == pytest.approx((1 + FRICTION) * own_s, rel=slack)


@pytest.mark.parametrize(
    ("model", "shape"),
    [("opt-30b", (512, 32)), ("llama-3-8b", (64, 128)), ("qwen3-30b-a3b", (256, 32))],
)
def test_a_few_sweeps_tell_what_all_take(model: str, shape: tuple[int, int]) -> None:
    machine = find_machine("t4")
    room: dict[Tier, int] = {"gpu": 12 * GIB, "cpu": 60 * GIB, "disk": 900 * GIB}
    wishes = Wishes(admission="refill")
    choice = search(model, machine, room, rows=80, shape=shape, wishes=wishes)
    assert choice.plan.policy.block_rows * 4 >= 80  # all sweeps are rolled out
    _, seconds = loads_and_clock(choice, machine, model, 80)
    first_s = choice.forecast.sweeps[0].seconds
    assert choice.forecast.seconds == pytest.approx(first_s + sum(seconds), rel=0.03)
