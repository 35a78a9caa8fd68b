"""Layers over machines that differ, against every way to cut them."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from freight.plan.balance import Capacity, balance_layers
from freight.plan.shares import layer_ranges, ranges_of
from freight.quantities import GIB

LAYER_BYTES, LAYER_FLOPS = GIB // 2, 1e11


def capacity(flops: float, gib: float) -> Capacity:
    return Capacity(flops_per_s=flops, memory_bytes=int(gib * GIB), read_bytes_per_s=2e9)


def slowest_s(stages: list[Capacity], layers: list[range]) -> float:
    return max(
        stage.seconds(len(own), LAYER_BYTES, LAYER_FLOPS)
        for stage, own in zip(stages, layers, strict=True)
    )


def cut(num_layers: int, stages: list[Capacity]) -> list[range]:
    return balance_layers(num_layers, stages, layer_bytes=LAYER_BYTES, layer_flops=LAYER_FLOPS)


@given(
    stages=st.lists(
        st.builds(capacity, st.floats(1e10, 1e13), st.floats(0.1, 8.0)), min_size=1, max_size=4
    ),
    more=st.integers(0, 6),
)
def test_no_cut_is_much_faster(stages: list[Capacity], more: int) -> None:
    num_layers = len(stages) + more
    found = cut(num_layers, stages)
    assert [number for own in found for number in own] == [*range(num_layers)]
    assert all(found)
    best_s = min(
        slowest_s(stages, ranges_of([b - a for a, b in pairwise((0, *borders, num_layers))]))
        for borders in combinations(range(1, num_layers), len(stages) - 1)
    )
    is_equal = found == layer_ranges(num_layers, len(stages))
    assert slowest_s(stages, found) <= best_s * ((1.25 if is_equal else 1.0) + 1e-9)


def test_what_a_machine_has_decides() -> None:
    def counts(*stages: Capacity) -> list[int]:
        return [len(own) for own in cut(32, [*stages])]

    assert counts(capacity(1e12, 64), capacity(1e12, 64)) == [16, 16]
    assert counts(capacity(1.1e12, 64), capacity(1e12, 64)) == [16, 16], "a measured rate varies"
    assert counts(capacity(3e12, 64), capacity(1e12, 64)) == [24, 8]
    roomy, narrow = capacity(1e12, 64), capacity(1e12, 2)
    first, second = counts(narrow, roomy)
    assert first < second, "what finds no room is read in every sweep"
    assert counts(capacity(1e12, 2), capacity(1e12, 2)) == [16, 16]
