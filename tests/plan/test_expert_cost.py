"""What experts take by forecast: the schedule's own groups on the clock against those that are
likely, and by the calls and requests that they are."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import pytest

from freight.hardware.machine import Machine
from freight.hardware.storage import find_machine
from freight.model.config import read_config
from freight.model.decoder import build_programme
from freight.plan.cost import Cost
from freight.plan.operation import Kind, Lane, Operation, UnitPlace
from freight.plan.policy import Split, Tier
from freight.plan.samples import Sampler, zigzag_story
from freight.plan.search import Choice
from freight.plan.wishes import Wishes
from freight.quantities import GIB

from .test_search import search

MODEL = "qwen3-30b-a3b"
DEPTH = 3
ON_CPU: dict[Tier, int] = {"cpu": 200 * GIB, "disk": 500 * GIB}
ON_GPU: dict[Tier, int] = {"gpu": 20 * GIB, "cpu": 100 * GIB, "disk": 500 * GIB}


def sampler(choice: Choice, machine: Machine) -> Sampler:
    file = resources.files("freight.model") / "configs" / f"{MODEL}.json"
    with resources.as_file(file) as path:
        config = read_config(path)
    programme = build_programme(config)
    return Sampler(
        plan=choice.plan, machine=machine, config=config, programme=programme, dtype="bfloat16"
    )


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, 4), (1, 32), (4, 8), (16, 1), (16, 16)],  # from few experts to all that are expected
)
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("laptop", Split(cpu=0.9, disk=0.1)),
        ("laptop", Split(cpu=1.0)),
        ("rtx-4090", Split(gpu=0.2, cpu=0.8)),
    ],
)
def test_the_clock_has_what_is_likely(count: int, size: int, name: str, weights: Split) -> None:
    """Of a group each micro-batch computes what it has chosen, and no more."""
    machine, room = find_machine(name), ON_GPU if name == "rtx-4090" else ON_CPU
    wishes = Wishes(
        micro_batch_size=size, num_micro_batches=count, admission="zigzag", weights=weights
    )
    choice = search(MODEL, machine, room, rows=count * size, shape=(64, 4), wishes=wishes)
    own = sampler(choice, machine)
    lengths = choice.plan.workload.row_lengths(0, count * size, choice.plan.geometry.shared_page)
    units = [unit for unit in own.programme.units if unit.layer is None or unit.layer < DEPTH + 1]
    clocked_s, chosen, batches, steps = 0.0, 0, {}, [0, 1, 2]
    for operation, start_s, end_s in own.run(zigzag_story(lengths, steps), steps, DEPTH + 1):
        unit = units[operation.unit]
        if operation.sweep == 1 and operation.kind is Kind.COMPUTE and unit.expert is not None:
            assert operation.batch is not None
            clocked_s += (end_s - start_s) * (unit.layer != DEPTH)  # it works for the head
            chosen += operation.num_chosen * (unit.layer != DEPTH)
            batches[operation.batch.index] = operation.batch
    assert len(batches) == count
    expert = next(unit for unit in own.programme.units if unit.expert is not None)
    likely_s = sum(
        own.cost._likely_s(
            expert, DEPTH * 128, own.cost._chunks(expert, batch.num_tokens), batch.num_tokens
        )
        for batch in batches.values()
    )
    likely = own.cost.config.expert_likelihood
    expected = sum(DEPTH * 128 * likely(batch.num_tokens) for batch in batches.values())
    # The clock's are chosen by chance, in whole groups.
    assert clocked_s == pytest.approx(likely_s * chosen / expected, rel=0.15)


def test_several_reads_are_as_many_requests() -> None:
    """Each of an expert's own size, of which a disk brings fewer bytes in a second."""
    machine = find_machine("laptop")
    wishes = Wishes(micro_batch_size=8, num_micro_batches=1, weights=Split(cpu=0.9, disk=0.1))
    cost: Cost = sampler(search(MODEL, machine, ON_CPU, rows=8, wishes=wishes), machine).cost
    link = machine.links["disk read"]
    size, others = 2**18, tuple(UnitPlace(6 + i, 0, i) for i in range(7))
    read = Operation(
        index=0,
        kind=Kind.READ_WEIGHTS,
        lane=Lane.DISK_READ,
        sweep=0,
        unit=5,
        batch=None,
        accesses=(),
        after=(),
        num_bytes=8 * size,
    )
    assert cost.demand(read).seconds == link.seconds(8 * size, "weights", 8 * size)
    own = cost.demand(read._replace(others=others)).seconds
    assert own == link.seconds(8 * size, "weights", size)


@pytest.mark.parametrize(("tokens", "together"), [(4, True), (64, True), (65, False)])
def test_a_device_takes_up_to_so_many_tokens_of_each_at_once(tokens: int, together: bool) -> None:
    call_s = 1.0
    machine = find_machine("rtx-4090")
    gpu = replace(machine.units["gpu"], call_s=call_s)
    machine = replace(machine, units={**machine.units, "gpu": gpu})
    wishes = Wishes(micro_batch_size=8, num_micro_batches=1, weights=Split(cpu=1.0))
    choice = search(MODEL, machine, ON_GPU, rows=8, wishes=wishes)
    cost = sampler(choice, machine).cost
    expert = next(unit for unit in cost.programme.units if unit.expert is not None)
    assert cost._experts_s(expert, [tokens], 7, 1) == (3.0 if together else 7.0) * call_s
    assert cost._experts_s(expert, [tokens], 1, 1) == call_s
    assert cost._experts_s(expert, [1], 0, 1) == call_s  # what nobody chose is waited for
