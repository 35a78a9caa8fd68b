"""Shares as people write them, "20/80/0", and as the engine wants them. Knows no policy."""

from __future__ import annotations

from freight.errors import InputError
from freight.runtime.options import Shares

__all__ = ["parse_shares"]


def parse_shares(flag: str, text: str | None) -> Shares | None:
    """Parse "20/80/0" as percent on gpu, cpu and disk; "40/60" as cpu and disk."""
    if text is None:
        return None
    try:
        shares = [float(part) for part in text.split("/")]
    except ValueError:
        shares = []
    if len(shares) == 2:
        return 0.0, shares[0], shares[1]
    if len(shares) == 3:
        return shares[0], shares[1], shares[2]
    raise InputError(
        f"{flag} {text} was given.",
        "Shares are three percentages for gpu, cpu and disk, or two for cpu and disk.",
        "Write them like 20/80/0 or 40/60.",
    )
