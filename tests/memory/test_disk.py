"""Files past the page cache, against the bytes that Python's own file functions see."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.errors import BudgetError, ModelError
from freight.memory import disk
from freight.memory.disk import BLOCK, DirectFile, DiskRequest, Traffic, create_scratch
from freight.memory.request_queue import RequestQueue
from freight.memory.tier import host_arena
from freight.memory.transfer import host_view

NUM_BYTES = 5 * BLOCK + 123


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that ends in the middle of a block."""
    path = tmp_path_factory.mktemp("files") / "data"
    path.write_bytes(random.Random(0).randbytes(NUM_BYTES))
    return path


@pytest.fixture
def file(path: Path) -> Iterator[DirectFile]:
    opened = DirectFile(path, Traffic())
    yield opened
    opened.close()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT."""
    plain = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *rest, **more)

    monkeypatch.setattr(disk.os, "open", refuse)


def aligned(num_bytes: int) -> memoryview:
    return host_view(host_arena(num_bytes).take(num_bytes, "test"))


BUFFER = aligned(16 * BLOCK)


@settings(deadline=None, max_examples=60)
@given(first=st.integers(0, 8), count=st.integers(1, 8))
def test_any_blocks(first: int, count: int, path: Path) -> None:
    """What the file has is read, and nothing is written beside the buffer."""
    traffic = Traffic()
    file = DirectFile(path, traffic)
    BUFFER[:] = b"\xaa" * len(BUFFER)
    into = BUFFER[BLOCK : (1 + count) * BLOCK]
    file.read(first * BLOCK, into, wanted=7)
    file.close()
    expected = path.read_bytes()[first * BLOCK : (first + count) * BLOCK]
    assert bytes(into[: len(expected)]) == expected
    beside = bytes(BUFFER[:BLOCK]) + bytes(BUFFER[(1 + count) * BLOCK :])
    assert beside == b"\xaa" * len(beside)
    assert traffic.moved["disk read"] == len(expected)
    assert traffic.wanted["disk read"] == 7


WAYS = pytest.mark.parametrize("way", ["queue", "one by one"])


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's queue of requests, or as where it has none."""
    if way == "queue":
        queue = RequestQueue.open()
        assert queue is not None, "this system has no queue of requests to test"
        queue.close()
    else:
        monkeypatch.setattr(RequestQueue, "open", classmethod(lambda cls: None))


@WAYS
@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(blocks=st.lists(st.integers(0, 4), max_size=9))
def test_several_pieces(
    blocks: list[int], way: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece in its own place, and nothing beside them."""
    take(way, monkeypatch)
    traffic = Traffic()
    file = DirectFile(path, traffic)
    BUFFER[:] = b"\xaa" * len(BUFFER)
    file.read_all(
        [
            DiskRequest(offset=own * BLOCK, place=i * BLOCK, num_bytes=BLOCK)
            for i, own in enumerate(blocks)
        ],
        BUFFER,
    )
    file.close()
    content = path.read_bytes()
    for i, own in enumerate(blocks):
        assert bytes(BUFFER[i * BLOCK : (i + 1) * BLOCK]) == content[own * BLOCK :][:BLOCK]
    rest = bytes(BUFFER[len(blocks) * BLOCK :])
    assert rest == b"\xaa" * len(rest)
    assert traffic.moved["disk read"] == traffic.wanted["disk read"] == BLOCK * len(blocks)


@WAYS
def test_the_file_s_last_piece_ends_where_it_does(
    way: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    traffic = Traffic()
    file = DirectFile(path, traffic)
    requests = [DiskRequest(4 * BLOCK, 0, 4 * BLOCK), DiskRequest(0, 4 * BLOCK, BLOCK)]
    file.read_all(requests, BUFFER)
    file.close()
    content = path.read_bytes()
    assert bytes(BUFFER[: NUM_BYTES - 4 * BLOCK]) == content[4 * BLOCK :]
    assert bytes(BUFFER[4 * BLOCK : 5 * BLOCK]) == content[:BLOCK]
    assert traffic.moved["disk read"] == NUM_BYTES - 4 * BLOCK + BLOCK
    assert traffic.wanted["disk read"] == 5 * BLOCK


@WAYS
def test_many_pieces_come_and_go(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a queue takes at once, from and to places in no order."""
    take(way, monkeypatch)
    count, dice = 300, random.Random(2)
    traffic = Traffic()
    file = create_scratch(tmp_path, count * BLOCK, traffic)
    data = aligned(count * BLOCK)
    content = dice.randbytes(count * BLOCK)
    data[:] = content
    offsets, places = dice.sample(range(count), count), dice.sample(range(count), count)
    requests = [
        DiskRequest(o * BLOCK, p * BLOCK, BLOCK) for o, p in zip(offsets, places, strict=True)
    ]
    file.write_all(requests, data)
    data[:] = bytes(len(data))
    file.read_all(dice.sample(requests, count), data)
    assert bytes(data) == content
    file.close()
    assert traffic.moved["disk write"] == traffic.wanted["disk write"] == count * BLOCK
    assert traffic.moved["disk read"] == traffic.wanted["disk read"] == count * BLOCK


@WAYS
@pytest.mark.parametrize("bad", [0, 1])
def test_a_piece_that_fails_is_reported(
    bad: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * BLOCK))
    file = DirectFile(path, Traffic())
    os.truncate(path, 2 * BLOCK)
    offsets = [0, 0]
    offsets[bad] = 3 * BLOCK
    requests = [DiskRequest(own, i * BLOCK, BLOCK) for i, own in enumerate(offsets)]
    with pytest.raises(ModelError, match="It ended there"):
        file.read_all(requests, BUFFER)
    file.close()


