"""Machines in files: what is written is read again, and damaged files are named, never crashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import InputError
from freight.hardware.curve import Curve
from freight.hardware.machine import Beside, ComputeUnit, Link, Machine
from freight.hardware.storage import find_machine, read_machine, write_machine

POSITIVE = st.floats(1e-9, 1e18)
CURVES = st.dictionaries(st.integers(1, 2**40), POSITIVE, min_size=1, max_size=5).map(
    lambda points: Curve(points=tuple(sorted((float(s), v) for s, v in points.items())))
)
UNITS = st.builds(
    ComputeUnit,
    name=st.just("unit"),
    memory_bytes=st.integers(0, 2**45),
    memory_bytes_per_s=POSITIVE,
    products=st.dictionaries(st.sampled_from(["bfloat16", "float32"]), CURVES, min_size=1),
    attention_flops=st.dictionaries(st.sampled_from(["bfloat16", "float32"]), POSITIVE, min_size=1),
    attended_bytes_per_s=CURVES,
    call_s=st.floats(0, 1),
    sweep_s=st.floats(0, 1),
)
LINKS = st.builds(
    Link,
    bytes_per_s=CURVES,
    kinds=st.dictionaries(st.sampled_from(["weights", "kv", "activations"]), CURVES),
    latency_s=st.floats(0, 1),
)
MACHINES = st.builds(
    Machine,
    name=st.text(max_size=20),
    description=st.text(max_size=20),
    units=st.fixed_dictionaries({"cpu": UNITS}, optional={"gpu": UNITS}),
    links=st.fixed_dictionaries(
        {
            "disk read": LINKS,
            "disk write": LINKS,
            "host to device": LINKS,
            "device to host": LINKS,
        }
    ),
    beside=st.lists(
        st.builds(Beside, part=st.just("cpu"), other=st.just("disk read"), share=CURVES),
        max_size=2,
    ).map(tuple),
    disk_bytes=st.integers(0, 2**50),
    num_gpus=st.integers(0, 8),
    dollars_per_hour=st.none() | POSITIVE,
    watts=st.none() | POSITIVE,
    host=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    sources=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@given(machine=MACHINES)
def test_what_is_written_is_read_again(folder: Path, machine: Machine) -> None:
    path = folder / "machine.json"
    write_machine(machine, path)
    assert read_machine(path) == machine
    assert find_machine(str(path)) == machine
    assert [file.name for file in folder.iterdir()] == ["machine.json"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "machine.json"
    machine = find_machine("laptop")
    write_machine(machine, path)

    def stop(self: Path, *_: object) -> int:
        with self.open("w") as file:
            return file.write("{ half")

    def fail(self: Path, *arguments: object) -> int:
        stop(self, *arguments)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space"):
        write_machine(find_machine("t4"), path)
    monkeypatch.undo()
    assert read_machine(path) == machine


def test_files_without_the_ending_are_found_too(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    write_machine(find_machine("laptop"), path)
    assert find_machine(str(path)).name == "laptop"


def _remove_link(record: dict[str, Any]) -> None:
    del record["links"]["disk read"]


def _remove_links(record: dict[str, Any]) -> None:
    del record["links"]


def _remove_field(record: dict[str, Any]) -> None:
    del record["units"]["gpu"]["attended_bytes_per_s"]


def _add_field(record: dict[str, Any]) -> None:
    record["units"]["gpu"]["tensor_cores"] = 320


def _add_unit(record: dict[str, Any]) -> None:
    record["units"]["npu"] = record["units"]["gpu"]


def _add_kind(record: dict[str, Any]) -> None:
    record["links"]["disk read"]["kinds"] = {"cache": 1e9}


def _negative_product(record: dict[str, Any]) -> None:
    record["units"]["gpu"]["products"]["float16"] = -1e12


def _negative_memory_rate(record: dict[str, Any]) -> None:
    record["units"]["cpu"]["memory_bytes_per_s"] = -1e9


def _endless_attention(record: dict[str, Any]) -> None:
    record["units"]["gpu"]["attention_flops"]["float16"] = float("inf")


def _negative_latency(record: dict[str, Any]) -> None:
    record["links"]["disk read"]["latency_s"] = -1


def _negative_price(record: dict[str, Any]) -> None:
    record["dollars_per_hour"] = -2


def _rate_in_words(record: dict[str, Any]) -> None:
    record["units"]["cpu"]["memory_bytes_per_s"] = "40 GB/s"


def _no_products(record: dict[str, Any]) -> None:
    record["units"]["cpu"]["products"] = {}


def _no_attention(record: dict[str, Any]) -> None:
    record["units"]["gpu"]["attention_flops"] = {}


def _sizes_descend(record: dict[str, Any]) -> None:
    record["links"]["disk read"]["bytes_per_s"].reverse()


def _no_points(record: dict[str, Any]) -> None:
    record["links"]["disk read"]["bytes_per_s"] = []


def _points_of_three(record: dict[str, Any]) -> None:
    record["links"]["disk read"]["bytes_per_s"] = [[1, 2, 3]]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_remove_link, "disk read"),
        (_remove_links, "links"),
        (_remove_field, "attended_bytes_per_s"),
        (_add_field, "tensor_cores"),
        (_add_unit, "npu"),
        (_add_kind, "cache"),
        (_negative_product, "-1000000000000"),
        (_negative_memory_rate, "memory_bytes_per_s of -1000000000"),
        (_endless_attention, "attention_flops.float16 of inf"),
        (_negative_latency, "latency_s of -1"),
        (_negative_price, "dollars_per_hour of -2"),
        (_rate_in_words, "memory_bytes_per_s of '40 GB/s'"),
        (_no_products, "has no products"),
        (_no_attention, "has no attention_flops"),
        (_sizes_descend, "ascending"),
        (_no_points, "points"),
        (_points_of_three, "ValueError"),
    ],
)
def test_damage_is_told(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], told: str
) -> None:
    path = tmp_path / "machine.json"
    write_machine(find_machine("t4"), path)
    record = json.loads(path.read_text("utf-8"))
    damage(record)
    path.write_text(json.dumps(record), "utf-8")
    assert told in _refusal(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "JSONDecodeError"),
        (b"not JSON", "JSONDecodeError"),
        (b"[1, 2]", "TypeError"),
        (b'"t4"', "ValueError"),
        (b"{}", "units"),
        (b'{"units": 3, "links": 4}', "AttributeError"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_other_files_are_told(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    assert told in _refusal(path)


def test_absent_files_and_folders_are_told(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "absent.json")
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in _refusal(tmp_path / "folder.json")


def _refusal(path: Path) -> str:
    """What is said of a file that is no machine: three parts, the first of which names it."""
    with pytest.raises(InputError) as caught:
        find_machine(str(path))
    assert str(path) in caught.value.asked
    assert caught.value.limit
    assert caught.value.advice
    return str(caught.value)
