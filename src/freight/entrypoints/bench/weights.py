"""Which weights are measured: those of a checkpoint, or random ones, written once and kept.

Random weights lie in a directory named after their configuration and number format, so that
different models do not mix. Knows no tensors here; writing them is a job for a child.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.bench.children import run_or_raise
from freight.entrypoints.bundled import bundled_path
from freight.entrypoints.model_source import find_model
from freight.errors import InputError
from freight.model.config import DTYPE_BYTES, read_config

__all__ = ["find_config", "provide_weights", "write_weights"]

_WEIGHTS: Final = ("*.safetensors", "*.gguf")


def find_config(name: str | None) -> Path:
    """What ``--model`` names: the file of a configuration, a bundled one too, or the directory of
    a model, with weights or without."""
    path = bundled_path(name) or (None if name is None else Path(name).expanduser())
    if path is not None and path.suffix == ".json":
        if path.is_file():
            return path
        raise InputError(
            f"--model {name} was given.",
            "There is no such file.",
            "Give a config.json, or a directory that holds one.",
        )
    return find_model(name)


def provide_weights(
    model: Path, work_dir: Path, *, dtype: str, dummy: bool, unwritten: bool = False
) -> Path:
    """A directory with config and weights. The file of a configuration, and a directory that has no
    weights beside it, gets random ones in ``work_dir`` unless they are there; where they are to be
    ``unwritten`` there is the configuration alone."""
    is_named = model.is_file()
    if not is_named and _has_weights(model) and not dummy and not unwritten:
        return model
    file = model if is_named else model / "config.json"
    config = read_config(file)
    dtype = config.dtype if dtype == "auto" else dtype
    dtype = dtype if dtype in DTYPE_BYTES else "bfloat16"
    text = file.read_text(encoding="utf-8")
    named = hashlib.blake2b(f"{dtype} {_canonical(text)}".encode(), digest_size=6).hexdigest()
    directory = work_dir / f"{'unwritten' if unwritten else 'random'}-{named}"
    _make_directory(directory)
    shutil.copyfile(file, directory / "config.json")
    if not unwritten and not _has_weights(directory):
        job = {"task": "write weights", "directory": str(directory), "dtype": dtype}
        run_or_raise(job, f"Random weights were to be written to {directory}.")
    return directory


def _has_weights(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in _WEIGHTS)


def write_weights(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a child: write them, in bounded memory."""
    from freight.model.dummy import write_dummy_checkpoint

    directory = Path(job["directory"])
    path = write_dummy_checkpoint(read_config(directory), directory, dtype=job["dtype"])
    return {"num_bytes": path.stat().st_size}


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"Random weights were to be kept in {directory}.",
            f"The system refuses: {error.strerror}.",
            "Name another directory with --work-dir.",
        ) from error
