"""The exceptions that a user of Freight can meet.

    FreightError
    ├── InputError         a file, row, flag or value that was given is not usable
    ├── ModelError         a checkpoint or its configuration is damaged, incomplete or not supported
    ├── BudgetError        the work does not fit into the memory or disk it was given
    ├── DeviceError        a device that was asked for is absent or failed
    ├── JobError           a job directory belongs to other work, or cannot be written
    └── RankError          a process of a run over several failed, or does not agree with the others

Every message has three parts: what was asked, what the limit is, what to do.
Anything that is not a ``FreightError`` is a bug in Freight.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DeviceError",
    "FreightError",
    "InputError",
    "JobError",
    "ModelError",
    "RankError",
    "reason_of",
]


class FreightError(Exception):
    """Base of all errors that have a cause outside Freight's own code."""

    def __init__(self, asked: str, limit: str, advice: str) -> None:
        self.asked = asked
        self.limit = limit
        self.advice = advice
        super().__init__(f"{asked} {limit} {advice}")


class InputError(FreightError, ValueError):
    """A file, row, flag or value that was given is not usable."""


class ModelError(FreightError):
    """A checkpoint or its configuration is damaged, incomplete or not supported."""


class BudgetError(FreightError):
    """The work does not fit into the memory or disk it was given."""


class DeviceError(FreightError):
    """A device that was asked for is absent or failed."""


class JobError(FreightError):
    """A job directory belongs to other work, or cannot be written."""


class RankError(FreightError):
    """A process of a run over several failed, or does not agree with the others."""


def reason_of(error: Exception) -> str:
    """What was wrong, in the system's words where it refused, without its number and the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
