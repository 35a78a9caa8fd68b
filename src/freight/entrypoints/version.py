"""The version of the installed package. Knows nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["freight_version"]


def freight_version() -> str:
    """The installed version, or a mark that the source tree is run without being installed."""
    try:
        return version("freight")
    except PackageNotFoundError:
        return "0+source"
