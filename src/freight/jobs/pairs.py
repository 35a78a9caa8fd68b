"""A context and a continuation as one row of tokens, cut as evaluation harnesses cut them.

The conventions are those of EleutherAI's lm-evaluation-harness (``TemplateLM._encode_pair`` and
``HFLM.loglikelihood``), so that figures can be compared: spaces that end the context begin the
continuation, both are tokenised together without special tokens and cut at the context's own
length, and rows that are too long for the model lose their beginning. Knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from freight.errors import InputError
from freight.runtime.params import SamplingParams

__all__ = ["SCORING", "check_pair", "fit_pair", "join_texts"]

SCORING: Final = SamplingParams(max_tokens=0, prompt_logprobs=1)
"""What is asked of such a row: one alternative to each token tells whether it is greedy."""

_MOST_CHARS: Final = 64
"""Characters per position of the model: what is cut off has been tokenised, which takes memory."""


def join_texts(context: str, continuation: str) -> tuple[str, str]:
    """The context without the spaces that end it, and all of the text."""
    return context.rstrip(), context + continuation


def check_pair(context: str, continuation: str, max_positions: int) -> None:
    """Refuse text so long that tokenising it only to cut it off takes too much memory."""
    num_chars = len(context) + len(continuation)
    if num_chars > _MOST_CHARS * max_positions:
        raise InputError(
            f"The prompt and its continuation have {num_chars} characters.",
            f"The model has {max_positions} positions; at most {_MOST_CHARS} characters for each "
            "are read.",
            "Cut the prompt at its beginning.",
        )


def fit_pair(
    ids: Sequence[int], num_context: int, *, prefix_id: int | None, max_positions: int
) -> tuple[list[int], int, int]:
    """The row's tokens, the place of the first that is scored, and how many were cut off before.

    The first ``num_context`` of ``ids`` are the context. Where there are none, ``prefix_id`` stands
    in for them, unless the continuation begins with it. The last token is scored and never
    computed, so a row may have one more than the model has positions.
    """
    num_scored = len(ids) - num_context
    row = [*ids]
    if not num_context:
        if prefix_id is None:
            raise InputError(
                "The prompt before the continuation is empty.",
                "The model has no token that begins or ends a text, to stand in for it.",
                "Put a token into the prompt.",
            )
        if row[:1] == [prefix_id]:
            num_scored -= 1
        else:
            row = [prefix_id, *row]
    if num_scored < 1:
        raise InputError(
            "The continuation has no tokens of its own.",
            "Only tokens behind those of the prompt can be scored.",
            "Put text into it, or move its beginning out of the prompt.",
        )
    if num_scored > max_positions:
        raise InputError(
            f"The continuation has {num_scored} tokens.",
            f"The model has {max_positions} positions.",
            "Shorten the continuation, or score it in parts.",
        )
    num_cut = max(0, len(row) - (max_positions + 1))
    row = row[num_cut:]
    return row, len(row) - num_scored, num_cut
