"""Why a plan cannot be: every tier that has too little, what wants it, and what would do.

Knows sizes by tier and purpose, not how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from freight.errors import BudgetError
from freight.plan.policy import Tier
from freight.quantities import MIB, format_bytes

__all__ = ["refusal"]

_BESIDE: Final = "indices and what libraries keep"
_ADVICE: Final[Mapping[Tier, str]] = {
    "gpu": "Raise --gpu-memory to {enough}, or give the cpu or the disk a larger share.",
    "cpu": "Raise --cpu-memory to {enough}, lower --micro-batch-size, or give the disk a larger "
    "share.",
    "disk": "Name a disk with {enough} free, or give it a smaller share.",
}


def refusal(
    usage: Mapping[Tier, Mapping[str, int]],
    needs: Mapping[Tier, int],
    room: Mapping[Tier, int],
    taken: Mapping[Tier, int],
) -> BudgetError:
    """For the tiers of ``needs``, which are above what there is ``room`` for beside what the
    process has ``taken``; ``usage`` is what each holds, by purpose, to which ``_BESIDE``
    comes. All in bytes."""
    asked, limits, advice = [], [], []
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
        advice.append(_ADVICE[tier].format(enough=f"{-(-(need + own) // MIB)}MiB"))
    return BudgetError(" ".join(asked), " ".join(limits), " ".join(advice))