def test_what_the_queue_refuses_is_done_one_by_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system whose queue takes three requests and then no more."""
    submit, taken = RequestQueue._submit, []

    def few(queue: RequestQueue, which: Any) -> int:
        count = submit(queue, which[: 3 - sum(taken)])
        taken.append(count)
        return count

    monkeypatch.setattr(RequestQueue, "_submit", few)
    traffic = Traffic()
    file = DirectFile(path, traffic)
    file.read_all([DiskRequest(i * BLOCK, i * BLOCK, BLOCK) for i in range(5)], BUFFER)
    file.close()
    assert sum(taken) == 3
    assert bytes(BUFFER[: 5 * BLOCK]) == path.read_bytes()[: 5 * BLOCK]
    assert traffic.moved["disk read"] == 5 * BLOCK


def test_a_full_disk_is_reported_whichever_piece_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = create_scratch(tmp_path, 2 * BLOCK, Traffic())
    full = np.full(2, -errno.ENOSPC, dtype=np.int64)
    monkeypatch.setattr(RequestQueue, "write", lambda *_: full)

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "pwritev", fail)
    with pytest.raises(BudgetError, match="No space left on device"):
        file.write_all([DiskRequest(i * BLOCK, i * BLOCK, BLOCK) for i in range(2)], BUFFER)
    file.close()


def test_requests_larger_than_one_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_REQUEST_BYTES", 2 * BLOCK)
    traffic = Traffic()
    file = DirectFile(path, traffic)
    file.read(0, BUFFER[: 6 * BLOCK])
    file.close()
    assert bytes(BUFFER[:NUM_BYTES]) == path.read_bytes()
    assert traffic.moved["disk read"] == NUM_BYTES
    assert traffic.wanted["disk read"] == 6 * BLOCK


def test_a_file_that_became_shorter_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * BLOCK))
    file = DirectFile(path, Traffic())
    os.truncate(path, 2 * BLOCK)
    with pytest.raises(ModelError, match="It ended there; it had 16384 bytes"):
        file.read(0, BUFFER[: 4 * BLOCK])
    file.close()


def test_a_disk_that_fails_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = DirectFile(path, Traffic())
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelError, match=r"byte 4096.*Input/output error"):
        file.read(BLOCK, host_view(host_arena(BLOCK).take(BLOCK, "read")))
    file.close()


def test_a_file_that_is_absent_is_the_system_s_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "nothing", Traffic())


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
def test_writes_come_back(is_direct: bool, tmp_path: Path, request: Any) -> None:
    if not is_direct:
        request.getfixturevalue("refused")
    traffic = Traffic()
    file = create_scratch(tmp_path, 10 * BLOCK - 1, traffic)
    if not is_direct:
        assert not file.is_direct
    assert file.num_bytes == 10 * BLOCK
    assert not [*tmp_path.iterdir()], "a scratch file has no name"
    dice = random.Random(1)
    content = bytearray(10 * BLOCK)
    for _ in range(20):
        first = dice.randrange(10)
        count = dice.randint(1, 10 - first)
        data = dice.randbytes(count * BLOCK)
        BUFFER[: len(data)] = data
        file.write(first * BLOCK, BUFFER[: len(data)], wanted=1)
        content[first * BLOCK : (first + count) * BLOCK] = data
        BUFFER[:] = bytes(len(BUFFER))
        file.read(0, BUFFER[: 10 * BLOCK])
        assert BUFFER[: 10 * BLOCK] == content
    file.close()
    assert traffic.wanted["disk write"] == 20
    assert traffic.moved["disk read"] == 20 * 10 * BLOCK


@pytest.mark.usefixtures("refused")
def test_without_direct_access_reads_are_the_same(path: Path) -> None:
    file = DirectFile(path, Traffic())
    assert not file.is_direct
    file.read(BLOCK, BUFFER[: 6 * BLOCK])
    file.close()
    assert bytes(BUFFER[: NUM_BYTES - BLOCK]) == path.read_bytes()[BLOCK:]


@pytest.mark.usefixtures("refused")
def test_without_direct_access_nothing_stays_in_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[int, int]] = []

    def note(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, length))

    monkeypatch.setattr(disk.os, "posix_fadvise", note)
    file = DirectFile(path, Traffic())
    file.read(BLOCK, BUFFER[: 2 * BLOCK])
    file.close()
    assert dropped == [(BLOCK, 2 * BLOCK)]


def test_a_full_disk_is_refused_when_space_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(BudgetError, match="No space left on device") as caught:
        create_scratch(tmp_path, 3 << 20, Traffic())
    assert "3.00 MiB" in caught.value.asked and str(tmp_path) in caught.value.asked
    assert "--disk-dir" in caught.value.advice
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_reported_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = create_scratch(tmp_path, BLOCK, Traffic())

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "pwritev", full)
    with pytest.raises(BudgetError, match="No space left on device"):
        file.write(0, BUFFER[:BLOCK])
    file.close()


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="No such file"):
        create_scratch(tmp_path / "absent", BLOCK, Traffic())


def test_closing_twice_closes_once(file: DirectFile) -> None:
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read(0, BUFFER[:BLOCK])
