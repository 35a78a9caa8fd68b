"""Tokenises a dataset into a spool, as a stream: one batch of rows in memory at a time.

Knows the tokenizer and the row format; does not know which rows are done already.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np

from freight.errors import FreightError, InputError
from freight.jobs.api_names import suspicion
from freight.jobs.durable import disk_errors, write_atomically
from freight.jobs.formats import (
    ROW_KEYS,
    Row,
    RowLimits,
    fit_max_tokens,
    parse_row,
    row_keys,
)
from freight.jobs.json_values import refuse_broken_text
from freight.jobs.lines import LONGEST_LINE_BYTES, LineReader
from freight.jobs.pairs import SCORING, check_pair, fit_pair, join_texts
from freight.jobs.readings import Reading
from freight.jobs.spool import RECORD, SPOOL_FILES, Spool, spool_marker
from freight.runtime.params import SamplingParams, check_tokenizer, check_vocabulary
from freight.runtime.tokenizer import Tokenizer

__all__ = ["SpoolWriter", "write_spool"]

_BATCH_ROWS: Final = 512
# Tokenising takes about 140 bytes of memory per byte of text.
_BATCH_BYTES: Final = 1 << 17
_PROBE_CHARS: Final = 16
_MOST_NAMES: Final = 8
_MOST_COUNTED: Final = 1000  # rows may have keys that no other row has, and memory is bounded
_BUFFER_BYTES: Final = 1 << 20


class SpoolWriter:
    """Takes rows in order and writes the three files of a spool."""

    def __init__(
        self,
        directory: Path,
        *,
        tokenizer: Tokenizer | None,
        limits: RowLimits,
        defaults: SamplingParams,
    ) -> None:
        check_vocabulary(defaults, limits.vocab_size)
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = defaults
        self._batch: list[tuple[str, Row]] = []
        self._batch_bytes = 0
        self._num_ids = 0
        self._num_extras_bytes = 0
        self._unread: Counter[str] = Counter()
        self._num_cut = 0
        self._num_lowered = 0
        self._num_prompted = 0
        self.num_rows = 0
        tokens, records, extras, _ = (directory / name for name in SPOOL_FILES)
        self._tokens = open(tokens, "wb", buffering=_BUFFER_BYTES)
        self._records = open(records, "wb", buffering=_BUFFER_BYTES)
        self._extras = open(extras, "wb", buffering=_BUFFER_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in (self._tokens, self._records, self._extras):
            try:
                file.close()
            except OSError:  # a full disk refuses the buffered rest once more
                if kind is None:
                    raise

    def add(self, where: str, line: bytes | None) -> None:
        """Take the next line; ``where`` opens the text of an error found in it."""
        row = _parse(line, where, self._defaults, self._limits.reading)
        self._batch.append((where, row))
        for name in row.unread:
            if len(self._unread) < _MOST_COUNTED or name in self._unread:
                self._unread[name] += 1
        self._batch_bytes += len(line or b"")
        if len(self._batch) >= _BATCH_ROWS or self._batch_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Tokenise and write the rows taken so far."""
        batch = [(where, self._render(where, row)) for where, row in self._batch]
        self._batch, self._batch_bytes = [], 0
        texts = (row for _, row in batch if row.messages is None and row.continuation is None)
        text_ids = self._encode(texts)
        chat_ids = self._encode(row for _, row in batch if row.messages is not None)
        pair_ids = self._encode_pairs(row for _, row in batch if row.continuation is not None)
        for where, row in batch:
            if row.error is not None:
                ids: list[int] = []
            elif row.continuation is not None:
                self._write_pair(where, row, *next(pair_ids))
                continue
            elif row.token_ids is not None:
                ids = list(row.token_ids)
            else:
                ids = next(text_ids if row.messages is None else chat_ids)
            self._write(where, row, ids)

    def _encode(self, rows: Iterable[Row]) -> Iterator[list[int]]:
        """Token ids of rows with a text; those of one call are all chats or all prompts."""
        usable = [row for row in rows if row.text is not None and row.error is None]
        if self._tokenizer is None or not usable:
            return iter(())
        texts = [row.text for row in usable if row.text is not None]
        are_chats = usable[0].messages is not None
        return iter(self._tokenizer.encode_batch(texts, add_special_tokens=not are_chats))

    def _encode_pairs(self, rows: Iterable[Row]) -> Iterator[tuple[list[int], int]]:
        """Token ids of rows with continuations, and how many of them are the prompt's."""
        usable = [row for row in rows if row.error is None]
        texts: list[str] = []
        for row in usable:
            if row.text is not None:
                texts += join_texts(row.text, str(row.continuation))
        encoded: Iterator[list[int]] = iter(())
        if texts and self._tokenizer is not None:
            encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for row in usable:
            if row.token_ids is None:
                context, whole = next(encoded), next(encoded)
            else:
                assert row.continuation is not None and not isinstance(row.continuation, str)
                context, whole = [*row.token_ids], [*row.token_ids, *row.continuation]
            yield whole, min(len(context), len(whole))

    def remarks(self) -> Iterator[str]:
        """What people should know of the rows, though they can be used."""
        if keys := self._remark_keys():
            yield keys
        if self._num_cut:
            yield (
                f"{self._num_cut} of {self.num_rows} rows are longer than the model's "
                f"{self._limits.max_positions} positions, and are scored without their beginning"
            )

        if self._num_prompted and self._limits.reading is not None:
            yield (
                f"{self._num_prompted} of {self.num_rows} rows are texts, and are read behind the "
                f'prompt of the model\'s files, "{self._limits.reading.readout.prompt}"'
            )
        if self._num_lowered:
            yield (
                f"min_tokens of {self._num_lowered} of {self.num_rows} rows is more than the "
                f"model's {self._limits.max_positions} positions leave, and is lowered to that"
            )

    def _remark_keys(self) -> str | None:
        """Keys that nothing reads: parameters that are misspelt, or other servers', are quietly
        without effect."""
        suspicions = ((self._suspicion(name), count) for name, count in self._unread.most_common())
        told = [
            f"{own} in {count} of {self.num_rows} rows"
            for own, count in suspicions
            if own is not None
        ]
        more = len(told) - _MOST_NAMES
        rest = f" and {more} others" if more > 0 else ""
        return f"keys without effect: {', '.join(told[:_MOST_NAMES])}{rest}" if told else None

    def _suspicion(self, name: str) -> str | None:
        reading = self._limits.reading
        if reading is not None and name in ROW_KEYS:
            return f"{name} (no token is chosen where {reading.readout.name} are made)"
        return suspicion(name, row_keys(reading))

    def sync(self) -> None:
        """Make everything written durable and drop it from the page cache."""
        for file in (self._tokens, self._records, self._extras):
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _render(self, where: str, row: Row) -> Row:
        """A chat gets its text; it keeps its messages as the sign that BOS is in it already."""
        if row.error is not None or row.token_ids is not None:
            return row
        try:
            if self._tokenizer is None:
                raise InputError(
                    "The row is text.",
                    self._limits.why_no_text,
                    'Give token ids, like {"prompt": [1, 2, 3]}, or put tokenizer.json beside it.',
                )
            if row.messages is not None:
                values = row.template_values
                if self._limits.reading is not None:  # it ends where an answer would begin
                    values = {**values, "add_generation_prompt": False}
                row = replace(row, text=self._tokenizer.render_chat(row.messages, values))
            elif self._limits.reading is not None and self._limits.reading.readout.prompt:
                row = replace(row, text=self._limits.reading.readout.prompt + (row.text or ""))
                self._num_prompted += 1
            if isinstance(row.continuation, str):
                check_pair(row.text or "", row.continuation, self._limits.max_positions)
            else:
                refuse_broken_text(row.text or "", "prompt" if row.messages is None else "messages")
                self._check_text(row.text or "", self._tokenizer)
        except FreightError as error:
            return replace(row, error=f"{where}: {error}")
        return row

    def _check_text(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuse text so long that encoding it takes too much memory: its first part alone has
        twice the tokens that the model takes."""
        most = self._limits.max_positions
        if len(text) <= _PROBE_CHARS * most:
            return
        num_tokens = len(tokenizer.encode(text[: _PROBE_CHARS * most]))
        if num_tokens >= 2 * most:
            raise self._limits.too_long(f"more than {num_tokens} tokens")

    def _write(self, where: str, row: Row, ids: list[int]) -> None:
        max_tokens, params, error = 0, self._defaults, row.error
        if error is None:
            try:
                params = self._defaults.with_changes(row.overrides)
                if self._limits.reading is not None and row.token_ids is None:
                    self._limits.reading.refuse_longer(len(ids))
                max_tokens = self._check(params, ids)
            except InputError as refusal:
                ids, error = [], f"{where}: {refusal}"
        self._append(replace(row, error=error), ids, params, max_tokens)

    def _write_pair(self, where: str, row: Row, ids: list[int], num_context: int) -> None:
        prefix_id = None if self._tokenizer is None else self._tokenizer.prefix_token_id
        most, score_from, num_cut = self._limits.max_positions, 0, 0
        try:
            ids, score_from, num_cut = fit_pair(
                ids, num_context, prefix_id=prefix_id, max_positions=most
            )
            self._check_ids(ids)
            self._num_cut += num_cut > 0
        except InputError as refusal:
            ids, num_cut, row = [], 0, replace(row, error=f"{where}: {refusal}")
        self._append(row, ids, SCORING, 0, score_from=score_from, num_cut=num_cut)

    def _append(
        self,
        row: Row,
        ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        *,
        score_from: int = 0,
        num_cut: int = 0,
    ) -> None:
        extras = _extras_blob(row, num_cut)
        record = np.array(
            (
                self._num_ids,
                len(ids),
                max_tokens,
                self._num_extras_bytes,
                len(extras),
                params.n,
                -1 if params.logprobs is None else params.logprobs,
                -1 if params.prompt_logprobs is None else params.prompt_logprobs,
                score_from,
                params.structured_outputs is not None,
                max_tokens > 0 and _ends_early(params) and self._limits.reading is None,
            ),
            dtype=RECORD,
        )
        self._tokens.write(array("i", ids).tobytes())
        self._extras.write(extras)
        self._records.write(record.tobytes())
        self._num_ids += len(ids)
        self._num_extras_bytes += len(extras)
        self.num_rows += 1

    def _check(self, params: SamplingParams, ids: list[int]) -> int:
        max_tokens = fit_max_tokens(len(ids), params.max_tokens, self._limits)
        check_vocabulary(params, self._limits.vocab_size)
        check_tokenizer(params, self._tokenizer)
        self._check_ids(ids)
        self._num_lowered += params.min_tokens > max_tokens
        return max_tokens

    def _check_ids(self, ids: list[int]) -> None:
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self._limits.vocab_size:
                raise InputError(
                    f"The {self._limits.noun} holds token id {token_id}.",
                    f"The model's vocabulary has the ids 0 to {self._limits.vocab_size - 1}.",
                    "Use the tokenizer that belongs to the model.",
                )


def write_spool(
    source: BinaryIO,
    directory: Path,
    *,
    name: str,
    key: Callable[[str], str],
    tokenizer: Tokenizer | None,
    limits: RowLimits,
    defaults: SamplingParams,
    on_rows: Callable[[int], None],
    on_remark: Callable[[str], None],
) -> Spool:
    """Tokenise all of ``source`` (``name`` in messages) into an empty directory.

    ``key`` makes of the input's hash what a later run compares to use the spool again.
    """
    reader = LineReader(source, name=name)
    with (
        disk_errors(directory),
        SpoolWriter(directory, tokenizer=tokenizer, limits=limits, defaults=defaults) as writer,
    ):
        for number, line in reader:
            writer.add(f"Line {number} of {name}", line)
            if number % _BATCH_ROWS == 0:
                on_rows(writer.num_rows)
        writer.flush()
        writer.sync()
        for remark in writer.remarks():
            on_remark(remark)
    marker = spool_marker(key(reader.digest), reader.digest)
    write_atomically(directory / "spool.json", json.dumps(marker).encode())
    return Spool(directory, defaults=defaults, input_hash=reader.digest)


def _parse(
    line: bytes | None, where: str, defaults: SamplingParams, reading: Reading | None
) -> Row:
    if line is not None:
        return parse_row(line, where=where, defaults=defaults, reading=reading)
    limit = f"A line may have {LONGEST_LINE_BYTES >> 20} MiB"
    error = f"{where}: It was read as a row. {limit}. Write one row per line."
    return Row(error=error, is_foreign=True)


def _ends_early(params: SamplingParams) -> bool:
    is_told = params.stop or params.stop_token_ids or params.structured_outputs is not None
    return not params.ignore_eos or bool(is_told)


def _extras_blob(row: Row, num_cut: int) -> bytes:
    extras: dict[str, Any] = {}
    if row.row_id is not None:
        extras["id"] = row.row_id
    if row.error is not None:
        extras["error"] = row.error
    elif row.overrides:
        extras["overrides"] = row.overrides
    if row.form is not None:
        extras["form"] = asdict(row.form)
    if row.batch is not None:
        extras["batch"] = row.batch
    if row.is_foreign:
        extras["foreign"] = True
    if num_cut:
        extras["cut"] = num_cut
    return json.dumps(extras).encode() if extras else b""
