"""The lines of an input of any size, one at a time, and a hash of all its bytes.

Knows nothing of what the lines mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from freight.errors import InputError
from freight.jobs.file_kinds import BEGINNING_BYTES, refuse_other_kinds

__all__ = ["LONGEST_LINE_BYTES", "LineReader", "hash_stream", "open_input"]

# A million tokens of text are about 4 MiB; a longer line is no prompt but a broken file, and
# holding it would break the bound on memory.
LONGEST_LINE_BYTES: Final = 16 << 20
_BLOCK_BYTES: Final = 1 << 20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\n"


class LineReader:
    """Iterates over ``(line number, line)``, blank lines left out, newlines cut.

    A line that is too long comes as ``None``. ``digest`` is the blake2b of every byte read, so
    it stands for the whole input once the iteration has ended. InputError, by ``name``, where the
    input begins as a file of another kind.
    """

    def __init__(self, file: BinaryIO, *, name: str) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        number, is_begun = 0, False
        while part := self._read():
            number += 1
            line = part.removeprefix(_BYTE_ORDER_MARK) if number == 1 else part
            if not is_begun and (beginning := line.lstrip(_BLANKS)[:BEGINNING_BYTES]):
                is_begun = True
                refuse_other_kinds(beginning, self._name)
            if len(part) > LONGEST_LINE_BYTES and not part.endswith(b"\n"):
                self._skip_rest()
                yield number, None
            elif line := line.strip(_BLANKS):
                yield number, line

    def _read(self) -> bytes:
        part = self._file.readline(LONGEST_LINE_BYTES + 1)
        self._hash.update(part)
        return part

    def _skip_rest(self) -> None:
        while (part := self._read()) and not part.endswith(b"\n"):
            pass


def hash_stream(file: BinaryIO) -> str:
    """The digest that a ``LineReader`` over the same bytes ends with."""
    digest = hashlib.blake2b(digest_size=16)
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def open_input(path: Path) -> BinaryIO:
    """Open an input file, or say why it is none."""
    if path.is_dir():
        raise InputError(
            f"The input {path} was opened.",
            "It is a directory.",
            "Name a JSONL file in it, or - for standard input.",
        )
    try:
        return open(path, "rb", buffering=_BLOCK_BYTES)
    except OSError as error:
        raise InputError(
            f"The input {path} was opened.",
            f"It cannot be read: {error.strerror}.",
            "Check the path, or give - for standard input.",
        ) from error
