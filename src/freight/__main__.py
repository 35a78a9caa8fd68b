"""``python -m freight`` is the ``freight`` command."""

from __future__ import annotations

import sys

from freight.entrypoints.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
