"""Why a plan cannot be: every tier that has too little, what wants it, and what would do.

Knows sizes by tier and purpose and what the user has fixed, not how they came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from freight.errors import BudgetError
from freight.plan.policy import Tier
from freight.plan.wishes import Wishes
from freight.quantities import MIB, format_bytes

__all__ = ["refusal"]

_BESIDE: Final = "indices and what libraries keep"
_KEYS: Final = "KV cache"
_MORE: Final[Mapping[Tier, str]] = {
    "gpu": "raise --gpu-memory to {enough}",
    "cpu": "raise --cpu-memory to {enough}",
    "disk": "name a disk with {enough} free",
}


def refusal(
    usage: Mapping[Tier, Mapping[str, int]],
    needs: Mapping[Tier, int],
    room: Mapping[Tier, int],
    taken: Mapping[Tier, int],
    wishes: Wishes,
    *,
    has_disk_dir: bool,
) -> BudgetError:
    """For the tiers of ``needs``, which are above what there is ``room`` for beside what the
    process has ``taken``; ``usage`` is what each holds, by purpose, to which ``_BESIDE``
    comes. All in bytes. Less than that is needed only where some of ``wishes`` is given up, or
    keys may go to a disk."""
    asked, limits, more = [], [], []
    for tier, need in needs.items():
        beside = need - sum(usage[tier].values())
        held = {**usage[tier], _BESIDE: max(0, beside)}
        items = sorted(((size, name) for name, size in held.items() if size), reverse=True)
        listed = ", ".join(f"{name} {format_bytes(size)}" for size, name in items)
        own = taken.get(tier, 0)
        process = f", the process itself {format_bytes(own)}" if own else ""
        asked.append(
            f"The plan that lacks least needs {format_bytes(need + own)} on {tier} "
            f"({listed}{process})."
        )
        limits.append(
            f"The budget is {format_bytes(room[tier] + own)}: {format_bytes(need - room[tier])} "
            f"are missing on {tier}."
        )
        more.append(_MORE[tier].format(enough=f"{-(-(need + own) // MIB)}MiB"))
    ways = [" and ".join(more), *_less(wishes)]
    can_go = not has_disk_dir and wishes.kv is None and "disk" not in needs
    if can_go and any(usage[own].get(_KEYS, 0) >= needs[own] - room[own] for own in needs):
        ways.append("name a directory on a fast disk for the KV cache (--disk-dir)")
    advice = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
    return BudgetError(" ".join(asked), " ".join(limits), f"{advice[0].upper()}{advice[1:]}.")


def _less(wishes: Wishes) -> Iterator[str]:
    """What was fixed, and takes memory."""
    for name in ("micro_batch_size", "num_micro_batches", "batch_tokens"):
        if (getattr(wishes, name) or 1) > 1:
            yield f"lower --{name.replace('_', '-')}"
    for name in ("weights", "kv", "activations"):
        if getattr(wishes, name) is not None:
            yield f"leave --{name} out"
