"""What of a policy the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from freight.plan.policy import Admission, Split

__all__ = ["Wishes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user has fixed; None leaves it open."""

    weights: Split | None = None
    kv: Split | None = None
    activations: Split | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    cpu_attention: float | None = None
    recomputed: float | None = None
    admission: Admission | None = None
    batch_tokens: int | None = None
    draft_tokens: int = 0
    shares_prefixes: bool = True
    rolls_windows: bool = True
    forgets_keys: bool = True
    moves_rows: bool = True
    overlap: bool = True

    def within(self, num_rows: int) -> Wishes:
        """The same of a block of no more than so many rows: more would be memory for nothing."""
        size, count = self.micro_batch_size, self.num_micro_batches
        size = None if size is None else min(size, num_rows)
        most = -(-num_rows // (size or 1))
        return replace(
            self,
            micro_batch_size=size,
            num_micro_batches=None if count is None else min(count, most),
        )

    @property
    def settled(self) -> dict[str, Any]:
        """What is never open, as policies call it."""
        names = "draft_tokens", "rolls_windows", "forgets_keys", "moves_rows", "overlap"
        return {name: getattr(self, name) for name in names}
