"""What a file is that is no JSONL, told by how it begins.

Read as lines such a file is thousands of rows that cannot be used, of which none says why. Knows
beginnings, no contents.
"""

from __future__ import annotations

from typing import Final

from freight.errors import InputError

__all__ = ["BEGINNING_BYTES", "refuse_other_kinds"]

BEGINNING_BYTES: Final = 8

_TO_LINES: Final = 'df.to_json("rows.jsonl", orient="records", lines=True)'
_TO_UTF8: Final = "Convert it: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl"
_KINDS: Final[tuple[tuple[bytes, str, str], ...]] = (
    (b"\x1f\x8b", "compressed by gzip", "Unpack it: zcat FILE > rows.jsonl"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "Unpack it: zstdcat FILE > rows.jsonl"),
    (b"\xfd7zXZ\x00", "compressed by xz", "Unpack it: xzcat FILE > rows.jsonl"),
    (b"BZh", "compressed by bzip2", "Unpack it: bzcat FILE > rows.jsonl"),
    (b"PK\x03\x04", "a zip archive", "Unpack it: unzip -p FILE > rows.jsonl"),
    (b"PAR1", "a Parquet file", f"Write it as JSONL, with pandas by {_TO_LINES}."),
    (b"ARROW1", "an Arrow file", f"Write it as JSONL, with pandas by {_TO_LINES}."),
    (b"\xff\xfe", "text in UTF-16", _TO_UTF8),
    (b"\xfe\xff", "text in UTF-16", _TO_UTF8),
    (b"{\x00", "text in UTF-16", _TO_UTF8),
    (b"\x00{", "text in UTF-16", _TO_UTF8),
    (b"[", "one JSON array", "Write one object per line: jq -c '.[]' FILE > rows.jsonl"),
)


def refuse_other_kinds(beginning: bytes, name: str) -> None:
    """InputError where an input begins, blanks left out, as no JSONL file does: its rows are JSON
    objects."""
    for magic, kind, advice in _KINDS:
        if beginning.startswith(magic):
            raise InputError(
                f"The input {name} was read as lines of JSON.",
                f"It is {kind}.",
                advice,
            )
