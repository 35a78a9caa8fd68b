"""A GGUF file alone is a model: its config.json and tokenizer.json are made of what it says."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import ExpertGatingFuncType
from gguf import GGMLQuantizationType as Kind
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, PretrainedConfig

from freight import LLM, SamplingParams
from freight.entrypoints.cli import main
from freight.entrypoints.eval import evaluate
from freight.entrypoints.eval.settings import SETTINGS_OF_QUANTISED
from freight.entrypoints.gguf_model import why_no_tokenizer
from freight.entrypoints.model_source import find_model
from freight.errors import FreightError, ModelError
from freight.model.checkpoint import resolve
from freight.model.config import parse_config, read_config
from freight.model.gguf import GgufFile, read_gguf
from freight.model.gguf_architectures import ARCHITECTURES
from freight.model.gguf_config import config_of_gguf
from freight.runtime.gguf_tokenizer import tokenizer_config_of_gguf, tokenizer_of_gguf
from freight.runtime.token_bytes import _letters
from freight.runtime.tokenizer import Tokenizer

from ..jobs.tiny_model import write_tiny_tokenizer
from ..runtime import tiny
from ..runtime.gguf_files import describe_tokenizer, split_gguf, write_gguf
from ..runtime.test_engine_gguf import CONFIGS, SIZES, mixed

TEXTS = ["the cat sat on the mat 1234", " naïve 日本 😀\n\n  don't  ", "</s>x<s>"]


def write(
    directory: Path,
    architecture: str,
    config: PretrainedConfig,
    pre: str = "gpt-2",
    describe: Callable[[Any], None] = lambda _: None,
    kind_of: Callable[[str], Kind] = mixed,
) -> tuple[Path, Any]:
    """A GGUF file with nothing beside it, and the model that it means."""
    model = tiny.make_model(directory / "theirs", config=config)
    content = json.loads(
        (write_tiny_tokenizer(directory / "theirs") / "tokenizer.json").read_text()
    )

    def say(writer: Any) -> None:
        describe_tokenizer(writer, content, pre)
        describe(writer)

    path = directory / "own" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    return path, write_gguf(model, path, architecture, kind_of, say)


@pytest.mark.parametrize(
    "name",
    [name for name in CONFIGS if name != "mistral" and ARCHITECTURES[CONFIGS[name][0]].classes],
)
def test_the_configuration_is_that_of_config_json(name: str, tmp_path: Path) -> None:
    architecture, config = CONFIGS[name]
    path, _ = write(tmp_path, architecture, config)
    made, theirs = read_config(find_model(str(path))), read_config(tmp_path / "theirs")
    if architecture == "gemma2":  # as the published models have it, but for the largest
        theirs = replace(theirs, attention_scalar=float(theirs.head_dim))
    if architecture == "qwen3next":  # whose tensors lie as its successor's do
        assert theirs.recurrence is not None
        theirs = replace(
            theirs,
            family="qwen3_5_moe",
            intermediate_size=made.intermediate_size,  # of no layer of either
            recurrence=replace(theirs.recurrence, is_dealt=False),
        )
    assert made.norm_eps == pytest.approx(theirs.norm_eps, rel=1e-7)  # the file has it in float32
    assert replace(made, dtype=theirs.dtype, norm_eps=theirs.norm_eps) == theirs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The file, and what transformers answers to each of the texts."""
    path, model = write(tmp_path_factory.mktemp("alone"), "llama", LlamaConfig(**SIZES))
    tokenizer = Tokenizer(path.parents[1] / "theirs")
    prompts = [tokenizer.encode(text) for text in TEXTS]
    return path, tiny.tokens(tiny.reference(model, prompts, 5))


def until_end(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(1)] if 1 in token_ids else token_ids


