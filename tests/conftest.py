"""What all tests share: none sees the profile that this machine may have."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: its threads would take the cores from each other's tests.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    own_cores = max(1, len(os.sched_getaffinity(0)) // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(own_cores))

import torch

# Before triton is imported: where there is no device, its kernels are tested by its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test is one of speed: machines stall.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory: Path = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(directory)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What was imported and collected is no garbage: each search for some, as after every call of
    the Python API, would go through all of it."""
    gc.collect()
    gc.freeze()
