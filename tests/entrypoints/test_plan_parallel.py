"""``freight plan --chips`` as people meet it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freight.entrypoints.cli import main
from freight.hardware.storage import find_machine, write_machine

FOUR = ["--model", "opt-6.7b", "--machine", "t4", "--chips", "4"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(*arguments: str) -> int:
    return main(["plan", "--workload", "64:8", "--rows", "64", *arguments])


def records(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert plan(*arguments, "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


def test_ways_are_compared_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*FOUR) == 0
    out = capsys.readouterr().out
    for way in ("data 4", "pipeline 4", "tensor 4", "data 2 x pipeline 2", "data 2 x tensor 2"):
        assert any(line.startswith(way + "  ") for line in out.splitlines()), way
    assert "best     " in out and "--weights" in out and "layers   0 to " in out


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("qwen3.5-9b", ()),
        ("gemma-4-31b", ()),
        ("llama-3-8b", ("--task", "embed", "--workload", "64:1")),
    ],
)
def test_what_a_run_would_refuse_is_named(
    model: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers that ranks cannot cut, and what is read in place of a token."""
    assert plan("--model", model, "--machine", "h100", "--chips", "2", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    (cut,) = [line for line in lines if line.startswith("tensor 2  ")]
    assert " -  It has " in cut and cut.endswith("cannot be cut yet.")
    assert any(line.startswith("best     data 2: ") for line in lines)


def test_ways_are_compared_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    record = records(capsys, *FOUR)
    ways = record["ways"]
    assert record["best"] == ways[0]["shared_by"]
    speeds = [way["new_tokens_per_s"] for way in ways]
    assert speeds == sorted(speeds, reverse=True)
    for way in ways:
        assert way["data"] * way["stages"] * way["ranks"] == 4
        assert way["new_tokens_per_s"] == pytest.approx(64 * 8 / way["seconds"]["generate"])
        # Four machines at 1.204 dollars an hour.
        dollars = way["dollars_per_million_new_tokens"]["rented"]
        assert dollars == pytest.approx(4 * 1.204 / 3600 * 1e6 / way["new_tokens_per_s"])
        layers = [
            n for own in way["chips"] for n in range(own["first_layer"], own["last_layer"] + 1)
        ]
        assert layers == [*range(32)]


def test_chips_that_share_a_host_have_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    record = records(capsys, *FOUR, "--host-chips", "4")
    assert record["host_chips"] == 4
    assert all(not way["dollars_per_million_new_tokens"] for way in record["ways"])


def test_what_was_not_measured_is_marked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a preset all figures; of a measured machine those that rest on links between chips."""
    assert plan(*FOUR) == 0
    lines = capsys.readouterr().out.splitlines()
    ways = [line for line in lines if line.startswith(("data ", "pipeline ", "tensor "))]
    assert len(ways) == 5
    assert all(line[24:57].count("~") == 3 for line in ways)  # speed, block, rent
    assert any(line.startswith("~        not calibrated: rates are the preset's") for line in lines)
    assert any("its fixed times estimates" in line for line in lines)
    assert not ways[0].endswith("sketched") and ways[-1].endswith("sketched")
    assert any(line.startswith("sketched from fewer sweeps") for line in lines)

    record = records(capsys, *FOUR)
    assert record["uncalibrated"]["rates"].endswith("freight profile measures them")
    assert "estimate" in record["uncalibrated"]["links"]["link_latency_s"]
    assert not record["ways"][0]["is_sketch"] and record["ways"][-1]["is_sketch"]
    for way in record["ways"]:
        crosses = way["stages"] * way["ranks"] > 1
        assert way["uncalibrated"] == ["rates", *(["links"] if crosses else [])]

    measured = replace(find_machine("t4"), host={"name": "here"})
    path = tmp_path / "measured.json"
    write_machine(measured, path)
    own = ["--model", "opt-6.7b", "--machine", str(path), "--chips", "2", "--chip", "t4"]
    record = records(capsys, *own)
    assert record["uncalibrated"]["rates"] is None
    for way in record["ways"]:
        assert way["uncalibrated"] == (["links"] if way["data"] == 1 else [])
    assert plan(*own) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("preset" in line for line in lines)
    (alone,) = (line for line in lines if line.startswith("data 2 "))
    assert "~" not in alone


def test_a_bound_on_latency_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    free = records(capsys, *FOUR)["ways"]
    bound = 0.7 * free[0]["seconds"]["block"]
    kept = records(capsys, *FOUR, "--max-latency", str(bound))["ways"][0]
    assert kept["seconds"]["block"] <= bound and kept["keeps_to_latency"]
    assert plan(*FOUR, "--max-latency", "0.0001") == 1
    assert "The least that was found is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "opt-6.7b", "--machine", "t4", "--host-chips", "2"], "for several chips"),
        (
            ["--model", "opt-6.7b", "--machine", "t4", "--chips", "2", "--host-chips", "3"],
            "no more chips than there are",
        ),
        (["--model", "opt-6.7b", "--machine", "t4", "--chip", "t4"], "for several chips"),
        (["--model", "opt-6.7b", "--machine", "t4", "--chips", "0"], "one at least"),
        ([*FOUR, "--explain"], "--explain was given with --chips"),
        ([*FOUR, "--chip", "t5"], "no preset"),
        (["--model", "opt-6.7b", "--machine", "a10g", "--chips", "2"], "with --chip"),
        (["--model", "llama-3.1-405b", "--machine", "laptop", "--chips", "1"], "on disk"),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("freight: error: ") and len(error.strip().splitlines()) == 3
    assert words in error
