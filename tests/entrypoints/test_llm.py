"""The Python API: what it takes, what it refuses before anything runs, and what it gives back."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freight
from freight import LLM, Completion, SamplingParams
from freight.entrypoints.llm_settings import _SETTINGS
from freight.errors import InputError, ModelError
from freight.jobs.spool import derive_seed
from freight.runtime.request import Request

from ..jobs.fakes import FakeEngine
from ..jobs.tiny_model import write_tiny_tokenizer
from ..runtime.tiny import make_model, prompts, reference, tokens

GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return write_tiny_tokenizer(directory)


@pytest.fixture
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, device="cpu", dtype="float32") as llm:
        yield llm


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines that answer without a model, as they are built."""
    import freight.runtime.engine as engine

    built: list[Any] = []

    def build(model_dir: Path, *, workload: Any, **_: Any) -> FakeEngine:
        built.append(FakeEngine(workload))
        return built[-1]

    monkeypatch.setattr(engine, "build_engine", build)
    return built


def test_the_names_are_these_and_resolve() -> None:
    assert freight.__all__ == ["LLM", "Classification", "Completion", "Embedding", "SamplingParams"]
    assert all(getattr(freight, name).__name__ == name for name in freight.__all__)
    assert set(freight.__all__) <= set(dir(freight))
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        freight.Llm  # noqa: B018


def test_tokens_are_those_of_transformers_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    model, rows = make_model(tmp_path), prompts(5, 20)
    write_tiny_tokenizer(tmp_path)
    for policy in ({}, {"weights": (0, 100)}, {"weights": "30/70", "micro_batch_size": 2}):
        with LLM(tmp_path, device="cpu", dtype="float32", **policy) as llm:  # type: ignore[arg-type]
            answers = list(llm.generate(rows, SamplingParams(max_tokens=6)))
        assert [answer.index for answer in answers] == [0, 1, 2, 3, 4]
        assert [answer.num_prompt_tokens for answer in answers] == [len(row) for row in rows]
        found = [list(answer.token_ids) for answer in answers]
        for ids, expected in zip(found, tokens(reference(model, rows, 6)), strict=True):
            assert ids == expected[: len(ids)]  # the tokenizer's own end of sequence ends a row
            assert ids == expected or expected[len(ids)] == 1


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "the cat sat"
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [
        text,
        ids,
        [ids],
        [tuple(ids)],
        [np.array(ids).tolist()],
        [list(np.array(ids))],
        {"prompt": text},
        [{"prompt_token_ids": ids}],
        (form for form in [text]),
    ]
    answers = [next(iter(llm.generate(form, GREEDY))) for form in forms]
    assert all(isinstance(answer, Completion) for answer in answers)
    assert {(a.index, a.token_ids, a.text, a.finish_reason) for a in answers} == {
        (0, answers[0].token_ids, answers[0].text, answers[0].finish_reason)
    }
    assert answers[0].num_prompt_tokens == len(ids)


def test_a_chat_is_its_template_without_a_second_bos(llm: LLM) -> None:
    assert llm.tokenizer is not None
    chat = [{"role": "user", "content": "the cat"}]
    ids = llm.tokenizer.encode_chat(chat)
    (one,) = llm.chat(chat, GREEDY)
    two, same = llm.chat([chat, chat], GREEDY)
    (plain,) = llm.generate(ids, GREEDY)
    assert one.num_prompt_tokens == len(ids)
    assert one.token_ids == two.token_ids == same.token_ids == plain.token_ids


def test_no_prompts_have_no_answers(llm: LLM, seen: list[Any]) -> None:
    assert list(llm.generate([])) == list(llm.chat([])) == []
    assert not seen


