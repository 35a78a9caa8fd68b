"""What models are for, by their files: to generate, to embed, to label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freight.errors import InputError, ModelError
from freight.model.config import parse_config, read_config
from freight.model.decoder import build_programme, tensor_shapes
from freight.model.readout import Readout
from freight.model.task import for_task, refuse_other

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
POOLING = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
MODULES = ("Transformer", "Pooling", "Normalize")


def of(architecture: str, **changes: Any) -> Any:
    return parse_config({**SMALL, "architectures": [architecture], **changes})


def publish(
    directory: Path, kinds: tuple[str, ...], pooling: dict[str, Any], **changes: Any
) -> Path:
    """A model as sentence-transformers keeps it."""
    raw = {**SMALL, "architectures": ["Qwen3ForCausalLM"], **changes}
    (directory / "config.json").write_text(json.dumps(raw))
    paths = {"Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [
        {"idx": n, "path": paths.get(kind, ""), "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def test_what_an_architecture_is_for() -> None:
    assert of("Qwen3ForCausalLM").readout is None
    assert of("Qwen3Model").readout == Readout()
    labels = of("Qwen3ForSequenceClassification", id2label={"1": "no", "0": "yes"}).readout
    assert labels == Readout(labels=("yes", "no"), problem="single_label_classification")
    counted = of("Qwen3ForSequenceClassification", num_labels=1).readout
    assert counted == Readout(labels=("LABEL_0",), problem="regression")
    assert len(of("Qwen3ForSequenceClassification").readout.labels) == 2
    listed = of("Qwen3ForSequenceClassification", id2label=["yes", "no", "?"], num_labels=3)
    assert listed.readout.labels == ("yes", "no", "?")
    several = of("Qwen3ForSequenceClassification", problem_type="multi_label_classification")
    assert several.readout.problem == "multi_label_classification"
    # These are called so though they generate.
    assert parse_config(_BLOOM).readout is None


_BLOOM: dict[str, Any] = {
    "architectures": ["BloomModel"],
    "model_type": "bloom",
    "vocab_size": 320,
    "n_embed": 64,
    "n_layer": 2,
    "num_attention_heads": 4,
}


def test_what_stands_in_place_of_a_head() -> None:
    plain = of("Qwen3ForCausalLM")
    labels = of("Qwen3ForSequenceClassification", num_labels=3)
    stream = of("Qwen3Model")
    assert [own.head_size for own in (plain, labels, stream)] == [320, 3, 64]
    shapes = {own.head_size: tensor_shapes(own) for own in (plain, labels, stream)}
    assert shapes[3].keys() - shapes[64].keys() == {"score.weight"}
    assert shapes[3]["score.weight"] == (3, 64)
    assert shapes[320].keys() - shapes[64].keys() == {"head.weight"}
    for own in (labels, stream):
        heads = [unit for unit in build_programme(own).units if unit.kind == "head"]
        assert [unit.columns for unit in heads] == [range(own.head_size)]


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Qwen3ForSequenceClassification", {"num_labels": 0}, "num_labels is 0"),
        ("Qwen3ForSequenceClassification", {"id2label": {"1": "a", "2": "b"}}, "1, 2, expected 0"),
        (
            "Qwen3ForSequenceClassification",
            {"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 2},
            "num_labels is 2, and id2label names 3",
        ),
        ("Qwen3ForSequenceClassification", {"id2label": ["a", "a"]}, 'names "a" twice'),
        ("Qwen3ForSequenceClassification", {"id2label": "a"}, "must name labels by their numbers"),
        ("Qwen3ForSequenceClassification", {"problem_type": "x"}, "problem_type is 'x'"),
        ("Qwen3Model", {"is_causal": False}, "is_causal is false"),
        ("Qwen3Model", {"use_bidirectional_attention": True}, "tokens would see what follows"),
        ("Qwen3Model", {"auto_map": {"AutoModel": "own.Qwen3Model"}}, "code of its own (own.Q"),
        ("FooForSequenceClassification", {}, "Supported architectures are"),
        ("FooModel", {}, "Supported architectures are"),
    ],
)
def test_what_cannot_be(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        of(architecture, **changes)
    assert words in str(caught.value)


def test_sentence_transformers_files(tmp_path: Path) -> None:
    for number, (kinds, is_unit) in enumerate(((MODULES, True), (MODULES[:2], False))):
        directory = tmp_path / str(number)
        directory.mkdir()
        config = read_config(publish(directory, kinds, POOLING))
        assert config.readout == Readout(is_unit=is_unit)
        assert ("of length 1" in config.readout.description) == is_unit  # a job's identity has it
        assert for_task(config, "generate").readout is None
        assert for_task(config, "embed").readout == Readout(is_unit=is_unit)
    newer = tmp_path / "newer"
    newer.mkdir()
    assert read_config(publish(newer, MODULES, {"pooling_mode": "lasttoken"})).readout == Readout()


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (MODULES, {"pooling_mode_mean_tokens": True}, "read by pooling_mode_mean_tokens"),
        (MODULES, {**POOLING, "pooling_mode_cls_token": True}, "and pooling_mode_cls_token"),
        (MODULES, {"pooling_mode": "mean"}, "pooling_mode mean"),
        (MODULES, {}, "nothing that its files say"),
        ((*MODULES[:2], "Dense"), POOLING, "it has Dense"),
    ],
)
def test_embeddings_of_other_tokens(
    kinds: tuple[str, ...], pooling: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert_no_embeddings(publish(tmp_path, kinds, pooling), words)


def assert_no_embeddings(directory: Path, words: str) -> None:
    """What is asked is refused, not the model: it may generate."""
    config = read_config(directory)
    with pytest.raises(ModelError) as caught:
        for_task(config, "auto")
    assert words in caught.value.limit and "the task generate" in caught.value.advice
    with pytest.raises(InputError) as asked:
        for_task(config, "embed")
    assert words in asked.value.limit and asked.value.asked == "Embeddings were asked for."
    assert asked.value.advice == "Choose another model."
    assert for_task(config, "generate").readout is None


def test_embeddings_by_code_of_their_own(tmp_path: Path) -> None:
    """Such a model is called as others are, and its tokens see all."""
    own = {"AutoModel": "own.Qwen2Model", "AutoModelForCausalLM": "own.Qwen2ForCausalLM"}
    directory = publish(tmp_path, MODULES, POOLING, auto_map=own)
    assert_no_embeddings(directory, "code of its own (own.Qwen2Model)")


def test_embeddings_need_a_norm_to_be_read_behind(tmp_path: Path) -> None:
    own = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 160}
    directory = publish(tmp_path, MODULES, POOLING, **own, do_layer_norm_before=False)
    assert_no_embeddings(directory, "no norm behind its last layer")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_causal": False}, "is_causal is false"),
        ({"use_bidirectional_attention": True}, "tokens would see what follows"),
        ({"auto_map": {"AutoModel": "own.Qwen3Model"}}, "code of its own (own.Qwen3Model)"),
        (
            {"auto_map": {"AutoModel": "b.Own", "AutoModelForCausalLM": "own.Qwen3ForCausalLM"}},
            "code of its own (b.Own)",
        ),
        ({"is_causal": True, "use_bidirectional_attention": "vision"}, None),
        ({"auto_map": {"AutoModelForCausalLM": "own.Qwen3ForCausalLM"}}, None),
        (
            {
                "auto_map": {
                    "AutoConfig": "config.Own",
                    "AutoModel": "own.Qwen3Model",
                    "AutoModelForCausalLM": "own.Qwen3ForCausalLM",
                }
            },
            None,
        ),
    ],
    ids=str,
)
def test_embeddings_of_a_model_that_generates(changes: dict[str, Any], words: str | None) -> None:
    """Its layers are those that generate; what would have them do something else is asked here,
    too."""
    config = of("Qwen3ForCausalLM", **changes)
    assert for_task(config, "auto").readout is None
    if words is None:
        assert for_task(config, "embed").readout == Readout()
        return
    with pytest.raises(InputError) as caught:
        for_task(config, "embed")
    assert words in caught.value.limit


def describe(directory: Path, name: str, **said: Any) -> None:
    (directory / name).write_text(json.dumps(said))


def test_how_texts_are_read_before(tmp_path: Path) -> None:
    publish(tmp_path, MODULES, POOLING)
    prompts = {"query": "Find: ", "other": "x"}
    stated = {"prompts": prompts, "default_prompt_name": "query", "truncate_dim": 16}
    describe(tmp_path, "config_sentence_transformers.json", **stated)
    describe(tmp_path, "sentence_bert_config.json", max_seq_length=32, do_lower_case=False)
    found = read_config(tmp_path).readout
    assert found == Readout(prompt="Find: ", most_tokens=32, dimensions=16)
    for own in ("16 dimensions", '"Find: "', "32 tokens"):
        assert own in found.description  # a job's identity has it
    # Without a length of its own that of the tokenizer counts, and positions are fewer than both.
    (tmp_path / "sentence_bert_config.json").unlink()
    describe(tmp_path, "tokenizer_config.json", model_max_length=64)
    found = read_config(tmp_path).readout
    assert found is not None and found.most_tokens == 64
    describe(tmp_path, "tokenizer_config.json", model_max_length=10**30)
    describe(tmp_path, "config_sentence_transformers.json", prompts={"query": "Find: "})
    assert read_config(tmp_path).readout == Readout()


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is set"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, 'max_seq_length is "x"'),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim is 0"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"a": "b"}, "default_prompt_name": "c"},
            "default_prompt_name is c",
        ),
    ],
)
def test_texts_that_are_read_otherwise(
    name: str, said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    publish(tmp_path, MODULES, POOLING)
    describe(tmp_path, name, **said)
    assert_no_embeddings(tmp_path, words)


def test_a_head_of_labels_stays_one(tmp_path: Path) -> None:
    """Files of sentence-transformers beside say how it embeds, where that is asked for."""
    publish(tmp_path, MODULES[:2], POOLING, architectures=["Qwen3ForSequenceClassification"])
    config = read_config(tmp_path)
    for task in ("auto", "classify"):
        readout = for_task(config, task).readout
        assert readout is not None and len(readout.labels) == 2
    assert for_task(config, "embed").readout == Readout(is_unit=False)


def test_tasks() -> None:
    plain, labels = of("Qwen3ForCausalLM"), of("Qwen3ForSequenceClassification")
    for task in ("auto", "generate"):
        assert for_task(plain, task) == plain
    assert for_task(plain, "embed").readout == for_task(labels, "embed").readout == Readout()
    assert for_task(labels, "auto") == for_task(labels, "classify") == labels
    for config, task in ((plain, "classify"), (labels, "generate"), (of("Qwen3Model"), "classify")):
        with pytest.raises(InputError, match=f"task {task}"):
            for_task(config, task)
    bare = parse_config(
        {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "do_layer_norm_before": False,
            **{key: value for key, value in SMALL.items() if key != "model_type"},
            "ffn_dim": 160,
        }
    )
    with pytest.raises(InputError, match="no norm behind its last layer"):
        for_task(bare, "embed")


def test_what_fits_a_task() -> None:
    """One function refuses, in words that are true of each: what a user did may not be undone where
    it was not done."""
    readouts = {"generate": None, "embed": Readout(), "classify": Readout(labels=("a", "b"))}
    for own, readout in readouts.items():
        for task in readouts:
            if own == task:
                refuse_other(readout, task, "It was wanted.")
                continue
            with pytest.raises(InputError) as caught:
                refuse_other(readout, task, "It was wanted.", spare="leave it out")
            made = "generates" if readout is None else f"makes {readout.name}"
            assert caught.value.limit.startswith(f"The model {made}")
            advice = caught.value.advice
            assert advice.startswith("Leave it out, ")
            is_one_of_tasks = task == "embed" or own == "embed"
            assert (f"run it with the task {task}" in advice) == is_one_of_tasks
    with pytest.raises(InputError) as caught:
        refuse_other(Readout(), "generate", "It was wanted.", takes_task=False)
    assert caught.value.advice == "Choose a model that generates."
