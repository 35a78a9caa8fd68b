"""Whether a sweep's tokens are enough for all experts of a layer to be chosen, so that these come
before their router has run.

At first by how likely that is, were they chosen by chance; then by what was chosen, for there are
experts that routers seldom choose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from freight.plan.sweep import StreamModel

__all__ = ["ExpectedExperts"]

_NEARLY_ALL: Final = 0.97
"""Of a layer's experts: what comes in vain should be less than what a link brings meanwhile."""


@dataclass(kw_only=True, slots=True)
class ExpectedExperts:
    """Of a run, sweep after sweep. ``enough`` says of a layer how many tokens are, once it has been
    seen what some choose."""

    model: StreamModel
    enough: dict[int, float] = field(default_factory=dict)

    def of(self, layer: int, num_tokens: int, num_picked: int) -> Collection[int]:
        """All experts of a layer, if they are expected in a sweep of so many tokens, of which the
        head needs some; or none."""
        working = self._working(layer, num_tokens, num_picked)
        if working < self.enough.get(layer, self.model.tokens_of_all):
            return ()
        return self.model.numbers_of_experts(layer)

    def learn(self, layer: int, num_tokens: int, num_picked: int, num_chosen: int) -> None:
        """So many of a layer's experts were chosen."""
        working = self._working(layer, num_tokens, num_picked)
        enough = self.enough.get(layer, self.model.tokens_of_all)
        if num_chosen >= _NEARLY_ALL * len(self.model.experts[layer]):
            self.enough[layer] = min(enough, working)
        else:
            self.enough[layer] = max(enough, working + 1)

    def _working(self, layer: int, num_tokens: int, num_picked: int) -> int:
        """How many of a sweep's tokens a layer's experts may have."""
        return num_picked if self.model.experts[layer][0] >= self.model.picks_at else num_tokens
