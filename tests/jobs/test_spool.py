"""The spool gives back what the input said, in an order fit for blocks, from bounded memory."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import json
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import BudgetError, InputError
from freight.jobs import spool_writer
from freight.jobs.formats import RowLimits
from freight.jobs.lines import LONGEST_LINE_BYTES, LineReader, hash_stream
from freight.jobs.spool import RECORD, Spool, derive_seed, open_spool
from freight.jobs.spool_writer import SpoolWriter, write_spool
from freight.plan.workload import Workload
from freight.runtime.request import SamplingParams
from freight.runtime.tokenizer import Tokenizer

LIMITS = RowLimits(max_positions=64, vocab_size=320)
DEFAULTS = SamplingParams(max_tokens=10, temperature=0.5, seed=3)


def spool_of(
    rows: Iterable[object], directory: Path, tokenizer: Tokenizer | None, limits: RowLimits = LIMITS
) -> Spool:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return write_spool(
        io.BytesIO(text.encode()),
        directory,
        name="rows.jsonl",
        key=lambda input_hash: "key " + input_hash,
        tokenizer=tokenizer,
        limits=limits,
        defaults=DEFAULTS,
        on_rows=lambda num_rows: None,
        on_remark=lambda text: None,
    )


def test_rows_come_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "the cat"}]
    rows = [
        {"prompt": "the cat", "id": "first"},
        {"prompt": [5, 6, 7], "max_tokens": 100, "seed": 9, "stop": ["x"], "temperature": 0},
        {"prompt": []},
        {"messages": chat},
        {"messages": [{"role": "broken", "content": ""}], "id": 4},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"prompt": [320]},
        {"prompt": [-1]},
        {"prompt": [1] * 64},
        {"prompt": [1] * 63},
    ]
    spool = spool_of(rows, tmp_path, tokenizer)
    assert spool.num_rows == 10
    first = spool.request(0)
    assert first.prompt_ids == tokenizer.encode("the cat") and first.index == 0
    assert first.params == SamplingParams(max_tokens=10, temperature=0.5, seed=derive_seed(3, 0))
    second = spool.request(1)
    assert list(second.prompt_ids) == [5, 6, 7]
    assert second.params == SamplingParams(max_tokens=61, temperature=0, seed=9, stop=("x",))
    assert spool.request(3).prompt_ids == tokenizer.encode_chat(chat)
    assert spool.request(9).params.max_tokens == 1
    assert [spool.row_id(index) for index in range(5)] == ["first", 1, 2, 3, 4]
    reasons = ["empty", "no such role", "surrogate", "token id 320", "token id -1", "64 tokens"]
    assert spool.failed().tolist() == [2, 4, 5, 6, 7, 8]
    for index, reason in zip(spool.failed(), reasons, strict=True):
        error = spool.row_error(int(index))
        assert error is not None and f"Line {index + 1} of rows.jsonl: " in error
        assert reason in error
    assert spool.row_error(0) is None
    spool.close()


def test_order_and_workload(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lengths = [(3, 5), (10, 5), (5, 10), (0, 1), (3, 5), (1, 1)]
    rows = [{"prompt": [1] * prompt, "max_tokens": new} for prompt, new in lengths]
    spool = spool_of(rows, tmp_path, tokenizer)
    assert spool.order().tolist() == [1, 2, 0, 4, 5]
    workload = spool.workload(spool.order())
    assert (workload.num_rows, workload.max_total_tokens) == (5, 15)
    assert (workload.max_prompt_tokens, workload.max_new_tokens) == (10, 10)
    assert (workload.total_prompt_tokens, workload.total_new_tokens) == (22, 26)
    assert spool.workload(np.array([5])).max_total_tokens == 2
    in_order = [
        (int(spool.num_prompt_tokens[row]), int(spool.max_new_tokens[row])) for row in spool.order()
    ]
    assert workload.ends_early
    most = replace(workload, ends_early=False)
    assert [row[:2] for row in most.row_lengths(0, 5)] == in_order
    assert [row[:2] for row in most.row_lengths(1, 3)] == in_order[1:3]
    spool.close()


@pytest.mark.parametrize(
    ("own", "ends_early"),
    [
        ({}, True),
        ({"ignore_eos": True}, False),
        ({"ignore_eos": True, "stop": ["x"]}, True),
        ({"ignore_eos": True, "stop_token_ids": [7]}, True),
        ({"ignore_eos": True, "structured_outputs": {"choice": ["a", "b"]}}, True),
        ({"max_tokens": 0, "prompt_logprobs": 0}, False),
    ],
)
def test_what_rows_say_of_their_ends_counts(
    own: dict[str, Any], ends_early: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Of their own, whatever holds for those that say nothing."""
    rows = [{"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}, {"prompt": [1, 2], **own}]
    spool = spool_of(rows, tmp_path, tokenizer)
    assert not len(spool.failed()), spool.row_error(1)
    assert spool.workload(np.array([0, 1])).ends_early == ends_early
    assert not spool.workload(np.array([0])).ends_early
    spool.close()


def test_a_spool_of_other_records_is_not_used(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spool_of([{"prompt": [1, 2]}], tmp_path, tokenizer).close()
    marker = tmp_path / "spool.json"
    written = json.loads(marker.read_bytes())
    defaults = SamplingParams()
    told = {"key": written["key"], "input_hash": written["input_hash"]}
    found = open_spool(tmp_path, defaults=defaults, **told)
    assert found is not None
    found.close()
    marker.write_text(json.dumps(told))
    assert open_spool(tmp_path, defaults=defaults, **told) is None


def test_samples_and_scores_are_work(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": [1] * 9, "n": 3},
        {"prompt": [1] * 4, "logprobs": 2, "max_tokens": 6},
        {"prompt": [1] * 5, "prompt_logprobs": 7, "max_tokens": 0},
        {"prompt": [1] * 64, "prompt_logprobs": 0, "max_tokens": 0},
        {"prompt": [1] * 60, "min_tokens": 8, "logit_bias": {"7": -1, "3": 2}},
        {"prompt": [1], "logit_bias": {"320": 1}},
        {"prompt": [1], "stop_token_ids": [320]},
        {"prompt": [1], "prompt_logprobs": 2, "n": 10001},
    ]
    spool = spool_of(rows, tmp_path, tokenizer)
    assert spool.failed().tolist() == [5, 6]
    for index, name in ((5, "logit_bias"), (6, "stop_token_ids")):
        assert f"{name} names token id 320" in (spool.row_error(index) or "")
    work = spool.workload(np.array([0, 1, 2, 3, 4]))
    assert (work.num_rows, work.min_samples, work.max_samples) == (3 + 1 + 1 + 1 + 1, 1, 3)
    assert (work.max_prompts(2), work.max_prompts(8)) == (2, 8)
    triple = spool.workload(np.array([0]))
    assert [triple.max_prompts(rows) for rows in (1, 2, 3, 5, 6)] == [1, 2, 1, 1, 2]
    assert (work.max_prompt_tokens, work.max_total_tokens) == (64, 64)
    assert (work.total_prompt_tokens, work.total_new_tokens) == (9 + 4 + 5 + 64 + 60, 30 + 6 + 4)
    assert (work.max_scored_tokens, work.max_listed_tokens, work.max_logprobs) == (63, 6, 7)
    assert spool.workload(np.array([2])).max_new_tokens == 0
    plain = spool.workload(np.array([0]))
    assert (plain.max_scored_tokens, plain.max_listed_tokens, plain.max_logprobs) == (0, 0, 0)
    assert spool.workload(np.array([7])).num_rows == 10001
    params = spool.request(4).params
    assert (params.max_tokens, params.min_tokens) == (4, 4)  # what the positions leave
    assert params.logit_bias == {3: 2.0, 7: -1.0}
    spool.close()


def test_continuations_are_scored_behind_their_prompts(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [
        {"prompt": [1, 2, 3], "continuation": [4, 5], "id": "pair"},
        {"prompt": "the cat", "continuation": " sat on the mat"},
        {"prompt": "the cat"},
        {"prompt": [7] * 100, "continuation": [8] * 4},
        {"prompt": [1], "continuation": [320]},
    ]
    spool = spool_of(rows, tmp_path, tokenizer)
    assert spool.failed().tolist() == [4]
    assert [spool.has_continuation(row) for row in range(4)] == [True, True, False, True]
    first, second, third, long = (spool.request(row) for row in range(4))
    assert (list(first.prompt_ids), first.score_from) == ([1, 2, 3, 4, 5], 3)
    assert first.params == SamplingParams(max_tokens=0, prompt_logprobs=1)
    context, whole = tokenizer.encode_batch(
        ["the cat", "the cat sat on the mat"], add_special_tokens=False
    )
    assert (second.prompt_ids, second.score_from) == (whole, len(context))
    assert (third.score_from, third.params.max_tokens) == (1, 10)
    assert (list(long.prompt_ids), long.score_from) == ([7] * 61 + [8] * 4, 61)
    assert long.num_computed == LIMITS.max_positions
    assert [spool.num_cut(row) for row in range(4)] == [0, 0, 0, 39]
    work = spool.workload(np.array([0, 1, 3]))
    most = max(2, len(whole) - len(context), 4)
    assert (work.max_new_tokens, work.max_scored_tokens, work.max_logprobs) == (0, most, 1)
    assert spool.row_id(0) == "pair"
    spool.close()


def test_defaults_beyond_the_vocabulary_are_refused_at_once(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InputError, match="logit_bias names token id 320"):
        SpoolWriter(
            tmp_path,
            tokenizer=tokenizer,
            limits=LIMITS,
            defaults=SamplingParams(logit_bias={320: 1.0}),
        )


def test_reuse_needs_the_same_key_and_a_complete_spool(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    written = spool_of([{"prompt": "x"}], tmp_path, tokenizer)
    input_hash, key = written.input_hash, "key " + written.input_hash
    written.close()
    again = open_spool(tmp_path, key=key, defaults=DEFAULTS, input_hash=input_hash)
    assert again is not None and again.request(0).prompt_ids == tokenizer.encode("x")
    again.close()
    assert open_spool(tmp_path, key="other", defaults=DEFAULTS, input_hash=input_hash) is None
    assert open_spool(tmp_path, key=key, defaults=DEFAULTS, input_hash="other") is None
    (tmp_path / "spool.json").write_text("{")
    assert open_spool(tmp_path, key=key, defaults=DEFAULTS, input_hash=input_hash) is None
    (tmp_path / "spool.json").unlink()
    assert open_spool(tmp_path, key=key, defaults=DEFAULTS, input_hash=input_hash) is None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=20), st.integers(1, 5))
def test_batches_do_not_change_ids(
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[str],
    batch_rows: int,
) -> None:
    limits = RowLimits(max_positions=1000, vocab_size=320)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_writer, "_BATCH_ROWS", batch_rows)
        rows = [{"prompt": prompt} for prompt in prompts]
        spool = spool_of(rows, tmp_path_factory.mktemp("spool"), tokenizer, limits)
    for index, prompt in enumerate(prompts):
        assert spool.request(index).prompt_ids == tokenizer.encode(prompt)
    spool.close()


def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = ({"prompt": [1] * 50, "id": f"row {index} " + "x" * 100} for index in range(4000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    with open(tmp_path / "in.jsonl", "rb") as file:
        spool = write_spool(
            file,
            tmp_path,
            name="in",
            key=str,
            tokenizer=tokenizer,
            limits=LIMITS,
            defaults=DEFAULTS,
            on_rows=lambda num_rows: None,
            on_remark=lambda text: None,
        )
    gc.collect()  # Python keeps freed tuples for later; these are not ours
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert RECORD.itemsize <= 38
    assert kept < 4000 * 36 + 200_000
    assert peak < 8_000_000
    spool.close()


def test_without_a_tokenizer(tmp_path: Path) -> None:
    rows = [{"prompt": [1]}, {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}]
    spool = spool_of(rows, tmp_path, None)
    assert spool.order().tolist() == [0]
    assert "no tokenizer" in (spool.row_error(1) or "")
    spool.close()


def test_endless_text_is_refused_before_it_takes_memory(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    longest = 0

    class Watched:
        def encode(self, text: str) -> list[int]:
            return tokenizer.encode(text)

        def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
            nonlocal longest
            longest = max(longest, *map(len, texts))
            return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

    rows = [{"prompt": "日本" * 100_000}, {"prompt": "x" * 80}, {"prompt": "x" * 30}]
    spool = spool_of(rows, tmp_path, Watched())  # type: ignore[arg-type]
    assert longest == 80
    assert spool.failed().tolist() == [0, 1] and "more than" in (spool.row_error(0) or "")
    spool.close()


def test_lines() -> None:
    text = b'\xef\xbb\xbf{"a":1}\r\n\n  \n{"b":2}\nlast'
    reader = LineReader(io.BytesIO(text), name="rows")
    assert list(reader) == [(1, b'{"a":1}'), (4, b'{"b":2}'), (5, b"last")]
    assert reader.digest == hash_stream(io.BytesIO(text))
    huge = b"x" * (2 * LONGEST_LINE_BYTES + 5)
    text = huge + b"\nnext\n" + b"y" * LONGEST_LINE_BYTES + b"\n"
    reader = LineReader(io.BytesIO(text), name="rows")
    lines = list(reader)
    assert lines[:2] == [(1, None), (2, b"next")] and len(lines[2][1] or b"") == LONGEST_LINE_BYTES


def packed(write: Callable[[IO[bytes]], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


LINE = '{"prompt": "the cat"}\n'


@pytest.mark.parametrize(
    ("content", "kind", "advice"),
    [
        (gzip.compress(LINE.encode()), "compressed by gzip", "zcat"),
        (lzma.compress(LINE.encode()), "compressed by xz", "xzcat"),
        (bz2.compress(LINE.encode()), "compressed by bzip2", "bzcat"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "compressed by zstd", "zstdcat"),
        (packed(lambda f: zipfile.ZipFile(f, "w").writestr("a", LINE)), "a zip archive", "unzip"),
        (b"PAR1\x15\x04\nPAR1", "a Parquet file", "lines=True"),
        (LINE.encode("utf-16"), "text in UTF-16", "iconv"),
        (LINE.encode("utf-16-le"), "text in UTF-16", "iconv"),
        (LINE.encode("utf-16-be"), "text in UTF-16", "iconv"),
        (b"\xfe\xff" + LINE.encode("utf-16-be"), "text in UTF-16", "iconv"),
        (b'[{"prompt": "the cat"}]', "one JSON array", "jq -c"),
        (b'\xef\xbb\xbf\n \n  [\n{"prompt": "x"}\n]', "one JSON array", "jq -c"),
        (b"[" + b"x" * (LONGEST_LINE_BYTES + 1), "one JSON array", "jq -c"),
    ],
    # Archives hold the time they were made: not for names, which all workers must agree on.
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_files_of_other_kinds(content: bytes, kind: str, advice: str) -> None:
    with pytest.raises(InputError, match=rf"The input rows\.x was .* It is {kind}\.") as refused:
        next(iter(LineReader(io.BytesIO(content), name="rows.x")))
    assert advice in refused.value.advice


def test_only_the_beginning_tells_the_kind() -> None:
    lines = [b'{"prompt": "[1"}', b"[1]", b"PAR1"]
    reader = LineReader(io.BytesIO(b"\n".join(lines)), name="rows")
    assert [line for _, line in reader] == lines


def test_seeds_are_stable_and_differ() -> None:
    assert derive_seed(0, 1) == derive_seed(0, 1)
    seeds = {derive_seed(job, index) for job in range(10) for index in range(100)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_full_disk(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("tokens.bin", "extras.bin"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(BudgetError, match="no room"):
        spool_of([{"prompt": "the cat", "id": 1}], tmp_path, tokenizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rows": 0},
        {"max_new_tokens": 0},
        {"max_total_tokens": 16},
        {"max_total_tokens": 9},
        {"total_prompt_tokens": 31},
        {"total_new_tokens": 16},
        {"min_samples": 0},
        {"max_samples": 0},
    ],
)
def test_a_workload_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    possible = {
        "num_rows": 3,
        "max_prompt_tokens": 10,
        "max_new_tokens": 5,
        "max_total_tokens": 15,
        "total_prompt_tokens": 20,
        "total_new_tokens": 15,
    }
    Workload(**possible)
    with pytest.raises(InputError):
        Workload(**(possible | changes))
