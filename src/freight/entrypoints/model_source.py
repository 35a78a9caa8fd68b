"""Finds the directory of the model that was asked for: a path, a Hub id, or the demo.

Knows no model's contents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from freight.entrypoints.adapter_model import base_of, directory_with_adapter, is_made
from freight.entrypoints.gguf_model import (
    describes_itself,
    directory_of_gguf,
    has_config,
    why_no_tokenizer,
)
from freight.errors import InputError, ModelError
from freight.jobs.formats import RowLimits
from freight.jobs.readings import Form, Reading
from freight.model.adapter import has_adapter
from freight.model.config import ModelConfig
from freight.model.gguf import parts_of
from freight.model.gguf_tensors import find_gguf
from freight.model.task import refuse_other
from freight.runtime.options import EngineOptions
from freight.runtime.tokenizer import Tokenizer, has_tokenizer

__all__ = ["find_model", "limits_of", "open_tokenizer", "row_limits"]

_HUB_ID: Final = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_ADAPTER_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES: Final = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
# The publisher's own format beside the same weights, or those of earlier steps: what is downloaded
# would be doubled, and more.
_HUB_DUPLICATES: Final = ("consolidated*", "original/*", "checkpoint-*")
_PLAIN: Final = Form()
_DYNAMIC: Final = "UD-"
"""Before a kind, of files that have more bits for some tensors: others of the kind go before."""


def find_model(name: str | None, lora: str | None = None) -> Path:
    """The directory of a model, downloaded from the Hub if ``name`` is an id there; for a GGUF
    file, and for a model with the adapter ``lora``, one that is made. An adapter's own name stands
    for it with the model that it was trained on."""
    directory = _find_directory(name)
    if lora is not None:
        return directory_with_adapter(directory, _find_adapter(lora))
    if has_adapter(directory) and not is_made(directory):
        return directory_with_adapter(_find_base(directory), directory)
    return directory


def _find_adapter(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir() and name:
        return path
    if not path.exists() and _ADAPTER_ID.fullmatch(name) and not name.startswith("."):
        return _download(name, _HUB_FILES)
    raise InputError(
        f"--lora {name or repr(name)} was given.",
        "It is a file."
        if path.is_file()
        else "There is no such directory, and it is no Hugging Face Hub id like owner/name.",
        "Give the directory of an adapter as PEFT saves it, or its Hub id.",
    )


def _find_base(adapter_dir: Path) -> Path:
    """The model that an adapter names, which nobody else has."""
    name, revision = base_of(adapter_dir)
    try:
        directory = _find_directory(name, revision)
    except (InputError, ModelError) as error:
        raise ModelError(
            f"The adapter in {adapter_dir} was given as a model.",
            f"It was trained on {name}, as it says, which cannot be found: {error.limit}",
            f"Give that model with --model, and --lora {adapter_dir}.",
        ) from error
    if has_adapter(directory):
        raise ModelError(
            f"The adapter in {adapter_dir} was given as a model.",
            f"It was trained on {name}, as it says, which is an adapter itself.",
            "Merge that one into its model with PEFT (merge_and_unload), and give what that makes.",
        )
    return directory


def _find_directory(name: str | None, revision: str | None = None) -> Path:
    """What a name stands for by itself."""
    if not name:
        raise InputError(
            "No model was given.",
            "Freight has no default model.",
            "Pass --model with a directory or a Hugging Face Hub id; --model demo is a tiny one "
            "that comes with the package.",
        )
    if name == "demo":
        from freight.demo import MODEL_DIR

        return Path(MODEL_DIR)
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory_of(path)
    if path.suffix == ".gguf" and path.is_file():
        return directory_of_gguf(path)
    if path.exists():
        raise InputError(
            f"--model {name} was given.",
            "It is a file.",
            "Give the directory that holds config.json and the weights, or a .gguf file.",
        )
    found = _HUB_ID.fullmatch(name)
    if found is None or name.startswith("."):
        raise InputError(
            f"--model {name} was given.",
            "There is no such directory, and it is no Hugging Face Hub id like owner/name, or "
            "owner/name:Q4_K_M for a GGUF file.",
            "Check the path, or use --model demo for the tiny model in the package.",
        )
    hub_id, kind = found.groups()
    if kind is not None:
        return _download_gguf(hub_id, kind)
    return _download(hub_id, _HUB_FILES, revision=revision)


def open_tokenizer(model_dir: Path, options: EngineOptions) -> Tokenizer | None:
    """The model's tokenizer. Random weights and GGUF files can do without: then the rows are token
    ids."""
    can_do_without = options.dummy_seed is not None or find_gguf(model_dir) is not None
    if can_do_without and not has_tokenizer(model_dir):
        return None
    return Tokenizer(model_dir)


def limits_of(config: ModelConfig, form: Form = _PLAIN) -> RowLimits:
    """What rows a model with these switches can take, and in which ``form`` they get embeddings.
    InputError for one that the model's cannot be in."""
    reading, readout = None, config.readout
    if form != _PLAIN:
        name = "dimensions" if form.dimensions is not None else "encoding_format"
        asked = f"--{name.replace('_', '-')} {getattr(form, name)} was given."
        refuse_other(readout, "embed", asked, spare="leave it out")
    form.check(config.head_size)
    if readout is not None:
        form = form.stated(readout, config.head_size)
        reading = Reading(readout=readout, size=config.head_size, form=form)
    return RowLimits(
        max_positions=config.max_positions, vocab_size=config.vocab_size, reading=reading
    )


