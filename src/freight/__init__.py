"""Freight: run any open-weight language model over a whole dataset on the hardware at hand.

The names below are imported when they are first used, so that ``import freight`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freight.entrypoints.llm import LLM
    from freight.jobs.readings import Classification, Embedding
    from freight.runtime.request import Completion, SamplingParams

__all__ = ["LLM", "Classification", "Completion", "Embedding", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from freight.entrypoints.llm import LLM

        return LLM
    if name in ("Completion", "SamplingParams"):
        from freight.runtime import request

        return getattr(request, name)
    if name in ("Classification", "Embedding"):
        from freight.jobs import readings

        return getattr(readings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
