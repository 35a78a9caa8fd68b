"""A profile's rates of integer products: measured where they are faster, and used by plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freight.hardware.curve import Curve
from freight.hardware.storage import find_machine
from freight.runtime import processor_probe, profiler
from freight.runtime.device import ComputeDevice

CPU = ComputeDevice(kind="cpu", torch_device=torch.device("cpu"))


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
