"""Structured answers over ranks: each follows the same tokens, whichever of them draws."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .commands import NUM_ROWS, job
from .forks import Forks

PATTERN = r" [0-9]{1,4} (m|cm|km)(, (long|wide)){0,2}"
FLAGS = ["--regex", PATTERN, "--temperature", "1.2", "--max-tokens", "24"]


@pytest.mark.parametrize("split", ["layers", "rows", "tensor"])
def test_ranks_answer_as_one_process(split: str, rows: Path, forks: Forks, tmp_path: Path) -> None:
    outputs = []
    for size in (1, 2):
        output = tmp_path / f"{size}.jsonl"
        status, told = forks.finish(size, job(rows, output, *FLAGS, "--split", split))
        assert status == 0, told
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1]
    done = [json.loads(line) for line in outputs[0].splitlines()]
    assert len(done) == NUM_ROWS
    for row in done:  # some of them may have few tokens
        assert row["finish_reason"] == "length" or re.fullmatch(PATTERN, row["text"]), row
    assert sum(row["finish_reason"] == "stop" for row in done) > NUM_ROWS // 2
