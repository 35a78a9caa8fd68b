"""Leave to use registers of sixteen by sixteen: asked for where there are such, and only there."""

from __future__ import annotations

import platform

import pytest

from freight.kernels import features as own
from freight.kernels.threads import find_loops

FEATURES = {"amx-tile": True, "amx-bf16": True}


@pytest.mark.parametrize("lacking", ["amx-tile", "amx-bf16", "pairs", "Linux", "x86_64"])
def test_not_where_something_lacks(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = {name: name != lacking for name in FEATURES}
    monkeypatch.setattr(own, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(own, "HAS_PAIR_PRODUCTS", lacking != "pairs")
    monkeypatch.setattr(platform, "system", lambda: "Other" if lacking == "Linux" else "Linux")
    machine = "other" if lacking == "x86_64" else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert not own.may_use_tiles.__wrapped__()


@pytest.mark.parametrize("answer", [0, -1])
def test_by_what_the_system_answers(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Library:
        def __init__(self, name: None) -> None: ...

        def syscall(self, *numbers: int) -> int:
            asked.append(numbers)
            return answer

    monkeypatch.setattr(own, "get_host_cpu_features", lambda: FEATURES)
    monkeypatch.setattr(own, "HAS_PAIR_PRODUCTS", True)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(own.ctypes, "CDLL", Library)
    assert own.may_use_tiles.__wrapped__() == (answer == 0)
    assert asked == [(158, 0x1023, 18)]


def test_loops_are_there_where_they_may_be_used() -> None:
    loops = find_loops()
    assert loops is not None
    found = {module is not None for module in (loops.tiles, loops.tile_blocks)}
    assert found == {own.may_use_tiles()}
    by_pairs = loops.pair_attention, loops.pair_queries, loops.code_queries
    found = {module is not None for module in by_pairs}
    assert found == {own.HAS_PAIR_PRODUCTS}


@pytest.mark.parametrize("may", [False, True])
def test_loops_are_compiled_without_what_may_not_be_used(
    may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what is kept of loops that use it is not taken where it may not be used."""

    class Features(dict[str, bool]):
        def flatten(self) -> str:
            return ",".join(f"{'+' if there else '-'}{name}" for name, there in self.items())

    given = Features({"avx512f": True, "amx-tile": True, "amx-bf16": True, "amx-fp16": False})
    monkeypatch.setattr(own, "get_host_cpu_features", lambda: given)
    monkeypatch.setattr(own, "may_use_tiles", lambda: may)
    more = "" if may else ",-amx-tile,-amx-bf16"
    assert own.compiled_for() == f"+avx512f,+amx-tile,+amx-bf16,-amx-fp16,-prefer-256-bit{more}"
