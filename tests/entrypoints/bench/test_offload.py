"""The command from end to end on a tiny model, its closed form of bytes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from freight.demo import MODEL_DIR
from freight.entrypoints.bench import offload
from freight.entrypoints.bench.children import run_child
from freight.entrypoints.bench.closed_form import SweepLog, expected_bytes, logged_bytes
from freight.entrypoints.bench.flexgen_run import flexgen_policies
from freight.entrypoints.bench.groups import GroupMaker
from freight.entrypoints.bench.machine import Rate
from freight.entrypoints.bench.peer_run import resident_bytes
from freight.entrypoints.bench.peers import Peer, Trial, check_peers, parse_batch_sizes, sweep
from freight.entrypoints.bench.report import byte_ratios, summarise
from freight.entrypoints.bench.weights import find_config
from freight.entrypoints.bench.work import Work, make_rows, parse_shape
from freight.entrypoints.cli import main
from freight.errors import InputError
from freight.model.config import read_config
from freight.model.decoder import tensor_shapes
from freight.runtime.options import EngineOptions

from ...runtime import tiny
from ...runtime.test_engine_policies import POLICIES

pytestmark = pytest.mark.usefixtures("forked_children")

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **tiny.SIZES,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def bench(config: Path, *flags: str) -> int:
    """Small work; of flags that are given twice the last one counts."""
    command = f"bench offload --model {config} --work-dir {config.parent}/work --dtype float32"
    return main([*command.split(), *"--shape 20:3 --rows 5 --repeats 1".split(), *flags])


def record_of(out: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(out.splitlines()[-1])
    return record


@pytest.mark.usefixtures("begun_anew")
def test_from_end_to_end(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = f"--weights 30/70 --kv 40/60 --micro-batch-size 2 --disk-dir {config.parent}"
    assert bench(config, *flags.split()) == 0
    out = capfd.readouterr().out
    lines = out.splitlines()
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("disk:", "products:", "ceiling:", "freight:")
    ]
    assert places == sorted(places), "the ceiling comes first"
    record = record_of(out)
    run = record["systems"]["freight"]["runs"][0]
    assert run["new_tokens"] == 15 and run["num_sweeps"] % 3 == 0
    assert run["prefill_s"] + run["decode_s"] <= run["generate_s"]
    assert record["byte_ratios"] == [{"disk read": 1.0, "disk write": 1.0}]
    assert run["decoded_tokens"] == 10 and run["decode_tokens_per_s"] > 0
    assert run["prefill_tokens_per_s"] == pytest.approx(100 / run["prefill_s"])
    assert run["total_tokens_per_s"] == pytest.approx(115 / run["generate_s"])
    assert 50 << 20 < run["peak_bytes"] <= record["systems"]["freight"]["peak_bytes"]
    assert record["share_of_ceiling"] > 0 and record["machine"]["ceiling"]["seconds"] > 0
    usual_s = record["usual_ceilings_s"]
    assert len(usual_s) == 1, "of one run nothing is measured again"
    assert usual_s[0] >= record["machine"]["ceiling"]["seconds"]
    share = usual_s[0] / run["generate_s"]
    assert record["share_of_usual_ceiling"] == pytest.approx(share)
    assert any(line.startswith("usual:") and f"{share:.3f} of that" in line for line in lines)


def test_weights_that_nobody_writes(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each run makes them, compressed too; peers are given as many of their own."""
    flags = "--unwritten-weights --weight-bits 4 --group-size 32 --peer transformers"
    assert bench(config, *flags.split(), "--peer-batch-sizes", "5") == 0
    record = record_of(capfd.readouterr().out)
    assert not [*config.parent.rglob("*.safetensors")]
    assert record["systems"]["freight"]["runs"][0]["new_tokens"] == 15
    peer = record["systems"]["transformers"]
    assert peer["same_first_tokens"] is None, "their weights are others"
    assert peer["trials"][0]["generate_s"] == peer["runs"][0]["generate_s"], "its trial is its run"


EXPERTS = {
    **CONFIG,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 12,
    "num_experts_per_tok": 1,
    "sliding_window": None,
}


@pytest.mark.parametrize(("rule", "device"), [("zigzag", "sim"), ("refill", "cpu")])
def test_of_experts_those_that_were_chosen_count(
    rule: str, device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(EXPERTS))
    flags = f"--weights 0/0/100 --kv 0/100/0 --admission {rule} --micro-batch-size 2"
    assert bench(path, *flags.split(), "--num-micro-batches", "2", "--device", device) == 0
    record = record_of(capfd.readouterr().out)
    run = record["systems"]["freight"]["runs"][0]
    assert set(record["byte_ratios"][0].values()) == {1.0}
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(read_config(tmp_path)).items()}
    all_bytes = 4 * sum(size for name, size in sizes.items() if name != "embedding")
    assert run["moved_bytes"]["disk read"] < 0.9 * all_bytes * run["num_sweeps"]


