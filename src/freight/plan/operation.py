"""The operations that a schedule is a stream of, and what each touches.

An operation names its *lane* (a link or a compute unit: operations of one lane run one after the
other, in order), what it reads and writes, and the operations of other lanes that it waits for.
Plain data: the verifier proves a stream legal, the executor runs it. A plan looks at tens of
thousands of them, and named tuples are made in a third of the time that a dataclass takes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from freight.model.batch import MicroBatch

__all__ = ["Access", "Kind", "Lane", "Operation", "Place", "UnitPlace"]


class Lane(StrEnum):
    """Links and compute units, each busy with one operation at a time."""

    COMPUTE = "compute"
    DISK_READ = "disk read"
    DISK_WRITE = "disk write"
    TO_DEVICE = "host to device"
    FROM_DEVICE = "device to host"
    ATTENTION = "cpu attention"
    RECEIVE = "receive"
    SEND = "send"

    @property
    def is_link(self) -> bool:
        """Whether it moves bytes."""
        return self not in (Lane.COMPUTE, Lane.ATTENTION)


class Kind(StrEnum):
    """What an operation does. READ and WRITE go to and from the disk, COPY between memories, SEND
    and RECEIVE to and from other stages of a pipeline.

    Where the CPU attends some rows, the attention unit is computed in two parts: up to the queries,
    which it gets, and from what it has attended. New tokens are taken where who enters next depends
    on them, on all stages in the same place of the stream.
    """

    READ_WEIGHTS = "read weights"
    COPY_WEIGHTS = "copy weights"
    READ_EMBEDDING = "read embedding rows"
    COPY_EMBEDDING = "copy embedding rows"
    READ_KV = "read KV"
    COPY_KV = "copy KV"
    COPY_BACK_KV = "copy back KV"
    WRITE_KV = "write KV"
    READ_HIDDEN = "read activations"
    COPY_HIDDEN = "copy activations"
    COPY_BACK_HIDDEN = "copy back activations"
    WRITE_HIDDEN = "write activations"
    DECODE_WEIGHTS = "decode weights"
    COMPUTE = "compute"
    BEGIN_ATTENTION = "begin attention"
    COPY_QUERIES = "copy queries"
    READ_DELEGATED = "read KV for the CPU"
    ATTEND = "attend"
    WRITE_DELEGATED = "write KV from the CPU"
    COPY_ATTENDED = "copy attended"
    FINISH_ATTENTION = "finish attention"
    RECEIVE_HIDDEN = "receive activations"
    COPY_DEPARTING = "copy departing activations"
    SEND_HIDDEN = "send activations"
    SEND_TOKENS = "send tokens"
    TAKE_TOKENS = "take tokens"


Place = tuple[str, int]
"""A slot of a ring, or a home: its name and its index."""

Owner = tuple[int, ...]
"""Whose content a place holds: (sweep, unit, micro-batch, stage) or as much of it as matters."""


class Access(NamedTuple):
    """A read or write of a place.

    A read wants the place to hold ``owner``'s content, complete. A write makes it hold it;
    content may arrive in ``num_pieces`` writes of one owner, this one being piece ``piece``.
    ``num_bytes`` is how much of the place the content takes, where the place has a fixed size.
    """

    place: Place
    owner: Owner
    is_write: bool
    piece: int = 0
    num_pieces: int = 1
    num_bytes: int = 0


class UnitPlace(NamedTuple):
    """A piece of a unit's weights, or all of them, and the place in the ring where the unit is."""

    unit: int
    piece: int
    slot: int


class Operation(NamedTuple):
    """One step of a schedule.

    ``unit`` counts in the programme (0 is the embedding). ``slot`` is the place in the ring that a
    load fills or a store empties, ``source_slot`` the one it comes from where there is one. A
    computation finds its weights in ``slot``, KV or embedding rows in ``source_slot``, offloaded
    rows of the residual stream in ``activation_slot`` (-1: none are there).
    ``after`` holds the earlier operations of other lanes that it waits for, by lane and index.
    ``num_bytes`` is what crosses the link, alignment included. ``is_last`` marks the computation
    after which a micro-batch's new tokens are known. ``num_delegated`` rows of the batch, its last
    ones, are those that the CPU attends. Of ``num_recomputed`` pages in its slot a computation
    makes keys and values first. Of experts one operation can bring, or compute, several:
    ``others`` are those beside its own, and ``num_chosen`` of them all are computed.
    """

    index: int  # type: ignore[assignment]
    kind: Kind
    lane: Lane
    sweep: int
    unit: int
    batch: MicroBatch | None
    accesses: tuple[Access, ...]
    after: tuple[tuple[Lane, int], ...]
    num_bytes: int = 0
    piece: int = 0
    slot: int = -1
    source_slot: int = -1
    activation_slot: int = -1
    is_last: bool = False
    num_delegated: int = 0
    num_recomputed: int = 0
    others: tuple[UnitPlace, ...] = ()
    num_chosen: int = 0

    @property
    def unit_places(self) -> tuple[UnitPlace, ...]:
        """What weights it brings, or computes with."""
        return (UnitPlace(self.unit, self.piece, self.slot), *self.others)

    @property
    def pairs(self) -> bool:
        """Whether it may be under way beside a neighbour on its lane that pairs, too: it waits by
        name for what it needs, and for those that used its place."""
        return self.kind in (Kind.READ_WEIGHTS, Kind.READ_KV)

    def __str__(self) -> str:
        batch = "" if self.batch is None else f" micro-batch {self.batch.index}"
        return f"#{self.index} {self.kind} (sweep {self.sweep}, unit {self.unit}{batch})"
