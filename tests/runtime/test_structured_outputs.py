"""What answers may be asked to look like: how it is written, what is refused, what it allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.demo import MODEL_DIR
from freight.errors import InputError
from freight.model.batch import RowKey
from freight.runtime.guide import Guide, Guides
from freight.runtime.params import SamplingParams
from freight.runtime.penalties import History
from freight.runtime.sampler import Draw, sample
from freight.runtime.structured_outputs import StructuredOutputs, from_response_format
from freight.runtime.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["n", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL_DIR)


# -- how it is written ----------------------------------------------------------------------------


def test_one_form_by_vllm_s_names() -> None:
    written = StructuredOutputs.of({"json": SCHEMA})
    assert written is not None and json.loads(written.json or "") == SCHEMA
    assert written == StructuredOutputs.of({"json": json.dumps(SCHEMA), "regex": None})
    assert StructuredOutputs.of({"choice": ["a", "b"]}) == StructuredOutputs(choice=("a", "b"))
    assert StructuredOutputs.of({"json_object": False}) is None
    for own in ({"json": SCHEMA}, {"json_object": True}, {"choice": ["a"]}, {"regex": "a"}):
        structure = StructuredOutputs.of(own)
        assert structure is not None
        assert StructuredOutputs.of(json.loads(json.dumps(structure.as_mapping()))) == structure
    params = SamplingParams(structured_outputs={"regex": "[0-9]+"})
    assert params.structured_outputs == StructuredOutputs(regex="[0-9]+")
    assert hash(params) != hash(SamplingParams())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"json": SCHEMA, "regex": "a"}, "not json and regex"),
        ({"yaml": "a"}, "one of json, json_object, regex, choice, grammar"),
        ("[0-9]", "one of json"),
        ({"json": False}, "an object that is a JSON schema"),
        ({"json": True}, "an object that is a JSON schema"),
        ({"json": 0}, "an object that is a JSON schema"),
        ({"json": ""}, "an object that is a JSON schema"),
        ({"regex": False}, "a regular expression"),
        ({"choice": False}, "a list of one or more texts, none of them empty"),
        ({"choice": 5}, "a list of one or more texts, none of them empty"),
        ({"regex": 7}, "a regular expression"),
        ({"regex": "[a-"}, "unclosed character class"),
        ({"json": "{"}, "it is no JSON"),
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"choice": []}, "a list of one or more texts, none of them empty"),
        ({"choice": ["a", 1]}, "a list of one or more texts, none of them empty"),
        ({"grammar": "begin: 'a'"}, "llguidance cannot use it"),
    ],
)
def test_what_cannot_be_used_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason.replace("[", r"\[")) as refusal:
        SamplingParams(structured_outputs=value)
    assert len(str(refusal.value).splitlines()) <= 3


def test_response_formats_of_openai() -> None:
    assert from_response_format({"type": "text"}) == {}
    assert from_response_format({"type": "json_object"}) == {"json_object": True}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    assert from_response_format(asked) == {"json": SCHEMA}
    for wrong in ({"type": "xml"}, "json_object", {"type": "json_schema"}, {}):
        with pytest.raises(InputError, match="response_format"):
            from_response_format(wrong)


# -- what it allows -------------------------------------------------------------------------------


def ids_of(bits: np.ndarray) -> set[int]:
    return {int(own) for own in np.flatnonzero(np.unpackbits(bits, bitorder="little"))}


def plain_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Tokens that are whole characters, and no special ones."""
    texts = {own: tokenizer.token_text(own) for own in range(tokenizer.vocab_size)}
    special = {own for own, text in texts.items() if not tokenizer.decode([own]) and text}
    return {
        own: text for own, text in texts.items() if text and "�" not in text and own not in special
    }


def follow(guide: Guide, tokens: list[int]) -> Iterator[set[int]]:
    for token in tokens:
        yield ids_of(guide.allowed())
        guide.take(token)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_choices_allow_what_brute_force_finds(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Tokens with which some choice goes on, and the end where one is complete. Where the text can
    go on in one way only, it does so in the tokenizer's own tokens."""
    alphabet = st.text("ab 12m", min_size=1, max_size=5)
    choices = data.draw(st.lists(alphabet, min_size=1, max_size=4, unique=True))
    texts = plain_tokens(tokenizer)
    guide = tokenizer.guides.start(StructuredOutputs(choice=tuple(choices)))
    text = ""
    while not guide.is_over:
        wanted = {
            own for own, piece in texts.items() if any(c.startswith(text + piece) for c in choices)
        }
        if text in choices:
            wanted |= tokenizer.eos_token_ids
        if forced := guide.forced():
            rest = "".join(texts[own] for own in forced)
            going = [c for c in choices if c.startswith(text)]
            assert all(c.startswith(text + rest) for c in going) and text not in choices
            assert forced[0] in wanted
            wanted = {forced[0]}
        assert ids_of(guide.allowed()) == wanted
        token = data.draw(st.sampled_from(sorted(wanted)))
        if token in tokenizer.eos_token_ids:
            break
        guide.take(token)
        text += texts[token]
    assert text in choices


def test_json_is_written_as_json_dumps_does(tokenizer: Tokenizer) -> None:
    structure = StructuredOutputs.of({"json": SCHEMA})
    assert structure is not None
    text = json.dumps({"n": 12, "unit": "km"})
    ids = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    guide = tokenizer.guides.start(structure)
    for token, allowed in zip(ids, follow(guide, ids), strict=True):
        assert token in allowed
    assert guide.is_over and not guide.has_failed
    other = tokenizer.guides.start(structure)
    assert ids_of(other.allowed()) and not other.is_over, "rows do not share what they have made"


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InputError, match="cannot read the model's tokenizer"):
        Guides('{"model": {}}', [0])


def test_a_token_that_is_not_allowed_ends_it(tokenizer: Tokenizer) -> None:
    guide = tokenizer.guides.start(StructuredOutputs(choice=("a",)))
    guide.take(tokenizer.encode_batch(["b"], add_special_tokens=False)[0][0])
    assert guide.is_over and guide.has_failed


def draw_of(params: SamplingParams, allowed: set[int], banned: tuple[int, ...] = ()) -> Draw:
    bits = np.zeros(16, dtype=np.uint8)
    bits[[*allowed]] = 1
    return Draw(
        row=RowKey(0),
        place=0,
        position=3,
        params=params,
        history=History(prompt=np.empty(0, dtype=np.int64), output=[]),
        banned=banned,
        allowed=np.packbits(bits, bitorder="little"),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    """Of a vocabulary that is wider than the tokenizer's, whatever biases and bans say."""
    logits = torch.zeros(1, 40)
    logits[0, 30], logits[0, 7] = 50.0, 20.0
    for seed in range(20):
        params = SamplingParams(temperature=temperature, seed=seed, logit_bias={5: 100.0})
        assert sample(logits, [draw_of(params, {7, 9})])[0] in {7, 9}
        plain = SamplingParams(temperature=temperature, seed=seed, min_tokens=2)
        assert sample(logits, [draw_of(plain, {7, 9}, banned=(7,))]) == [9]
        assert sample(logits, [draw_of(plain, {7}, banned=(7,))]) == [7], "a ban leaves something"
