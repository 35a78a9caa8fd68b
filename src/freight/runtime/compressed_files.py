"""A checkpoint's matrices compressed once and kept in a directory, for every later run: by wish, or
because they are quantised in a way that is not read in place.

The directory has the rows in one file and a note of what they were made of, and of how many
exponents rows had to spare, for which all numbers are looked at first. It is made under another
name and gets its own when it is whole: what was interrupted is begun anew, and who finds another
process at it waits. What was written to since it was made is read through before it is believed.
Tensors are taken one after the other, some rows at a time, so that a model of any size needs little
memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from freight.errors import BudgetError
from freight.model.compression import (
    choose_formats,
    compressed_places,
    kind_of,
    packed_formats,
    refuse_compression,
    shortened_names,
)
from freight.model.config import ModelConfig
from freight.model.number_format import Compression, ExactCompression
from freight.model.sources import ADAPTED, TensorSource
from freight.quantities import MIB, align_up, format_bytes
from freight.runtime.compressed_rows import look_for_spared, made_rows, opened, parts_of
from freight.runtime.device import ComputeDevice, choose_compute
from freight.runtime.options import EngineOptions
from freight.runtime.packed_rows import check_order

__all__ = [
    "announcement",
    "compressed_sources",
    "default_directory",
    "kept_sources",
    "settle_compute",
    "sources_of_run",
]

_VERSION: Final = 2
_CHUNK_BYTES: Final = 16 * MIB
_SAMPLE_BYTES: Final = 4096
_BLOCK: Final = 4096


def default_directory() -> Path:
    """Where compressed weights are kept unless the user says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "freight" / "compressed"


def settle_compute(
    options: EngineOptions,
    sources: Mapping[str, TensorSource],
    device: ComputeDevice,
    dtype: str,
    say: Callable[[str], None],
) -> EngineOptions:
    """With the products that the device will make; ``say`` is told where it is not as asked.
    InputError where what is to be compressed is quantised already, whichever they are."""
    if options.compression is not None:
        refuse_compression(packed_formats(sources), options.compression)
    return replace(options, compute=choose_compute(options.compute, device, dtype, say))


def sources_of_run(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    options: EngineOptions,
    say: Callable[[str], None],
) -> Mapping[str, TensorSource]:
    """The tensors as a run reads them: those of the checkpoint, or of what is made of it."""
    return compressed_sources(
        config,
        sources,
        options.compression,
        directory=options.compressed_dir or default_directory(),
        say=say,
    )


def kept_sources(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    options: EngineOptions,
    say: Callable[[str], None],
) -> Mapping[str, TensorSource]:
    """The weights compressed, or as the checkpoint has compressed them; of random ones, which are
    not there yet, what they will be."""
    if options.dummy_seed is None:
        return sources_of_run(config, sources, options, say)
    formats = choose_formats(config, sources, options.compression)
    return compressed_places(sources, formats, Path("compressed"))


def compressed_sources(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression | ExactCompression | None,
    *,
    directory: Path,
    say: Callable[[str], None],
) -> dict[str, TensorSource]:
    """``sources`` with the matrices compressed, or with those that the checkpoint has quantised
    already in the form that runs use: as they are kept, or made now.

    BudgetError where the disk has no room for them.
    """
    work = _plan(config, sources, compression, directory)
    if not _is_whole(work):
        with _alone(work.own.parent, say):
            work = _plan(config, sources, compression, directory)
            if not _is_whole(work):  # another process has not made it meanwhile
                say(_announcement(work, compression))
                shutil.rmtree(work.own, ignore_errors=True)
                if isinstance(compression, ExactCompression):
                    names = shortened_names(config, sources)
                    least = dict.fromkeys(map(kind_of, names), 0)
                    # A disk without room is told before everything is read.
                    _check_room(_with_spared(work, config, sources, compression, least))
                    spared = look_for_spared(sources, names)
                    work = _with_spared(work, config, sources, compression, spared)
                _make(work, sources)
    return dict(work.places)


