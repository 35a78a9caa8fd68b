"""What a caller asks of the engine for one row, and what it gets back.

Plain values and arrays: no tensors, no tokenizer, no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np
import numpy.typing as npt

from freight.runtime.params import SamplingParams

__all__ = [
    "Completion",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "Prefix",
    "Request",
    "SamplingParams",
    "Vector",
]

FinishReason = Literal["stop", "length", "error"]
"""``error``: what the model computed is no number, and nothing of the answer counts."""
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first ``num_tokens`` of a prompt, fewer than all, which other prompts with the same
    ``key`` begin with too."""

    key: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row: ``index`` is its place in the dataset, ``prompt_ids`` its tokens (at least one).
    Rows that share a ``prefix`` should come one after the other.

    Where ``params.prompt_logprobs`` asks for the prompt's log-probabilities, they are those of the
    tokens from ``score_from`` (at least 1) on.
    """

    index: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    prefix: Prefix | None = None
    score_from: int = 1

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that go through the model: what follows the last one is of interest
        only where something is generated."""
        count = len(self.prompt_ids)
        return count if self.params.max_tokens else max(1, count - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """A token's natural log-probability, by the model's own logits in float32.

    ``text`` is the token by itself and ``raw`` its bytes, empty without a tokenizer. ``rank`` is 1
    for the most likely token; of a prompt's token it is known only within the alternatives,
    ``None`` beyond them. ``top`` are the alternatives that were asked for, the most likely first.
    """

    token_id: int
    text: str
    raw: bytes = b""
    logprob: float
    rank: int | None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer to a row: the new tokens, the one that ended it (end of sequence, or of
    ``stop_token_ids``) not included.

    ``stop_reason`` is the stop string or the id of the stop token that ended it, else ``None``.
    ``logprobs`` has one entry per token, and ``cumulative_logprob`` is their sum; both are ``None``
    where they were not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[Logprob, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the model answered to one row: as many ``outputs`` as samples were asked for.

    ``text``, ``token_ids`` and ``finish_reason`` are those of the first. ``prompt_logprobs`` has an
    entry for each token of the prompt, ``None`` for the first, which nothing comes before, and for
    those that were not to be scored. Of a model with a readout there is one output without text,
    and its ``vector`` [n] is an embedding, as it is computed, or a number for each label.
    """

    index: int
    num_prompt_tokens: int
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    vector: Vector | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def has_failed(self) -> bool:
        """Whether what the model computed for it is infinite, or no number."""
        return any(output.finish_reason == "error" for output in self.outputs)

    @property
    def scored(self) -> tuple[Logprob, ...]:
        """The tokens of the prompt that were scored."""
        return tuple(item for item in self.prompt_logprobs or () if item is not None)

    @property
    def log_likelihood(self) -> float:
        """The natural logarithm of the probability of the tokens that were scored."""
        return fsum(item.logprob for item in self.scored)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have made the tokens that were scored, which needs an
        alternative to each: of equally likely tokens it takes the first of the vocabulary."""
        return all(item.top[0].token_id == item.token_id for item in self.scored)

    @property
    def num_new_tokens(self) -> int:
        """Of all outputs together."""
        return sum(len(output.token_ids) for output in self.outputs)
