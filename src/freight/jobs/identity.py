"""What makes two runs the same work: the model's files, the input, the sampling parameters.

Knows file names, not formats. Paths, devices, memory budgets and policies are left out on
purpose: they do not change the tokens, so a job may go on elsewhere or with another budget.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from freight.errors import ModelError
from freight.jobs.journal import INPUT, Fingerprint
from freight.runtime.request import SamplingParams

__all__ = ["job_fingerprint", "model_identity"]

_CONFIG_FILES: Final = ("config.json", "generation_config.json", "adapter_config.json")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_SAMPLE_BYTES: Final = 64 << 10


def model_identity(model_dir: Path, *, dummy_seed: int | None = None) -> dict[str, str]:
    """Hashes of a model directory's files. Weights are sampled: header, middle and end of each."""
    try:
        weights = (
            _hash_weights(model_dir) if dummy_seed is None else f"random with seed {dummy_seed}"
        )
        return {
            "the model's configuration": _hash_files(model_dir, _CONFIG_FILES),
            "the tokenizer": _hash_files(model_dir, _TOKENIZER_FILES),
            "the weights": weights,
        }
    except OSError as error:
        raise ModelError(
            f"The model {model_dir} was opened.",
            f"{error.filename or 'A file of it'} cannot be read: {error.strerror}.",
            "Check the path and its permissions, or download the model again.",
        ) from error


def job_fingerprint(
    identity: Mapping[str, str],
    *,
    input_hash: str,
    sampling: SamplingParams,
    unordered: bool,
) -> Fingerprint:
    """All that the output rows of a job depend on. ``identity`` is the model's and the caller's."""
    parameters = {
        name.replace("_", "-"): str(list(value) if isinstance(value, tuple) else value)
        for name, value in asdict(sampling).items()
        if not (name == "structured_outputs" and value is None)  # as it was before there were any
    }
    return {
        INPUT: input_hash,
        **identity,
        **parameters,
        "the order of the output": "as finished" if unordered else "as the input",
    }


def _hash_files(model_dir: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        if (model_dir / name).is_file():
            content = (model_dir / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _hash_weights(model_dir: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*model_dir.glob("*.safetensors"), *model_dir.glob("*.gguf")]):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}\n".encode())
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()
