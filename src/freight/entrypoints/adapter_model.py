"""A model's directory for one with an adapter: links to the files of both, kept.

Where both have a file it is the adapter's: it was trained with that tokenizer. Knows files, no
tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from freight.entrypoints.made_directory import kept_in, key_of, make_directory
from freight.errors import InputError, ModelError
from freight.model.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, has_adapter
from freight.model.gguf_tensors import find_gguf

__all__ = ["base_of", "directory_with_adapter", "is_made"]

_VERSION: Final = 2
_KIND: Final = "adapted"
_TOKENIZER: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Of one tokenizer: they are of the adapter all, or none."""
_WHOLE: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OWN: Final = (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
)


def base_of(adapter_dir: Path) -> tuple[str, str | None]:
    """The model that an adapter was trained on, as it names it, and its revision on the Hub.
    ModelError where it names none."""
    try:
        raw = json.loads((adapter_dir / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        raw = raw if isinstance(raw, dict) else {}
    except (OSError, ValueError):
        raw = {}
    name, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    if not isinstance(name, str) or not name:
        raise ModelError(
            f"The adapter in {adapter_dir} was given as a model.",
            f"Its {ADAPTER_CONFIG} does not say which model it was trained on "
            "(base_model_name_or_path).",
            f"Give that model with --model, and --lora {adapter_dir}.",
        )
    return name, revision if isinstance(revision, str) and revision else None


def is_made(directory: Path) -> bool:
    """Whether it is such a directory, which has both."""
    return directory.absolute().parent == kept_in(_KIND).absolute()


def directory_with_adapter(model_dir: Path, adapter_dir: Path) -> Path:
    """A directory that has the model's files and the adapter's."""
    if not has_adapter(adapter_dir):
        raise InputError(
            f"--lora {adapter_dir} was given.",
            f"It has no {ADAPTER_CONFIG}.",
            "Give the directory of an adapter as PEFT saves it.",
        )
    if has_adapter(model_dir):
        raise InputError(
            f"--lora {adapter_dir} was given for the model in {model_dir}.",
            "That is an adapter, or has one already.",
            "Give the model that they were trained on; several are merged with PEFT.",
        )
    if find_gguf(model_dir) is not None:
        raise InputError(
            f"--lora {adapter_dir} was given for a GGUF file.",
            "Adapters are added to the tensors of safetensors files, by their names.",
            "Give the model that it was trained on; --weight-bits 4 makes it small here.",
        )
    links = _links(model_dir.resolve(), adapter_dir.resolve())
    own = kept_in(_KIND) / key_of([str(_VERSION)], links.items())
    if own.is_dir():
        return own
    make_directory(own, links, {}, what="A directory for a model with an adapter")
    return own


def _links(model_dir: Path, adapter_dir: Path) -> dict[str, Path]:
    """What lies in the directory, and what each name stands for."""
    links = {path.name: path for path in sorted(model_dir.iterdir()) if path.exists()}
    links.pop(ADAPTER_WEIGHTS, None)
    own: Iterable[str] = [*_OWN, *_poolings(adapter_dir)]
    if any((adapter_dir / name).is_file() for name in _WHOLE):
        for name in _TOKENIZER:
            links.pop(name, None)
        own = [*own, *_TOKENIZER]
    links |= {name: adapter_dir / name for name in own if (adapter_dir / name).exists()}
    return links


def _poolings(directory: Path) -> list[str]:
    """Directories of what sentence-transformers does behind a model."""
    return [path.name for path in sorted(directory.glob("[0-9]_*")) if path.is_dir()]
