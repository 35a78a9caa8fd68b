"""The command as people meet it: flags, messages, exit statuses, and being stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from freight.entrypoints.cli import _build_parser, main
from freight.entrypoints.progress import Progress
from freight.entrypoints.run import job_spec
from freight.entrypoints.shares import parse_shares
from freight.errors import InputError
from freight.runtime.options import EngineOptions
from freight.runtime.request import SamplingParams

from ..jobs.fakes import FakeEngine
from ..jobs.tiny_model import write_tiny_tokenizer

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Desk:
    """A model directory, an input and an output, and the options that the engine was built with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_tiny_tokenizer(directory / "model")
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        self.source, self.sink = directory / "in.jsonl", directory / "out.jsonl"
        self.source.write_text('{"prompt": "the cat"}\n{"prompt": []}\n{"prompt": [1, 2]}\n')
        self.options: list[EngineOptions] = []
        self.failure: BaseException | None = None

    def build_engine(self, model_dir: Path, *, options: Any, workload: Any, say: Any) -> FakeEngine:
        assert model_dir == self.model
        self.options.append(options)
        return FakeEngine(
            workload, fail_after=None if self.failure is None else 1, failure=self.failure
        )

    def run(self, *flags: str) -> int:
        return main(["run", str(self.source), "-o", str(self.sink), "-m", str(self.model), *flags])


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path)
    engine = types.ModuleType("freight.runtime.engine")
    engine.build_engine = desk.build_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "freight.runtime.engine", engine)
    return desk


