"""Settings as people write them, and the windows that a text is cut into."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.entrypoints.cli import _build_parser
from freight.entrypoints.eval.options import options_of
from freight.entrypoints.eval.perplexity import Windows, split_windows
from freight.entrypoints.eval.settings import KEYS, parse_settings
from freight.errors import InputError
from freight.runtime.options import EngineOptions


def options(text: str, *flags: str) -> EngineOptions:
    (setting,) = parse_settings([text])
    return options_of(vars(_build_parser().parse_args(["eval", *flags])), setting)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("exact", {}),
        ("weights=4", {"weight_bits": 4}),
        ("lossless=yes", {"lossless": True}),
        ("weights=3,group=128", {"weight_bits": 3, "group_size": 128}),
        ("group=32, weights=8", {"weight_bits": 8, "group_size": 32}),
        ("weights=4,dim=output", {"weight_bits": 4, "group_dim": "output"}),
    ],
)
def test_a_setting_is_some_options(text: str, fields: dict[str, Any]) -> None:
    assert options(text) == EngineOptions(**fields)
    flags = "--cpu-memory 2GiB --dtype float32 --weights 40/60 --micro-batch-size 3".split()
    assert options(text, *flags) == EngineOptions(
        cpu_memory_bytes=2 << 30,
        dtype="float32",
        weights_percent=(0, 40, 60),
        micro_batch_size=3,
        **fields,
    )


def test_every_key_sets_a_field_that_there_is() -> None:
    for word, key in KEYS.items():
        for value in key.values.split("|"):
            # Groups, and their dimension, are of something.
            more = ",weights=4" if word in ("dim", "group") else ""
            (setting,) = parse_settings([f"{word}={value}{more}"])
            assert getattr(EngineOptions(**setting.fields), key.field) == key.read(value)


def test_without_settings_there_are_the_published_ones() -> None:
    """Exact, weights, keys, both, sparse besides, and the negative control."""
    first, *others = parse_settings([])
    assert first.name == "exact" and not first.fields
    assert {key for setting in others for key in setting.fields} == {
        "weight_bits",
        "kv_bits",
        "sparse_attention",
    }
    assert others[-1].fields == {"weight_bits": 3}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["weight=4"],
            r"'weight=4' is not known.*weights=8\|4\|3, kv=8\|4\|3, group=32\|64\|128",
        ),
        (["exact,weights=4"], "'exact' is not known"),
        (["weights"], "'weights' is not known"),
        ([""], "'' is not known"),
        (["weights=4,"], "'' is not known"),
        (["weights=four"], r"weights takes values like 8, 4, 3\. Write it like weights=8"),
        (["weights=4,weights=8"], "It has weights twice"),
        (["exact", "exact"], "given twice"),
        (["weights=4,group=32", "group=32, weights=4"], "given twice"),
    ],
)
def test_settings_that_there_are_not(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_settings(texts)


@pytest.mark.parametrize("text", ["weights=5", "weights=4,group=48"])
def test_values_that_there_are_not(text: str) -> None:
    with pytest.raises(InputError, match="There are 4 and 8 bits"):
        options(text)


@given(
    num_tokens=st.integers(2, 60),
    num_before=st.integers(0, 2),
    width=st.integers(2, 20),
    data=st.data(),
)
def test_each_token_is_scored_once_after_others(
    num_tokens: int, num_before: int, width: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, width - 1))
    windows = Windows(before=(0,) * num_before, width=width, stride=stride)
    scored: list[int] = []
    for number, (first, last, count) in enumerate(split_windows(num_tokens, windows)):
        assert first == number * stride and last == min(first + width, num_tokens)
        assert count > 0
        scored += range(last - count, last)
        assert num_before or last - count > first, "it has a token before it in its window"
    assert scored == list(range(not num_before, num_tokens))
