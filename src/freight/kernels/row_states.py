"""Which of the states that are kept for rows belong to the rows of some tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["RowStates"]

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStates:
    """Of R rows each brings ``counts[i]`` tokens from ``starts[i]`` on, behind ``lengths[i]`` that
    it has had; its state is in ``seats[i]``, and is nothing yet where ``is_new[i]`` is not 0."""

    starts: Places
    counts: Places
    seats: Places
    is_new: Places
    lengths: Places = field(default_factory=lambda: np.empty(0, np.int64))
    tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)
    singles: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)

    def single(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Of rows that bring one token: where it is, their seats, and how many they have had."""
        if device not in self.singles:
            own = self.counts == 1
            rows = np.stack((self.starts[own], self.seats[own], self.lengths[own]))
            self.singles[device] = torch.from_numpy(rows).to(device)
        return self.singles[device].unbind(0)

    def table(self, device: torch.device) -> torch.Tensor:
        """These four, one below the other, on a device: put there once for all layers."""
        if device not in self.tables:
            rows = np.stack((self.starts, self.counts, self.seats, self.is_new))
            self.tables[device] = torch.from_numpy(rows).to(device)
        return self.tables[device]
