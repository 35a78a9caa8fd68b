"""The heads of a layer whose rows keep a matrix for each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StateHeads"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeads:
    """N heads with a matrix [W, U] each; K of queries and keys, which they share in equal parts.
    Tokens correct at most the share ``strength``; what is there decays alike, or ``by_row``, which
    may have a ``bound`` (see ``model.recurrent_steps``)."""

    num_key_heads: int
    num_heads: int
    key_width: int
    value_width: int
    strength: float = 1.0
    by_row: bool = False
    bound: float | None = None

    def places(self, *, is_delta: bool) -> tuple[int, int, int]:
        """Where queries, keys and values of a token begin."""
        keys = self.num_key_heads * self.key_width
        if is_delta:
            return 0, keys, 2 * keys
        values = self.num_heads * self.value_width
        return values + keys, values, 0
