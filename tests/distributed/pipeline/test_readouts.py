"""Embeddings and labels of models whose layers are on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.virtual import VirtualRanks
from freight.errors import InputError
from freight.partition.layout import Mesh
from freight.plan.workload import Workload
from freight.runtime.request import Request, SamplingParams

from ...runtime.test_engine_readouts import (
    CONFIGS,
    assert_close,
    make_model,
    make_rows,
    wanted,
)
from ..tensor.bed import CUTS
from .stages import answers


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize("admission", ["zigzag", "refill"])
def test_stages_read_as_one_machine_does(kind: Any, admission: str, tmp_path: Path) -> None:
    model, rows = make_model(kind, CONFIGS["qwen3"], tmp_path), make_rows()
    work = Workload.of_alike(len(rows), max(map(len, rows)), 1)
    requests = [
        Request(index=index, prompt_ids=row, params=SamplingParams(max_tokens=1))
        for index, row in enumerate(rows)
    ]
    options = {"admission": admission, "micro_batch_size": 2}
    stages = answers(tmp_path, 2, requests, work, **options)
    for done in stages:
        found = [own.vector for own in done if own.vector is not None]
        assert len(found) == len(rows)
        assert_close(found, wanted(model, rows))


def test_layers_that_are_cut_have_rows_of_a_vocabulary(tmp_path: Path) -> None:
    make_model(AutoModel, CONFIGS["llama"], tmp_path)
    with pytest.raises(InputError, match="a readout in place of a head"):
        load_model(tmp_path, VirtualRanks(Mesh.of(x=2)), CUTS, dtype=torch.float32)
