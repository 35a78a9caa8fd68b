"""The processes of one run, started by torchrun: who is there, what all know, and who is lost.

Each connects to the others over one network interface, on which alone it listens. Values that all
must have pass through torchrun's store; groups for messages are made of it. The first rank watches
all others and each watches the first: an open connection that breaks says at once that a process
has ended, however busy it was, and one that stays silent that its host has. Knows no model and no
work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

import freight.errors
from freight.distributed.values import pack, unpack
from freight.errors import FreightError, InputError, RankError

__all__ = ["Connection", "ConnectionLost", "Group", "Message", "Place", "Ranks"]

Value = TypeVar("Value")

_POLL_S: Final = 0.02
_CONNECT_S: Final = 120.0
_FAREWELL_S: Final = 20.0
_ASK_S: Final = 1.0
_LOOK_S: Final = 0.1
_NO_LIMIT: Final = timedelta(days=365)
_AT_ONCE: Final = timedelta(milliseconds=1)
_BEAT_S: Final = 1.0
_MOST_SILENT: Final = 60
"""Beats of a rank that may be missing; counted here in beats too, so that time in which this
process itself was stopped does not count."""
_SAID_FAREWELL: Final = -(10**9)
_WATCH, _GIVEN_UP = 1, 2
_FAREWELL: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process among those of a run, and among those of its host."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> Self | None:
        """As torchrun says it; None where it has not started this process, or it alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
            return None
        return cls(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How ranks find each other: a store, and the address of the interface to listen on."""

    store: Store
    address: str

    @classmethod
    def from_environment(cls, place: Place) -> Self:
        """torchrun's store; on the interface that ``GLOO_SOCKET_IFNAME`` names, else on that which
        leads to the first rank, or for one host the loopback."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        address = _own_address(host, port, place)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        limit = timedelta(seconds=_CONNECT_S)
        is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_served or place.rank:
            store = TCPStore(host, port, place.size, False, limit)
        else:
            listener = socket.create_server((address, port))
            store = TCPStore(
                host, port, place.size, True, limit, master_listen_fd=listener.detach()
            )
        return cls(store=PrefixStore(f"freight/{attempt}", store), address=address)


class ConnectionLost(RuntimeError):
    """A message cannot come or go any more: some rank has ended."""


class Message:
    """Under way."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, limit: timedelta = _NO_LIMIT) -> None:
        """It has gone, or come, however long that takes: whoever is slow is waited for, and who is
        lost is noticed. ConnectionLost where the connection breaks, or after the limit, which
        breaks it. Without one, that for connecting would count here too."""
        with _connected():
            self._work.wait(limit)


class Group:
    """Connections between all ranks for messages of one kind: tensors on the host, one after the
    other from each rank to each other. ConnectionLost where one is broken."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Message:
        """Begin to send; ``wait`` for the result before the tensor is changed."""
        with _connected():
            return Message(self._backend.send([tensor], peer, tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Message:
        """Begin to receive into ``tensor``, which may be larger than what comes."""
        with _connected():
            return Message(self._backend.recv([tensor], peer, tag))


class Ranks:
    """One process's view of all. ``on_loss`` is called from another thread when a rank that is
    watched has ended, with its number."""

    def __init__(
        self, place: Place, connection: Connection, on_loss: Callable[[int], None] | None = None
    ) -> None:
        self.place = place
        self.lost: list[int] = []
        self._store = connection.store
        self._address = connection.address
        self._on_loss = on_loss
        self._lost_one = threading.Event()
        self._closing = threading.Event()
        self._groups: list[Group] = []
        about = socket.gethostname(), self._address
        told = self.exchange("hosts", about, limit_s=_CONNECT_S)
        self.hosts: list[str] = [host for host, _ in told]
        self._addresses: list[str] = [address for _, address in told]
        self._watch = self._make_group("watch")
        self._peers = range(1, place.size) if place.rank == 0 else range(1)
        self._missing = dict.fromkeys(self._peers, 0)
        self._watchers = [
            *(
                threading.Thread(target=self._watch_rank, args=(p,), daemon=True)
                for p in self._peers
            ),
            *(threading.Thread(target=self._beat, args=(p,), daemon=True) for p in self._peers),
        ]
        for watcher in self._watchers:
            watcher.start()
        threading.Thread(target=self._count, daemon=True).start()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def network(self) -> str:
        """What connects the ranks: their hosts, in order, and the first one's address."""
        return f"{' '.join(self.hosts)} over {self._addresses[0]}"

    # -- values that all have ------------------------------------------------------------------

    def exchange(self, topic: str, value: Any, *, limit_s: float = float("inf")) -> list[Any]:
        """What each rank gives for ``topic``, in their order, however long they take: who is lost
        is noticed, once all watch each other. RankError if one is, or gives nothing for so long."""
        self.say(f"{topic}/{self.rank}", value)
        return [self._get(f"{topic}/{rank}", rank, limit_s) for rank in range(self.size)]

    def hear(self, topic: str) -> Any:
        """What the first rank says of ``topic``, however long it takes."""
        return self._get(topic, 0, float("inf"))

    def say(self, topic: str, value: Any) -> None:
        """Tell all others."""
        self._store.set(topic, pack(value).hex())

    def share(self, topic: str, make: Callable[[], Value], *, together: bool = False) -> Value:
        """What ``make`` returns here, once all ranks have made theirs. If one of them is refused,
        all are: the first one's error is raised everywhere. Where they make it ``together``, others
        may wait for a message of that rank, which never comes: groups' connections are broken then.
        """
        own: Value | None = None
        refused: tuple[str, ...] = ()
        broken: ConnectionLost | None = None
        try:
            own = make()
        except FreightError as error:
            refused = (type(error).__name__, error.asked, error.limit, error.advice)
            if together:
                self.abandon()
        except ConnectionLost as error:
            broken = error
        for rank, told in enumerate(self.exchange(topic, refused)):
            if told:
                raise self._refusal(rank, *told)
        if broken is not None:
            raise broken
        return own  # type: ignore[return-value]

    def _refusal(self, rank: int, kind: str, asked: str, limit: str, advice: str) -> FreightError:
        where = f"On rank {rank} of {self.size} ({self.hosts[rank]}): " if rank else ""
        error: FreightError = getattr(freight.errors, kind)(where + asked, limit, advice)
        return error

    def _get(self, key: str, rank: int, limit_s: float) -> Any:
        ends_s = time.monotonic() + limit_s
        while not self._store.check([key]):
            if self.lost:
                raise self.loss()
            if time.monotonic() > ends_s:
                raise RankError(
                    f"{self.size} ranks were to work together.",
                    f"Nothing has come from rank {rank} for {limit_s:g} s.",
                    "Look at that rank's own messages, and start all of them again.",
                )
            time.sleep(_POLL_S)
        return unpack(bytes.fromhex(self._store.get(key).decode()))

    # -- messages ------------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        """New connections between all ranks; made on all of them."""
        group = self._make_group(name)
        self._groups.append(group)
        return group

    def _make_group(self, name: str) -> Group:
        backend: Any = ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=_CONNECT_S)
        store = PrefixStore(name, self._store)
        with _connected():
            return Group(backend(store, self.rank, self.size, options))

    def abandon(self) -> None:
        """Break all groups' connections: whoever waits for a message stops waiting, here and on the
        other ranks. A wait that is given up in time would leave the others waiting."""
        groups, self._groups = self._groups, []
        others = [rank for rank in range(self.size) if rank != self.rank]
        for group in groups:
            for peer in others:  # one that is dead refuses at once, and breaks nothing else
                with suppress(ConnectionLost):
                    group.receive(torch.zeros(1), peer, _GIVEN_UP).wait(_AT_ONCE)

    # -- who is there --------------------------------------------------------------------------

    def note_failure(self, text: str) -> None:
        """Leave word of why this rank ends."""
        self._store.set(f"failed/{self.rank}", text)

    def wait_for_loss(self, limit_s: float) -> bool:
        """Whether a rank is lost, or is within that time: a broken connection is noticed sooner
        than whose end it was."""
        return self._lost_one.wait(limit_s)

    def wait_for_failure(self, limit_s: float) -> int | None:
        """Which rank is lost, or has left word of why it ends, within that time: it breaks its
        connections before it is gone."""
        ends_s = time.monotonic() + limit_s
        others = [rank for rank in range(self.size) if rank != self.rank]
        while not self.lost:
            if (word := self._word(others)) is not None:
                return word[0]
            if time.monotonic() > ends_s:
                return None
            self._lost_one.wait(_LOOK_S)
        return self.lost[0]

    def loss(self, rank: int | None = None) -> RankError:
        """That a rank has ended, or which was lost first, and why if it has said so."""
        rank = self.lost[0] if rank is None else rank
        _, why = self._word([rank]) or (rank, "")
        return RankError(
            f"{self.size} ranks were at work.",
            f"Rank {rank} ({self.hosts[rank]}) has ended{f': {why}' if why else ''}.",
            "Look at that rank's own messages, and start all of them again.",
        )

    def _word(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """The first of these that has left word, and what. Whoever waits in the store keeps all
        others out of it, also for something of a rank that is gone: then there is none."""
        found: list[tuple[int, str]] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store was on that rank's host
                for rank in ranks:
                    if self._store.check([f"failed/{rank}"]):
                        found.append((rank, self._store.get(f"failed/{rank}").decode()))
                        return

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ASK_S)
        return found[0] if found else None

    def close(self) -> None:
        """Say farewell: from now on nobody is missed. Waits until the others have said so too."""
        self._closing.set()
        for watcher in self._watchers:
            watcher.join(_FAREWELL_S)

    def _beat(self, peer: int) -> None:
        """Say every moment that this rank is there, and at last farewell."""
        try:
            while not self._closing.wait(_BEAT_S):
                self._watch.send(torch.zeros(1), peer, _WATCH).wait()
            self._watch.send(torch.tensor([_FAREWELL]), peer, _WATCH).wait()
        except ConnectionLost:
            return  # whoever watches notices too

    def _watch_rank(self, peer: int) -> None:
        beat = torch.zeros(1)
        try:
            while beat[0] != _FAREWELL:
                self._watch.receive(beat, peer, _WATCH).wait()
                self._missing[peer] = 0
        except ConnectionLost:
            self._lose(peer)
            return
        self._missing[peer] = _SAID_FAREWELL

    def _count(self) -> None:
        """How many beats of each rank are missing: a host that vanishes breaks no connection."""
        while not self._closing.wait(_BEAT_S):
            for peer in [*self._missing]:
                self._missing[peer] += 1
                if self._missing[peer] == _MOST_SILENT:
                    self._lose(peer)

    def _lose(self, peer: int) -> None:
        if not self._closing.is_set():
            self.lost.append(peer)
            self._lost_one.set()
            if self._on_loss is not None:
                self._on_loss(peer)


@contextmanager
def _connected() -> Iterator[None]:
    """What the library says of a connection that is not there."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionLost(str(error)) from error


def _own_address(host: str, port: int, place: Place) -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if name:
        return _address_of(name)
    if place.local_size == place.size:
        return "127.0.0.1"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])  # sends nothing; only finds the way there
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, get_address, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise InputError(
                f"GLOO_SOCKET_IFNAME={interface} was set.",
                f"No address of that interface is known: {error.strerror}.",
                "Name one that `ip addr` lists with an IPv4 address, or leave it out.",
            ) from error
    return socket.inet_ntoa(found[20:24])