def row_limits(config: ModelConfig, model_dir: Path, form: Form = _PLAIN) -> RowLimits:
    """Likewise, and where the model has no tokenizer, why."""
    limits, why = limits_of(config, form), why_no_tokenizer(model_dir)
    return limits if why is None else replace(limits, why_no_text=why)


def _directory_of(path: Path) -> Path:
    """The directory itself, unless all that counts there is a GGUF file."""
    file = find_gguf(path)
    if file is None or (has_config(path) and not describes_itself(file)):
        return path
    return directory_of_gguf(file)


def _download_gguf(hub_id: str, kind: str) -> Path:
    """Of a repository's GGUF files those of a kind, such as Q4_K_M, which their names have."""
    spellings = dict.fromkeys((kind, kind.upper(), kind.lower()))
    patterns = (*(f"*{own}*.gguf" for own in spellings), *_HUB_FILES[1:])
    directory = _download(hub_id, patterns, (*_HUB_DUPLICATES, "*mmproj*"))
    own = re.compile(rf"(?:.*[-._])?{re.escape(kind)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = [path for path in sorted(directory.rglob("*.gguf")) if own.fullmatch(path.name)]
    models = list(dict.fromkeys(parts_of(path)[0] for path in found if "mmproj" not in path.name))
    if not kind.upper().startswith(_DYNAMIC):
        models = [path for path in models if _DYNAMIC not in path.name.upper()] or models
    if len(models) == 1:
        return directory_of_gguf(models[0])
    names = ", ".join(path.name for path in models) or "none"
    raise ModelError(
        f"{hub_id}:{kind} was to be fetched from the Hugging Face Hub.",
        f"Of the repository's GGUF files these are of that kind by their name: {names}.",
        "Name a kind that one of its files has, such as Q4_K_M.",
    )


def _download(
    hub_id: str,
    patterns: Sequence[str],
    ignored: Sequence[str] = _HUB_DUPLICATES,
    revision: str | None = None,
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
        )
        return Path(directory)
    except Exception as error:  # network, permission, disk: the library has many of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"The model {hub_id} was to be fetched from the Hugging Face Hub.",
            f"That failed: {reason[0]}",
            "Check the name and the network, or download it elsewhere and pass its directory.",
        ) from error