def test_a_job(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    assert desk.run() == 0
    rows = [json.loads(line) for line in desk.sink.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2] and "error" in rows[1]
    out, err = capfd.readouterr()
    assert out == ""
    assert "3 rows: 2 answered, 1 with an error" in err and "generated token/s" in err
    assert "freight: fake engine\nfreight: two lines\n" in err
    assert desk.run() == 0
    assert "already complete" in capfd.readouterr().err
    assert desk.run("--restart", "--quiet") == 0
    assert capfd.readouterr() == ("", "")


def test_rows_with_errors_and_the_exit_status(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    assert desk.run("--fail-on-error") == 3
    assert "1 of 3 rows cannot be used, and become errors. Line 2 of" in capfd.readouterr().err
    assert len(desk.sink.read_text().splitlines()) == 3
    assert desk.run("--fail-on-error") == 3, "of a job that is complete, too"
    assert desk.run() == 0
    desk.source.write_text("prompt,max_tokens\nhello,3\n")
    assert desk.run("--restart") == 3, "no row was answered"
    err = capfd.readouterr().err
    assert "2 of 2 rows cannot be used" in err and "It was read as JSON" in err


def test_a_file_of_another_kind_is_refused(
    desk: Desk, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.source.write_text('[{"prompt": "the cat"}]')
    assert desk.run() == 2
    err = capfd.readouterr().err
    assert "The input in.jsonl was read as lines of JSON.\n  It is one JSON array.\n" in err
    assert not desk.sink.exists() and not (desk.directory / "out.jsonl.freight").exists()
    stream = io.TextIOWrapper(io.BytesIO(b"\x1f\x8b\x08"))
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["run", "-", "-o", str(desk.sink), "-m", str(desk.model)]) == 2
    assert "The input standard input was read" in capfd.readouterr().err


def test_keys_without_effect_are_said(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": [1], "max_token": 3, "label": "x", "tools": [1], "do_sample": False},
        {"prompt": [2], "answer": 4, "tools": [1], "num_beams": 1, "length_penalty": 1.0},
        {"prompt": [2], "stop_sequences": ["a"], "num_beams": 4, "do_sample": True},
    ]
    desk.source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert desk.run() == 0
    err = capfd.readouterr().err
    assert "max_token (did you mean max_tokens?) in 1 of 3 rows" in err
    assert "tools (Freight has nothing like it) in 2 of 3 rows" in err
    assert "num_beams (Freight has nothing like it) in 1 of 3 rows" in err
    assert "stop_sequences (did you mean stop?) in 1 of 3 rows" in err
    assert "do_sample (did you mean temperature?) in 1 of 3 rows" in err
    assert not any(key in err for key in ("label", "answer ", "length_penalty"))
    desk.source.write_text(json.dumps({"prompt": [1], "label": "x"}) + "\n")
    assert desk.run("--restart") == 0
    assert "without effect" not in capfd.readouterr().err


def test_what_answers_look_like_is_a_flag(
    desk: Desk, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')

    def asked(*flags: str) -> object:
        arguments = _build_parser().parse_args(["run", "a", "-o", "b", *flags])
        return job_spec(arguments).sampling.structured_outputs

    assert asked() is None
    for flags, wanted in (
        (["--json-schema", str(schema)], {"json": '{"type": "integer"}'}),
        (["--regex", "[0-9]+"], {"regex": "[0-9]+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
    ):
        assert asked(*flags) == SamplingParams(structured_outputs=wanted).structured_outputs
    assert desk.run("--regex", "a", "--choice", "b") == 2
    assert "--regex and --choice were given" in capfd.readouterr().err
    assert desk.run("--json-schema", str(tmp_path / "none.json")) == 2
    assert "cannot be read" in capfd.readouterr().err
    schema.write_text("{")
    assert desk.run("--json-schema", str(schema)) == 2
    err = capfd.readouterr().err
    assert f"--json-schema {schema} was given.\n  llguidance cannot use it: it is no JSON" in err
    assert "structured_outputs" not in err and "Traceback" not in err
    schema.write_text("")
    assert desk.run("--json-schema", str(schema)) == 2
    assert f"--json-schema {schema} was given.\n  It is empty." in capfd.readouterr().err
    # As from a script whose variable is not set: not as if nothing were asked for.
    for flag in ("--regex", "--choice", "--json-schema", "--grammar"):
        assert desk.run(flag, "") == 2
        assert f"{flag} '' was given.\n  It is empty." in capfd.readouterr().err
    assert desk.run("--choice", "a", "--choice", "") == 2
    assert "--choice 'a' '' was given.\n  It is empty." in capfd.readouterr().err
    schema.write_text("begin: 'a'")
    assert desk.run("--grammar", str(schema)) == 2
    assert f"--grammar {schema} was given.\n  llguidance cannot" in capfd.readouterr().err
    assert desk.run("--regex", "[a-") == 2
    assert "--regex [a- was given.\n  llguidance cannot" in capfd.readouterr().err


def test_a_log_gets_a_line_from_time_to_time() -> None:
    file = io.StringIO()
    with Progress(file, is_quiet=False, line_every_s=0.001) as progress:
        time.sleep(0.002)
        progress.on_reading(512)
        assert file.getvalue() == "freight: 512 rows read\n"
        progress.on_start(num_rows=7, num_done=2, status=lambda: "all is well")
        wait_for(file, "2 of 7 rows done, all is well\n")  # jobs may make no tokens at all
        progress.on_row(num_new_tokens=1)
        wait_for(file, "3 of 7 rows done, ")
        wait_for(file, " token/s, all is well\n")


def wait_for(file: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in file.getvalue():
        assert time.monotonic() < deadline, file.getvalue()
        time.sleep(0.001)


def test_a_missing_disk_dir(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    assert desk.run("--disk-dir", "/nowhere/at/all") == 2
    assert "There is no such directory" in capfd.readouterr().err and not desk.sink.exists()
    assert desk.run("--disk-dir", __file__) == 2
    assert "It is a file" in capfd.readouterr().err and not desk.sink.exists()


def test_every_flag_reaches_the_engine(desk: Desk, tmp_path: Path) -> None:
    flags = (
        "--cpu-memory 2GiB --gpu-memory 1450MiB --device sim --dtype float32 --weights 20/80/0 "
        "--kv 0/50/50 --activations 40/60 --micro-batch-size 3 --num-micro-batches 2 --no-overlap "
        "--sim-bandwidth 2GB --dummy-weights --compute int8"
    )
    assert desk.run(*flags.split(), "--disk-dir", str(tmp_path)) == 0
    assert desk.options == [
        EngineOptions(
            device="sim",
            dtype="float32",
            cpu_memory_bytes=2 << 30,
            gpu_memory_bytes=1450 << 20,
            disk_dir=tmp_path,
            weights_percent=(20, 80, 0),
            kv_percent=(0, 50, 50),
            activations_percent=(0, 40, 60),
            micro_batch_size=3,
            num_micro_batches=2,
            overlap=False,
            sim_bytes_per_s=2_000_000_000,
            compute="int8",
            dummy_seed=0,
        )
    ]


def test_answers_of_other_groups_are_another_job(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dummy-weights", "--weight-bits", "4")
    assert desk.run(*flags, "--group-dim", "output") == 0
    assert (desk.options[0].weight_bits, desk.options[0].group_dim) == (4, "output")
    assert desk.run(*flags, "--group-dim", "output") == 0
    assert "already complete" in capfd.readouterr().err
    assert desk.run(*flags) == 1
    assert "the dimension of the weights' groups" in capfd.readouterr().err


def test_sampling_flags(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    desk.source.write_text('{"prompt": [1, 2, 3, 4]}\n')
    assert desk.run("--max-tokens", "2", "--seed", "5", "--stop", "a", "--stop", "b") == 0
    assert json.loads(desk.sink.read_text())["completion_tokens"] == 2
    for flag, value in (
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--top-p", "2"),
        ("--stop", ""),
        ("--n", "2"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "3"),
        ("--frequency-penalty", "-3"),
        ("--logit-bias", "[1]"),
        ("--logit-bias", "{"),
        ("--logit-bias", '{"a": 1}'),
        ("--logit-bias", '{"1": 101}'),
        ("--logit-bias", '{"320": 1}'),
        ("--stop-token-id", "320"),
        ("--min-tokens", "257"),
        ("--logprobs", "21"),
        ("--prompt-logprobs", "-1"),
    ):
        capfd.readouterr()
        assert desk.run(flag, value, "--restart") == 2
        told = capfd.readouterr().err
        assert flag in told or flag.strip("-").replace("-", "_") in told, told
        assert len(told.strip().splitlines()) <= 3 and "Traceback" not in told


def test_every_sampling_flag_is_a_parameter(desk: Desk) -> None:
    flags = (
        "--max-tokens 7 --n 3 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty -0.3 --seed 8 "
        "--stop a --stop b --stop-token-id 4 --stop-token-id 5 --min-tokens 2 --ignore-eos "
        "--logprobs 5 --prompt-logprobs 0"
    )
    line = ["run", "in", "-o", "out", *flags.split(), "--logit-bias", '{"9": -1, "3": 2}']
    assert job_spec(_build_parser().parse_args(line)).sampling == SamplingParams(
        max_tokens=7,
        n=3,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={3: 2.0, 9: -1.0},
        seed=8,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        min_tokens=2,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=0,
    )
    assert desk.run("--n", "2", "--temperature", "1") == 0
    rows = [json.loads(line) for line in desk.sink.read_text().splitlines()]
    assert len(rows[0]["outputs"]) == 2 and "text" not in rows[0]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--weights", "20/80"], 0, ""),
        (["--weights", "20/81/0"], 2, "add up to 100"),
        (["--weights", "a/b/c"], 2, "three percentages"),
        (["--weights", "100"], 2, "three percentages"),
        (["--weights", "nan/50/50"], 2, "add up to 100"),
        (["--weights", "120/-20/0"], 2, "add up to 100"),
        (["--weights", "20/80/0", "--device", "cpu"], 2, "no GPU to hold"),
        (["--kv", "50/50"], 2, "--disk-dir"),
        (["--cpu-memory", "lots"], 2, "not a number with a unit"),
        (["--cpu-memory", "0"], 2, "more than zero"),
        (["--micro-batch-size", "0"], 2, "more than zero"),
        (["--gpu-memory", "1GiB", "--device", "cpu"], 2, "Leave one"),
        (["--sim-bandwidth", "2GB"], 2, "--device sim"),
        (["--device", "tpu"], 2, "auto, cuda, cpu, sim"),
        (["--dtype", "int3"], 2, "bfloat16"),
        (["--compute", "int3"], 2, "plain or int8"),
        (["--compute", "int8", "--weight-bits", "4"], 2, "Leave one of the two out"),
        (["--lossless", "--weight-bits", "4"], 2, "Leave one of the two out"),
        (["--lossless", "--compute", "int8"], 2, "Leave one of the two out"),
        (["--weight-bits", "4", "--group-dim", "rows"], 2, "Use input or output"),
        (["--group-dim", "output"], 2, "Add --weight-bits 4"),
        (["--output", "/nowhere/out.jsonl"], 2, "no directory"),
        (["--model", "no such model"], 2, "--model demo"),
    ],
)
def test_flags_that_cannot_work(
    desk: Desk,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    message: str,
) -> None:
    assert desk.run(*flags) == status
    err = capfd.readouterr().err
    assert message in err and "Traceback" not in err
    if status:
        first, limit, advice = err.splitlines()
        assert first.startswith("freight: error: ")
        assert limit.startswith("  ") and advice.startswith("  ")


def test_no_model(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(desk.source), "-o", str(desk.sink)]) == 2
    err = capfd.readouterr().err
    assert "--model" in err and "demo" in err


def test_the_hub_is_asked_for_what_is_needed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = ["model-00001-of-00002.safetensors", "model.safetensors"]
    others = ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin"]
    others.append("checkpoint-500/adapter_model.safetensors")

    def download(
        hub_id: str, *, revision: None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        wanted = filter_repo_objects(
            weights + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(wanted) == weights
        if hub_id == "owner/gone":
            raise OSError("offline\nlong story")
        return str(desk.model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert desk.run("--model", "owner/there") == 0
    assert desk.run("--model", "owner/gone") == 1
    assert "offline" in capfd.readouterr().err


def test_other_work_exits_1_and_bad_input_2(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    desk.run()
    assert desk.run("--max-tokens", "3") == 1
    assert "max-tokens was 256, now 3" in capfd.readouterr().err
    assert desk.run("--compute", "int8", "--dummy-weights", "--restart") == 0
    assert desk.run("--dummy-weights") == 1
    assert "arithmetic of products" in capfd.readouterr().err
    desk.source.unlink()
    assert desk.run() == 2


def test_ctrl_c(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    desk.failure = KeyboardInterrupt()
    assert desk.run() == 130
    assert "stopped with 2 of 3 rows done and kept" in capfd.readouterr().err
    desk.failure = None
    assert desk.run() == 0
    err = capfd.readouterr().err
    assert "going on: 2 of 3 rows are done" in err and "2 of them by earlier runs" in err
    assert len(desk.sink.read_text().splitlines()) == 3


def test_streams(desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = desk.source.read_bytes()
    out = open(tmp_path / "stdout", "w")
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(text)))
    monkeypatch.setattr("sys.stdout", out)
    assert main(["run", "-", "-o", "-", "-m", str(desk.model)]) == 0
    out.close()
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 1, 2]


def test_closed_streams(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by `<&-` and `>&-`."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", "-", "-o", str(desk.sink), "-m", str(desk.model)]) == 2
    assert "Standard input is closed" in capfd.readouterr().err
    monkeypatch.setattr("sys.stdout", None)
    assert main(["run", str(desk.source), "-o", "-", "-m", str(desk.model)]) == 2
    assert "Standard output is closed" in capfd.readouterr().err


def test_the_bar_of_a_terminal(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("freight.entrypoints.progress._REFRESH_S", 0.01)
    slow = FakeEngine(delay_s=0.1)
    monkeypatch.setattr(desk, "build_engine", lambda *_, **__: slow)
    sys.modules["freight.runtime.engine"].build_engine = desk.build_engine  # type: ignore
    assert desk.run() == 0
    assert "token/s, fake" in terminal.getvalue() and "/3" in terminal.getvalue()


def test_shares() -> None:
    assert parse_shares("--kv", None) is None
    assert parse_shares("--kv", "0.5/99.5/0") == (0.5, 99.5, 0)
    assert parse_shares("--kv", "40/60") == (0, 40, 60)
    with pytest.raises(InputError):
        parse_shares("--kv", "1/2/3/4")


SLOW = """
import signal, sys, types
# A process that is started in the background of a shell ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
from fakes import FakeEngine
engine = types.ModuleType("freight.runtime.engine")
engine.build_engine = lambda *a, options, workload, say: FakeEngine(workload, delay_s=0.02)
sys.modules["freight.runtime.engine"] = engine
from freight.entrypoints.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start(desk: Desk, *arguments: str) -> subprocess.Popen[bytes]:
    code = SLOW.format(tests=str(Path(__file__).parents[1] / "jobs"))
    return subprocess.Popen(
        [sys.executable, "-c", code, "run", str(desk.source), "-m", str(desk.model), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_rows(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_bytes().count(b"\n") > 5):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(desk: Desk, number: int, status: int) -> None:
    desk.source.write_text('{"prompt": [1, 2, 3]}\n' * 100)
    process = start(desk, "-o", str(desk.sink))
    wait_for_rows(desk.directory / "out.jsonl.freight" / "journal.jsonl")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == status and out == b""
    assert b"Run the same command again" in err and b"Traceback" not in err
    assert desk.run() == 0
    ids = [json.loads(line)["id"] for line in desk.sink.read_text().splitlines()]
    assert ids == list(range(100))


def test_closed_standard_error(desk: Desk) -> None:
    """As by `2>&-`: no file of the job may come to be where messages of libraries go."""
    code = SLOW.format(tests=str(Path(__file__).parents[1] / "jobs"))
    flags = ["run", str(desk.source), "-m", str(desk.model), "-o", str(desk.sink)]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
    assert subprocess.run([*shell, sys.executable, "-c", code, *flags]).returncode == 0
    assert len(desk.sink.read_text().splitlines()) == 3


@pytest.mark.parametrize(("keeps", "words"), [(False, b"not kept"), (True, b"done and kept")])
def test_a_reader_that_leaves(desk: Desk, keeps: bool, words: bytes) -> None:
    desk.source.write_text('{"prompt": [1, 2, 3]}\n' * 100)
    own = ["--job-dir", str(desk.directory / "job")] if keeps else []
    process = start(desk, "-o", "-", *own)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b'{"id": 0')
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(20) == 1
    assert err.startswith(b"freight: the output's reader has gone: stopped with ")
    assert words in err and err.count(b"\n") == 1
    process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "rows", "-o", "out", "--weight-bits", "four"], "invalid int value: 'four'."),
        (["run", "rows"], "The following arguments are required: -o/--output."),
        (["run", "rows", "-o", "out", "--weight"], "Unrecognized arguments: --weight."),
        (["bench", "offload", "--rows", "few"], "Argument --rows: invalid int value: 'few'."),
        (["ruin"], "invalid choice: 'ruin'"),
        (["run", "rows", "-o", "out", "--max-token", "5"], "arguments: --max-token 5."),
        (["plan", "--machines", "t4"], "Unrecognized arguments: --machines t4."),
    ],
)
def test_arguments_that_cannot_be_read(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    asked, limit, advice = capsys.readouterr().err.splitlines()
    assert asked.endswith("was given arguments that it cannot read.")
    assert reason in limit
    assert advice.endswith("--help names them all.")
    likely = {"--max-token": "--max-tokens?", "--machines": "--machine?"}
    assert all(meant in advice for flag, meant in likely.items() if flag in arguments)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom freight.entrypoints.cli import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - started < 2, "0.05 s where nothing else runs"


def test_a_run_needs_neither_transformers_nor_torch_of_its_own(desk: Desk) -> None:
    code = SLOW.format(tests=str(Path(__file__).parents[1] / "jobs")).replace(
        "sys.exit(main(sys.argv[1:]))",
        "assert main(sys.argv[1:]) == 0\nassert not {'torch', 'transformers'} & set(sys.modules)",
    )
    arguments = ["run", str(desk.source), "-m", str(desk.model), "-o", str(desk.sink), "--quiet"]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=dict(os.environ))


def test_version_and_no_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("freight ")
    assert main([]) == 2
