"""The tokenizer against transformers, and the incremental text against decoding everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import InputError, ModelError
from freight.runtime.tokenizer import Detokenizer, Tokenizer

from ..jobs.tiny_model import write_tiny_tokenizer

CHAT = [
    {"role": "system", "content": 'Say "x" & <b>'},
    {"role": "user", "content": "日本", "name": None},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.mark.parametrize("with_bos", [True, False])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_agrees_with_transformers(
    tmp_path: Path, with_bos: bool, add_bos_token: bool | None
) -> None:
    from transformers import AutoTokenizer

    write_tiny_tokenizer(tmp_path, with_bos=with_bos)
    if add_bos_token is not None:
        _edit(tmp_path / "tokenizer_config.json", add_bos_token=add_bos_token)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in ["", "the cat", "naïve 日本 😀\n\t<s>", "a</s>b"]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode_batch([text, "x"])[0] == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    chat_ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(CHAT) == chat_ids
    assert ours.encode_chat(CHAT).count(0) == 1, "BOS once"


TEMPLATES = [
    "{% for m in messages %}{{ m['content'] }}{% if loop.first %}{% continue %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ tools is none }}{{ add_generation_prompt }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_templates_render_as_in_transformers(tmp_path: Path, template: str, place: str) -> None:
    from transformers import AutoTokenizer

    write_tiny_tokenizer(tmp_path)
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif place == "list":
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
        _edit(tmp_path / "tokenizer_config.json", chat_template=named)
    else:
        _edit(tmp_path / "tokenizer_config.json", chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer(tmp_path).render_chat(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )


def test_values_of_a_row_go_before_special_tokens_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny_tokenizer(tmp_path)
    template = "{{ bos_token }}{{ eos_token }}{% if thinks is defined %}{{ thinks }}{% endif %}"
    _edit(tmp_path / "tokenizer_config.json", chat_template=template)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for values in ({}, {"thinks": False}, {"thinks": [1], "eos_token": "x"}):
        assert ours.render_chat(CHAT, values) == theirs.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=True, **values
        )


def test_refusals_of_templates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="no such role"):
        tokenizer.render_chat([{"role": "broken", "content": ""}])
    write_tiny_tokenizer(tmp_path)
    _edit(tmp_path / "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(ModelError, match="not a usable template"):
        Tokenizer(tmp_path).render_chat(CHAT)
    _edit(tmp_path / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="unsafe"):
        Tokenizer(tmp_path).render_chat(CHAT)
    _edit(tmp_path / "tokenizer_config.json", chat_template=None)
    assert not Tokenizer(tmp_path).has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(tmp_path).render_chat(CHAT)


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_token_ids == {1}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert Tokenizer(tmp_path).eos_token_ids == {7}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer(tmp_path).eos_token_ids == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert Tokenizer(tmp_path).eos_token_ids == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0]}))
    assert Tokenizer(tmp_path).eos_token_ids == {0, 3}


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    assert ours.decode(ours.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert len(ours.encode("the")) < 5


def test_older_formats_are_converted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_tiny_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    _edit(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    assert Tokenizer(tmp_path).encode("the cat sat") == tokenizer.encode("the cat sat")[1:]


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json and no older"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path)
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        Tokenizer(tmp_path)


def test_transformers_and_torch_stay_out(model_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from freight.runtime.tokenizer import Tokenizer;"
        f"Tokenizer(Path({str(model_dir)!r})).encode_chat([{{'role': 'u', 'content': 'x'}}]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STOPS = st.lists(
    st.sampled_from(["the", " t", "at", "日本", "😀", "e c", "\n\n", "x", "</", "aaa"])
    | st.text(min_size=1, max_size=3),
    max_size=3,
).map(tuple)
TEXTS = st.lists(
    st.sampled_from(["the", " cat", "日", "本", "😀", "😀😀", "a", "\n", " ", "ï"]) | st.text(),
    max_size=8,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), text=TEXTS, stop=STOPS, pieces=st.lists(st.integers(2, 319), max_size=30))
def test_detokenizer_agrees_with_decoding_everything(
    tokenizer: Tokenizer, data: st.DataObject, text: str, stop: tuple[str, ...], pieces: list[int]
) -> None:
    ids = data.draw(st.sampled_from([tokenizer.encode(text), pieces]))
    detokenizer = Detokenizer(tokenizer, stop)
    for count, token_id in enumerate(ids, 1):
        stopped = detokenizer.append(token_id)
        so_far = tokenizer.decode(ids[:count])
        settled = so_far.rstrip("\ufffd")
        places = [place for one in stop if (place := settled.find(one)) >= 0]
        assert stopped == bool(places)
        if stopped:
            assert detokenizer.text == settled[: min(places)]
            assert not detokenizer.append(token_id), "only the completing token stops"
            return
        assert detokenizer.text == so_far


@settings(deadline=None, max_examples=200)
@given(data=st.data(), text=TEXTS, stop=STOPS, min_tokens=st.integers(0, 12))
def test_stop_strings_complete_by_min_tokens_end_nothing(
    tokenizer: Tokenizer, data: st.DataObject, text: str, stop: tuple[str, ...], min_tokens: int
) -> None:
    pieces = st.lists(st.integers(2, 319), max_size=30)
    ids = data.draw(st.one_of(st.just(tokenizer.encode(text)), pieces))
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    closed = len(tokenizer.decode(ids[:min_tokens]).rstrip("\ufffd"))
    for count, token_id in enumerate(ids, 1):
        stopped = detokenizer.append(token_id)
        settled = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        places = [
            (place, one)
            for one in stop
            if (place := settled.find(one, max(0, closed - len(one) + 1))) >= 0
        ]
        assert stopped == (count > min_tokens and bool(places))
        if stopped:
            place = min(places)[0]
            assert detokenizer.text == settled[:place]
            assert (place, detokenizer.stop_string) in places
            return
    assert detokenizer.stop_string is None


def test_detokenizer_work_per_token_is_bounded(tokenizer: Tokenizer) -> None:
    longest = 0

    class Watched:
        def decode_answer(self, ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode_answer(ids)

    for ids in (tokenizer.encode("freight 😀" * 500), [tokenizer.encode("😀")[1]] * 2000):
        detokenizer = Detokenizer(Watched(), ("never",))  # type: ignore[arg-type]
        for token_id in ids:
            detokenizer.append(token_id)
    assert longest <= 130


def _edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture(scope="module")
def of_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With the layout of Llama 2's: a space before a text, which is taken off again."""
    directory = tmp_path_factory.mktemp("pieces")
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*letters, *"\u2581helowrd", "he", "ll", "\u2581he", "\u2581hell", "\u2581hello"]
    merges = [("h", "e"), ("l", "l"), ("\u2581", "he"), ("\u2581he", "ll"), ("\u2581hell", "o")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@given(st.text(st.sampled_from("hello wrd\u00e9"), min_size=1, max_size=12))
def test_the_space_that_an_answer_begins_with_is_its_own(of_pieces: Tokenizer, text: str) -> None:
    ids = of_pieces.encode(text)
    assert of_pieces.decode(ids) == text
    assert of_pieces.decode_answer(ids) == f" {text}"
    pieces = b"".join(of_pieces.token_bytes(number) for number in ids)
    assert pieces.decode() == f" {text}"
    watcher = Detokenizer(of_pieces, ("none of it",))
    for number in ids:
        watcher.append(number)
    assert watcher.text == f" {text}"


def test_a_stop_string_may_begin_with_a_space(of_pieces: Tokenizer) -> None:
    (hello,) = of_pieces.encode("hello")
    watcher = Detokenizer(of_pieces, (" hello",))
    assert watcher.append(hello) and watcher.text == ""
    assert of_pieces.token_text(hello) == " hello"
    assert of_pieces.token_text(2) == "</s>"
