"""Leave to use registers of sixteen by sixteen: asked for where there are such, and only there."""

from __future__ import annotations

import platform

import pytest

from freight.kernels import tile_registers
from freight.kernels.threads import find_loops

FEATURES = {"amx-tile": True, "amx-bf16": True}


@pytest.mark.parametrize("lacking", ["amx-tile", "amx-bf16", "pairs", "Linux", "x86_64"])
def test_not_where_something_lacks(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = {name: name != lacking for name in FEATURES}
    monkeypatch.setattr(tile_registers, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(tile_registers, "HAS_PAIR_PRODUCTS", lacking != "pairs")
    monkeypatch.setattr(platform, "system", lambda: "Other" if lacking == "Linux" else "Linux")
    machine = "other" if lacking == "x86_64" else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert not tile_registers.may_use_tiles.__wrapped__()


@pytest.mark.parametrize("answer", [0, -1])
def test_by_what_the_system_answers(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Library:
        def __init__(self, name: None) -> None: ...

        def syscall(self, *numbers: int) -> int:
            asked.append(numbers)
            return answer

    monkeypatch.setattr(tile_registers, "get_host_cpu_features", lambda: FEATURES)
    monkeypatch.setattr(tile_registers, "HAS_PAIR_PRODUCTS", True)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tile_registers.ctypes, "CDLL", Library)
    assert tile_registers.may_use_tiles.__wrapped__() == (answer == 0)
    assert asked == [(158, 0x1023, 18)]


def test_loops_are_there_where_they_may_be_used() -> None:
    loops = find_loops()
    assert loops is not None
    found = {own is not None for own in (loops.tiles, loops.tile_blocks)}
    assert found == {tile_registers.may_use_tiles()}
