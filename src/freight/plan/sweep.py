"""What the schedule is made from: sweeps over micro-batches, and units with pieces to bring.

Plain values, all sizes in bytes. Who makes up a sweep is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.batch import MicroBatch
from freight.model.programme import UnitKind
from freight.plan.policy import Tier

__all__ = ["BatchWork", "Moved", "StreamModel", "StreamUnit", "Sweep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Bytes of one load or store, by the tier whose home they leave or reach.

    ``tails`` counts the KV pages in progress of rows on disk, which are in RAM: they cross no disk.
    """

    cpu: int = 0
    disk: int = 0
    tails: int = 0

    def __bool__(self) -> bool:
        return bool(self.cpu or self.disk or self.tails)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchWork:
    """One micro-batch in one sweep, with what it moves: KV per layer, activations per unit.

    ``kv_slot_bytes`` and ``activation_slot_bytes`` are what its offloaded rows take in a slot;
    0 where all its rows stay on the compute tier. ``embedding_bytes`` of embedding rows come from
    elsewhere than the compute tier. ``continues``: it waits for tokens of the sweep before.
    """

    batch: MicroBatch
    continues: bool
    embedding_bytes: int = 0
    kv_load: Moved = Moved()
    kv_store: Moved = Moved()
    kv_slot_bytes: int = 0
    activations: Moved = Moved()
    activation_slot_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The micro-batches of one pass over the units."""

    index: int
    works: tuple[BatchWork, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamUnit:
    """What the schedule must know of a unit: its kind, and (tier, bytes) of each piece to bring."""

    kind: UnitKind
    layer: int | None
    pieces: tuple[tuple[Tier, int], ...] = ()
    needs_decode: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamModel:
    """The units in order, the embedding first, and where they are computed."""

    units: tuple[StreamUnit, ...]
    compute_tier: Tier
