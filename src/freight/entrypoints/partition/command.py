"""Chooses between the commands of ``freight partition``."""

from __future__ import annotations

import argparse

from freight.entrypoints.partition.plan import plan_partition
from freight.entrypoints.partition.search import search_schemes

__all__ = ["run_partition"]


def run_partition(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    return (
        search_schemes(arguments) if arguments.partition == "search" else plan_partition(arguments)
    )
