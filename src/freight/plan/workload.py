"""The work of a job as the planner sees it: how many rows, how long.

A plain value. It does not know the rows themselves, their order, or any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.errors import InputError

__all__ = ["Workload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rows still to be answered, in numbers.

    ``max_total_tokens`` is the largest prompt + new tokens of one row, which can be less than
    ``max_prompt_tokens + max_new_tokens``: the longest prompt need not ask for the longest answer.
    New tokens are upper bounds; rows may end sooner.
    """

    num_rows: int
    max_prompt_tokens: int
    max_new_tokens: int
    max_total_tokens: int
    total_prompt_tokens: int
    total_new_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_rows", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise _refuse(f"{name}={getattr(self, name)}", "It must be at least 1.")
        longest, shortest = self.max_prompt_tokens + self.max_new_tokens, self._shortest_total()
        if not shortest <= self.max_total_tokens <= longest:
            raise _refuse(
                f"max_total_tokens={self.max_total_tokens}",
                f"One row has between {shortest} and {longest} tokens at most.",
            )
        for name, most in (
            ("total_prompt_tokens", self.max_prompt_tokens * self.num_rows),
            ("total_new_tokens", self.max_new_tokens * self.num_rows),
        ):
            if not self.num_rows <= getattr(self, name) <= most:
                raise _refuse(
                    f"{name}={getattr(self, name)}",
                    f"{self.num_rows} rows have between {self.num_rows} and {most}.",
                )

    def _shortest_total(self) -> int:
        return max(self.max_prompt_tokens, self.max_new_tokens) + 1


def _refuse(asked: str, limit: str) -> InputError:
    return InputError(
        f"A workload with {asked} was given.", limit, "Count prompt and new tokens of each row."
    )