def test_the_api_answers(alone: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    path, wanted = alone
    for model in (path, path.parent):
        with LLM(model, dtype="float32") as llm:
            answers = llm.generate(TEXTS, SamplingParams(max_tokens=5))
            assert [list(answer.token_ids) for answer in answers] == list(map(until_end, wanted))


def test_the_commands_answer(
    alone: tuple[Path, list[list[int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, wanted = alone
    rows = [{"prompt": text, "max_tokens": 5} for text in TEXTS]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--model", str(path), "--dtype", "float32", "-o", str(tmp_path / "out.jsonl")]
    assert main(["run", str(tmp_path / "in.jsonl"), *flags]) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    decode = Tokenizer(path.parents[1] / "theirs").decode
    assert [row["text"] for row in found] == [decode(until_end(ids)) for ids in wanted]
    assert main(["compress", "--model", str(path)]) == 0
    assert Path(capsys.readouterr().out.strip(), "weights.bin").is_file()
    plan = ["plan", "--model", str(path), "--machine", "laptop", "--workload", "64:8"]
    assert main([*plan, "--rows", "8"]) == 0
    assert "quantised by its checkpoint" in capsys.readouterr().out
    for asked in (["--weight-bits", "4"], ["--compute", "int8"]):
        for command in ([*plan, "--rows", "8"], ["compress", "--model", str(path)]):
            assert main([*command, *asked]) == 2
            assert "quantised already" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_children")
def test_an_evaluation_leaves_what_is_quantised(
    alone: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("weights" in setting for setting in SETTINGS_OF_QUANTISED)
    monkeypatch.setattr(evaluate, "SETTINGS_OF_QUANTISED", ("exact", "kv=4"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the cat", "answer": "sat", "max_tokens": 3}')
    flags = ["--exact-match", str(tmp_path / "rows.jsonl"), "--json", str(tmp_path / "found.json")]
    assert main(["eval", "--model", str(alone[0]), *flags]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["settings"]
    assert [own["setting"] for own in found] == ["exact", "kv=4"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_the_tokenizer_is_that_of_transformers(pre: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, "llama", LlamaConfig(**SIZES), pre)
    own = Tokenizer(find_model(str(path)))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    @settings(deadline=None, max_examples=80)
    @given(st.one_of(st.sampled_from(TEXTS), st.text(st.characters(codec="ascii"), max_size=30)))
    def agree(text: str) -> None:
        ids = own.encode(text)
        assert ids[1:] == theirs.encode(text, add_special_tokens=False) and ids[0] == 0
        assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    agree()
    assert own.eos_token_ids == {1}


def describe_pieces(writer: Any) -> None:
    """A vocabulary of SentencePiece's kind: pieces by rank, and a token for each byte."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(PIECES))
    writer.add_token_scores([-float(number) for number in range(len(PIECES))])
    kinds = [3 if number < 3 else 6 if number < 259 else 1 for number in range(len(PIECES))]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


PIECES = {
    piece: number
    for number, piece in enumerate(
        [
            *("<unk>", "<s>", "</s>"),
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *("▁t", "he", "▁the", "at", "▁c", "▁cat", "▁sat", "on", "▁on", "▁▁", "▁th", "e▁", "ca"),
            *sorted(set("▁thecatsonmidwr.,!")),
        ]
    )
}


def join_pieces(text: str) -> list[int]:
    """What SentencePiece does: of neighbours that are one piece, those of the highest score first;
    letters that are none become bytes."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        ranks = [PIECES.get(a + b, len(PIECES)) for a, b in itertools.pairwise(parts)]
        best = min(ranks, default=len(PIECES))
        if best == len(PIECES):
            break
        place = ranks.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [PIECES[part]] if part in PIECES else [3 + byte for byte in part.encode()]
    return ids


def write_pieces(directory: Path, describe: Callable[[Any], None] = lambda _: None) -> Path:
    def say(writer: Any) -> None:
        describe_pieces(writer)
        describe(writer)

    model = tiny.make_model(directory / "theirs", config=LlamaConfig(**SIZES))
    path = directory / "own" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(model, path, "llama", mixed, say)
    return path


def test_pieces_are_joined_by_their_scores(tmp_path: Path) -> None:
    own = Tokenizer(find_model(str(write_pieces(tmp_path))))

    @settings(deadline=None, max_examples=80)
    @given(
        st.one_of(
            st.lists(st.sampled_from(["the", "cat", "sat", "on", "mat", "", "é日"])).map(" ".join),
            st.text(st.sampled_from("thecatson xyz.é"), max_size=30),
        ).filter(lambda text: text)
    )
    def agree(text: str) -> None:
        ids = own.encode(text)
        assert ids == [1, *join_pieces(text)]
        assert own.decode(ids) == text
        # As the answer to another prompt it begins with the space of its first piece.
        assert own.decode_answer(ids[1:]) == f" {text}"

    agree()
    assert own.eos_token_ids == {2}


def test_a_text_behind_a_special_token_begins_with_a_space(tmp_path: Path) -> None:
    """As in llama.cpp, and by the files that Llama 2 and Mistral were published with."""
    own = Tokenizer(find_model(str(write_pieces(tmp_path))))
    ids = own.encode("the cat</s> on<s>the")
    assert ids == [1, *join_pieces("the cat"), 2, *join_pieces(" on"), 1, *join_pieces("the")]


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_space_before_a_text_is_the_file_s_to_say(prefixed: bool, tmp_path: Path) -> None:
    path = write_pieces(tmp_path, lambda w: w.add_add_space_prefix(prefixed))
    own = Tokenizer(find_model(str(path)))
    first = PIECES["▁the"] if prefixed else PIECES["t"]
    ids = own.encode("the cat")
    assert ids[:2] == [1, first] and own.decode(ids) == "the cat"


def test_pieces_without_the_library_that_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pieces(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    made = find_model(str(path))
    assert not (made / "tokenizer.json").exists() and (made / "config.json").exists()
    assert "made by transformers, which is not" in (why_no_tokenizer(made) or "")


def test_pieces_that_make_no_tokenizer(tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "theirs", config=LlamaConfig(**SIZES))
    write_gguf(model, tmp_path / "a.gguf", "llama", mixed, lambda w: w.add_tokenizer_model("llama"))
    with pytest.raises(ModelError, match="transformers cannot make it of what the file says"):
        find_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<eos>", "<end_of_turn>"], [0, 1]),
        (["<|im_end|>", "x", "<|endoftext|>"], [1, 0, 2]),
        (["<|return|>", "<|end|>", "<|call|>"], [2, 0]),
    ],
)
def test_tokens_that_end_a_turn_are_known_by_their_text(
    tokens: list[str], ends: list[int], tmp_path: Path
) -> None:
    def describe(writer: Any) -> None:
        writer.add_eos_token_id(ends[0])
        writer.add_token_list(tokens)

    (path, *_) = write_alone(tmp_path, "qwen3", describe)
    assert config_of_gguf(read_gguf(path, with_arrays=True))["eos_token_id"] == ends


def write_alone(
    directory: Path, name: str, describe: Callable[[Any], None]
) -> tuple[Path, PretrainedConfig]:
    """A file without a tokenizer."""
    architecture, config = CONFIGS[name]
    model = tiny.make_model(directory / "theirs", config=config)
    write_gguf(model, directory / "a.gguf", architecture, mixed, describe)
    return directory / "a.gguf", config


@pytest.mark.parametrize(
    ("name", "describe", "found"),
    [
        ("qwen3", lambda w: w.add_float32("qwen3.rope.scale_linear", 4.0), ("linear", 4.0)),
        ("qwen3", lambda w: w.add_rope_scaling_factor(2.0), ("linear", 2.0)),
        ("granite", lambda w: w.add_rope_scaling_finetuned(False), None),
        ("granite", lambda w: w.add_rope_scaling_finetuned(True), ("default", None)),
    ],
)
def test_rotations_by_other_names(
    name: str, describe: Callable[[Any], None], found: Any, tmp_path: Path
) -> None:
    path, _ = write_alone(tmp_path, name, describe)
    (tmp_path / "config.json").write_text(json.dumps(config_of_gguf(read_gguf(path))))
    for rope in read_config(tmp_path).ropes:
        assert (rope and (rope.kind, rope.factor)) == found


def test_a_window_that_goes_without_saying(tmp_path: Path) -> None:
    """Of Gemma 2, whose first files do not say it."""
    given = replace_config(CONFIGS["gemma2"][1], sliding_window=None)
    model = tiny.make_model(tmp_path / "theirs", config=given)
    write_gguf(model, tmp_path / "a.gguf", "gemma2", mixed)
    (tmp_path / "config.json").write_text(
        json.dumps(config_of_gguf(read_gguf(tmp_path / "a.gguf")))
    )
    assert read_config(tmp_path).sliding_windows == (4096, None)


def replace_config(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    return type(config)(**{**config.to_dict(), **changes})


@pytest.mark.parametrize(
    ("name", "describe", "words"),
    [
        ("glm4", lambda w: w.add_rope_dimension_sections([8, 12, 12, 0]), "in another order"),
        (
            "glm4_moe",
            lambda w: w.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX),
            "It says expert_gating_func 1",
        ),
    ],
)
def test_kin_that_is_not_the_same(
    name: str, describe: Callable[[Any], None], words: str, tmp_path: Path
) -> None:
    path, _ = write_alone(tmp_path, name, describe)
    with pytest.raises(ModelError) as caught:
        made = find_model(str(path))
        resolve(read_config(made), made)
    assert words in str(caught.value)


def test_a_config_that_only_names_the_kind_is_left_out(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "qwen3", CONFIGS["qwen3"][1])
    (path.parent / "config.json").write_text('{"model_type": "qwen3"}')
    for source in (path, path.parent):
        assert read_config(find_model(str(source))).num_layers == 2


def test_parts_that_were_put_together_again(tmp_path: Path) -> None:
    path, _ = write(
        tmp_path, "qwen3", CONFIGS["qwen3"][1], describe=lambda w: w.add_uint16("split.count", 0)
    )
    assert find_model(str(path)).is_dir()


ODD: list[Any] = [-1, 0, 1, 7, 2**31 - 1, 1e38, float("nan"), True, "text", "", [1], [True], ["a"]]
GONE = object()
ALONE = sorted({CONFIGS[name][0] for name in CONFIGS if ARCHITECTURES[CONFIGS[name][0]].classes})


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    """A file of each architecture, as far as its header goes."""
    found = {}
    for name, (architecture, _) in CONFIGS.items():
        if architecture in ALONE and architecture not in found:
            path, _ = write_alone(tmp_path_factory.mktemp("alone"), name, lambda _: None)
            found[architecture] = read_gguf(path, with_arrays=True)
    return found


@settings(deadline=None, max_examples=300)
@given(
    architecture=st.sampled_from(ALONE),
    changes=st.lists(
        st.tuples(st.integers(0, 999), st.one_of(st.just(GONE), st.sampled_from(ODD))),
        min_size=1,
        max_size=3,
    ),
)
def test_odd_headers_are_refused_or_read(
    architecture: str, changes: list[tuple[int, Any]], headers: dict[str, GgufFile]
) -> None:
    file = headers[architecture]
    own = [key for key in file.metadata if key.startswith(f"{architecture}.")]
    more = ["nextn_predict_layers", "rope.scaling.type", "rope.scaling.factor", "ssm.inner_size"]
    more += ["attention.sliding_window_pattern", "attention.recurrent_layers"]
    more += ["rope.scaling.finetuned"]
    own += [f"{architecture}.{key}" for key in more]
    own += [f"tokenizer.ggml.{key}" for key in ("eos_token_id", "tokens", "merges", "token_type")]
    changed = dict(file.metadata)
    for number, value in changes:
        key = own[number % len(own)]
        changed[key] = value
        if value is GONE:
            del changed[key]
    odd = replace(file, metadata={**changed, "tokenizer.ggml.model": "gpt2"})
    try:
        raw = config_of_gguf(odd)
        tokenizer_of_gguf(odd)
        tokenizer_config_of_gguf(odd)
        parse_config(json.loads(json.dumps(raw)), "a header")
    except FreightError:
        pass


def test_llama_3_rotates_by_the_factors_of_the_file(tmp_path: Path) -> None:
    """As the converter of llama.cpp writes them: one number for each frequency."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(**SIZES, rope_parameters=scaling)
    low, high = 32 / 1.0, 32 / 4.0
    factors = []
    for i in range(0, 64, 2):
        length = 2 * np.pi * 10_000.0 ** (i / 64)
        smooth = (32 / length - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if length < high else 8.0 if length > low else between)

    def add_factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    path, model = write(tmp_path, "llama", config, describe=add_factors)
    prompts = tiny.prompts(4, 100)
    wanted = tiny.tokens(tiny.reference(model, prompts, 6))
    options = {**tiny.ON_CPU, "compressed_dir": tmp_path / "kept"}
    with tiny.engine(find_model(str(path)), prompts, 6, **options) as engine:
        engine.tokenizer = None  # with no end of sequence, every row makes all its tokens
        assert tiny.run(engine, prompts, 6) == wanted


def test_without_a_tokenizer_rows_are_token_ids(tmp_path: Path) -> None:
    path, model = write(tmp_path, "llama", LlamaConfig(**SIZES), pre="one of its own")
    wanted = tiny.tokens(tiny.reference(model, [[5, 6, 7]], 5))
    (answer,) = LLM(path, dtype="float32").generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    assert list(answer.token_ids) == wanted[0]
    with pytest.raises(ValueError, match=r"tiny\.gguf has a tokenizer that splits text as 'one of"):
        LLM(path).generate("text")
    # One that lies beside it is used.
    theirs = tmp_path / "theirs/tokenizer.json"
    (path.parent / "tokenizer.json").write_bytes(theirs.read_bytes())
    own = Tokenizer(find_model(str(path)))
    assert own.encode(TEXTS[0]) == Tokenizer(theirs.parent).encode(TEXTS[0])


def test_made_once_and_anew_for_another_file(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "qwen3", CONFIGS["qwen3"][1])
    made = find_model(str(path))
    assert find_model(str(path)) == find_model(str(path.parent)) == made != path.parent
    path.touch()
    assert find_model(str(path)) != made


def write_parts(directory: Path, count: int) -> tuple[list[Path], Any]:
    """A model in several files, as llama-gguf-split makes them."""
    path, model = write(directory, "llama", LlamaConfig(**SIZES))
    split_gguf(path, count)
    path.unlink()
    return sorted(path.parent.iterdir()), model


@pytest.mark.parametrize("named", [0, 2])
def test_a_model_in_several_files(named: int, tmp_path: Path) -> None:
    parts, model = write_parts(tmp_path, 3)
    tokenizer = Tokenizer(tmp_path / "theirs")
    wanted = tiny.tokens(tiny.reference(model, [tokenizer.encode(text) for text in TEXTS], 5))
    for source in (parts[named], parts[named].parent):
        with LLM(source, dtype="float32") as llm:
            answers = llm.generate(TEXTS, SamplingParams(max_tokens=5))
            assert [list(answer.token_ids) for answer in answers] == list(map(until_end, wanted))
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"00003-of-00003.*cut short"):
        made = find_model(str(parts[0]))
        resolve(read_config(made), made)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    parts, _ = write_parts(tmp_path, 3)
    parts[1].unlink()
    for source in (parts[0], parts[2], parts[0].parent):
        with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf cannot be found"):
            find_model(str(source))
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="one of 3 files of a model, and by its name one of 1"):
        find_model(str(tmp_path / "renamed.gguf"))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("Q4_K_M", "a-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "a-UD-Q4_K_M.gguf"),
        ("q8_0", "big-Q8_0-00001-of-00002.gguf"),
        ("F16", "a-F16.gguf"),
        ("bf16", "a-BF16.gguf"),
        ("Q4_K", ""),
    ],
)
def test_the_hub_is_asked_for_one_kind(
    kind: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users of llama.cpp name a model."""
    path, _ = write(tmp_path, "qwen3", CONFIGS["qwen3"][1])
    split_gguf(path, 2)
    kinds = ("Q4_K_M", "UD-Q4_K_M", "Q4_K_S", "Q2_K", "F16", "BF16")
    published = [*(f"a-{own}.gguf" for own in kinds), "mmproj-F16.gguf", "a-mmproj-q8_0.gguf"]
    parts = [f"Q8_0/big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    repository = tmp_path / "hub"

    def download(
        hub_id: str, *, revision: None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert hub_id == "owner/name"
        names = filter_repo_objects(
            published + parts, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in names:
            assert "a-Q2_K.gguf" != name and "mmproj" not in name
            source = path.with_name(name.split("big-Q8_0")[-1].join(["tiny", ""]))
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).symlink_to(source if name in parts else path)
        return str(repository)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    if wanted:
        assert (find_model(f"owner/name:{kind}") / wanted).is_symlink()
    else:
        with pytest.raises(ModelError, match="these are of that kind by their name: none"):
            find_model(f"owner/name:{kind}")


def test_a_file_that_is_a_link(tmp_path: Path) -> None:
    """As in the cache of the Hub, whose files have other names."""
    path, _ = write(tmp_path, "qwen3", CONFIGS["qwen3"][1])
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    made = find_model(str(path))
    assert (made / path.name).is_symlink() and (made / "config.json").is_file()


@pytest.mark.parametrize(
    ("architecture", "describe", "words"),
    [
        ("qwen2", lambda w: w.add_expert_count(8), "a model of 8 experts"),
        ("xverse", lambda _: None, "It holds a model of architecture xverse"),
    ],
)
def test_other_models_are_refused(
    architecture: str, describe: Callable[[Any], None], words: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, architecture, CONFIGS["qwen2"][1], describe=describe)
    with pytest.raises(ModelError) as caught:
        find_model(str(path))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("deepseek-v3", "Hello12345 世界!foo ,x\n\n y", "Hello|123|45|Ġ|世界|!foo|Ġ,|x|ĊĊ|Ġy"),
        ("lfm2", "I'LL see 12345 cats", "I|'LL|Ġsee|Ġ|123|45|Ġcats"),
        ("olmo", "I'll see 12345 cats", "I|'ll|Ġsee|Ġ12345|Ġcats"),
        ("hunyuan", "see 12345", "see|Ġ|1|2|3|4|5"),
    ],
)
def test_text_is_split_as_llama_cpp_splits_it(
    pre: str, text: str, parts: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, "llama", LlamaConfig(**SIZES), pre)
    content = json.loads((find_model(str(path)) / "tokenizer.json").read_text())
    own = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
    letters = _letters()
    found = [part for part, _ in own.pre_tokenize_str(text)]
    wanted = [part.replace("Ġ", " ").replace("Ċ", "\n") for part in parts.split("|")]
    assert [bytes(map(letters.__getitem__, part)).decode() for part in found] == wanted
