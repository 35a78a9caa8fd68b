"""How long the threads of torch's products wait busily for the next one, before torch is loaded.

By default it is milliseconds, in which they take the cores from the lanes and loops beside them: on
two cores these then take up to twice as long. Knows no torch.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["wait_briefly"]

_TURNS: Final = "10000"
"""Of waiting: tens of microseconds, as long as it is from one operation of a unit to the next."""


def wait_briefly() -> None:
    """Set it for this process, unless the user has said how to wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _TURNS)
