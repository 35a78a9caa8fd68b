"""The rows of an evaluation: read, checked and tokenised once, for the runs of all settings.

They are the rows of a job. What a row is held against travels as its id, which the spool keeps on
disk: a number of tokens to score, or an answer. Knows no measure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from freight.errors import InputError
from freight.jobs.formats import RowLimits, load_record
from freight.jobs.lines import LONGEST_LINE_BYTES, LineReader, open_input
from freight.jobs.spool import Spool
from freight.jobs.spool_writer import SpoolWriter
from freight.runtime.request import SamplingParams
from freight.runtime.tokenizer import Tokenizer

__all__ = ["Record", "Rows", "read_records", "refuse_row", "spool_rows"]

Record = dict[str, Any]
Rows = Iterator[tuple[str, Record]]
"""Where a row is, for messages, and what it says."""

_MOST_ERRORS: Final = 3


def read_records(path: Path) -> Rows:
    """The objects of a JSONL file. InputError names the line that is none."""
    with open_input(path) as file:
        for number, line in LineReader(file, name=path.name):
            where = f"Line {number} of {path.name}"
            try:
                yield where, load_record(_whole(line))
            except InputError as error:
                raise refuse_row(where, error) from error


def _whole(line: bytes | None) -> bytes:
    if line is None:
        raise InputError(
            "It was read as a row.",
            f"A line may have {LONGEST_LINE_BYTES >> 20} MiB.",
            "Write one row per line.",
        )
    return line


def refuse_row(where: str, error: InputError) -> InputError:
    """The same error, with the place of the row."""
    return InputError(f"{where}: {error.asked}", error.limit, error.advice)


def spool_rows(
    rows: Rows,
    directory: Path,
    *,
    tokenizer: Tokenizer,
    limits: RowLimits,
    defaults: SamplingParams,
) -> int:
    """Tokenise the rows into a spool; how many they are. InputError if one cannot be used: scores
    of the others would be of another dataset."""
    with SpoolWriter(directory, tokenizer=tokenizer, limits=limits, defaults=defaults) as writer:
        for where, record in rows:
            writer.add(where, json.dumps(record).encode())
        writer.flush()
    with Spool(directory, defaults=defaults, input_hash="") as spool:
        failed = spool.failed()
        if not spool.num_rows:
            raise InputError("A dataset was read.", "It has no rows.", "Give it one per line.")
        if len(failed):
            reasons = [spool.row_error(int(index)) or "" for index in failed[:_MOST_ERRORS]]
            raise InputError(
                f"{spool.num_rows} rows were to be evaluated.",
                f"{len(failed)} cannot be used. {' '.join(reasons)}",
                "Mend these rows or leave them out.",
            )
        return spool.num_rows
