"""What files beside config.json say of a model: how its weights are kept, whether its head is its
own, what was learnt of its rotation. Those that are damaged are for others to refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from freight.errors import ModelError
from freight.model.adapter import as_adapted, read_adapter
from freight.model.families import Family
from freight.model.own_head import has_own_head
from freight.model.places import spellings
from freight.model.safetensors_files import read_safetensors
from freight.model.sources import TensorSource
from freight.model.switches import ModelConfig

__all__ = ["as_files_say", "quantised_beside"]

_KINDS: Final = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}


def quantised_beside(path: Path) -> dict[str, Any]:
    """What a file of NVIDIA's Model Optimizer beside config.json says of how weights are kept:
    older versions say it nowhere else."""
    try:
        said = json.loads(path.with_name("hf_quant_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    own = said.get("quantization") if isinstance(said, dict) else None
    if not isinstance(own, dict) or not own.get("quant_algo"):
        return {}
    return {"quantization_config": {"quant_method": "modelopt", **own}}


def as_files_say(config: ModelConfig, family: Family, model_dir: Path) -> ModelConfig:
    """With a head of its own where the weights have one, what an adapter makes of it, and the
    frequencies that the weights have."""
    if (adapter := read_adapter(model_dir)) is not None:
        config = as_adapted(config, adapter, family.tensors.get("embedding"))
    if config.tied_embeddings and has_own_head(model_dir, family.tensors):
        config = replace(config, tied_embeddings=False)
    if family.rope_exponents is None:
        return config
    found = read_safetensors(model_dir, []) or {}
    names = spellings(family.rope_exponents)
    name = next((own for own in names if own in found), None)
    if name is None:
        return config
    try:
        gains = _exponentials(found[name])
        ropes = {rope: replace(rope, gains=gains) for rope in config.rotations}
    except (OSError, KeyError, ModelError) as error:
        what = error.limit if isinstance(error, ModelError) else f"it is {found[name].dtype}."
        raise ModelError(
            f"The model in {model_dir} was asked for.",
            f"Its tensor {name} says nothing of how fast queries and keys rotate that can be: "
            f"{what}",
            "Fetch these files again from where the model was published.",
        ) from error
    return replace(config, ropes=tuple(rope and ropes[rope] for rope in config.ropes))


def _exponentials(source: TensorSource) -> tuple[float, ...]:
    """Of a tensor's few numbers. KeyError for numbers of another kind."""
    with source.path.open("rb") as file:
        file.seek(source.offset)
        data = file.read(source.num_bytes)
    numbers = np.frombuffer(data, _KINDS[source.dtype])
    if source.dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return tuple(np.exp(numbers.astype(np.float32)).tolist())
