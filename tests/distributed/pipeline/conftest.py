"""Stages are threads of one process here: each computes with one of its own, and how fast this CPU
multiplies is measured by the first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest

from freight.distributed.pipeline import planning
from freight.runtime.device import product_flops

from ...runtime.conftest import single_thread

__all__ = ["single_thread"]


@pytest.fixture(autouse=True, scope="session")
def measured_once(single_thread: None) -> Iterator[None]:
    with patch.object(planning, "product_flops", cache(product_flops)):
        yield
