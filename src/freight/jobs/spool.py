"""The rows of a job as token ids on disk, so that memory does not grow with the dataset.

Three files: token ids one after another, one fixed-size record per row, and a JSON blob for each
row that has an id, sampling parameters or an error of its own. Memory holds the records only, 38
bytes a row. ``spool.json`` is written last: without it the spool is not complete. Knows no
tokenizer, no journal and no engine.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from freight.jobs.api_names import Batch
from freight.jobs.formats import RowId
from freight.jobs.pairs import SCORING
from freight.jobs.prefixes import SharedPrefixes, find_prefixes
from freight.jobs.readings import Form
from freight.plan.beginnings import Beginnings, Shared
from freight.plan.workload import Workload
from freight.runtime.request import Prefix, Request, SamplingParams

__all__ = ["RECORD", "SPOOL_FILES", "Spool", "derive_seed", "open_spool", "spool_marker"]

RECORD: Final = np.dtype(
    [
        ("offset", "<i8"),  # of the first token id, counted in ids
        ("num_tokens", "<i4"),  # 0: the row has an error
        ("max_tokens", "<i4"),
        ("extras_offset", "<i8"),
        ("extras_bytes", "<i4"),  # 0: nothing of its own
        ("num_samples", "<i2"),
        ("logprobs", "i1"),  # -1: not asked for
        ("prompt_logprobs", "i1"),
        ("score_from", "<i4"),  # the first token of a continuation; 0: the row has none
        ("is_structured", "?"),
        ("ends_early", "?"),  # its answer may be shorter than it may be
    ]
)
SPOOL_FILES: Final = ("tokens.bin", "records.bin", "extras.bin", "spool.json")

_MOST_GROUPS: Final = 64
_MOST_PREFIXES: Final = 8

Indices = npt.NDArray[np.int64]


def _beginnings(
    prefixes: SharedPrefixes, indices: Indices, prompts: Indices, new: Indices, samples: Indices
) -> Beginnings | None:
    """What these rows begin with, if any do alike. Where no keys are kept only a few beginnings
    that all have: others are shared by the rows of one micro-batch, see ``_brought``."""
    keys, tokens = prefixes.keys[indices], prefixes.num_tokens[indices]
    found, first = np.unique(keys, return_index=True)
    if found[-1] < 0:
        return None
    if new.max() <= 1 and (found[0] < 0 or len(found) > _MOST_PREFIXES):
        return None
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[first[found >= 0]] = True
    groups = tuple(
        Shared(round(np.average(tokens[own], weights=samples[own])), int(is_first[own].sum()))
        for own in _groups(prompts, new, samples)
    )
    totals = prompts + new
    return Beginnings.of(
        groups, keys=keys, tokens=tokens, prompts=prompts, totals=totals, rows=samples
    )


def _brought(
    prefixes: SharedPrefixes, indices: Indices, prompts: Indices, new: Indices, samples: Indices
) -> tuple[tuple[int, int, int], ...]:
    """Groups of rows by what they bring where the first that has a beginning computes it for all:
    where no keys are kept, and rows with one beginning are in one micro-batch."""
    keys, shared = prefixes.keys[indices], prefixes.num_tokens[indices].astype(np.int64)
    if new.max() > 1 or samples.max() > 1 or not (keys >= 0).any():
        return ()
    shared[np.unique(keys, return_index=True)[1]] = 0
    own = prompts - np.where(keys >= 0, shared, 0)
    return _group_lengths(own, new, samples)


def _groups(prompts: Indices, new: Indices, samples: Indices) -> list[Indices]:
    """A few groups of neighbouring requests with about as many rows each, one if all are alike."""
    if (prompts == prompts[0]).all() and (new == new[0]).all():
        return [np.arange(len(prompts))]
    reached = np.cumsum(samples)
    count = min(_MOST_GROUPS, len(prompts))
    borders = 1 + np.searchsorted(reached, reached[-1] * np.arange(1, count) / count)
    return [own for own in np.split(np.arange(len(prompts)), borders) if len(own)]


def _group_lengths(
    prompts: Indices, new: Indices, samples: Indices
) -> tuple[tuple[int, int, int], ...]:
    """(rows, prompt, new) of these groups, with means of their rows."""

    def mean(values: Indices, own: Indices) -> int:
        return round(np.average(values[own], weights=samples[own]))

    return tuple(
        (int(samples[own].sum()), max(1, mean(prompts, own)), mean(new, own))
        for own in _groups(prompts, new, samples)
    )


class Spool:
    """A complete spool, open for reading. ``defaults`` fill what a row does not set itself."""

    def __init__(self, directory: Path, *, defaults: SamplingParams, input_hash: str) -> None:
        self.input_hash = input_hash
        self._defaults = defaults
        self._records = np.fromfile(directory / "records.bin", dtype=RECORD)
        self._tokens = os.open(directory / "tokens.bin", os.O_RDONLY | os.O_CLOEXEC)
        self._extras = os.open(directory / "extras.bin", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._tokens)
        os.close(self._extras)

    @property
    def num_rows(self) -> int:
        return len(self._records)

    @property
    def num_prompt_tokens(self) -> npt.NDArray[np.int32]:
        """Per row; 0 where the row has an error."""
        return self._records["num_tokens"]

    @property
    def max_new_tokens(self) -> npt.NDArray[np.int32]:
        """Per row, already lowered to what the model's positions leave."""
        return self._records["max_tokens"]

    def order(self) -> Indices:
        """Usable rows, longest first, so that the rows of a block are alike.

        Sorted by prompt + new tokens, then by prompt, then by place in the dataset; rows that begin
        alike follow the first of them.
        """
        prompts = self.num_prompt_tokens.astype(np.int64)
        totals = prompts + self.max_new_tokens
        usable = np.flatnonzero(prompts)
        order = usable[np.lexsort((usable, -prompts[usable], -totals[usable]))]
        keys = self.prefixes.keys[order]
        places = np.arange(len(order))
        firsts = places.copy()  # of each row, where the first row is that begins alike
        shares = keys >= 0
        if shares.any():
            least = np.full(int(keys.max()) + 1, len(order), dtype=np.int64)
            np.minimum.at(least, keys[shares], places[shares])
            firsts[shares] = least[keys[shares]]
        return order[np.lexsort((places, firsts))]

    @cached_property
    def prefixes(self) -> SharedPrefixes:
        """What prompts begin with alike, by row: tokens that need not be scored, with one behind
        them that goes through the model. Samples that keep keys begin with all of their prompt."""
        records = self._records
        samples = np.where(records["max_tokens"] > 1, records["num_samples"], 1).astype(np.int64)
        lengths = records["num_tokens"] - (records["max_tokens"] == 0).astype(np.int64)
        scored = records["prompt_logprobs"] >= 0
        lengths[scored] = np.minimum(lengths, np.maximum(1, records["score_from"]))[scored]
        lengths[records["num_tokens"] == 0] = 0
        if not lengths.any():
            return SharedPrefixes(
                keys=np.full(len(lengths), -1), num_tokens=np.zeros(len(lengths), dtype=np.int64)
            )
        with mmap.mmap(self._tokens, 0, prot=mmap.PROT_READ) as pages:
            tokens = np.frombuffer(pages, dtype="<i4")
            found = find_prefixes(tokens, records["offset"], lengths, samples)
            del tokens  # the map cannot be closed while it is seen
        return found

    def failed(self) -> Indices:
        """Rows that have an error instead of a prompt, in order of the dataset."""
        return np.flatnonzero(self.num_prompt_tokens == 0)

    def workload(self, indices: Indices) -> Workload:
        """The work that the given usable rows are, at least one, in the order in which they run;
        each sample is a row of it."""
        records = self._records[indices]
        prompts = records["num_tokens"].astype(np.int64)
        new = records["max_tokens"].astype(np.int64)
        samples = records["num_samples"].astype(np.int64)
        listed, scored = records["logprobs"], records["prompt_logprobs"]
        num_scored = prompts - np.maximum(1, records["score_from"])
        return Workload(
            num_rows=int(samples.sum()),
            max_prompt_tokens=int(prompts.max()),
            max_new_tokens=int(new.max()),
            max_total_tokens=int((prompts + new).max()),
            total_prompt_tokens=int(prompts.sum()),
            total_new_tokens=int((new * samples).sum()),
            min_samples=int(samples.min()),
            max_samples=int(samples.max()),
            max_scored_tokens=int(num_scored[scored >= 0].max(initial=0)),
            total_scored_tokens=int(num_scored[scored >= 0].sum()),
            max_listed_tokens=int(new[listed >= 0].max(initial=0)),
            max_logprobs=int(max(listed.max(), scored.max(), 0)),
            lengths=_group_lengths(prompts, new, samples),
            brought=_brought(self.prefixes, indices, prompts, new, samples),
            ends_early=bool(records["ends_early"].any()),
            beginnings=_beginnings(self.prefixes, indices, prompts, new, samples),
            is_structured=bool(records["is_structured"].any()),
        )

    def request(self, index: int) -> Request:
        """The row as the engine wants it."""
        record = self._records[index]
        num_tokens = int(record["num_tokens"])
        raw = os.pread(self._tokens, 4 * num_tokens, 4 * int(record["offset"]))
        token_ids = np.frombuffer(raw, dtype="<i4").tolist()
        if score_from := int(record["score_from"]):
            return Request(
                index=index,
                prompt_ids=token_ids,
                params=SCORING,
                prefix=self._prefix(index),
                score_from=score_from,
            )
        overrides = dict(self._read_extras(index).get("overrides", {}))
        if "logit_bias" in overrides:  # JSON has made strings of its ids
            biases = overrides["logit_bias"].items()
            overrides["logit_bias"] = {int(token_id): bias for token_id, bias in biases}
        overrides.setdefault("seed", derive_seed(self._defaults.seed, index))
        overrides["max_tokens"] = max_tokens = int(record["max_tokens"])
        least = overrides.get("min_tokens", self._defaults.min_tokens)
        overrides["min_tokens"] = min(least, max_tokens)
        return Request(
            index=index,
            prompt_ids=token_ids,
            params=replace(self._defaults, **overrides),
            prefix=self._prefix(index),
        )

    def _prefix(self, index: int) -> Prefix | None:
        key = int(self.prefixes.keys[index])
        if key < 0:
            return None
        return Prefix(key=key, num_tokens=int(self.prefixes.num_tokens[index]))

    def has_continuation(self, index: int) -> bool:
        """Whether the row is a prompt with a continuation to be scored."""
        return bool(self._records["score_from"][index])

    def num_cut(self, index: int) -> int:
        """Tokens that a row with a continuation has lost at its beginning."""
        return int(self._read_extras(index).get("cut", 0))

    def form(self, index: int) -> Form | None:
        """How the row wants its embedding, where that is not as the job gives them."""
        own = self._read_extras(index).get("form")
        return None if own is None else Form(**own)

    def row_id(self, index: int) -> RowId:
        """The row's own id, else its place in the dataset."""
        own = self.own_id(index)
        return index if own is None else own

    def own_id(self, index: int) -> RowId | None:
        own: RowId | None = self._read_extras(index).get("id")
        return own

    def batch(self, index: int) -> Batch | None:
        """What a line of a batch file wants, empty where it has an error; ``None`` for others."""
        extras = self._read_extras(index)
        if extras.get("foreign"):  # answered as the lines beside it are
            return {} if self._is_batch_file else None
        batch: Batch | None = extras.get("batch")
        return batch

    @cached_property
    def _is_batch_file(self) -> bool:
        """Whether any line is one of a batch file."""
        with mmap.mmap(self._extras, 0, prot=mmap.PROT_READ) as extras:
            if extras.find(b'"batch"') < 0:  # which a text of a row may hold as well
                return False
        with_extras = np.flatnonzero(self._records["extras_bytes"])
        return any("batch" in self._read_extras(int(index)) for index in with_extras)

    def row_error(self, index: int) -> str | None:
        """Why the row cannot be used; ``None`` for a usable row."""
        error: str | None = self._read_extras(index).get("error")
        return error

    def _read_extras(self, index: int) -> Mapping[str, Any]:
        record = self._records[index]
        num_bytes = int(record["extras_bytes"])
        if not num_bytes:
            return {}
        raw = os.pread(self._extras, num_bytes, int(record["extras_offset"]))
        extras: dict[str, Any] = json.loads(raw)
        return extras


def derive_seed(job_seed: int, index: int) -> int:
    """The seed of a row without its own: the same for the same job and row, alike for no two."""
    digest = hashlib.blake2b(f"{job_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def spool_marker(key: str, input_hash: str) -> dict[str, str]:
    """What ``spool.json`` says, by which a later run knows whether it can use the spool again."""
    return {"key": key, "input_hash": input_hash, "record": ", ".join(map(str, RECORD.descr))}


def open_spool(
    directory: Path, *, key: str, defaults: SamplingParams, input_hash: str
) -> Spool | None:
    """The spool in a directory, if it is complete and was made for the same ``key``."""
    try:
        written = json.loads((directory / "spool.json").read_bytes())
    except (OSError, ValueError):
        return None
    if written != spool_marker(key, input_hash):
        return None
    return Spool(directory, defaults=defaults, input_hash=input_hash)
