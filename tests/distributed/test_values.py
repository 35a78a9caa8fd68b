"""What ranks tell each other comes back as it was; what could act does not."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from freight.distributed.messages import Inbox
from freight.distributed.ranks import ConnectionLost
from freight.distributed.values import pack, unpack
from freight.errors import RankError
from freight.plan.operation import Lane
from freight.plan.policy import Split
from freight.runtime.params import SamplingParams
from freight.runtime.request import Request


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, True, "text", b"bytes"], 3: ({4}, range(5))},
        Counter({("weights", "all-gather"): 7}),
        Path("some/where"),
        Split(cpu=0.25, disk=0.75),
        Lane.DISK_READ,
        Request(index=3, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4, seed=1)),
    ],
)
def test_values_come_back(value: object) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "float64"])
def test_arrays_come_back(dtype: str) -> None:
    value = np.arange(12).reshape(3, 4).astype(dtype)
    for own in (value, value.T, value[:0], value[0, 1]):
        found = unpack(pack(own))
        assert np.array_equal(found, own) and found.dtype == own.dtype


def test_what_is_refused_ends_the_wait() -> None:
    inbox = Inbox()
    inbox.fail(RankError("asked", "limit", "advice"))
    with pytest.raises(ConnectionLost, match="limit"):
        inbox.get()


class _Acts:
    def __init__(self, called: object, *given: object) -> None:
        self.called, self.given = called, given

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.called, self.given


@pytest.mark.parametrize(
    "hostile",
    [
        _Acts(os.system, "true"),
        _Acts(eval, "1"),
        _Acts(getattr, Path, "home"),
        _Acts(pack, 1),  # Freight's own functions, too
    ],
)
def test_nothing_is_called(hostile: object) -> None:
    with pytest.raises(RankError, match="came from another rank"):
        unpack(pickle.dumps(hostile))
