"""A model's directory for a GGUF file that comes alone: what is missing beside it is made, once, of
what it says itself, and kept.

The directory has links to the file and to what does lie beside it. Knows files, no tensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from freight.errors import InputError
from freight.model.gguf import parts_of, read_gguf
from freight.model.gguf_architectures import ARCHITECTURES
from freight.model.gguf_config import config_of_gguf
from freight.runtime.gguf_tokenizer import (
    absence_of_tokenizer,
    tokenizer_config_of_gguf,
    tokenizer_of_gguf,
)
from freight.runtime.tokenizer import has_tokenizer

__all__ = ["describes_itself", "directory_of_gguf", "has_config", "why_no_tokenizer"]

_VERSION: Final = 3
_MISSING: Final = "tokenizer.missing"
"""Where the directory says why it has no tokenizer."""
_BESIDE: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
)


def directory_of_gguf(path: Path) -> Path:
    """A directory with the file, a config.json and, where its tokenizer can be made, that. Raises
    ModelError where the file cannot be run without a config.json beside it."""
    parts = [part.absolute() for part in parts_of(path)]
    path = parts[0]
    found = [path.parent / name for name in _BESIDE if (path.parent / name).is_file()]
    if not has_config(path.parent) or describes_itself(path):
        found = [beside for beside in found if beside.name != "config.json"]
    own = _kept() / _key(path, [*parts[1:], *found])
    if own.is_dir():
        return own
    file = read_gguf(path, with_arrays=True)
    names = {beside.name for beside in found}
    made: dict[str, Mapping[str, Any] | None] = {}
    if "config.json" not in names:
        made["config.json"] = config_of_gguf(file)
    if not has_tokenizer(path.parent):
        made["tokenizer.json"] = own_tokenizer = tokenizer_of_gguf(file)
        if own_tokenizer is None:
            made[_MISSING] = {"why": absence_of_tokenizer(file)}
    if "tokenizer_config.json" not in names:
        made["tokenizer_config.json"] = tokenizer_config_of_gguf(file)
    draft = own.with_name(f"{own.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        for beside in (*parts, *found):
            (draft / beside.name).symlink_to(beside)
        for name, content in made.items():
            if content is not None:
                (draft / name).write_text(json.dumps(content), "utf-8")
        draft.replace(own)
    except OSError as error:
        if not own.is_dir():  # another process may have made it in the meantime
            raise InputError(
                f"A configuration for {path.name} was to be kept in {own.parent}.",
                f"The system refused: {error.strerror}.",
                "Set XDG_CACHE_HOME to a directory that can be written.",
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return own


def why_no_tokenizer(directory: Path) -> str | None:
    """Why the directory that was made of a file has none; None where nothing is known of that."""
    path = directory / _MISSING
    return str(json.loads(path.read_text("utf-8"))["why"]) if path.is_file() else None


def has_config(directory: Path) -> bool:
    """Whether there is a config.json that describes a model: repositories of GGUF files may have
    one that only names its kind."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return True  # for whoever reads it to refuse
    sizes = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "text_config")
    return raw is not None and (not isinstance(raw, dict) or any(name in raw for name in sizes))


def describes_itself(path: Path) -> bool:
    """Whether the file is read by its own numbers, whatever lies beside it."""
    own = ARCHITECTURES.get(read_gguf(path).architecture)
    return own is not None and own.describes_itself


def _kept() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "freight" / "gguf"


def _key(path: Path, beside: list[Path]) -> str:
    """Another file, or other files beside it, make another directory, and so does the library that
    makes some tokenizers."""
    marks = [str(_VERSION), str(importlib.util.find_spec("transformers") is not None)]
    for file in (path, *beside):
        stat = file.stat()
        marks += [str(file), str(stat.st_size), str(stat.st_mtime_ns)]
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:24]
