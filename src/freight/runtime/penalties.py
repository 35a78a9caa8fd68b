"""What is done to a row's logits before anything is drawn: biases, bans, penalties.

Logits are changed in float32 in the order of vLLM: bias, then stop tokens that must not come yet,
then the repetition penalty (CTRL, Keskar et al. 2019, section 4.1), over prompt and output, then
frequency and presence penalties as OpenAI defines them, over the output. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.runtime.params import SamplingParams

__all__ = ["History", "adjust", "is_adjusted"]

_LEAST_PENALTY: Final = 1e-30
"""Beyond it float32 has no number for a logit that is divided by it."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The tokens of a row so far: those that its prompt has, each once and in ascending order, and
    its output. The prompt's matter to the repetition penalty alone."""

    prompt: Ids
    output: Sequence[int]


def is_adjusted(params: SamplingParams, num_new: int) -> bool:
    """Whether the next token of a row with ``num_new`` tokens is drawn of changed logits."""
    return (
        bool(params.logit_bias)
        or num_new < params.min_tokens
        or params.repetition_penalty != 1
        or (num_new > 0 and (params.presence_penalty != 0 or params.frequency_penalty != 0))
    )


def adjust(
    logits: torch.Tensor, params: SamplingParams, history: History, banned: Sequence[int]
) -> None:
    """Change one row of ``logits`` [V] in place; ``banned`` are tokens that must not come yet."""
    if params.logit_bias:
        ids = _on(logits, np.fromiter(params.logit_bias, dtype=np.int64))
        logits[ids] += _on(logits, np.fromiter(params.logit_bias.values(), dtype=np.float32))
    if banned:
        logits[_on(logits, np.asarray(banned, dtype=np.int64))] = -torch.inf
    output = np.asarray(history.output, dtype=np.int64)
    if params.repetition_penalty != 1:
        seen = _on(logits, np.union1d(history.prompt, output))
        values = logits[seen]
        penalty = min(max(params.repetition_penalty, _LEAST_PENALTY), 1 / _LEAST_PENALTY)
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        used, counts = np.unique(output, return_counts=True)
        loss = params.frequency_penalty * counts + params.presence_penalty
        logits[_on(logits, used)] -= _on(logits, loss.astype(np.float32))


def _on(logits: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)
