"""Structured answers through the whole engine: what they look like, and by which odds they come.

The bundled model in float32; every operation is proven legal as it runs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from freight.demo import MODEL_DIR
from freight.model.batch import MicroBatch
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Request, SamplingParams
from freight.runtime.tokenizer import Tokenizer

from . import tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "quantity": {"type": "integer", "minimum": 0, "maximum": 99999},
        "unit": {"enum": ["m", "cm", "km"]},
    },
    "required": ["quantity", "unit"],
    "additionalProperties": False,
}
REGEX = r" [0-9]{1,3} (m|cm), (long|wide)( and (long|wide)){0,2}"
CHOICES = ("one metre", "one kilometre", "ten")
TEXTS = ["Quantity: 3 km\nIn m:", "Quantity: 12 dm\nIn cm:", "The cat sat", "a", "In words: 3\n"]
PLANNED = SamplingParams(max_tokens=48, structured_outputs={"json": SCHEMA})
FORMS: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": REGEX}, {"choice": CHOICES}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL_DIR)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS for _ in FORMS]


def requests(prompts: Sequence[Sequence[int]], **changes: Any) -> Iterator[Request]:
    """Each text with each form, and each with a seed of its own."""
    for index, prompt in enumerate(prompts):
        asked = {
            "max_tokens": 48,
            "temperature": 1.5,
            "seed": index,
            "structured_outputs": FORMS[index % len(FORMS)],
        }
        params = SamplingParams(**{**asked, **changes})
        yield Request(index=index, prompt_ids=prompt, params=params)


def run(
    prompts: Sequence[Sequence[int]], directory: Path, on_batch: Any = None, **options: Any
) -> list[Completion]:
    defaults: dict[str, Any] = {"dtype": "float32", "verify": True, "disk_dir": directory}
    built = build_engine(
        MODEL_DIR,
        options=EngineOptions(**{**defaults, **options}),
        workload=tiny.workload(prompts, 48, PLANNED),
    )
    try:
        return sorted(built.run(requests(prompts), on_batch), key=lambda own: own.index)
    finally:
        built.close()


def conforms(text: str, form: dict[str, Any]) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    found = json.loads(text)
    return (
        set(found) == {"quantity", "unit"}
        and type(found["quantity"]) is int
        and 0 <= found["quantity"] <= 99999
        and found["unit"] in SCHEMA["properties"]["unit"]["enum"]
        and text == json.dumps(found)
    )


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    return run(prompts, tmp_path_factory.mktemp("alone"), device="cpu")


def test_answers_look_as_they_must(alone: list[Completion]) -> None:
    assert len(alone) == len(TEXTS) * len(FORMS)
    for own in alone:
        assert own.finish_reason == "stop"
        assert conforms(own.text, FORMS[own.index % len(FORMS)]), own.text
    assert len({own.text for own in alone}) > len(FORMS)


@pytest.mark.parametrize(
    "options",
    [
        tiny.ON_CPU,
        tiny.ON_SIM,
        {**tiny.ON_CPU, "admission": "refill", "batch_tokens": 16},
        {**tiny.ON_SIM, "admission": "diagonal"},
        {"device": "cpu", "admission": "refill", "micro_batch_size": 4, "num_micro_batches": 1},
    ],
    ids=["disk", "device", "refill in chunks", "diagonal", "refill in memory"],
)
def test_no_policy_changes_them(
    options: dict[str, Any], prompts: list[list[int]], alone: list[Completion], tmp_path: Path
) -> None:
    assert run(prompts, tmp_path, **options) == alone


def test_what_must_follow_costs_no_sweep(prompts: list[list[int]], tmp_path: Path) -> None:
    """Names of a schema come at once, with the token that they follow."""
    sweeps: set[int] = set()

    def note(sweep: int, batch: MicroBatch) -> None:
        sweeps.add(sweep)

    done = run(prompts[::3], tmp_path, note, device="cpu", micro_batch_size=len(TEXTS))
    longest = max(len(own.token_ids) for own in done)
    assert len(sweeps) < 0.6 * longest


LISTED = replace(PLANNED, logprobs=2)


def test_scores_are_of_every_token(prompts: list[list[int]], tmp_path: Path) -> None:
    with tiny.engine(MODEL_DIR, prompts[:3], 48, LISTED, disk_dir=tmp_path) as engine:
        for own in engine.run(requests(prompts[:3], logprobs=2)):
            assert len(own.outputs[0].logprobs or ()) == len(own.token_ids)
            assert conforms(own.text, FORMS[own.index])


def test_the_longest_answer_ends_it(prompts: list[list[int]], tmp_path: Path) -> None:
    with tiny.engine(MODEL_DIR, prompts[:1], 5, PLANNED, disk_dir=tmp_path) as engine:
        (done,) = engine.run(requests(prompts[:1], max_tokens=5))
    assert done.finish_reason == "length" and len(done.token_ids) == 5
    assert json.dumps({"quantity": 0}).startswith(done.text[:6])


# -- odds -----------------------------------------------------------------------------------------

NUMBERS = (" 1", " 12", " 13", " 2", " 3")


def exact_odds(prompt: list[int], tokenizer: Tokenizer) -> dict[str, float]:
    """Of each choice, over all ways of making it of tokens: at each the allowed ones' own odds."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    texts = {own: tokenizer.token_text(own) for own in range(tokenizer.vocab_size)}
    odds: Counter[str] = Counter()

    def walk(ids: list[int], text: str, share: float) -> None:
        going = [c for c in NUMBERS if c.startswith(text)]
        if going == [text]:
            odds[text] += share
            return
        allowed = {
            own: text + piece
            for own, piece in texts.items()
            if piece and any(c.startswith(text + piece) for c in NUMBERS)
        }
        if text in NUMBERS:
            allowed |= dict.fromkeys(tokenizer.eos_token_ids, text)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        shares = torch.softmax(logits[[*allowed]], dim=0).tolist()
        for (token, after), own in zip(allowed.items(), shares, strict=True):
            if token in tokenizer.eos_token_ids:
                odds[text] += share * own
            else:
                walk([*ids, token], after, share * own)

    walk(prompt, "", 1.0)
    return odds


def test_choices_come_by_the_model_s_own_odds(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompt = tokenizer.encode("The cat sat")
    odds = exact_odds(prompt, tokenizer)
    assert sum(odds.values()) == pytest.approx(1)
    params = SamplingParams(
        max_tokens=6, n=800, temperature=1.0, seed=5, structured_outputs={"choice": NUMBERS}
    )
    with tiny.engine(MODEL_DIR, [prompt], 6, params, disk_dir=tmp_path) as engine:
        (done,) = engine.run(iter([Request(index=0, prompt_ids=prompt, params=params)]))
    found = Counter(own.text for own in done.outputs)
    assert set(found) <= set(odds)
    common = [text for text, share in odds.items() if share * params.n >= 5]
    rest = params.n - sum(found[text] for text in common)
    expected = [odds[text] * params.n for text in common]
    seen = [found[text] for text in common]
    if params.n - sum(expected) >= 1:
        seen, expected = [*seen, rest], [*expected, params.n - sum(expected)]
    scale = sum(seen) / sum(expected)
    assert len(seen) > 2
    assert chisquare(seen, [own * scale for own in expected]).pvalue > 1e-3