def test_unusable_prompts_are_refused_before_anything_runs(llm: LLM, seen: list[Any]) -> None:
    long = [1] * 256
    cases: list[tuple[Any, str]] = [
        (["the cat", []], "2 prompts were given. 1 cannot be used. Prompt 1: The prompt is empty"),
        (["the cat", long], "Prompt 1: The prompt has 256 tokens"),
        ([[1, 320]], "Prompt 0: The prompt holds token id 320"),
        ([[1, -1]], "token id -1"),
        ([[1, True]], 'Its "prompt[1]" is true or false'),
        ([[1, "x"]], "a whole number (a token id)"),
        ([[1, None, object()]], "Prompt 0 was given. It holds something"),
        (["the \ud83d"], "half a surrogate"),
        ([3.5], "A float was given as a prompt"),
        (np.array(3), "An int was given as a prompt"),
        (torch.tensor(3), "An int was given as a prompt"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], "A dict was given as a prompt"),
        ([{"text": "a"}], "A dict was given as a prompt"),
    ]
    for given, message in cases:
        with pytest.raises(InputError) as caught:
            llm.generate(given)
        assert message in str(caught.value)
    with pytest.raises(InputError, match=r"Prompt 0: .*no such role"):
        llm.chat([{"role": "broken", "content": "x"}])
    with pytest.raises(InputError, match=r'Prompt 0: Its "messages" is a string'):
        llm.chat("hello")  # type: ignore[arg-type]
    for wrong in (None, 5):
        name = type(wrong).__name__
        with pytest.raises(InputError, match=f"An? {name} was given as a prompt. A prompt is text"):
            llm.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"An? {name} was given as a pair"):
            llm.loglikelihood(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match='Prompt 0: Its "messages" is '):
            llm.chat(wrong)  # type: ignore[arg-type]
    params: list[Any] = [5, "x", ["x"], {"max_token": 3}, [{"seed": 1}, {"max_token": 3}]]
    reasons = ["An int was given among", "A str was", "A str was", "'max_token' was given among"]
    for own, reason in zip(params, [*reasons, reasons[-1]], strict=True):
        with pytest.raises(InputError, match=reason):
            llm.generate(["the", "cat"], own)
    with pytest.raises(InputError, match="two names for one thing"):
        llm.generate(["the"], SamplingParams(), sampling_params=SamplingParams())
    with pytest.raises(InputError, match="2 cannot be used"):
        llm.chat([[], 3])  # type: ignore[list-item]
    assert not seen


def test_parameters_are_for_all_or_for_each(llm: LLM, seen: list[Any]) -> None:
    own = [SamplingParams(max_tokens=2, seed=7), SamplingParams(max_tokens=3, stop=("x", "y"))]
    assert len(list(llm.generate(["the", "cat"], own))) == 2
    assert len(list(llm.generate(["the", "cat"], SamplingParams(max_tokens=300, seed=7)))) == 2
    each, shared = ({r.index: r.params for r in engine.requests} for engine in seen)
    assert each == dict(enumerate(own))
    assert [shared[i].seed for i in (0, 1)] == [derive_seed(7, 0), derive_seed(7, 1)]
    assert shared[0].max_tokens < 256  # lowered to the positions that the prompt leaves
    with pytest.raises(InputError, match="3 prompts and 2 sampling parameters"):
        llm.generate(["a", "b", "c"], own)


def test_parameters_may_be_mappings_and_have_vllms_name(llm: LLM, seen: list[Any]) -> None:
    expected = SamplingParams(max_tokens=3, stop=("x",), seed=4)
    given: dict[str, Any] = {"max_tokens": 3, "stop": "x", "seed": 4}
    chat = [{"role": "user", "content": "x"}]
    list(llm.generate(["the"], [given]))
    list(llm.generate(["the"], sampling_params=[expected]))
    list(llm.chat(chat, sampling_params=[given]))
    list(llm.generate(["the"], given))
    list(llm.generate(["the"], sampling_params=expected))
    params = [engine.requests[0].params for engine in seen]
    assert params[:3] == [expected] * 3
    assert params[3:] == [replace(expected, seed=derive_seed(4, 0))] * 2


def test_a_template_is_given_what_a_chat_sets_for_it(llm: LLM, seen: list[Any]) -> None:
    chat = [{"role": "user", "content": "x"}]
    list(llm.chat(chat, chat_template_kwargs={"bos_token": "the cat"}))
    assert llm.tokenizer is not None
    text = llm.tokenizer.render_chat(chat).replace("<s>", "the cat")
    (expected,) = llm.tokenizer.encode_batch([text], add_special_tokens=False)
    assert seen[0].requests[0].prompt_ids == expected