def test_rows_that_enter_at_any_time_have_phases_too(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One row after the other enters: prompts beside rows that decode, and a last row alone."""
    flags = "--weights 30/70 --micro-batch-size 2 --num-micro-batches 1 --admission diagonal"
    assert bench(config, *flags.split()) == 0
    out = capfd.readouterr().out
    run = record_of(out)["systems"]["freight"]["runs"][0]
    assert 0 < run["decoded_tokens"] < 10
    assert run["decode_tokens_per_s"] == pytest.approx(run["decoded_tokens"] / run["decode_s"])
    assert run["prefill_s"] + run["decode_s"] == pytest.approx(run["generate_s"], rel=0.2)
    assert "prefill" in out and "decode" in out


def test_integer_products_have_a_ceiling_of_their_own(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(config.parent))
    assert bench(config, "--weights", "30/70", "--compute", "int8") == 0
    out = capfd.readouterr().out
    machine = record_of(out)["machine"]
    if machine["compute"] == "plain":
        assert "note:     --compute int8: this CPU is not faster" in out
    else:
        assert "float32 on CPU, products in int8" in out and not machine["notes"]
        assert (config.parent / "freight" / "compressed").is_dir()
    assert record_of(out)["byte_ratios"] == [{"disk read": 1.0}]
    shapes = tensor_shapes(read_config(config.parent)).items()
    names = {name: shape for name, shape in shapes if len(shape) == 2 and name != "embedding"}
    elements = sum(rows * columns for rows, columns in names.values())
    if machine["compute"] == "plain":
        assert machine["weight_bytes"] == 4 * elements
    else:  # with the scales of the longest rows, which have the least of them
        with_scales = sum(rows * (columns + 4) for rows, columns in names.values())
        assert elements < machine["weight_bytes"] <= with_scales


def run_with_a_peer(
    repeats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], dict[str, Any]]:
    """What ran, in order, and the record, of runs that take as long as is said here."""
    order: list[Any] = []
    own_s, peer_s = iter([2.0, 5.0, 3.0]), iter([31.0, 20.0, 27.0, 21.0, 24.0])

    def figures(seconds: float, **more: Any) -> dict[str, Any]:
        times = {"load_s": 1.0, "generate_s": seconds, "prefill_s": 1.0, "decode_s": seconds - 1}
        return {**times, "peak_bytes": 1 << 20, "first_tokens": [0] * 4, **more}

    def own(job: dict[str, Any], asked: str, group: Any = None) -> dict[str, Any]:
        if job.get("task") != "freight":
            return {"usual": {"seconds": 2.5}}
        order.append("freight")
        moved = {"disk read": 10}
        told = {"plan": "", "forecast_s": None, "moved_bytes": moved, "expected_bytes": moved}
        return figures(next(own_s), **told)

    def peer(self: Peer, setting: int) -> Trial:
        order.append(setting)
        if setting == 4:
            return Trial(setting=4, result=None, reason="it was killed")
        result = figures(next(peer_s), batch_size=setting)
        return Trial(setting=setting, result=result, reason="")

    monkeypatch.setattr(offload, "run_or_raise", own)
    monkeypatch.setattr(offload, "forget_files", lambda directory: order.append("forget"))
    monkeypatch.setattr(Peer, "run", peer)
    request: Any = SimpleNamespace(
        work=Work(num_rows=4, prompt_tokens=8, new_tokens=2),
        options=EngineOptions(device="cpu"),
        model=tmp_path,
        group=None,
        peers=("accelerate",),
        settings={"accelerate": (4, 2, 1)},
        timeout_s=1.0,
        resident_bytes=None,
        repeats=repeats,
        is_unwritten=False,
        peer_rows=2,
        peer_work=Work(num_rows=2, prompt_tokens=8, new_tokens=2),
    )
    measured = offload._Bench(
        request=request,
        model_dir=tmp_path,
        job={"model": str(tmp_path), "dtype": "float32"},
        probe={"task": "probe"},
        probed={
            "paths": [{"name": "disk", "room_bytes": 1}],
            "budget_bytes": 1 << 30,
            "parameter_bytes": 1000,
            "ceiling": {"seconds": 1.5},
            "usual": {"seconds": 2.5},
        },
    )
    measured.run()
    return order, measured.record(Namespace(model="tiny"))


def test_where_each_runs_once_ours_is_first(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is ended while a peer runs has told of it, and the peer's best try is its run."""
    order, record = run_with_a_peer(1, tmp_path, monkeypatch)
    assert order == ["forget", "freight", "forget", 4, "forget", 2, "forget", 1]
    assert record["systems"]["freight"]["median"]["generate_s"] == 2.0
    assert record["systems"]["accelerate"]["median"]["generate_s"] == 20.0
    assert record["times_peer"] == {"accelerate": 20.0}


def test_systems_run_in_turn_with_what_suits_them_best(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch sizes are tried first; then own runs and the peer's best alternate, and medians count.
    Of files nothing is left in the page cache before any run."""
    order, record = run_with_a_peer(3, tmp_path, monkeypatch)
    assert order[::2] == ["forget"] * 9
    assert order[1::2] == [4, 2, 1, *["freight", 1] * 3]
    assert record["systems"]["freight"]["median"]["generate_s"] == 3.0
    assert record["systems"]["accelerate"]["median"]["generate_s"] == 24.0
    assert record["times_peer"] == {"accelerate": 16.0}, "for each of its two rows"
    assert record["share_of_ceiling"] == 0.5
    trials = record["systems"]["accelerate"]["trials"]
    assert [(t["batch_size"], t["generate_s"]) for t in trials] == [(4, None), (2, 31.0), (1, 20.0)]


@pytest.mark.parametrize("peer", ["accelerate", "transformers", "flexgen"])
def test_a_peer_that_is_missing_ends_the_command(
    peer: str, config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench(config, "--peer", peer) == 2
    told = capfd.readouterr().err
    assert f"--peer {peer} was given." in told and "Not installed here" in told
    assert "pip install" in told and "Traceback" not in told


@pytest.mark.slow
def test_against_both_peers(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--weights 0/100 --peer accelerate --peer transformers --peer-resident 200KiB"
    assert bench(config, *flags.split(), "--peer-batch-sizes", "5,2") == 0
    systems = record_of(capfd.readouterr().out)["systems"]
    for name in ("accelerate", "transformers"):
        assert [trial["batch_size"] for trial in systems[name]["trials"]] == [5, 2]
        assert systems[name]["runs"][0]["new_tokens"] == 15
        assert systems[name]["same_first_tokens"] == 1.0
    assert systems["accelerate"]["runs"][0]["resident_bytes"] == 200 << 10
    assert len(list((config.parent / "work").glob("*/model.safetensors"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("begun_anew")
def test_on_the_simulated_device_in_a_group(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        GroupMaker(limit_bytes=1 << 30).check()
    except InputError as error:
        pytest.skip(str(error))
    flags = "--device sim --gpu-memory 8MiB --weights 20/30/50 --sim-bandwidth 1GB --group 1GiB"
    assert bench(config, *flags.split()) == 0
    record = record_of(capfd.readouterr().out)
    assert record["byte_ratios"] == [{"disk read": 1.0, "host to device": 1.0}]
    assert 0 < record["systems"]["freight"]["group_peak_bytes"] <= 1 << 30
    assert [path["name"] for path in record["machine"]["paths"]] == ["link", "disk"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the head shares the embedding's table."""
    directories = {tied: tmp_path_factory.mktemp("model") for tied in (False, True)}
    for tied, directory in directories.items():
        tiny.make_model(directory, tie_word_embeddings=tied)
    return directories


@pytest.mark.parametrize(
    "name",
    [
        "cpu: row by row",
        "cpu: all on disk",
        "cpu: odd mix",
        "sim: weights on cpu",
        "sim: KV on disk",
        "sim: all on disk",
        "sim: odd mix",
        "sim: attention on the CPU, KV on disk",
        "sim: attention on both",
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_the_closed_form(
    name: str, tied: bool, models: dict[bool, Path]
) -> None:
    work = Work(num_rows=5, prompt_tokens=17, new_tokens=3)
    rows = make_rows(work, tiny.VOCAB)
    with tiny.engine(models[tied], rows, work.new_tokens, **POLICIES[name]) as engine:
        answers = tiny.run(engine, rows, work.new_tokens)
        moved = {k: n - engine.load_traffic.get(k, 0) for k, n in engine.traffic.moved.items()}
        assert {k: n for k, n in moved.items() if n} == expected_bytes(engine, rows, answers)


@pytest.mark.parametrize("prompt_tokens", [3, 17])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", ["cpu: odd mix", "sim: weights on cpu", "sim: odd mix"])
def test_bytes_of_experts_are_those_of_the_closed_form(
    name: str, size: int, prompt_tokens: int, tmp_path: Path
) -> None:
    """Of prompts enough tokens for all experts to be expected, and not; activations that pass once
    for each group of experts."""
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    tiny.make_model(tmp_path, config=Qwen3MoeConfig(**tiny.SIZES, head_dim=16, **sizes))
    work = Work(num_rows=5, prompt_tokens=prompt_tokens, new_tokens=3)
    rows = make_rows(work, tiny.VOCAB)
    options = {**POLICIES[name], "micro_batch_size": size}
    with tiny.engine(tmp_path, rows, work.new_tokens, **options) as engine:
        log = SweepLog(engine)
        tiny.run(engine, rows, work.new_tokens, on_batch=log.on_batch)
        moved = {k: n - engine.load_traffic.get(k, 0) for k, n in engine.traffic.moved.items()}
        assert {k: n for k, n in moved.items() if n} == logged_bytes(engine, log)


@pytest.mark.parametrize(
    "flags",
    [
        "--shape 9x3",
        "--shape 0:3",
        "--shape 250:50",
        "--shape 9-4:3",
        "--shape 4:0-3",
        "--rows 0",
        "--repeats 0",
        "--peer-rows 0",
        "--peer-timeout -1",
        "--peer-timeout nan",
        "--peer vllm",
        "--flexgen=--cpu-cache-compute",
        "--peer-batch-sizes 4,0",
        "--peer-batch-sizes x",
        "--peer-resident lots",
        "--group little",
        "--group 1GiB --cpu-memory 2GiB",
        "--model ./none.json",
        "--weights 50/60",
        "--device tpu",
    ],
)
def test_bad_input(flags: str, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(config, *flags.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("freight: error: ") and len(err.splitlines()) == 3


def test_no_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offload", "--model", str(tmp_path)]) == 1
    assert "config.json cannot be read" in capfd.readouterr().err
    assert main(["bench", "offload"]) == 2
    assert "No model was given" in capfd.readouterr().err


def test_what_does_not_fit_is_refused(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(config, "--cpu-memory", "9MiB") == 1
    assert "The plan that lacks least needs" in capfd.readouterr().err


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"freight\[bench\]"):
        check_peers(["accelerate"])
    with pytest.raises(InputError, match=r"freight\[bench,flexgen\]"):
        check_peers(["flexgen"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "flexgen" or None)
    with pytest.raises(InputError, match=r"Not installed here: flexgen.*freight\[flexgen\]"):
        check_peers(["flexgen", "accelerate"])


def test_groups_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No memory control group"):
        GroupMaker(limit_bytes=1 << 30, root=tmp_path).make()
    (tmp_path / "cgroup.controllers").write_text("cpu io\n")
    with pytest.raises(InputError, match="no memory controller"):
        GroupMaker(limit_bytes=1 << 30, root=tmp_path).make()


def trials(times: dict[int, float]) -> Any:
    def run(size: int) -> Trial:
        result = {"generate_s": times[size]} if size in times else None
        return Trial(setting=size, result=result, reason="" if result else "killed")

    return run


def test_sweep_of_batch_sizes() -> None:
    def tried(times: dict[int, float], sizes: tuple[int, ...] = ()) -> list[int]:
        return [trial.setting for trial in sweep(trials(times), sizes, 64, lambda _: None)]

    assert tried({64: 5, 32: 4, 16: 6}) == [64, 32, 16]
    assert tried({16: 4, 8: 5}) == [64, 32, 16, 8], "what is killed is halved"
    assert tried({}) == [64, 32, 16, 8, 4, 2, 1]
    assert tried({8: 1, 16: 2}, (8, 16, 32)) == [8, 16, 32]
    assert parse_batch_sizes("8, 16,8") == (8, 16) and parse_batch_sizes(None) == ()


def test_shapes_and_rows() -> None:
    assert parse_shape("128:16", 5).lengths() == [(128, 16)] * 5
    ragged = parse_shape("16-256:4-128", 200)
    assert ragged.is_ragged and ragged.lengths() == parse_shape("16-256:4-128", 200).lengths()
    prompts, answers = zip(*ragged.lengths(), strict=True)
    assert 16 <= min(prompts) < 40 and 230 < max(prompts) <= 256
    assert 4 <= min(answers) < 12 and 120 < max(answers) <= 128
    assert ragged.workload().max_new_tokens == 128, "how long answers are is told to nobody"
    work = Work(num_rows=3, prompt_tokens=4, new_tokens=1)
    rows = make_rows(work, 10)
    assert rows == make_rows(work, 10) and [len(row) for row in rows] == [4, 4, 4]
    assert make_rows(work, 1) == [[0] * 4] * 3
    assert all(3 <= token < 10 for row in rows for token in row)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom freight.entrypoints.cli import main\n"
        "try: main(['bench', 'offload', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_every_engine_flag_is_taken(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineOptions] = []

    def stop(*_: Any, **__: Any) -> Path:
        raise KeyboardInterrupt

    from freight.entrypoints.bench import offload

    real = offload.engine_options
    monkeypatch.setattr(offload, "engine_options", lambda a: seen.append(real(a)) or seen[-1])
    monkeypatch.setattr(offload, "provide_weights", stop)
    assert bench(config, "--cpu-memory", "2GiB", "--num-micro-batches", "2") == 130
    assert seen[0].cpu_memory_bytes == 2 << 30 and seen[0].num_micro_batches == 2


@pytest.mark.usefixtures("begun_anew")
def test_a_child_that_takes_too_long() -> None:
    outcome = run_child({"task": "probe"}, timeout_s=0.01)
    assert outcome.result is None and outcome.reason == "not done in 0.01 s"
    outcome = run_child({"task": "probe"})
    assert outcome.result is None and "KeyError" in outcome.reason, "a bug is no result"


def test_what_peers_may_hold() -> None:
    work = Work(num_rows=8, prompt_tokens=10, new_tokens=2)
    peer = Peer(
        name="transformers",
        job={"on_cuda": False},
        config=read_config(Path(MODEL_DIR)),
        work=work,
        weight_bytes=1 << 30,
        budget_bytes=1 << 30,
        groups=None,
        timeout_s=1,
    )
    assert "more than the budget of 1.00 GiB" in (peer.refusal() or "")
    assert replace(peer, name="accelerate").refusal() is None
    assert replace(peer, budget_bytes=2 << 30).refusal() is None
    config = read_config(Path(MODEL_DIR))
    held = [resident_bytes(config, work, size, "float32", 1 << 30) for size in (1, 2, 8, 16)]
    assert held[0] > held[1] > held[2] == held[3]
    assert resident_bytes(config, work, 8, "float32", 0) == 1


def test_what_flexgen_computes() -> None:
    opt = find_config("opt-30b")
    peer = Peer(
        name="flexgen",
        job={"on_cuda": True},
        config=read_config(opt),
        work=Work(num_rows=8, prompt_tokens=10, new_tokens=2),
        weight_bytes=1 << 40,
        budget_bytes=1 << 30,
        groups=None,
        timeout_s=1,
    )
    assert peer.refusal() is None
    assert "CUDA" in (replace(peer, job={"on_cuda": False}).refusal() or "")
    ragged = Work(num_rows=8, prompt_tokens=10, new_tokens=4, least_new_tokens=2)
    assert "one length" in (replace(peer, work=ragged).refusal() or "")
    for other in (read_config(Path(MODEL_DIR)), replace(peer.config, norm_place="after")):
        assert "OPT models alone" in (replace(peer, config=other).refusal() or "")
    first, second = flexgen_policies((), peer.config.hidden_size)
    assert "20 80 0 100 0 100" in first and second == f"{first} --cpu-cache-compute"
    assert flexgen_policies(("--gpu-batch-size 2",), 64) == ("--gpu-batch-size 2",)
    with pytest.raises(InputError, match="width 64"):
        flexgen_policies((), 64)


def test_the_rate_of_all_tries_is_no_more_than_the_best() -> None:
    rate = Rate.of(6.0, [2.0, 1.0, 3.0])
    assert (rate.best, rate.usual) == (6.0, 3.0)
    other = Rate(best=5.0, usual=4.0)
    assert rate.or_better(other) == other.or_better(rate) == Rate(best=6.0, usual=4.0)
    assert rate.or_better(None) == rate


def test_medians() -> None:
    work = Work(num_rows=2, prompt_tokens=5, new_tokens=3)
    runs = [
        {"load_s": 1, "generate_s": t, "prefill_s": 1, "decode_s": t - 1, "peak_bytes": t}
        for t in (4, 2, 3)
    ]
    summary = summarise(runs, work, ceiling_s=1.5)
    assert summary["median"]["generate_s"] == 3 and summary["median"]["share_of_ceiling"] == 0.5
    assert summary["median"]["decode_tokens_per_s"] == 2 and summary["peak_bytes"] == 4
    assert summary["runs"][1]["new_tokens_per_s"] == 3
    assert byte_ratios({"moved_bytes": {"a": 4, "b": 1}, "expected_bytes": {"a": 2}}) == {
        "a": 2.0,
        "b": None,
    }
