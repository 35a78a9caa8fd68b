"""Freight as a model of lm-evaluation-harness, against the harness's own model of transformers.

The bundled demo model and a tiny one whose tokenizer begins texts with BOS, in float32; tasks from
files of the test's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._index import Entry, TaskIndex

import freight.entrypoints.llm as llm_module
from freight.demo import EXAMPLES, MODEL_DIR
from freight.entrypoints.cli import main
from freight.entrypoints.harness_model import HarnessModel
from freight.errors import InputError

from ..jobs.tiny_model import write_tiny_tokenizer
from ..runtime.tiny import make_model

CHOICE = """
task: units
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_target: 0
doc_to_choice: [" {{expected}}", " 7", " none"]
metric_list: [{metric: acc}]
"""

ANSWER = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: " {{expected}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 40, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness would log to the standard error of the first test for good."""
    monkeypatch.setattr("lm_eval.utils.setup_logging", lambda: None)


@pytest.fixture(autouse=True, scope="module")
def tasks_read_once() -> Iterator[None]:
    """The harness reads 14 000 files of its own tasks for each command; those of a test's own are
    read each time."""
    build = TaskIndex.build
    own: dict[Path, dict[str, Entry]] = {}

    def build_once(paths: Iterable[Path], **more: Any) -> dict[str, Entry]:
        first, *others = paths
        if first not in own:
            own[first] = build([first], **more)
        return {**own[first], **build(others, **more)}

    with patch.object(TaskIndex, "build", staticmethod(build_once)):
        yield


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()[:24]]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return HFLM(pretrained=str(MODEL_DIR), dtype="float32", device="cpu", batch_size=8)


@pytest.fixture(scope="module")
def ours() -> HarnessModel:
    return HarnessModel(str(MODEL_DIR), dtype="float32", batch_size=8, weights="0/100")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, vocab_size=320, eos_token_id=1, bos_token_id=0)
    return write_tiny_tokenizer(directory)


@pytest.fixture(scope="module")
def tiny_pair(tiny_dir: Path) -> tuple[Any, HarnessModel]:
    return (
        HFLM(pretrained=str(tiny_dir), dtype="float32", device="cpu"),
        HarnessModel(str(tiny_dir), dtype="float32"),
    )


def asked(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, own, place) for place, own in enumerate(arguments)]


def scores(model: Any, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    return model.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)


def test_scores(ours: HarnessModel, theirs: Any, rows: list[dict[str, Any]]) -> None:
    pairs = [(row["prompt"], f" {row['expected']}") for row in rows]
    pairs += [(row["prompt"] + "  ", "no") for row in rows[:6]]
    pairs += [("", "Quantity: 3 km"), ("long " * 700, "and longer")]
    for (own, is_greedy), (other, is_other) in zip(
        scores(ours, pairs), scores(theirs, pairs), strict=True
    ):
        assert own == pytest.approx(other, abs=1e-3, rel=1e-5)
        assert is_greedy == is_other


def test_windows_over_long_texts(ours: HarnessModel, theirs: Any) -> None:
    texts = [("Quantity: 3 km\nIn m: 3000 m\n" * 60,), ("a",), ("Tidy this postal address.\n",)]
    requests = asked("loglikelihood_rolling", texts)
    own = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    other = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert own == pytest.approx(other, abs=1e-3, rel=1e-5)


def test_answers(ours: HarnessModel, theirs: Any, rows: list[dict[str, Any]]) -> None:
    wishes: list[dict[str, Any]] = [
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": [" ", "\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        {"until": ["e"], "max_new_tokens": 8, "num_beams": 1},
    ]
    arguments = [(row["prompt"], wishes[place % 3]) for place, row in enumerate(rows)]
    requests = asked("generate_until", arguments)
    own = ours.generate_until(requests, disable_tqdm=True)
    assert own == theirs.generate_until(requests, disable_tqdm=True)
    assert len(set(own)) > len(own) // 2


def test_prompts_that_leave_no_room_lose_their_beginning(ours: HarnessModel, theirs: Any) -> None:
    prompt = "Quantity: 3 km\nIn m: 3000 m\n" * 60 + "Quantity: 5 km\nIn m:"
    requests = asked("generate_until", [(prompt, {"until": ["\n"], "max_gen_toks": 20})])
    own = ours.generate_until(requests, disable_tqdm=True)
    assert own == theirs.generate_until(requests, disable_tqdm=True)


def test_special_tokens_are_the_harness_s(tiny_pair: tuple[Any, HarnessModel]) -> None:
    theirs, ours = tiny_pair
    for text in ("the cat sat", "<s>the cat sat", "", " mat"):
        for wish in (None, True, False):
            assert ours.tok_encode(text, wish) == theirs.tok_encode(text, wish), (text, wish)
    assert ours.prefix_token_id == theirs.prefix_token_id == 0
    assert ours.eot_token_id == theirs.eot_token_id == 1
    pairs = [("the cat", " sat on"), ("", "the mat"), ("<s>the mat", " move")]
    for own, other in zip(scores(ours, pairs), scores(theirs, pairs), strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-3)


def test_without_bos(tiny_dir: Path) -> None:
    ours = HarnessModel(str(tiny_dir), dtype="float32", add_bos_token=False)
    assert ours.tok_encode("the cat")[0] != 0
    assert ours.tok_encode("the cat", add_special_tokens=True)[0] == 0


def test_chats(tiny_pair: tuple[Any, HarnessModel]) -> None:
    theirs, ours = tiny_pair
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    begun = ours.apply_chat_template(chat, add_generation_prompt=False)
    assert begun == theirs.apply_chat_template(chat, add_generation_prompt=False)
    assert begun.endswith("sat on")
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.chat_template(False) == ""
    assert ours.tokenizer_name.count("/") == 0


