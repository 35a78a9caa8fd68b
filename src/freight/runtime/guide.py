"""Keeps an answer to what it must look like: which tokens may come next, and which must.

Grammars and masks are llguidance's; here they are made for a tokenizer once, and followed by rows.
Knows no logits and no schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from freight.errors import InputError
from freight.runtime.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Guide", "Guides"]

_KEPT_STARTS: Final = 64


class Guides:
    """Of one tokenizer, from its tokenizer.json as text; ``eos_ids`` end an answer. InputError if
    llguidance cannot read it."""

    def __init__(self, tokenizer_json: str, eos_ids: Collection[int]) -> None:
        from llguidance import LLTokenizer

        try:
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=sorted(eos_ids) or None)
        except Exception as error:  # the library names none of its own
            raise InputError(
                "Answers of a certain form were asked for.",
                f"llguidance cannot read the model's tokenizer: {error}.",
                "Leave the form out for this model.",
            ) from error
        self._eos_ids = frozenset(eos_ids)
        self._begun = lru_cache(_KEPT_STARTS)(self._begin)

    def start(self, structure: StructuredOutputs) -> Guide:
        """For a new answer."""
        return Guide(self._begun(structure).deep_copy(), self._eos_ids)

    def _begin(self, structure: StructuredOutputs) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, structure.grammar_text(), log_level=0)


class Guide:
    """Follows one answer. ``take`` is told of each of its tokens."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids

    @property
    def is_over(self) -> bool:
        """Nothing may follow: it is complete. Or it has failed."""
        return bool(self._matcher.is_stopped())

    @property
    def has_failed(self) -> bool:
        """The grammar has grown too large for the parser, or a token was not allowed."""
        return bool(self._matcher.is_error())

    def allowed(self) -> npt.NDArray[np.uint8]:
        """A bit for each token that may come, the lowest bit of a byte first."""
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)

    def take(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def possible(self, token_ids: Sequence[int]) -> int:
        """How many of these may come next, one after the other."""
        return int(self._matcher.validate_tokens([*token_ids]))

    def allowed_along(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.uint8] | None]:
        """What may come now and after each of some tokens that are possible; None where they have
        completed it."""
        found: list[npt.NDArray[np.uint8] | None] = [self.allowed()]
        num_taken = 0
        for token_id in token_ids:
            if not self.is_over:
                self.take(token_id)
                num_taken += 1
            found.append(None if self.is_over else self.allowed())
        if num_taken:
            self._matcher.rollback(num_taken)
        return found

    def forced(self) -> list[int]:
        """Tokens that come next whatever the model says; the end is none of them."""
        found = self._matcher.compute_ff_tokens()
        return [*takewhile(lambda token_id: token_id not in self._eos_ids, found)]
