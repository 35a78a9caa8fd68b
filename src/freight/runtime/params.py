"""How the tokens of one row are chosen: every setting, and what each may be.

Plain values. Where a setting has the name that OpenAI or vLLM gave it, it means what it means
there. Knows no vocabulary: whether token ids exist is checked where its size is known.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Final

from freight.errors import InputError
from freight.runtime.structured_outputs import StructuredOutputs

__all__ = [
    "MOST_LOGPROBS",
    "MOST_SAMPLES",
    "SamplingParams",
    "check_tokenizer",
    "check_vocabulary",
]

MOST_LOGPROBS: Final = 20
MOST_SAMPLES: Final = 16384
_MOST_BIAS: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one row are chosen.

    Temperature 0 is greedy, and the default: a dataset job should give the same output twice.
    ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 switch these filters off, ``repetition_penalty``
    1.0 and the other penalties 0.0 those. ``n`` answers are drawn of one prompt, which is computed
    once. ``seed`` fixes a row's output whatever else is in the batch; each of ``n`` answers has a
    seed derived of it.

    ``logit_bias`` adds to the logits of tokens. A row ends at ``max_tokens``, at the end of the
    sequence unless ``ignore_eos``, at a token of ``stop_token_ids``, or where its text holds one of
    ``stop``, which is left out of the text; a single string may be given bare. None of these but
    the first ends it before ``min_tokens``.

    ``logprobs`` and ``prompt_logprobs`` ask for the log-probability of each new token and of each
    token of the prompt, with so many alternatives, by the model's own logits: no setting above
    changes them. With ``prompt_logprobs``, ``max_tokens`` may be 0: nothing is generated.

    ``structured_outputs`` say what an answer must look like, as in vLLM: a mapping with one of
    "json", "json_object", "regex", "choice" and "grammar". An answer that is complete ends there.
    """

    max_tokens: int = 16
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def may_stop(self, *, has_end: bool) -> bool:
        """Whether something else than its length can end an answer, if the model ``has_end``: a
        token that does."""
        ends = has_end and not self.ignore_eos
        return ends or bool(self.stop or self.stop_token_ids)

    def __post_init__(self) -> None:
        self._normalise()
        for name, is_fine, limit, advice in _LIMITS:
            value = getattr(self, name)
            if not is_fine(value):
                raise _refuse(name, value, limit, advice)
        if self.max_tokens == 0:
            self._check_scoring_only()
        if self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens, {self.max_tokens}"
            raise _refuse("min_tokens", self.min_tokens, limit, "Lower it, or raise max_tokens.")
        if self.n > 1 and self.temperature == 0:
            raise InputError(
                f"n={self.n!r} was given with temperature=0.",
                "Greedy answers to one prompt are all the same.",
                "Raise temperature, or leave n at 1.",
            )

    def with_changes(self, changes: Mapping[str, Any]) -> SamplingParams:
        """With some settings changed; InputError where one is out of range. Most rows of a dataset
        change nothing, and checking takes longer than tokenising."""
        return replace(self, **changes) if changes else self

    def _normalise(self) -> None:
        """None is the default, as in other APIs, and top_k -1 is off. One stop string as a tuple,
        lists as tuples, biases by ascending token id."""
        for own in fields(self):
            if getattr(self, own.name) is None:
                is_made = own.default_factory is not MISSING
                value = own.default_factory() if is_made else own.default  # type: ignore[operator]
                object.__setattr__(self, own.name, value)
        structure = StructuredOutputs.of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", structure)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.logit_bias, Mapping) and all(map(_is_whole, self.logit_bias)):
            object.__setattr__(self, "logit_bias", dict(sorted(self.logit_bias.items())))

    def _check_scoring_only(self) -> None:
        if self.prompt_logprobs is None:
            limit = "at least 1, or 0 where prompt_logprobs is set"
            raise _refuse("max_tokens", 0, limit, "Raise it.")
        if self.n > 1:
            raise _refuse("n", self.n, "1 where max_tokens is 0", "Leave it out.")


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids, and more alternatives, than a model of so many tokens has."""
    for name, ids in (
        ("logit_bias", tuple(params.logit_bias)),
        ("stop_token_ids", params.stop_token_ids),
    ):
        unknown = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
        if unknown:
            raise InputError(
                f"{name} names token id {unknown[0]}.",
                f"The model's vocabulary has the ids 0 to {vocab_size - 1}.",
                "Use ids of the tokenizer that belongs to the model.",
            )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            limit = f"at most {vocab_size}, the size of the model's vocabulary"
            raise _refuse(name, count, limit, "Ask for fewer alternatives.")


def check_tokenizer(params: SamplingParams, tokenizer: object | None) -> None:
    """Refuse what texts are needed for, where there is no tokenizer to make them."""
    if tokenizer is None and params.structured_outputs is not None:
        raise InputError(
            "structured_outputs was given.",
            "The model has no tokenizer that is read, and what is allowed is a matter of text.",
            "Put the tokenizer's files beside the model, or leave it out.",
        )


def _refuse(name: str, value: object, limit: str, advice: str) -> InputError:
    shown = list(value) if isinstance(value, tuple) else value
    return InputError(f"{name}={shown!r} was given.", f"{name} must be {limit}.", advice)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: _is_whole(value) and low <= value <= high


def _number(low: float, high: float) -> Callable[[Any], bool]:
    """Finite and within both."""
    return lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (abs(value) <= sys.float_info.max and low <= value <= high)
    )


def _perhaps(is_fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_fine(value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_whole(token_id) and token_id >= 0 and _number(-_MOST_BIAS, _MOST_BIAS)(bias)
        for token_id, bias in value.items()
    )


def _are_stops(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(_is_whole(item) and item >= 0 for item in value)


_TOP: Final = f"a whole number from 0 to {MOST_LOGPROBS}, or None"
_LIMITS: Final[tuple[tuple[str, Callable[[Any], bool], str, str], ...]] = (
    ("max_tokens", _whole(0), "a whole number, at least 1", "Give how many to make at most."),
    (
        "n",
        _whole(1, MOST_SAMPLES),
        f"a whole number from 1 to {MOST_SAMPLES}",
        "Use 1 for one answer.",
    ),
    ("temperature", _number(0, math.inf), "a finite number, 0 or more", "Use 0 for greedy."),
    ("top_k", _whole(0), "a whole number, 0 or more", "Use 0 to switch it off."),
    (
        "top_p",
        lambda p: _number(0, 1)(p) and p > 0,
        "a number in (0, 1]",
        "Use 1.0 to switch it off.",
    ),
    ("min_p", _number(0, 1), "a number in [0, 1]", "Use 0.0 to switch it off."),
    (
        "repetition_penalty",
        lambda p: _number(0, math.inf)(p) and p > 0,
        "a finite number above 0",
        "Use 1.0 to switch it off.",
    ),
    ("presence_penalty", _number(-2, 2), "a number in [-2, 2]", "Use 0.0 to switch it off."),
    ("frequency_penalty", _number(-2, 2), "a number in [-2, 2]", "Use 0.0 to switch it off."),
    (
        "logit_bias",
        _is_bias,
        f"token ids with numbers from -{_MOST_BIAS} to {_MOST_BIAS}",
        "Write it like {50256: -100}.",
    ),
    ("seed", _whole(-(2**63), 2**63 - 1), "a whole number of 64 bits", "Use a small one."),
    ("stop", _are_stops, "texts that are not empty", "Leave out what is none."),
    ("stop_token_ids", _are_ids, "token ids, 0 or more", "Use ids of the model's tokenizer."),
    ("min_tokens", _whole(0), "a whole number, 0 or more", "Use 0 to switch it off."),
    ("ignore_eos", lambda value: isinstance(value, bool), "True or False", "Use one of them."),
    ("logprobs", _perhaps(_whole(0, MOST_LOGPROBS)), _TOP, "Ask for fewer alternatives."),
    ("prompt_logprobs", _perhaps(_whole(0, MOST_LOGPROBS)), _TOP, "Ask for fewer alternatives."),
)
