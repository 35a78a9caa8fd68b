"""``freight plan`` and ``freight profile`` as people meet them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from freight.entrypoints import own_machine as own
from freight.entrypoints.cli import main
from freight.entrypoints.plan import bundled_configs
from freight.entrypoints.profile import default_path, read_own_profile
from freight.errors import InputError
from freight.hardware.storage import find_machine, write_machine
from freight.quantities import GIB

SMALL = ["--workload", "64:8", "--rows", "16"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(*arguments: str) -> int:
    return main(["plan", *SMALL, *arguments])


def test_a_person_reads_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "llama-3-8b", "--machine", "t4", "--gpu-memory", "8GiB") == 0
    out = capsys.readouterr().out
    for word in ("model", "machine", "work", "policy", "time", "speed", "busy", "moved", "cost"):
        assert any(line.startswith(word) for line in out.splitlines()), word
    assert "--weights" in out and "of 8.00 GiB" in out and "(binds)" in out


def test_a_program_reads_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "opt-6.7b", "--machine", "t4", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    for tier, memory in record["memory_bytes"].items():
        assert 0 <= memory["used"] <= memory["budget"], tier
    seconds = record["seconds"]
    assert seconds["generate"] == pytest.approx(seconds["prefill"] + seconds["decode"])
    assert record["new_tokens_per_s"] == pytest.approx(16 * 8 / seconds["generate"])
    assert sum(record["policy"]["weights"].values()) == pytest.approx(1)
    assert all(0 <= share <= 1 + 1e-9 for share in record["utilisation"].values())


def test_a_policy_that_is_given_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--weights", "10/40/50", "--kv", "0/100/0", "--activations", "100/0/0"]
    shape = ["--micro-batch-size", "4", "--num-micro-batches", "2"]
    assert plan("--model", "opt-6.7b", "--machine", "t4", "--json", *given, *shape) == 0
    policy = json.loads(capsys.readouterr().out)["policy"]
    assert policy["weights"] == {"gpu": 0.1, "cpu": 0.4, "disk": 0.5}
    assert (policy["micro_batch_size"], policy["num_micro_batches"]) == (4, 2)


def test_machines_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "llama-3-8b", "--machine", "t4", "--machine", "laptop") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["machine", "t4", "laptop"]


def test_a_config_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    path = tmp_path / "some.json"
    path.write_text(json.dumps(config))
    assert plan("--model", str(path), "--machine", "laptop") == 0
    assert "3 layers" in capsys.readouterr().out


def test_every_bundled_model_can_be_planned_for() -> None:
    assert {"opt-6.7b", "opt-30b", "opt-175b", "llama-2-70b", "llama-3-8b"} <= set(
        bundled_configs()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "opt-6.7b", "--machine", "a100"], ["no preset", "a100-40gb"]),
        (["--model", "lama-3-8b", "--machine", "t4"], ["no such file", "llama-3-8b"]),
        (["--machine", "t4"], ["No model was given", "--model"]),
        (["--model", "opt-6.7b"], ["No machine was given", "freight profile"]),
        (["--model", "opt-6.7b", "--machine", "t4", "--gpu-memory", "99GiB"], ["The machine t4"]),
        (["--model", "opt-6.7b", "--machine", "t4", "--workload", "512"], ["like 512:32"]),
        (["--model", "opt-6.7b", "--machine", "t4", "--rows", "0"], ["num_rows=0"]),
        (["--model", "opt-6.7b", "--machine", "t4", "--weights", "50/60/0"], ["Shares of"]),
        (["--model", "llama-3.1-405b", "--machine", "laptop"], ["The disk of laptop has"]),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("freight: error: ") and len(error.strip().splitlines()) == 3
    for word in words:
        assert word in error


HOST = {"cpu": "an imagined one", "threads": "2", "gpu": "none"}


def test_a_profile_of_another_machine_says_so(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert read_own_profile(HOST, path) is None
    write_machine(replace(find_machine("laptop"), host=HOST), path)
    found = read_own_profile(HOST, path)
    assert found is not None and found.units["cpu"].memory_bytes == 32 * GIB
    with pytest.raises(InputError, match="of another machine: cpu an imagined one"):
        read_own_profile({**HOST, "cpu": "this one"}, path)


def test_short_work_is_not_worth_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work is: once, by another process, whose profile is used; where that fails, work goes on
    without."""
    from freight.runtime import profiler
    from freight.runtime.options import EngineOptions

    monkeypatch.setattr(profiler, "identify_host", lambda _: HOST)
    said: list[str] = []
    calls: list[str] = []

    def measure(kind: str, directory: Path | None) -> None:
        calls.append(kind)
        if len(calls) == 1:
            raise OSError("no room")
        write_machine(replace(find_machine("laptop"), host=HOST), default_path())

    monkeypatch.setattr(own, "_measure", measure)
    options = EngineOptions(device="cpu")
    assert own.own_machine(options, tmp_path, 10.0, said.append) is None and not calls
    assert own.own_machine(options, tmp_path, 1e4, said.append) is None
    assert "nominal rates" in said[-1]
    found = own.own_machine(options, tmp_path, 1e4, said.append)
    assert found is not None and calls == ["cpu", "cpu"]
    assert own.own_machine(options, tmp_path, 10.0, said.append) == found and len(calls) == 2


def test_recalibrating_meets_what_was_measured() -> None:
    """A part that took twice as long is half as fast; one that hardly worked tells nothing."""
    machine = find_machine("laptop")
    predicted = {"compute": 10.0, "disk read": 4.0, "disk write": 0.1}
    measured = {"compute": 20.0, "disk read": 3.2, "disk write": 0.3}
    found = own.recalibrate(machine, predicted, measured)
    for rows in (1, 64, 4096):
        rates = [m.units["cpu"].products["float32"].at(rows) for m in (machine, found)]
        assert rates[1] == pytest.approx(rates[0] / 2)
    for name, factor in (("disk read", 1.25), ("disk write", 1.0)):
        seconds = [m.links[name].seconds(1e9, "kv", 1 << 20) for m in (machine, found)]
        latency = machine.links[name].latency_s
        assert seconds[0] - latency == pytest.approx((seconds[1] - latency) * factor)
    assert found.host == machine.host
