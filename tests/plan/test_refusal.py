"""Why a plan cannot be: what is listed makes up what is needed."""

from __future__ import annotations

import re

from freight.plan.refusal import refusal
from freight.quantities import MIB, parse_bytes


def test_what_wants_memory_adds_up_to_what_is_needed() -> None:
    usage = {"cpu": {"weights": 5 * MIB, "KV cache": 3 * MIB, "logits": 0}}
    error = refusal(usage, {"cpu": 40 * MIB}, {"cpu": 10 * MIB}, {"cpu": 300 * MIB})
    need, listed = re.fullmatch(r"The .* needs (.+) on cpu \((.+)\)\.", error.asked).groups()
    parts = [re.fullmatch(r"(.+) (\S+ \w+)", part).groups() for part in listed.split(", ")]
    assert [parse_bytes(size) // MIB for _, size in parts] == [32, 5, 3, 300]
    assert [name for name, _ in parts][1:] == ["weights", "KV cache", "the process itself"]
    assert parse_bytes(need) == 340 * MIB
    assert error.limit == "The budget is 310.00 MiB: 30.00 MiB are missing on cpu."
    assert "--cpu-memory to 340MiB" in error.advice
