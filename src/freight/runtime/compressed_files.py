"""A checkpoint's matrices compressed once and kept in a directory, for every later run.

The directory has the rows in one file and a note of what they were made of. It is made under
another name and gets its own when it is whole: what was interrupted is begun anew. Tensors are
taken one after the other, some rows at a time, so that a model of any size needs little memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from freight.errors import BudgetError, ModelError
from freight.kernels.grouped import quantise
from freight.kernels.integers import quantise_rows
from freight.memory.disk import Traffic
from freight.memory.tier import host_arena
from freight.model.checkpoint import TensorSource
from freight.model.compression import choose_formats, compressed_places
from freight.model.config import ModelConfig
from freight.model.number_format import Compressed, Compression, Grouped
from freight.quantities import MIB, align_up, format_bytes
from freight.runtime.loaders import CheckpointFiles, bounce_bytes

__all__ = ["are_kept", "compressed_sources", "default_directory"]

_VERSION: Final = 1
_CHUNK_BYTES: Final = 16 * MIB
_SAMPLE_BYTES: Final = 4096
_BLOCK: Final = 4096


def default_directory() -> Path:
    """Where compressed weights are kept unless the user says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "freight" / "compressed"


def compressed_sources(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression,
    *,
    directory: Path,
    say: Callable[[str], None],
) -> dict[str, TensorSource]:
    """``sources`` with the matrices compressed: as they are kept, or made now.

    BudgetError where the disk has no room for them.
    """
    formats = choose_formats(config, sources, compression)
    marks = _marks(sources, formats, compression)
    own = directory / _key(marks)
    places = compressed_places(sources, formats, own / "weights.bin")
    if not _is_whole(own, places, formats):
        shutil.rmtree(own, ignore_errors=True)
        say(f"compressing the weights ({compression}), once, into {own}")
        _make(own, places, sources, formats, marks)
    return places


def are_kept(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression,
    *,
    directory: Path,
) -> bool:
    """Whether ``compressed_sources`` would find them made."""
    formats = choose_formats(config, sources, compression)
    own = directory / _key(_marks(sources, formats, compression))
    return _is_whole(own, compressed_places(sources, formats, own / "weights.bin"), formats)


def _marks(
    sources: Mapping[str, TensorSource],
    formats: Mapping[str, Compressed],
    compression: Compression,
) -> dict[str, str]:
    marks = {"version": str(_VERSION), "bits": str(compression.bits)}
    marks["group size"] = str(compression.group_size)
    return marks | {str(path): mark for path, mark in _identify(sources, formats)}


def _key(marks: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:24]


def _identify(
    sources: Mapping[str, TensorSource], formats: Mapping[str, Compressed]
) -> Iterator[tuple[Path, str]]:
    """Files by size, time and header: another checkpoint has other compressed weights."""
    for path in sorted({sources[name].path for name in formats}):
        stat = path.stat()
        with path.open("rb") as file:
            start = file.read(64 * 1024)
        hashed = hashlib.sha256(start).hexdigest()
        yield path.resolve(), f"{stat.st_size} bytes, {stat.st_mtime_ns}, {hashed}"


def _is_whole(
    own: Path, places: Mapping[str, TensorSource], formats: Mapping[str, Compressed]
) -> bool:
    """Whether what is kept is what it was when it was made: its size, and each tensor's start."""
    try:
        note = json.loads((own / "index.json").read_text("utf-8"))
        with (own / "weights.bin").open("rb") as file:
            if os.fstat(file.fileno()).st_size != _size(places, formats):
                return False
            for name in formats:
                file.seek(places[name].offset)
                start = file.read(min(_SAMPLE_BYTES, places[name].num_bytes))
                if note["starts"][name] != zlib.crc32(start):
                    return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _size(places: Mapping[str, TensorSource], formats: Mapping[str, Compressed]) -> int:
    end = max((places[name].offset + places[name].num_bytes for name in formats), default=0)
    return align_up(end, _BLOCK)


def _make(
    own: Path,
    places: Mapping[str, TensorSource],
    sources: Mapping[str, TensorSource],
    formats: Mapping[str, Compressed],
    marks: Mapping[str, str],
) -> None:
    draft = own.with_name(f"{own.name}.{os.getpid()}")
    size = _size(places, formats)
    try:
        for left in own.parent.glob(f"{own.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
        if free < size:
            raise BudgetError(
                f"{format_bytes(size)} of compressed weights were to be written to {own.parent}.",
                f"{format_bytes(free)} are free there.",
                "Free some space, or name another directory with --compressed-dir.",
            )
        note = {"made of": marks, "starts": _write(draft / "weights.bin", places, sources, formats)}
        (draft / "index.json").write_text(json.dumps(note, indent=1), "utf-8")
        draft.replace(own)
    except OSError as error:
        raise BudgetError(
            f"Compressed weights were to be written to {own.parent}.",
            f"The system refused: {error.strerror}.",
            "Name a directory that can be written with --compressed-dir.",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(
    path: Path,
    places: Mapping[str, TensorSource],
    sources: Mapping[str, TensorSource],
    formats: Mapping[str, Compressed],
) -> dict[str, Any]:
    """Write the file; the checksum of each tensor's start."""
    size = bounce_bytes(sources)
    arena = host_arena(align_up(size, _BLOCK))
    files = CheckpointFiles(sources, Traffic(), arena.take(size, "read buffer"))
    starts = {}
    try:
        with path.open("wb") as file:
            for name, number_format in formats.items():
                file.seek(places[name].offset)
                start = b""
                for rows in _plain_rows(files, name, sources[name]):
                    data = _compress(rows, number_format).numpy().tobytes()
                    start += data[: _SAMPLE_BYTES - len(start)]
                    file.write(data)
                starts[name] = zlib.crc32(start)
            file.truncate(_size(places, formats))
            file.flush()
            os.fsync(file.fileno())
    finally:
        files.close()
        arena.close()
    return starts


def _compress(rows: torch.Tensor, number_format: Compressed) -> torch.Tensor:
    if isinstance(number_format, Grouped):
        return quantise(rows, number_format)
    return quantise_rows(rows)


def _plain_rows(files: CheckpointFiles, name: str, source: TensorSource) -> Iterator[torch.Tensor]:
    """A tensor in float32, some rows at a time. ModelError where a value is no number."""
    num_rows, columns = source.shape
    step = max(1, _CHUNK_BYTES // (4 * columns))
    for first in range(0, num_rows, step):
        rows = torch.empty(min(step, num_rows - first), columns)
        files.fill(name, first, rows)
        if not bool(torch.isfinite(rows).all()):
            raise ModelError(
                f"{name} of {source.path.name} was to be compressed.",
                "It has values that are infinite or not numbers.",
                "Run it uncompressed, or fetch the weights again.",
            )
        yield rows