@contextmanager
def _alone(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """While no other process makes anything there; a process that ends lets go."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes weights in {directory}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unwritable(directory: Path, error: OSError) -> BudgetError:
    return BudgetError(
        f"Compressed weights were to be written to {directory}.",
        f"The system refused: {error.strerror}.",
        "Name a directory that can be written with --compressed-dir.",
    )


def announcement(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression | ExactCompression | None,
    *,
    directory: Path,
) -> str | None:
    """What to say before ``compressed_sources`` makes weights; None where it would find them."""
    work = _plan(config, sources, compression, directory)
    return None if _is_whole(work) else _announcement(work, compression)


def _announcement(work: _Work, compression: Compression | ExactCompression | None) -> str:
    what = "converting the quantised weights"
    if work.has_adapter:
        what = "adding the adapter to the weights"
    if compression is not None:
        what = f"compressing the weights ({compression})"
    if work.own.exists():
        return f"{what} anew, for what is kept in {work.own} is damaged"
    return f"{what}, once, into {work.own}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What is to be made: ``own`` is its directory, ``marks`` what it depends on, ``spared`` what
    rows of tensors of each kind have to spare, where that is known."""

    own: Path
    places: Mapping[str, TensorSource]
    formats: Mapping[str, str]
    marks: Mapping[str, str]
    has_adapter: bool
    spared: Mapping[str, int] | None = None

    @property
    def num_bytes(self) -> int:
        ends = (self.places[name].offset + self.places[name].num_bytes for name in self.formats)
        return align_up(max(ends, default=0), _BLOCK)


def _plan(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression | ExactCompression | None,
    directory: Path,
) -> _Work:
    formats = choose_formats(config, sources, compression)
    marks = {"version": str(_VERSION)}
    changed = [sources[name].packed for name in formats]
    if any(changed):
        marks["packed"] = _hash_packing(sources, formats)
    if isinstance(compression, ExactCompression):
        marks["exact"] = str(compression)
    elif compression is not None:
        marks["bits"], marks["group size"] = str(compression.bits), str(compression.group_size)
        marks |= {"groups": "across rows"} if compression.across else {}
    if config.readout is not None:  # other matrices are kept
        marks["what is made"] = config.readout.name
    marks |= {str(path): mark for path, mark in _identify(sources, formats)}
    own = directory / _key(marks)
    work = _Work(
        own=own,
        places=compressed_places(sources, formats, own / "weights.bin"),
        formats=formats,
        marks=marks,
        has_adapter=any(own is not None and own.scheme == ADAPTED for own in changed),
    )
    if isinstance(compression, ExactCompression) and (spared := _noted(own)) is not None:
        return _with_spared(work, config, sources, compression, spared)
    return work


def _noted(own: Path) -> dict[str, int] | None:
    """What rows had to spare when it was made; None where nothing, or something else, is kept."""
    try:
        note = json.loads((own / "index.json").read_text("utf-8"))
        return {str(kind): int(most) for kind, most in note["spared"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _with_spared(
    work: _Work,
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: ExactCompression,
    spared: Mapping[str, int],
) -> _Work:
    try:
        formats = choose_formats(config, sources, compression, spared)
    except KeyError:  # a note that has been tampered with
        return work
    places = compressed_places(sources, formats, work.own / "weights.bin")
    return replace(work, formats=formats, places=places, spared=spared)


def _hash_packing(sources: Mapping[str, TensorSource], formats: Mapping[str, str]) -> str:
    """What a conversion does beside reading the files: config.json says it, too."""
    done = [[name, dtype, *_changes(sources[name])] for name, dtype in formats.items()]
    return hashlib.sha256(json.dumps(done).encode()).hexdigest()


def _changes(source: TensorSource) -> list[object]:
    """What is done to a tensor, and to what it is made of."""
    own = source.packed
    if own is None:
        return []
    numbers = (own.bits, own.group_size, own.zero_shift, own.first_row, own.every, own.head_rows)
    changes = (own.minus_one, own.logarithms, own.turned, own.scale, repr(own.dealt))
    inner = [[name, *_changes(part)] for name, part in own.parts.items() if part.packed]
    return [own.scheme, *numbers, *changes, inner]


def _key(marks: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:24]


def _identify(
    sources: Mapping[str, TensorSource], formats: Mapping[str, str]
) -> Iterator[tuple[Path, str]]:
    """Files by size, time and header: another checkpoint has other compressed weights."""
    for path in sorted({part.path for name in formats for part in parts_of(sources[name])}):
        stat = path.stat()
        with path.open("rb") as file:
            start = file.read(64 * 1024)
        hashed = hashlib.sha256(start).hexdigest()
        yield path.resolve(), f"{stat.st_size} bytes, {stat.st_mtime_ns}, {hashed}"


def _is_whole(work: _Work) -> bool:
    """Whether what is kept is what it was when it was made: what of, its size, and each tensor, of
    which the start is looked at, or where the file is not as it was left, all. Nothing is whole."""
    if not work.formats:
        return True
    try:
        note = json.loads((work.own / "index.json").read_text("utf-8"))
        with (work.own / "weights.bin").open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size != work.num_bytes or note["made of"] != work.marks:
                return False
            is_untouched = note["written"] == stat.st_mtime_ns
            for name in work.formats:
                place, known = work.places[name], note["checksums"][name]
                file.seek(place.offset)
                if zlib.crc32(file.read(min(_SAMPLE_BYTES, place.num_bytes))) != known[0]:
                    return False
                file.seek(place.offset)
                if not is_untouched and _checksum(file, place.num_bytes) != known[1]:
                    return False
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False
    if not is_untouched:
        with suppress(OSError):  # of a directory that cannot be written all is read each time
            _note(work.own, {**note, "written": stat.st_mtime_ns})
    return True


def _checksum(file: BinaryIO, num_bytes: int) -> int:
    """Of the next bytes."""
    found = 0
    while num_bytes:
        data = file.read(min(num_bytes, _CHUNK_BYTES))
        if not data:
            return -1
        found, num_bytes = zlib.crc32(data, found), num_bytes - len(data)
    return found


def _note(directory: Path, note: Mapping[str, Any]) -> None:
    draft = directory / f"index.json.{os.getpid()}"
    draft.write_text(json.dumps(note, indent=1), "utf-8")
    draft.replace(directory / "index.json")


def _make(work: _Work, sources: Mapping[str, TensorSource]) -> None:
    own = work.own
    draft = own.with_name(f"{own.name}.{os.getpid()}")
    try:
        for left in own.parent.glob(f"{own.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        _check_room(work)
        draft.mkdir(parents=True)
        checksums = _write(draft / "weights.bin", work, sources)
        written = (draft / "weights.bin").stat().st_mtime_ns
        note = {"made of": work.marks, "checksums": checksums, "written": written}
        _note(draft, note if work.spared is None else {**note, "spared": work.spared})
        draft.replace(own)
    except OSError as error:
        raise _unwritable(own.parent, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_room(work: _Work) -> None:
    """BudgetError where the disk has no room for all of it."""
    free = shutil.disk_usage(work.own.parent).free
    if free < work.num_bytes:
        raise BudgetError(
            f"{format_bytes(work.num_bytes)} of compressed weights were to be written to "
            f"{work.own.parent}.",
            f"{format_bytes(free)} are free there.",
            "Free some space, or name another directory with --compressed-dir.",
        )


def _write(
    path: Path, work: _Work, sources: Mapping[str, TensorSource]
) -> dict[str, tuple[int, int]]:
    """Write the file; the checksums of each tensor's start, and of all of it."""
    parts = [part for name in work.formats for part in parts_of(sources[name])]
    checksums = {}
    with opened(sources, parts) as files:
        check_order(files, sources)
        with path.open("wb") as file:
            for name, dtype in work.formats.items():
                file.seek(work.places[name].offset)
                start, whole = b"", 0
                for rows in made_rows(files, name, sources[name], dtype):
                    data = rows.numpy().tobytes()
                    start += data[: _SAMPLE_BYTES - len(start)]
                    whole = zlib.crc32(data, whole)
                    file.write(data)
                checksums[name] = zlib.crc32(start), whole
            file.truncate(work.num_bytes)
            file.flush()
            os.fsync(file.fileno())
    return checksums
