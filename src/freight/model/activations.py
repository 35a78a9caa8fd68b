"""An MLP's activation as a step: by its name, with weights where it has some.

Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from freight.model.programme import Activate, Step, Xielu
from freight.model.weight import Weight

__all__ = ["activation_step"]


def activation_step(
    function: str, prefix: str, x: str, vector: Callable[[str, str], Weight]
) -> Step:
    """That of x, in place; ``vector`` makes a weight of a name and dims."""
    if function != "xielu":
        return Activate(x=x, function=function)
    positive, negative = (
        replace(vector(f"{prefix}.{name}", "1"), is_wide=True) for name in ("positive", "negative")
    )
    return Xielu(x=x, positive=positive, negative=negative)
