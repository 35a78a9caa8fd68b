"""Who wrote and who read each slot and home last, so that an operation can say what it waits for.

The schedule declares what its operations touch; the waits follow from that alone. Knows nothing of
models or sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from freight.model.batch import MicroBatch
from freight.plan.operation import Access, Kind, Lane, Operation, Owner, Place, UnitPlace

__all__ = ["RING_SLOTS", "Scoreboard", "arrival", "read", "write"]

RING_SLOTS: Final = {
    "decoded weights": 1,
    "embedding rows": 1,
    "embedding slot": 1,
    "departing slot": 1,
    "kv slot": 3,
    "kv in": 2,
    "kv out": 2,
    "delegated kv": 3,
    "activation slot": 3,
    "activations in": 2,
    "activations out": 2,
}
"""Slots per ring; the ring of weights is sized by the layout, what is staged for it by the policy.
Three where content is fetched, used and stored; two where it passes one way; one where it is used
at once."""


_new: Final = tuple.__new__
"""A search for a plan makes some hundred thousand of these, and a named tuple's own constructor is
a function more."""

_BEFORE: Final[Owner] = (-1,)


_Occupant = tuple[Owner, dict[Lane, int], dict[Lane, int]]
"""Whose a place is, who wrote it and who read it since, as the last operation per lane."""


@dataclass(kw_only=True, slots=True)
class Scoreboard:
    """Numbers operations, hands out ring slots in turn, and derives waits."""

    staging_slots: int
    next_index: int = 0
    places: dict[Place, _Occupant] = field(default_factory=dict)
    next_slot: dict[str, int] = field(default_factory=dict)
    homes: dict[Place, Owner] = field(default_factory=dict)

    def in_place(self, ring: str, slot: int, owner: Owner, loaded: object) -> list[Access]:
        """Accesses of a computation that updates a slot: stage 0 is as loaded, 1 as computed."""
        loads = [read(ring, slot, (*owner, 0))] if loaded else []
        return [*loads, write(ring, slot, (*owner, 1), 0)]

    def home(self, name: str, k: int) -> Access:
        """What is there of a micro-batch; a stretch of sweeps may begin with rows under way."""
        owner = self.homes.setdefault((name, k), _BEFORE)
        return _new(Access, ((name, k), owner, False, 0, 1, 0))

    def new_home(self, name: str, k: int, owner: Owner) -> Access:
        self.homes[name, k] = owner
        return _new(Access, ((name, k), owner, True, 0, 1, 0))

    def take_slot(self, ring: str) -> int:
        slot = self.next_slot.get(ring, 0)
        count = self.staging_slots if ring == "weight staging" else RING_SLOTS[ring]
        self.next_slot[ring] = (slot + 1) % count
        return slot

    def make(
        self,
        kind: Kind,
        lane: Lane,
        accesses: list[Access],
        *,
        sweep: int,
        unit: int,
        batch: MicroBatch | None = None,
        num_bytes: int = 0,
        piece: int = 0,
        slot: int = -1,
        source_slot: int = -1,
        activation_slot: int = -1,
        is_last: bool = False,
        num_delegated: int = 0,
        num_recomputed: int = 0,
        others: tuple[UnitPlace, ...] = (),
        num_chosen: int = 0,
    ) -> Operation:
        index = self.next_index
        self.next_index += 1
        values = (
            index,
            kind,
            lane,
            sweep,
            unit,
            batch,
            tuple(accesses),
            self.waits(index, lane, accesses),
            num_bytes,
            piece,
            slot,
            source_slot,
            activation_slot,
            is_last,
            num_delegated,
            num_recomputed,
            others,
            num_chosen,
        )
        return _new(Operation, values)

    def waits(self, index: int, lane: Lane, accesses: list[Access]) -> tuple[tuple[Lane, int], ...]:
        """The last operation of each other lane that the accesses must come after, and none of its
        own has come after yet."""
        waits: dict[Lane, int] = {}
        places = self.places
        for place, owner, is_write, _, _, _ in accesses:
            earlier: tuple[dict[Lane, int], ...] = ()
            if place not in places:
                places[place] = (
                    (owner, {lane: index}, {}) if is_write else (owner, {}, {lane: index})
                )
                continue
            before, writers, readers = places[place]
            if not is_write:
                if lane not in readers:
                    earlier = (writers,)
                readers[lane] = index
            elif before == owner:
                writers[lane] = index
            else:
                earlier = (writers, readers)
                places[place] = owner, {lane: index}, {}
            for lanes in earlier:
                for other, last in lanes.items():
                    if last != index and last > waits.get(other, -1):
                        waits[other] = last
        waits.pop(lane, None)
        return tuple(waits.items())


def read(ring: str, slot: int, owner: Owner) -> Access:
    return _new(Access, ((ring, slot), owner, False, 0, 1, 0))


def arrival(
    ring: str, slot: int, owner: Owner, piece: int, num_pieces: int, num_bytes: int
) -> Access:
    """One of several writes that fill a place together."""
    return _new(Access, ((ring, slot), owner, True, piece, num_pieces, num_bytes))


def write(ring: str, slot: int, owner: Owner, num_bytes: int) -> Access:
    return _new(Access, ((ring, slot), owner, True, 0, 1, num_bytes))