def test_thoughts_are_left_out(ours: HarnessModel) -> None:
    thinking = HarnessModel(str(MODEL_DIR), dtype="float32", think_end_token=":")
    wishes = {"until": ["m"], "max_gen_toks": 24}
    requests = asked("generate_until", [("Quantity: 3 km\nIn m: 3000 m\nQuantity: 5", wishes)])
    [plain] = ours.generate_until(requests, disable_tqdm=True)
    [found] = thinking.generate_until(requests, disable_tqdm=True)
    assert "m" not in plain and "m" not in found and ":" not in found
    whole = asked("generate_until", [(requests[0].args[0], {"max_gen_toks": 24})])
    [text] = ours.generate_until(whole, disable_tqdm=True)
    assert found == text.rpartition(":")[2].lstrip().partition("m")[0]


def write_task(directory: Path, text: str, rows: Sequence[dict[str, Any]]) -> None:
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    name = text.split("task: ")[1].split()[0]
    (directory / f"{name}.yaml").write_text(text.replace("DATA", str(data)), encoding="utf-8")


def test_the_command(
    tmp_path: Path,
    theirs: Any,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_task(tmp_path, CHOICE, rows)
    write_task(tmp_path, ANSWER, rows)
    out = tmp_path / "out"
    shared = ["--tasks", "units,answers", "--include_path", str(tmp_path)]
    status = main(
        [
            "lm-eval",
            "--model_args",
            "pretrained=demo,dtype=float32,weights=0/100",
            "--output_path",
            str(out),
            "--log_samples",
            *shared,
        ]
    )
    assert status == 0
    assert "exact_match" in capsys.readouterr().out
    [path] = out.rglob("results_*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["config"]["model"] == "freight"
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path))
    expected = lm_eval.simple_evaluate(
        theirs, tasks=["units", "answers"], task_manager=manager, bootstrap_iters=0
    )
    for task, metric in (("units", "acc,none"), ("answers", "exact_match,none")):
        assert found["results"][task][metric] == expected["results"][task][metric]
    assert found["results"]["answers"]["exact_match,none"] > 0.8


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("dtype=float32", "No model was named"),
        ("pretrained=demo,parallelize=True", "parallelize=True"),
        ("pretrained=demo,weights=0/40", "weights"),
        ("pretrained=no/such/place", "no/such/place"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: str, named: str, tmp_path: Path, rows: list[dict[str, Any]], capsys: Any
) -> None:
    write_task(tmp_path, ANSWER, rows)
    flags = ["--model_args", arguments, "--tasks", "answers", "--include_path", str(tmp_path)]
    status = main(["lm-eval", *flags])
    told = capsys.readouterr().err
    assert status in (1, 2)
    assert "freight: error:" in told and named in told
    assert "Traceback" not in told


def test_tasks_that_are_not_there_are_told(capsys: Any) -> None:
    assert main(["lm-eval", "--model_args", "pretrained=demo", "--tasks", "none_such"]) == 2
    told = capsys.readouterr().err
    assert "freight: error:" in told and "none_such" in told and "Traceback" not in told


def test_wishes_that_cannot_be_are_told(ours: HarnessModel) -> None:
    for wishes, named in (
        ({"until": [], "num_beams": 4}, "num_beams"),
        ({"until": [], "max_gen_toks": 512}, "512"),
        ({"until": [], "temperature": -1.0, "do_sample": True}, "temperature"),
    ):
        with pytest.raises(InputError, match=named):
            ours.generate_until(asked("generate_until", [("a", wishes)]), disable_tqdm=True)


def test_several_answers_to_one_prompt_are_not_one(ours: HarnessModel) -> None:
    wishes = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    requests = asked("generate_until", [("the", wishes)] * 4)
    found = ours.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) > 1
    assert ours.generate_until(requests, disable_tqdm=True) == found


def test_continuations_are_scored_whole(ours: HarnessModel) -> None:
    """A bound below the model's positions cuts contexts alone."""
    short = HarnessModel(str(MODEL_DIR), dtype="float32", max_length=8)
    context, continuation = ours.tok_encode("Quantity: 3 km"), list(range(40, 52))
    [cut] = short._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    last = [(None, context[-1:], continuation)]
    [whole] = ours._loglikelihood_tokens(last, disable_tqdm=True)
    assert cut[0] == pytest.approx(whole[0], abs=1e-4)


def test_results_are_cached_as_they_come(ours: HarnessModel, monkeypatch: Any) -> None:
    """What came before a run was stopped is not computed again."""
    kept: list[tuple[str, Any]] = []

    class Hook:
        def add_partial(self, kind: str, arguments: Any, found: Any) -> None:
            kept.append((kind, found))

    monkeypatch.setattr(ours, "cache_hook", Hook())
    whole = llm_module.LLM.generate

    def broken(self: Any, *args: Any, **named: Any) -> Any:
        answers = whole(self, *args, **named)
        yield next(answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_module.LLM, "generate", broken)
    wishes = {"until": ["\n"], "max_gen_toks": 4}
    with pytest.raises(KeyboardInterrupt):
        ours.generate_until(asked("generate_until", [("a", wishes)] * 3), disable_tqdm=True)
    assert [kind for kind, _ in kept] == ["generate_until"]


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval._cli", None)
    assert main(["lm-eval", "--tasks", "x"]) == 2
    assert 'pip install "freight[lm-eval]"' in capsys.readouterr().err
