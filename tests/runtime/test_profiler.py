"""A profile's rates: of integer products, measured where they are faster, and used by plans; of a
disk whose rate comes and goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from freight.hardware.curve import Curve
from freight.hardware.storage import find_machine
from freight.quantities import MIB
from freight.runtime import disk_probe, processor_probe, profiler
from freight.runtime.beside_probe import (
    BothWays,
    Pair,
    measure_both_ways,
    of_both_ways,
    what_is_left,
)
from freight.runtime.device import ComputeDevice
from freight.runtime.disk_probe import Moved, total

CPU = ComputeDevice(kind="cpu", torch_device=torch.device("cpu"))


@pytest.fixture
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_SCRATCH_BYTES", 16 * MIB)
    monkeypatch.setattr(disk_probe, "_RING_BYTES", 8 * MIB)
    monkeypatch.setattr(disk_probe, "_LONG_BYTES", 24 * MIB)


@pytest.mark.parametrize("is_faster", [True, False])
def test_integer_products_are_measured_where_they_are_faster(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "computes_int8", lambda _: is_faster)
    monkeypatch.setattr(processor_probe, "_COLD_BYTES", 1 << 20)
    monkeypatch.setattr(processor_probe, "_MOST_TRIES", 3)
    # Where these are not faster they are very slow.
    monkeypatch.setattr(profiler, "ROWS", processor_probe.ROWS[:4])
    probe = profiler._UnitProbe(CPU)
    unit = probe.unit([probe.measure()], 1 << 30)
    assert ("int8" in unit.products) == is_faster
    assert set(unit.attention_flops) == set(unit.products) - {"int8", "codes", "exponents"}
    points = dict(unit.products["codes"].points)
    assert [*points] == [*map(float, processor_probe.ROWS[:4])]
    assert 1e7 < points[1.0] < 1e16
    assert set(unit.passes) == {"norm", "rotation", "silu", "gate"}
    assert all(0.0 <= often < 100.0 for often in unit.passes.values())
    assert min(unit.passes[name] for name in ("norm", "rotation", "silu")) > 0.0
    assert unit.passes["gate"] in (0.0, unit.passes["silu"])
    if is_faster:
        assert [rows for rows, _ in unit.products["int8"].points] == [
            *map(float, processor_probe.ROWS[:4])
        ]
        assert 1e8 < unit.products["int8"].at(64) < 1e16


def test_rates_of_integers_are_those_of_the_dtype_where_none_are_known() -> None:
    unit = find_machine("laptop").units["cpu"]
    assert unit.product_flops("bfloat16", 64) == unit.products["bfloat16"].at(64)
    assert unit.product_flops("bfloat16", 64, "int8") == unit.products["int8"].at(64)
    plain = {name: rate for name, rate in unit.products.items() if name != "int8"}
    without = replace(unit, products=plain)
    assert without.product_flops("bfloat16", 64, "int8") == plain["bfloat16"].at(64)
    assert replace(without, products={"float32": Curve.constant(3.0)}).product_flops(
        "bfloat16", 1, "int8"
    ) == pytest.approx(3.0)


def test_a_disk_that_comes_and_goes_is_not_slower_beside_products() -> None:
    """It gives 1 and 3 bytes a second in turn, alone as beside a product, so one of two pairs has
    it three times as slow beside; products take a quarter longer."""

    def pair(alone_s: int, beside_s: int) -> Pair:
        return Pair(
            product_s=0.8,
            after_wait_s=1.6,
            beside_s=1.0,
            read=Moved(3, alone_s),
            read_beside=Moved(3, beside_s),
        )

    found = {
        (own.part, own.other): own.share for own in what_is_left([[pair(1, 3), pair(3, 1)] * 2] * 3)
    }
    assert found["disk read", "compute"].at(1) == pytest.approx(1.0)
    assert found["compute", "disk read"].at(64) == pytest.approx(0.8)
    assert found["compute", "wait"].at(64) == pytest.approx(0.5)
    slower = [[pair(1, 4), pair(3, 1)] * 2]
    assert what_is_left(slower)[2].share.at(1) == pytest.approx(0.8)


def test_a_disk_is_read_until_enough_is_read_or_it_is_told_to_stop(
    tmp_path: Path, small_scratch: None
) -> None:
    stop = Event()
    stop.set()
    with disk_probe.DiskProbe(tmp_path) as disk:
        assert disk.read_some().num_bytes == 24 * MIB
        assert disk.read_until(stop).num_bytes == 0
    assert total([Moved(6, 1.0), Moved(2, 3.0)]).bytes_per_s == 2.0


def test_after_a_wait_long_products_take_no_more_seconds_than_short_ones() -> None:
    def pair(product_s: float, after_wait_s: float | None) -> Pair:
        return Pair(
            product_s=product_s,
            after_wait_s=after_wait_s,
            beside_s=product_s,
            read=Moved(1, 1.0),
            read_beside=Moved(1, 1.0),
        )

    rounds = [[pair(1.0, 2.0), pair(2.0, 4.0), pair(6.0, None), pair(30.0, None)]] * 2
    after_wait = what_is_left(rounds)[1].share
    assert [share for _, share in after_wait.points] == pytest.approx([0.4, 4 / 7, 0.8, 20 / 21])


def test_what_each_way_keeps_beside_the_other_is_that_of_all_rounds() -> None:
    """Reads lose a fifth beside writes, and these a half; one round was of a slow minute."""

    def both_ways(times: float) -> BothWays:
        return BothWays(
            names=("disk read", "disk write"),
            alone=(Moved(10, times), Moved(10, 2 * times)),
            beside=(Moved(8, times), Moved(5, 2 * times)),
        )

    found = {
        (own.part, own.other): own.share for own in of_both_ways([both_ways(1.0), both_ways(4.0)])
    }
    assert found["disk read", "disk write"].at(1) == pytest.approx(0.8)
    assert found["disk write", "disk read"].at(1) == pytest.approx(0.5)


def test_reads_and_writes_of_a_disk_are_measured_together(
    tmp_path: Path, small_scratch: None
) -> None:
    with disk_probe.DiskProbe(tmp_path) as disk:
        found = measure_both_ways(disk)
    assert [own.num_bytes for own in found.alone] == [24 * MIB] * 2
    assert all(own.num_bytes > 0 for own in found.beside)
    reads, writes = of_both_ways([found])
    assert (reads.part, reads.other) == (writes.other, writes.part) == ("disk read", "disk write")
    assert 0.0 < reads.share.at(1) <= 1.0
    assert 0.0 < writes.share.at(1) <= 1.0
