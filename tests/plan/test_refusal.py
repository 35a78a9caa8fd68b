"""Why a plan cannot be: what is listed makes up what is needed."""

from __future__ import annotations

import re

import pytest

from freight.errors import BudgetError
from freight.plan.policy import Split, Tier
from freight.plan.refusal import refusal
from freight.plan.wishes import Wishes
from freight.quantities import MIB, parse_bytes


def refused(
    usage: dict[Tier, dict[str, int]], wishes: Wishes, *, has_disk_dir: bool
) -> BudgetError:
    need, room, taken = {"cpu": 40 * MIB}, {"cpu": 10 * MIB}, {"cpu": 300 * MIB}
    return refusal(usage, need, room, taken, wishes, has_disk_dir=has_disk_dir)


def test_what_wants_memory_adds_up_to_what_is_needed() -> None:
    usage = {"cpu": {"weights": 5 * MIB, "KV cache": 3 * MIB, "logits": 0}}
    error = refused(usage, Wishes(), has_disk_dir=True)
    need, listed = re.fullmatch(r"The .* needs (.+) on cpu \((.+)\)\.", error.asked).groups()
    parts = [re.fullmatch(r"(.+) (\S+ \w+)", part).groups() for part in listed.split(", ")]
    assert [parse_bytes(size) // MIB for _, size in parts] == [32, 5, 3, 300]
    assert [name for name, _ in parts][1:] == ["weights", "KV cache", "the process itself"]
    assert parse_bytes(need) == 340 * MIB
    assert error.limit == "The budget is 310.00 MiB: 30.00 MiB are missing on cpu."
    assert error.advice == "Raise --cpu-memory to 340MiB."


@pytest.mark.parametrize(
    ("wishes", "has_disk_dir", "advice"),
    [
        (Wishes(micro_batch_size=1), True, "Raise --cpu-memory to 340MiB."),
        (
            Wishes(micro_batch_size=2, kv=Split(cpu=1.0)),
            False,
            "Raise --cpu-memory to 340MiB, lower --micro-batch-size, or leave --kv out.",
        ),
        (
            Wishes(num_micro_batches=3),
            False,
            "Raise --cpu-memory to 340MiB, lower --num-micro-batches, or name a directory on a "
            "fast disk for the KV cache (--disk-dir).",
        ),
    ],
)
def test_only_what_may_help_is_advised(wishes: Wishes, has_disk_dir: bool, advice: str) -> None:
    usage = {"cpu": {"weights": 5 * MIB, "KV cache": 30 * MIB}}
    assert refused(usage, wishes, has_disk_dir=has_disk_dir).advice == advice


@pytest.mark.parametrize("keys", [0, 29])
def test_a_disk_does_not_help_where_few_keys_are_kept(keys: int) -> None:
    """30 MiB are missing."""
    usage = {"cpu": {"weights": 5 * MIB, "KV cache": keys * MIB}}
    assert refused(usage, Wishes(), has_disk_dir=False).advice == "Raise --cpu-memory to 340MiB."


def test_all_tiers_are_raised() -> None:
    usage: dict[Tier, dict[str, int]] = {"gpu": {}, "cpu": {}}
    sizes: dict[Tier, int] = {"gpu": 2 * MIB, "cpu": 3 * MIB}
    room: dict[Tier, int] = {"gpu": MIB, "cpu": MIB}
    error = refusal(usage, sizes, room, {}, Wishes(), has_disk_dir=True)
    assert error.advice == "Raise --gpu-memory to 2MiB and raise --cpu-memory to 3MiB."
