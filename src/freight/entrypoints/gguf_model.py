"""A model's directory for a GGUF file that comes alone: what is missing beside it is made, once, of
what it says itself, and kept.

The directory has links to the file and to what does lie beside it. Knows files, no tensors.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.made_directory import kept_in, key_of, make_directory
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

_VERSION: Final = 4
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
    # The library makes some tokenizers.
    marks = (str(_VERSION), str(importlib.util.find_spec("transformers") is not None))
    files = [("", beside) for beside in (path, *parts[1:], *found)]
    own = kept_in("gguf") / key_of(marks, files)
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
    texts = {name: json.dumps(content) for name, content in made.items() if content is not None}
    links = {beside.name: beside for beside in (*parts, *found)}
    make_directory(own, links, texts, what=f"A configuration for {path.name}")
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
