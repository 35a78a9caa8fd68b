"""Last words: is each row's last word what the model would say? (LAMBADA; Paperno et al. 2016)

A row is right if each token of the word is the most likely one, given all before it: greedy
decoding would write just these. So one pass scores a row. The word's tokens are those of the whole
text that it does not share with the text before the last white space. Knows no engine.
"""

from __future__ import annotations

import math
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.eval.rows import Rows, read_records, refuse_row
from freight.errors import InputError
from freight.jobs.json_values import refuse_broken_text, wrong_kind
from freight.runtime.request import Completion
from freight.runtime.tokenizer import Tokenizer

__all__ = ["LastWordScore", "make_rows"]

_LAST_WORD: Final = re.compile(r"(.*\S)\s+\S+", re.DOTALL)


def make_rows(path: Path, tokenizer: Tokenizer) -> Rows:
    """The rows that score last words; each row's id is how many of its last tokens count."""
    for where, record in read_records(path):
        try:
            ids, num_scored = _split(record.get("text"), tokenizer)
        except InputError as error:
            raise refuse_row(where, error) from error
        yield where, {"id": num_scored, "prompt": ids}


def _split(text: object, tokenizer: Tokenizer) -> tuple[list[int], int]:
    if not isinstance(text, str):
        raise wrong_kind("text", text, "a string")
    refuse_broken_text(text, "text")
    text = text.rstrip()
    found = _LAST_WORD.fullmatch(text)
    if found is None:
        raise InputError(
            f'Its "text" is {text!r}.',
            "It has no last word with something before it.",
            "Give at least two words.",
        )
    ids, before = tokenizer.encode(text), tokenizer.encode(found[1])
    pairs = zip(ids, before, strict=False)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not 0 < num_shared < len(ids):
        raise InputError(
            f'Its "text" ends in {text[-20:]!r}.',
            "The model's tokenizer does not tell the last word from what comes before it.",
            "Leave the row out.",
        )
    return ids, len(ids) - num_shared


class LastWordScore:
    """The share of rows that are right, and how likely the words were, as they grow."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._num_right = 0
        self._total = 0.0

    def add(self, completion: Completion, num_scored: Any) -> None:
        assert completion.prompt_logprobs is not None
        word = completion.prompt_logprobs[-num_scored:]
        self._num_rows += 1
        self._num_right += all(item is not None and item.rank == 1 for item in word)
        self._total += sum(item.logprob for item in word if item is not None)

    def result(self) -> dict[str, float]:
        """``perplexity`` is per word."""
        return {
            "accuracy": self._num_right / self._num_rows,
            "perplexity": math.exp(-self._total / self._num_rows),
            "right": self._num_right,
            "rows": self._num_rows,
        }
