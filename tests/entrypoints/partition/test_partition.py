"""``freight partition`` as people and programs meet it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from freight.entrypoints.cli import main
from freight.entrypoints.partition.inputs import read_model
from freight.entrypoints.partition.sweep import describe_sweep

PALM = ["--model", "palm-540b", "--chip", "tpu-v4", "--chips", "64"]


def run(*arguments: str) -> int:
    return main(["partition", *arguments])


def record(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_person_reads_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *PALM, "--phase", "decode", "--batch", "64", "--context", "2048") == 0
    out = capsys.readouterr().out
    for word in ("model", "chips", "padding", "decode", "layout", "time", "memory", "rates"):
        assert any(line.startswith(word) for line in out.splitlines()), word
    assert "2D weight-stationary; attention by rows" in out
    assert "memory binds" in out and "48 heads padded to 64" in out and "3.3%" in out
    assert "reduce-scatter over zy (E) of both" in out
    assert "Pope et al., Table 2" in out


def test_a_program_reads_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "plan", *PALM)
    (step,) = found["steps"]
    parts = sum(step[name] for name in ("compute_s", "memory_s", "links_s", "fixed_s"))
    assert step["seconds"] == pytest.approx(parts)
    moved = sum(
        part["count"] * line["waited_s"] for part in step["parts"] for line in part["steps"]
    )
    assert moved == pytest.approx(step["links_s"])
    x, y, z = step["mesh"].values()
    assert x * y * z == 64
    mlp = step["mlp_alone"]
    assert 0 < mlp["shortest_seconds"] <= mlp["seconds"] * (1 + 1e-12)
    assert len(mlp["shortest_steps"]) >= 3
    memory = step["memory_bytes"]
    assert memory["weights"] + memory["keys and values"] + memory["working"] <= memory["room"]


def test_rates_of_another_chip_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """The defaults were measured on one kind of chip."""
    own = ["--model", "llama-2-7b", "--chips", "4", "--chip"]
    for chip, is_calibrated in (("tpu-v4", True), ("h100", False)):
        for command in ("plan", "search"):
            found = record(capsys, command, *own, chip)
            rates = found["rates"] if command == "search" else found["steps"][0]["efficiency"]
            assert rates["is_calibrated"] is is_calibrated
            assert run(command, *own, chip) == 0
            marked = "not calibrated for h100" in capsys.readouterr().out
            assert marked is not is_calibrated


def test_the_shortest_path_is_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """It is no slower; where it is faster by a hundredth, it is written out."""
    given = ["--batch", "64", "--context", "2016", "--mesh", "4x4x4"]
    (step,) = record(capsys, "plan", *PALM, *given)["steps"]
    path = step["shortest"]
    assert 0.9 * step["seconds"] < path["seconds"] < 0.99 * step["seconds"]
    assert path["fits"] and path["mfu"] > step["mfu"]
    assert run("plan", *PALM, *given) == 0
    out = capsys.readouterr().out
    assert "with the shortest path through a layer" in out
    assert f"stream {path['stream']}; {path['moves'][0]}" in out


def test_a_workload_has_both_phases(capsys: pytest.CaptureFixture[str]) -> None:
    """The chat example: 1.9 s (Pope et al., section 4)."""
    given = ["--workload", "1920+64:64", "--prefill-batch", "1", "--decode-batch", "64"]
    found = record(capsys, "plan", *PALM, *given, "--weight-bits", "8")
    prefill, decode = found["steps"]
    assert (prefill["rows"], prefill["new_tokens"], prefill["past"]) == (1, 64, 1920)
    assert (decode["rows"], decode["new_tokens"], decode["past"]) == (64, 1, 2015)
    assert prefill["mesh"] == decode["mesh"] and prefill["stored"] == decode["stored"]
    total = found["total"]
    assert total["seconds_of_a_row"] == pytest.approx(1.9, rel=0.08)
    per_row = prefill["seconds"] + decode["seconds"] * 64 / 64
    assert total["chip_seconds_per_new_token"] == pytest.approx(64 * per_row / 64)
    assert run("plan", *PALM, *given) == 0
    assert "a row waits" in capsys.readouterr().out


def test_what_is_given_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--mesh", "4x4x4", "--dollars-per-hour", "3.6", "--kv-bits", "8"]
    plain = record(capsys, "plan", *PALM, *given)["steps"][0]
    assert list(plain["mesh"].values()) == [4, 4, 4]
    assert plain["dollars_per_token"] == pytest.approx(plain["chip_seconds_per_token"] * 1e-3)
    rates = ["--compute-share", "0.5", "--memory-share", "0.5", "--link-share", "0.5"]
    slow = record(capsys, "plan", *PALM, *given, *rates, "--layer-us", "200")["steps"][0]
    peaks = record(capsys, "plan", *PALM, *given, "--peaks")["steps"][0]
    assert peaks["seconds"] < plain["seconds"] < slow["seconds"]
    assert slow["fixed_s"] == pytest.approx(118 * 200e-6)
    assert slow["compute_s"] == pytest.approx(2 * peaks["compute_s"])
    assert "as given" in slow["efficiency"]["source"] and "peaks" in peaks["efficiency"]["source"]
    hidden = record(capsys, "plan", *PALM, *given, "--overlap", "1")["steps"][0]
    assert hidden["links_s"] < plain["links_s"]


def test_rates_are_fitted_to_what_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = {"phase": "decode", "rows": 64, "new_tokens": 1, "past": 2048, "seconds": 0.1}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([step]), "utf-8")
    found = record(capsys, "plan", *PALM, "--measured", str(path))["steps"][0]
    assert found["seconds"] == pytest.approx(0.1)
    assert "fitted to 1 steps in measured.json" in found["efficiency"]["source"]
    assert found["efficiency"]["is_calibrated"]
    path.write_text("[{}]", "utf-8")
    assert run("plan", *PALM, "--measured", str(path)) == 2
    assert "no list of objects" in capsys.readouterr().err


def test_schemes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("search", "--model", "llama-2-7b", "--chips", "4", "--chip", "a100") == 0
    out = capsys.readouterr().out
    assert "found    3 schemes" in out
    assert "sent    3 s h elements" in out and "sent    1.5 s h + 2.25 h f elements" in out
    assert "saves   0.5625 s h elements against scheme 3, weights +24.9%" in out
    assert "without overlap" in out and "gathering overlapped" in out


def test_schemes_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "search", "--model", "llama-2-7b", "--chips", "4", "--literal")
    assert len(found["schemes"]["schemes"]) == 55
    assert found["rules"]["core_by_heads"] is False
    lifted = record(
        capsys, "search", "-m", "llama-2-7b", "--lift", "gathered-for-rows", "--chip", "a100"
    )
    assert len(lifted["schemes"]["schemes"]) == 8
    for spans in lifted["schemes"]["fastest"].values():
        assert spans[0]["first"] == 1 and spans[-1]["last"] == 65536
        assert all(1 <= span["scheme"] <= 8 for span in spans)


def test_charts_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--model", "palm-8b", "--chip", "tpu-v4", "--chips", "2", "--context", "256"]
    found = record(capsys, "plan", *given, "--sweep", str(tmp_path / "charts"))["sweep"]
    names = {path.stem for path in (tmp_path / "charts").glob("*.png")}
    assert names == {
        "frontier-decode",
        "frontier-prefill",
        "mfu-decode",
        "mfu-prefill",
        "crossovers",
        "stationary",
        "prefill-mfu",
        "contexts",
        "one-prompt",
        "shapes",
    }
    for name in names:
        assert (tmp_path / "charts" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert any(found[name].values()), name
    best = found["frontier-decode"]["frontier"]
    assert [cost for _, cost in best] == sorted((cost for _, cost in best), reverse=True)
    assert found["max_context"]["attention by rows"]["128 rows"] > 0
    # What a frontier's points are, and what a person is told beside the charts.
    assert found["rows"]["frontier-decode"]["2 chips"] == [1, 4, 16, 64, 256, 1024]
    assert all(len(found["rows"][name]) > 1 for name in ("mfu-prefill", "shapes"))
    _, crossing, heads, rows, charts = describe_sweep(found, tmp_path / "charts")
    assert "1D weight-stationary, XY-weight-gathered from 24,576" in crossing
    longest = found["max_context"]["attention by heads"]["512 rows"]
    assert f"{longest:,} tokens for 512 rows" in heads and rows.startswith("context  attention by")
    assert charts.count(".png") == 10
    (tmp_path / "file").write_text("")
    assert run("plan", *given, "--sweep", str(tmp_path / "file")) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_experts_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No path is searched through them and no closed form knows them: said, and left out."""
    path = tmp_path / "config.json"
    config = {"model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    config |= {"vocab_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2}
    path.write_text(json.dumps(config), "utf-8")
    given = ["--model", str(path), "--chips", "2", "--batch", "8", "--context", "64"]
    assert record(capsys, "plan", *given)["steps"][0]["shortest"] is None
    assert run("plan", *given, "--sweep", str(tmp_path / "charts")) == 0
    out = capsys.readouterr().out
    assert " B to a token" in out and "path     not searched for" in out
    assert "charts   in" in out and "contexts.png" in out
    assert "crossing" not in out and "crossovers" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "No model was given"),
        (["plan", "--model", "palm-541b"], "Did you mean palm-540b"),
        (["plan", *PALM[:4], "--chips", "63"], "cannot be padded"),
        (["plan", *PALM[:4], "--chips", "63"], "as 48 or 64"),
        (["plan", *PALM, "--workload", "64:8", "--prefill-batch", "0"], "A step of 0 rows"),
        (["plan", *PALM, "--dollars-per-hour", "-1"], "a number from 0"),
        (["plan", *PALM[:4], "--chips", str(10**12)], "does not divide by 1000000000000"),
        (["plan", *PALM, "--decode-batch", "8"], "--decode-batch was given without --workload"),
        (["plan", *PALM, "--context", "-1"], "after none or more"),
        (["plan", *PALM, "--chip", "tpu-v9"], "Did you mean"),
        (["plan", *PALM, "--mesh", "4x4"], "not a box"),
        (["plan", *PALM, "--mesh", "4x4x8"], "It has 128"),
        (["plan", *PALM, "--workload", "64"], "not a number of prompt tokens"),
        (["plan", *PALM, "--batch", "0"], "one row"),
        (["plan", *PALM, "--compute-share", "2"], "compute of 2"),
        (["search", "--model", "palm-8b"], "side by side"),
        (["search", "--model", "llama-2-7b", "--chips", "3"], "do not divide by 3"),
        (["search", "--model", "llama-2-7b", "--most-tokens", "0"], "every length".capitalize()),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", "palm-540b", "--chip", "tpu-v4", "--chips", "16") == 1
    err = capsys.readouterr().err
    # 34 chips would hold it; the next number by which the model's width divides is 36.
    assert "weights" in err and "Take about 36 chips" in err and "weights of fewer bits" in err


def test_no_torch_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    import subprocess

    code = (
        "import sys\nfrom freight.entrypoints.cli import main\n"
        "main(['partition', 'plan', '--model', 'llama-2-7b', '--chip', 'h100', '--chips', '2'])\n"
        "main(['partition', 'search', '--model', 'llama-2-7b'])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_model_in_the_package_has_a_name() -> None:
    assert read_model("demo").num_layers == 6