def test_a_stop_string_may_be_given_bare(llm: LLM, seen: list[Any]) -> None:
    params = SamplingParams(max_tokens=2, stop="the")  # type: ignore[arg-type]
    list(llm.generate(["a"], params))
    list(llm.generate(["a"], [params]))
    assert [engine.requests[0].params.stop for engine in seen] == [("the",), ("the",)]


def test_what_answers_look_like_may_be_each_prompts_own(llm: LLM, seen: list[Any]) -> None:
    asked: list[Any] = [{"json": {"type": "integer"}}, {"choice": ["a", "b"]}, None]
    own = [SamplingParams(structured_outputs=structure) for structure in asked]
    list(llm.generate(["a", "b", "c"], own))
    found = {r.index: r.params.structured_outputs for r in seen[0].requests}
    assert found == {index: params.structured_outputs for index, params in enumerate(own)}


def test_samples_scores_and_scoring_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, logprobs=2, ignore_eos=True)
    (several,) = llm.generate("the cat", params)
    assert len(several.outputs) == 3 and several.text == several.outputs[0].text
    assert len({output.token_ids for output in several.outputs}) > 1
    for output in several.outputs:
        assert output.logprobs is not None and output.cumulative_logprob is not None
        assert [item.token_id for item in output.logprobs] == list(output.token_ids)
    own = [SamplingParams(max_tokens=0, prompt_logprobs=1), SamplingParams(logit_bias={7: 100})]
    scored, biased = llm.generate(["the cat", "the cat"], own)
    assert scored.prompt_logprobs is not None and scored.token_ids == ()
    assert len(scored.prompt_logprobs) == scored.num_prompt_tokens
    assert set(biased.token_ids) == {7}


def test_settings_beyond_the_vocabulary(llm: LLM, seen: list[Any]) -> None:
    far = SamplingParams(stop_token_ids=(320,))
    with pytest.raises(InputError, match="stop_token_ids names token id 320"):
        llm.generate("the", far)
    with pytest.raises(InputError, match="Prompt 0: stop_token_ids names token id 320"):
        llm.generate(["the"], [far])
    assert not seen


def test_answers_come_as_they_are_ready_and_stop_when_closed(llm: LLM, seen: list[Any]) -> None:
    answers = llm.generate(["a"] * 40)
    assert not seen  # nothing is loaded before the first answer is asked for
    assert next(answers).index == 0
    assert not seen[0].closed
    llm.close()
    assert seen[0].closed
    for _ in range(2):  # a dataset does not end early with nothing said
        with pytest.raises(InputError, match=r"40 answers.*closed when 1 of them"):
            next(answers)
    done = llm.generate(["a"])
    assert next(done).index == 0
    llm.close()
    assert [*done] == []


def test_an_llm_is_not_closed_under_who_takes_answers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has one iterator two takers at once."""

    class Meddled(FakeEngine):
        def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
            for completion in super().run(requests):
                for meddle in (llm.close, partial(next, answers)):
                    with pytest.raises(InputError, match="Another thread is just taking"):
                        meddle()
                yield completion

    monkeypatch.setattr("freight.runtime.engine.build_engine", lambda *_, **__: Meddled())
    answers = llm.generate(["a"] * 9)
    assert [answer.index for answer in answers] == [*range(9)]


def test_an_iterator_that_is_left_open_says_nothing_at_the_end(model_dir: Path) -> None:
    """Of the interpreter, which takes modules apart that the engine would want."""
    program = (
        "from freight import LLM\n"
        f"llm = LLM({str(model_dir)!r}, device='cpu', dtype='float32')\n"
        "answers = llm.generate(['the cat'] * 9)\n"
        "print(next(answers).index)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_ends_that_the_model_cannot_make_count_for_nothing(model_dir: Path, tmp_path: Path) -> None:
    """Configurations name tokens that were added for other parts."""
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4000]}))
    params = SamplingParams(max_tokens=8, min_tokens=4)
    forms = SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-c]{2}"})
    with LLM(tmp_path, device="cpu", dtype="float32") as own:
        (answer,) = own.generate(["the cat"], params)
        assert len(answer.token_ids) >= 4
        (answer,) = own.generate(["the cat"], forms)
        assert re.fullmatch("[a-c]{2}", answer.text)


def test_a_copy_of_a_process_that_has_computed_is_refused(model_dir: Path) -> None:
    """It would wait for threads that it does not have."""
    program = f"""
