"""A model's directory that is made, of links to files that lie elsewhere and of what is written
beside them, once, and kept in the user's cache. Knows files alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from freight.errors import InputError

__all__ = ["kept_in", "key_of", "make_directory"]


def kept_in(kind: str) -> Path:
    """Where directories of a kind are."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "freight" / kind


def key_of(marks: Iterable[str], files: Iterable[tuple[str, Path]]) -> str:
    """What another file, or one that was changed, makes another."""
    found = [*marks]
    for name, path in files:
        stat = path.stat()
        found += [name, str(path), str(stat.st_size), str(stat.st_mtime_ns)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:24]


def make_directory(
    own: Path, links: Mapping[str, Path], texts: Mapping[str, str], *, what: str
) -> None:
    """``own`` with these links and these files; whole, or not at all. ``what`` it is, for people:
    InputError where it cannot be written."""
    draft = own.with_name(f"{own.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        for name, target in links.items():
            (draft / name).symlink_to(target)
        for name, text in texts.items():
            (draft / name).write_text(text, "utf-8")
        draft.replace(own)
    except OSError as error:
        if not own.is_dir():  # another process may have made it in the meantime
            raise InputError(
                f"{what} was to be kept in {own.parent}.",
                f"The system refused: {error.strerror}.",
                "Set XDG_CACHE_HOME to a directory that can be written.",
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
