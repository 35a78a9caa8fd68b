"""The machines that come with Freight: every figure has a source and obeys the hardware."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from freight.errors import InputError
from freight.hardware.curve import Curve
from freight.hardware.machine import LINKS, Machine
from freight.hardware.storage import find_machine, preset_names, write_machine

NAMES = (
    "a100-40gb",
    "a100-80gb",
    "a10g",
    "cpu-server",
    "flexgen-t4",
    "h100",
    "h200",
    "l4",
    "laptop",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "t4",
)
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}

# TFLOP/s in data sheets: dense, halves summed in float32; float32 without TF32.
GPU_PEAKS = {
    "a100-40gb": {"bfloat16": 312, "float16": 312, "float32": 19.5, "int8": 624},
    "a100-80gb": {"bfloat16": 312, "float16": 312, "float32": 19.5, "int8": 624},
    "a10g": {"bfloat16": 70, "float16": 70, "float32": 35, "int8": 140},
    "flexgen-t4": {"float16": 65, "float32": 8.1, "int8": 130},
    "h100": {"bfloat16": 989, "float16": 989, "float32": 67, "int8": 1979},
    "h200": {"bfloat16": 989, "float16": 989, "float32": 67, "int8": 1979},
    "l4": {"bfloat16": 121, "float16": 121, "float32": 30.3, "int8": 242},
    "rtx-3090": {"bfloat16": 71, "float16": 71, "float32": 35.6, "int8": 284},
    "rtx-4090": {"bfloat16": 165.2, "float16": 165.2, "float32": 82.6, "int8": 660.6},
    "rtx-5090": {"bfloat16": 209.5, "float16": 209.5, "float32": 104.8, "int8": 838},
    "t4": {"float16": 65, "float32": 8.1, "int8": 130},
}
# GB/s in data sheets.
GPU_MEMORY = {
    "a100-40gb": 1555,
    "a100-80gb": 1935,
    "a10g": 600,
    "flexgen-t4": 320,
    "h100": 3350,
    "h200": 4800,
    "l4": 300,
    "rtx-3090": 936,
    "rtx-4090": 1008,
    "rtx-5090": 1792,
    "t4": 320,
}
# TFLOP/s: cores x FLOP per cycle x highest clock of one core; AMX has 2048 per cycle in bfloat16.
CPU_PEAKS = {
    "a100-40gb": {"float32": 6 * 64 * 3.4e-3, "int8": 6 * 256 * 3.4e-3},
    "a100-80gb": {"float32": 24 * 32 * 3.7e-3},
    "a10g": {"float32": 8 * 32 * 3.3e-3},
    "cpu-server": {
        "bfloat16": 48 * 2048 * 3.2e-3,
        "float32": 48 * 64 * 3.2e-3,
        "int8": 48 * 4096 * 3.2e-3,
    },
    "flexgen-t4": {"float32": 16 * 64 * 2.7e-3},
    "h100": {"float32": 8 * 32 * 3.6e-3},
    "h200": {
        "bfloat16": 12 * 2048 * 3.8e-3,
        "float32": 12 * 64 * 3.8e-3,
        "int8": 12 * 4096 * 3.8e-3,
    },
    "l4": {"float32": 8 * 32 * 3.6e-3},
    "laptop": {"bfloat16": 8 * 64 * 5.1e-3, "float32": 8 * 32 * 5.1e-3, "int8": 8 * 128 * 5.1e-3},
    "rtx-3090": {
        "bfloat16": 16 * 128 * 5.7e-3,
        "float32": 16 * 64 * 5.7e-3,
        "int8": 16 * 256 * 5.7e-3,
    },
    "t4": {"float32": 8 * 64 * 3.5e-3, "int8": 8 * 256 * 3.5e-3},
}
CPU_PEAKS["rtx-4090"] = CPU_PEAKS["rtx-5090"] = CPU_PEAKS["rtx-3090"]
# GB/s of a host's whole memory, over all channels.
CPU_MEMORY = {
    "a100-40gb": 140.8,
    "a100-80gb": 204.8,
    "a10g": 204.8,
    "cpu-server": 358.4,
    "flexgen-t4": 128,
    "h100": 204.8,
    "h200": 307.2,
    "l4": 204.8,
    "laptop": 89.6,
    "rtx-3090": 89.6,
    "rtx-4090": 89.6,
    "rtx-5090": 89.6,
    "t4": 140.8,
}
# GB/s of one direction of the narrowest part between host and device, before any overhead.
PCIE = {
    "a100-40gb": 15.75,
    "a100-80gb": 31.5,
    "a10g": 31.5,
    "flexgen-t4": 15.75,
    "h100": 31.5,
    "h200": 63,
    "l4": 31.5,
    "rtx-3090": 31.5,
    "rtx-4090": 31.5,
    "rtx-5090": 63,
    "t4": 15.75,
}


@pytest.fixture(params=NAMES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return find_machine(request.param)


def _leaves(value: object, path: str = "") -> Iterator[str]:
    """Dotted paths of numbers; a curve is one."""
    if isinstance(value, int | float | Curve) and not isinstance(value, bool):
        yield path
    elif isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, own in items:
            yield from _leaves(own, f"{path}.{key}".removeprefix("."))
    elif hasattr(value, "__dataclass_fields__"):
        yield from _leaves({key: getattr(value, key) for key in value.__dataclass_fields__}, path)


def _curves(machine: Machine) -> Iterator[Curve]:
    for unit in machine.units.values():
        yield from unit.products.values()
    for link in machine.links.values():
        yield from (link.bytes_per_s, *link.kinds.values())


def _most(curve: Curve) -> float:
    return max(value for _, value in curve.points)


def test_all_are_there() -> None:
    assert preset_names() == sorted(NAMES)


def test_names_are_those_of_the_files(machine: Machine) -> None:
    assert machine.name in NAMES
    assert find_machine(machine.name) == machine
    assert machine.description and not machine.host


def test_every_number_has_a_source_and_every_source_a_number(machine: Machine) -> None:
    assert sorted(machine.sources) == sorted(_leaves(machine))
    assert all(len(text) > 20 or text.startswith("derived:") for text in machine.sources.values())


def test_files_are_as_freight_writes_them(machine: Machine, tmp_path: Path) -> None:
    write_machine(machine, tmp_path / "machine.json")
    file = resources.files("freight.hardware") / "presets" / f"{machine.name}.json"
    assert file.read_text("utf-8") == (tmp_path / "machine.json").read_text("utf-8")


def test_rates_rise_with_sizes(machine: Machine) -> None:
    for curve in _curves(machine):
        values = [value for _, value in curve.points]
        assert values == sorted(values)


def test_farther_memories_are_slower(machine: Machine) -> None:
    slowest = min(unit.memory_bytes_per_s for unit in machine.units.values())
    ways = {name: _most(link.bytes_per_s) for name, link in machine.links.items()}
    assert ways["disk write"] <= ways["disk read"] < slowest
    if "gpu" in machine.units:
        gpu, cpu = machine.units["gpu"], machine.units["cpu"]
        assert ways["disk read"] < ways["host to device"] < gpu.memory_bytes_per_s
        assert ways["disk write"] < ways["device to host"] < gpu.memory_bytes_per_s
        assert cpu.memory_bytes_per_s < gpu.memory_bytes_per_s
        assert set(ways) == set(LINKS)
    else:
        assert set(ways) == {"disk read", "disk write"}


def test_few_rows_are_bound_by_memory(machine: Machine) -> None:
    for unit in machine.units.values():
        for dtype, curve in unit.products.items():
            for rows in (1, 2, 3, 4, 6, 11, 16, 23, 45, 90, 181):
                most = 2 * rows * unit.memory_bytes_per_s / ELEMENT_BYTES[dtype]
                assert curve.at(rows) <= 1.1 * most, (unit.name, dtype, rows)


def test_many_rows_are_below_the_peak_but_not_far(machine: Machine) -> None:
    peaks = {"cpu": CPU_PEAKS[machine.name], "gpu": GPU_PEAKS.get(machine.name, {})}
    for name, unit in machine.units.items():
        assert set(unit.products) == set(peaks[name])
        for dtype, curve in unit.products.items():
            peak = 1e12 * peaks[name][dtype]
            least = 0.05 if dtype == "int8" or name == "cpu" else 0.3
            assert least * peak < curve.at(8192) < 0.95 * peak, (unit.name, dtype)


def test_attention_is_below_the_products(machine: Machine) -> None:
    for unit in machine.units.values():
        assert set(unit.attention_flops) == set(unit.products) - {"int8"}
        for dtype, rate in unit.attention_flops.items():
            assert rate < _most(unit.products[dtype])
        assert unit.attended_bytes_per_s.at(1) < unit.memory_bytes_per_s


def test_memory_is_below_its_peak(machine: Machine) -> None:
    cpu = machine.units["cpu"].memory_bytes_per_s
    assert cpu < 0.85e9 * CPU_MEMORY[machine.name]
    if "gpu" in machine.units:
        peak = 1e9 * GPU_MEMORY[machine.name]
        assert 0.7 * peak < machine.units["gpu"].memory_bytes_per_s < 0.95 * peak


def test_the_way_to_the_device_is_below_its_peak(machine: Machine) -> None:
    for name in {"host to device", "device to host"} & set(machine.links):
        assert _most(machine.links[name].bytes_per_s) < 0.9e9 * PCIE[machine.name]


def test_parts_beside_others_are_known(machine: Machine) -> None:
    parts = {*machine.units, *machine.links}
    assert ("gpu" in machine.units) == (not machine.beside)
    for entry in machine.beside:
        assert {entry.part, entry.other} <= parts
        assert 0.5 < entry.share.at(1) <= 1


def test_sizes_are_of_this_world(machine: Machine) -> None:
    assert 2**34 < machine.units["cpu"].memory_bytes < machine.disk_bytes
    assert machine.num_gpus == ("gpu" in machine.units)
    assert machine.watts is not None and 50 <= machine.watts <= 1500
    assert machine.dollars_per_hour is None or 0.1 < machine.dollars_per_hour < 15
    for unit in machine.units.values():
        assert 1e-6 < unit.call_s <= unit.sweep_s < 0.01
    assert all(0 < link.latency_s < 1e-3 for link in machine.links.values())


@pytest.mark.parametrize("name", ["t4", "flexgen-t4"])
def test_turing_has_no_bfloat16(name: str) -> None:
    assert "bfloat16" not in find_machine(name).units["gpu"].products


def test_processors_have_no_float16(machine: Machine) -> None:
    assert "float16" not in machine.units["cpu"].products


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("a100", {"a100-40gb", "a100-80gb"}),
        ("A100-80", {"a100-80gb"}),
        ("rtx4090", {"rtx-4090"}),
        ("4090", {"rtx-4090"}),
        ("H-100", {"h100"}),
    ],
)
def test_unknown_names_bring_close_ones(name: str, close: set[str]) -> None:
    with pytest.raises(InputError) as caught:
        find_machine(name)
    assert caught.value.advice.startswith("Did you mean ")
    assert close <= set(caught.value.advice.removesuffix("?").split())


@pytest.mark.parametrize("name", ["", "zzzzzz"])
def test_names_like_none_bring_all(name: str) -> None:
    with pytest.raises(InputError) as caught:
        find_machine(name)
    assert all(preset in caught.value.advice for preset in NAMES)


def test_copies_of_a_simulated_device_end_later_where_cores_are_shared() -> None:
    machine = find_machine("laptop")
    shared = machine.with_simulated_device(1 << 30, 1e9)
    apart = machine.with_simulated_device(1 << 30, 1e9, shares_cores=False)
    late = [own.links["host to device"].seconds(1e6, "weights", 1e6) for own in (shared, apart)]
    assert late[0] > late[1] > 1e-3
