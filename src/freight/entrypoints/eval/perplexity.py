"""Perplexity of a text: cut into windows, every token scored once.

A window holds a stretch of the text's tokens after the special tokens that a prompt begins with. It
begins ``stride`` tokens after the one before it and scores those that were not scored yet (Hugging
Face, "Perplexity of fixed-length models"). The stride is less than a window, so that each token but
the first has others before it. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.eval.rows import Rows
from freight.errors import InputError
from freight.jobs.lines import open_input
from freight.runtime.request import Completion
from freight.runtime.tokenizer import Tokenizer

__all__ = ["PerplexityScore", "Windows", "choose_windows", "make_rows", "split_windows"]

_MOST_CONTEXT: Final = 2048
_MOST_TEXT_BYTES: Final = 16 << 20
"""Tokenising takes a hundred times as much memory, and a figure is steady long before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """``before`` are the tokens that a window begins with, ``width`` is how many of the text follow
    them, ``stride`` from its start to the next one's."""

    before: tuple[int, ...]
    width: int
    stride: int

    @property
    def context(self) -> int:
        return len(self.before) + self.width


def choose_windows(
    context: int | None, stride: int | None, tokenizer: Tokenizer, max_positions: int
) -> Windows:
    """The windows that the flags ask for, or as large as the model takes and sharing one token."""
    before = tuple(tokenizer.encode(""))
    least = len(before) + 2
    context = min(max_positions, _MOST_CONTEXT) if context is None else context
    if not least <= context <= max_positions:
        raise InputError(
            f"Windows of {context} tokens were asked for.",
            f"A window has from {least} tokens to the {max_positions} that the model takes.",
            "Give --context a number between them, or leave it out.",
        )
    width = context - len(before)
    stride = width - 1 if stride is None else stride
    if not 1 <= stride < width:
        raise InputError(
            f"--stride {stride} was given for windows of {width} tokens of text.",
            "Each begins at least 1 token after the one before it, and shares at least 1 with it.",
            f"Give a number from 1 to {width - 1}, or leave it out.",
        )
    return Windows(before=before, width=width, stride=stride)


def make_rows(path: Path, tokenizer: Tokenizer, windows: Windows) -> Rows:
    """The rows that score a text file; each row's id is how many of its last tokens count."""
    (ids,) = tokenizer.encode_batch([_read_text(path)], add_special_tokens=False)
    if len(ids) < 2:
        raise InputError(
            f"The text {path} was to be scored.",
            f"It has fewer than two tokens: {len(ids)}.",
            "Give a longer text: some thousands of tokens make a steady figure.",
        )
    for first, last, num_scored in split_windows(len(ids), windows):
        record = {"id": num_scored, "prompt": [*windows.before, *ids[first:last]]}
        yield f"The window of {path.name} from token {first} on", record


def split_windows(num_tokens: int, windows: Windows) -> Iterator[tuple[int, int, int]]:
    """(first, last, scored): tokens first to last - 1, of which the last ``scored`` were not in the
    window before. Where nothing is before the text its first token is not scored."""
    done = 0 if windows.before else 1
    for first in range(0, num_tokens, windows.stride):
        last = min(first + windows.width, num_tokens)
        yield first, last, last - done
        done = last
        if last == num_tokens:
            return


def _read_text(path: Path) -> str:
    with open_input(path) as file:
        raw = file.read(_MOST_TEXT_BYTES + 1)
    if len(raw) > _MOST_TEXT_BYTES:
        raise InputError(
            f"The text {path} was to be scored.",
            f"It has more than {_MOST_TEXT_BYTES >> 20} MiB.",
            "Give a part of it: a megabyte makes a steady figure.",
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"The text {path} was read as UTF-8.",
            f"Byte {error.start + 1} is not: {error.reason}.",
            "Convert the file to UTF-8.",
        ) from error


class PerplexityScore:
    """The mean of all scored tokens' log-probabilities, as it grows."""

    def __init__(self) -> None:
        self._total = 0.0
        self._num_tokens = 0

    def add(self, completion: Completion, num_scored: Any) -> None:
        assert completion.prompt_logprobs is not None
        scored = completion.prompt_logprobs[-num_scored:]
        self._total += sum(item.logprob for item in scored if item is not None)
        self._num_tokens += num_scored

    def result(self) -> dict[str, float]:
        """``nll`` is in nats per token."""
        nll = -self._total / self._num_tokens
        return {"perplexity": math.exp(nll), "nll": nll, "tokens": self._num_tokens}
