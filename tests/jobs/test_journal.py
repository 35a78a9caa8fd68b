"""A journal cut at any byte gives back every row that was whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import BudgetError, JobError
from freight.jobs.journal import Journal, compare_fingerprints, read_fingerprint
from freight.jobs.output import Output

PRINT = {"the input": "abc", "temperature": "0.0"}


def row(index: int) -> bytes:
    text = 'a "row":{} \n 日本'
    return json.dumps({"id": index, "text": text}, ensure_ascii=False).encode()


def write_journal(path: Path, indices: list[int], num_rows: int) -> None:
    journal = Journal(path, fingerprint=PRINT, num_rows=num_rows)
    for index in indices:
        journal.append(index, row(index))
    journal.close()


def test_torn_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    indices = [2, 0, 3]
    write_journal(path, indices, 4)
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:cut])
        journal = Journal(path, fingerprint=PRINT, num_rows=4)
        kept = sum(end <= cut for end in ends) - 1
        assert journal.num_done == kept
        assert [i for i in range(4) if journal.is_done(i)] == sorted(indices[:kept])
        assert all(journal.row(index) == row(index) for index in indices[:kept])
        journal.append(1, row(1))
        journal.close()
        reopened = Journal(path, fingerprint=PRINT, num_rows=4)
        assert reopened.num_done == kept + 1 and reopened.row(1) == row(1)
        reopened.close()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_damage_costs_only_what_lies_after_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write_journal(path, [0, 1, 2, 3], 4)
    whole = bytearray(path.read_bytes())
    start = whole.index(b"\n") + 1
    place = data.draw(st.integers(start, len(whole) - 1))
    length = data.draw(st.integers(1, 40))
    whole[place : place + length] = b"\0" * len(whole[place : place + length])
    path.write_bytes(whole)
    journal = Journal(path, fingerprint=PRINT, num_rows=4)
    untouched = whole[start:place].count(b"\n")
    assert journal.num_done == untouched
    assert all(journal.row(index) == row(index) for index in range(untouched))
    journal.close()


def test_errors_are_counted_and_rows_are_done_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, fingerprint=PRINT, num_rows=3)
    journal.append(1, b'{"id": 1, "error": "x"}', failed=True)
    journal.append(0, b'{"id": 0, "text": "an \\"error\\""}')
    with pytest.raises(RuntimeError, match="twice"):
        journal.append(1, b"{}")
    journal.close()
    journal = Journal(path, fingerprint=PRINT, num_rows=3)
    assert (journal.num_done, journal.num_failed) == (2, 1)
    assert journal.row(2) is None
    journal.close()


def test_syncs_by_time_and_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    now = 0.0
    journal = Journal(
        tmp_path / "journal.jsonl", fingerprint=PRINT, num_rows=3000, clock=lambda: now
    )
    journal.append(0, b"{}")
    assert not synced
    now = 0.6
    journal.append(1, b"{}")
    assert len(synced) == 1
    for index in range(2, 2 + 1024):
        journal.append(index, b"{}")
    assert len(synced) == 2
    journal.sync()
    assert len(synced) == 2, "nothing new to sync"
    journal.close()


def test_fingerprints(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_fingerprint(path) is None
    write_journal(path, [], 1)
    assert read_fingerprint(path) is None, "without a row it binds nobody"
    write_journal(path, [0], 1)
    assert read_fingerprint(path) == PRINT
    compare_fingerprints(PRINT, dict(PRINT), where=path, source="rows.jsonl")
    with pytest.raises(JobError) as caught:
        compare_fingerprints(
            PRINT,
            {"temperature": "0.7", "the input": "abc", "k": "1"},
            where=path,
            source="rows.jsonl",
        )
    assert "temperature was 0.0, now 0.7" in caught.value.limit
    assert "k was not recorded, now 1" in caught.value.limit
    assert "input" not in caught.value.limit
    assert "--restart" in caught.value.advice
    with pytest.raises(JobError, match=r"or rows\.jsonl has changed since\.") as caught:
        compare_fingerprints(PRINT, {**PRINT, "the input": "x"}, where=path, source="rows.jsonl")
    assert "abc" not in caught.value.limit, "a hash tells nobody anything"
    path.write_bytes(b"garbage\nmore\n")
    with pytest.raises(JobError, match="damaged"):
        read_fingerprint(path)


def test_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, fingerprint=PRINT, num_rows=1)
    with pytest.raises(BudgetError, match="no room"), open("/dev/full", "wb") as full:
        journal._descriptor, kept = full.fileno(), journal._descriptor
        journal.append(0, row(0))
    journal._descriptor = kept
    assert journal.num_done == 0
    journal.close()


@settings(deadline=None, max_examples=60)
@given(
    order=st.permutations(range(6)),
    num_done=st.integers(0, 6),
    cut=st.integers(0, 400),
    garbage=st.binary(max_size=8),
    unordered=st.booleans(),
)
def test_an_output_in_any_state_is_mended(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[int],
    num_done: int,
    cut: int,
    garbage: bytes,
    unordered: bool,
) -> None:
    directory = tmp_path_factory.mktemp("output")
    out = directory / "out.jsonl"
    journal = Journal(directory / "journal.jsonl", fingerprint=PRINT, num_rows=6)
    for index in order[:num_done]:
        journal.append(index, row(index))
    output = Output(out, journal=journal, unordered=unordered)
    output.emit()
    output.close()
    out.write_bytes(out.read_bytes()[:cut] + garbage)
    output = Output(out, journal=journal, unordered=unordered)
    output.emit()
    for index in order[num_done:]:
        journal.append(index, row(index))
        output.emit()
    output.sync()
    output.close()
    journal.close()
    expected = order if unordered else range(6)
    assert out.read_bytes() == b"".join(row(index) + b"\n" for index in expected)