import os
from freight import LLM
from freight.errors import InputError
llm = LLM({str(model_dir)!r}, device="cpu", dtype="float32")
if not (child := os.fork()):
    print(len(list(llm.generate(["the cat"]))), flush=True)  # nothing had computed yet
    os._exit(0)
os.waitpid(child, 0)
print(len(list(llm.generate(["the cat"]))), flush=True)
if not (child := os.fork()):
    try:
        list(llm.generate(["the cat"]))
    except InputError as error:
        print("spawn" in error.advice, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["1", "1", "True"], done.stderr


def test_nothing_is_left_behind(llm: LLM, seen: list[Any], tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    llm.generate(["never asked for"])
    for _ in llm.generate(["a"] * 3):
        pass
    next(llm.generate(["dropped"] * 3))
    gc.collect()
    assert all(engine.closed for engine in seen)
    assert len(os.listdir("/proc/self/fd")) == before


def test_wrong_settings_are_refused_when_the_model_is_named(model_dir: Path) -> None:
    for settings, message in (
        ({"weights": (20, 20, 20)}, "add up to 100"),
        ({"kv": "a/b"}, "kv a/b was given"),
        ({"weights": (10,)}, "weights 10 was given"),
        ({"cpu_memory": "many"}, "cpu_memory 'many' was given"),
        ({"cpu_memory": 0}, "more than zero"),
        ({"device": "tpu"}, "not known"),
        ({"compute": "int4"}, "--compute int4 was given"),
        ({"compute": "int8", "weight_bits": 8}, "Leave one of the two out"),
        ({"weight_bits": 4, "group_dim": "rows"}, "Use input or output"),
        ({"group_dim": "output"}, r"It is of the matrices' groups.*Add --weight-bits 4"),
        ({"group_dim": "output", "kv_bits": 4}, "Add --weight-bits 4"),
        ({"group_dim": "output", "compute": "int8"}, "Add --weight-bits 4"),
        ({"disk_dir": "/nowhere"}, "disk_dir='/nowhere' was given. There is no such directory"),
        ({"disk_dir": __file__}, "It is a file"),
        ({"disk_dir": 3}, "disk_dir=3 was given. It must be a directory"),
        ({"cpu_memory": True}, "cpu_memory=True was given. It must be a text like"),
        ({"cpu_memory": 1.5e9}, "cpu_memory=1500000000.0 was given"),
        ({"share_prefixes": "no"}, "share_prefixes='no' was given. It must be True or False"),
        ({"micro_batch_size": "4"}, "micro_batch_size='4' was given. It must be a whole number"),
        ({"draft_tokens": 2.5}, "draft_tokens=2.5 was given"),
        ({"draft_tokens": None}, "draft_tokens=None was given"),
        ({"cpu_attention": "x"}, "cpu_attention='x' was given. It must be a number"),
        ({"weights": 3}, "weights=3 was given. It must be percentages"),
        ({"admission": None}, "admission=None was given. It must be a text"),
        ({"micro_batch_size": np.array([4, 8])}, "micro_batch_size=array([4, 8]) was given"),
        ({"micro_batch_size": torch.tensor(4.5)}, "It must be a whole number"),
        ({"cpu_memory": np.array(3.0)}, "It must be a text like"),
        ({"cpu_attention": torch.tensor([1.0, 2.0])}, "It must be a number"),
        ({"cpu_attention": 10**400}, "It must be a number"),
        ({"cpu_attention": float("nan")}, "It must be a number"),
        ({"weights": np.ndarray}, "It must be percentages"),
        ({"weights": b"20/80/0"}, "It must be percentages"),
    ):
        with pytest.raises(InputError, match=re.escape(message) if "=" in message else message):
            LLM(model_dir, **settings)  # type: ignore[arg-type]
    for model in (None, 3, "", True):
        with pytest.raises(InputError, match="It must be a directory, a GGUF file"):
            LLM(model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no such directory"):
        LLM("no-such-model")
    with pytest.raises(ModelError):
        LLM(Path(__file__).parent)


def test_numbers_of_numpy_are_numbers(model_dir: Path, tmp_path: Path) -> None:
    with LLM(
        model_dir,
        micro_batch_size=np.int64(3),  # type: ignore[arg-type]
        cpu_attention=np.float32(50),  # type: ignore[arg-type]
        weights=np.array([0, 30, 70]),  # type: ignore[arg-type]
        disk_dir=tmp_path,
        move_rows=np.False_,  # type: ignore[arg-type]
    ) as own:
        options = own._options
    assert options.micro_batch_size == 3 and type(options.micro_batch_size) is int
    assert options.move_rows is False
    assert (options.cpu_attention_percent, options.weights_percent) == (50.0, (0, 30, 70))


def test_every_setting_is_read() -> None:
    """Each keyword of LLM sets a field of its own, but what names files."""
    keywords = {*inspect.signature(LLM).parameters} - {"model", "lora"}
    assert keywords == {*_SETTINGS}
    fields = [field for field, _, _ in _SETTINGS.values()]
    assert len({*fields}) == len(fields)


def test_random_weights_need_a_configuration_alone(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    with LLM(tmp_path, device="cpu", dummy_weights=True, cpu_memory="64GiB") as bare:
        assert bare.tokenizer is None
        with pytest.raises(InputError, match="no tokenizer"):
            bare.generate("text")
    with LLM(tmp_path, device="cpu", dtype="float32", dummy_weights=True) as bare:
        (answer,) = bare.generate([1, 2, 3], GREEDY)
        assert len(answer.token_ids) == 6 and answer.text == ""


def test_weights_in_fewer_bits_that_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model, whose weights are bfloat16: the same answers and scores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    params = SamplingParams(max_tokens=8, logprobs=0)
    found = []
    for lossless in (False, True):
        with LLM("demo", device="cpu", dtype="float32", lossless=lossless) as own:
            found.append([answer.outputs[0] for answer in own.generate(["Count: 3 + 4 ="], params)])
    assert found[0] == found[1]
    assert len(list((tmp_path / "freight" / "compressed").glob("*/weights.bin"))) == 1


def test_products_of_integers(
    llm: LLM, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.runtime import device

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device, "computes_int8", lambda _: True)
    params = SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True)
    with LLM(model_dir, device="cpu", dtype="float32", compute="int8") as other:
        found = [
            answer.outputs[0].cumulative_logprob
            for answer in other.generate(["the cat"] * 2, params)
        ]
    plain = next(llm.generate("the cat", params)).outputs[0].cumulative_logprob
    assert plain is not None and found[0] == found[1]
    assert found[0] != plain and found[0] == pytest.approx(plain, abs=1.0)
    assert (tmp_path / "freight" / "compressed").is_dir()


def test_weights_are_kept_for_the_next_call(
    llm: LLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.runtime import loaders

    filled: list[str] = []
    fill = loaders.CheckpointFiles.fill

    def note(self: Any, name: str, first_row: int, out: Any) -> None:
        filled.append(name)
        fill(self, name, first_row, out)

    def answers(*prompts: str) -> list[list[int]]:
        return [list(answer.token_ids) for answer in llm.generate(prompts, GREEDY)]

    monkeypatch.setattr(loaders.CheckpointFiles, "fill", note)
    one, other = ("the cat", "a"), ["a longer prompt " * 4] * 9
    first = answers(*one)
    loaded = len(filled)
    assert loaded
    found = answers(*other)
    assert answers(*one) == first
    next(llm.generate(["given up"] * 5))
    gc.collect()
    assert answers(*one) == first
    assert len(filled) == loaded
    llm.close()
    assert answers(*other) == found
    assert len(filled) == 2 * loaded


def test_calls_do_not_add_up_in_memory(llm: LLM) -> None:
    from freight.memory.process import process_bytes

    sizes = []
    for _ in range(6):
        list(llm.generate(["the cat"] * 4, GREEDY))
        sizes.append(process_bytes())
    assert sizes[-1] - sizes[1] < 16 << 20
