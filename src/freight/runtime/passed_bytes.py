"""What of rows elsewhere passes through a slot, in bytes, for the schedule."""

from __future__ import annotations

from freight.memory.passage import Passage, num_pages_of
from freight.plan.sweep import Moved, Passed

__all__ = ["loaded", "passed", "stored"]


def passed(passage: Passage, page_bytes: int) -> Passed:
    """All that passes, of pages of this size."""
    come = (passage.cpu_in, passage.disk_in, passage.tails_in)
    return Passed(
        load=loaded(passage, page_bytes),
        store=stored(passage, page_bytes),
        slot_bytes=passage.num_pages * page_bytes,
        num_loaded=sum(map(num_pages_of, come)),
    )


def loaded(passage: Passage, page_bytes: int) -> Moved:
    """What comes from where."""
    return Moved(
        cpu=num_pages_of(passage.cpu_in) * page_bytes,
        disk=num_pages_of(passage.disk_in) * page_bytes,
        tails=num_pages_of(passage.tails_in) * page_bytes,
    )


def stored(passage: Passage, page_bytes: int) -> Moved:
    """What goes where."""
    return Moved(
        cpu=num_pages_of(passage.cpu_out) * page_bytes,
        disk=num_pages_of(passage.disk_out) * page_bytes,
        tails=num_pages_of(passage.tails_out) * page_bytes,
    )
