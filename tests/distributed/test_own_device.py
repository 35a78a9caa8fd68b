"""Each rank of a host sees one of its devices; too few for all are refused."""

from __future__ import annotations

import os

import pytest

from freight.distributed.ranks import Place
from freight.entrypoints.run_stages import use_own_device
from freight.errors import InputError


def place(local_rank: int, local_size: int) -> Place:
    return Place(rank=local_rank, size=local_size, local_rank=local_rank, local_size=local_size)


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, seen in ((0, "2"), (1, "5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
        use_own_device(place(rank, 2), "auto")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    with pytest.raises(InputError, match="3 ranks") as refused:
        use_own_device(place(0, 3), "cuda")
    assert "--nproc-per-node 2" in refused.value.advice
    use_own_device(place(0, 3), "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"
