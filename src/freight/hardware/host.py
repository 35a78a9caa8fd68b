"""What tells a host, and what it is measured with, from others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["LOOPS", "processor_name"]

LOOPS: Final = "18"
"""Counts up where loops have become so much faster, or are measured so differently, that older
profiles would mislead a plan."""


def processor_name() -> str:
    """As the system calls it; "unknown" where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
