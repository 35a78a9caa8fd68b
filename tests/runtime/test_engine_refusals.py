"""What an engine refuses before it plans: options that this machine cannot honour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freight.errors import InputError

from . import tiny


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_budget_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **tiny.SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(InputError) as caught,
        tiny.engine(tmp_path, [[1]], 1, dummy_seed=1, gpu_memory_bytes=1 << 30),
    ):
        pass
    assert "--gpu-memory 1.00 GiB" in str(caught.value) and "--device sim" in str(caught.value)
