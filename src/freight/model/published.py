"""What the files that sentence-transformers keeps beside a model say of its embeddings.

``modules.json`` lists what is behind the decoder; prompts, lengths and dimensions are in files of
their own. Whether what they say can be computed is for others to ask. Knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from freight.model.readout import Readout, doubts_of
from freight.model.switches import ModelConfig

__all__ = ["as_published"]

_LAST_TOKEN: Final = "pooling_mode_lasttoken"
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")
_UNSTATED: Final = {"query": "", "document": ""}
"""Prompts that there are, empty, where none are stated."""


def as_published(config: ModelConfig, model_dir: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """``config`` with embeddings made as the files beside config.json, ``raw``, say, and as what
    the model is for, where there are such. A head of labels stays that: a model that was saved to
    embed has none."""
    embedding = _published(model_dir, (*config.embedding.doubts, *doubts_of(raw)))
    if embedding is None:
        return config
    if (embedding.most_tokens or 0) >= config.max_positions:
        embedding = replace(embedding, most_tokens=None)
    own = config.readout
    has_labels = own is not None and bool(own.labels)
    return replace(config, embedding=embedding, readout=own if has_labels else embedding)


def _published(model_dir: Path, doubts: tuple[str, ...]) -> Readout | None:
    modules = _read(model_dir / "modules.json")
    kinds = {}
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict):
            kinds[str(module.get("type")).rpartition(".")[2]] = str(module.get("path") or "")
    if "Pooling" not in kinds:
        return None
    found = [*dict.fromkeys(doubts)]
    if others := [kind for kind in kinds if kind not in _KNOWN]:
        found.append(f"behind the decoder it has {', '.join(others)}, which is not computed")
    found += _pooled_otherwise(_read_object(model_dir / kinds["Pooling"] / "config.json"))
    inner = model_dir / kinds.get("Transformer", "")
    read = _read_object(inner / "sentence_bert_config.json")
    if read.get("do_lower_case"):
        found.append("do_lower_case is set: its texts are made lower case before they are read")
    stated = _read_object(model_dir / "config_sentence_transformers.json")
    prompt = _prompt(stated, found)
    dimensions = _count("truncate_dim", stated, found)
    most = _count("max_seq_length", read, found)
    if most is None:
        most = _count("model_max_length", _read_object(inner / "tokenizer_config.json"), [])
    return Readout(
        is_unit="Normalize" in kinds,
        dimensions=dimensions,
        prompt=prompt,
        most_tokens=most,
        doubts=tuple(found),
    )


def _pooled_otherwise(pooling: Mapping[str, Any]) -> Iterator[str]:
    modes = [name for name, value in pooling.items() if name.startswith("pooling_mode") and value]
    mode = pooling.get("pooling_mode")
    if modes != [_LAST_TOKEN] and mode != "lasttoken":
        said = " and ".join(modes) if mode is None else f"pooling_mode {mode}"
        said = said or "nothing that its files say"
        yield f"they are read by {said}, and here of the last token alone"


def _prompt(stated: Mapping[str, Any], doubts: list[str]) -> str:
    """What is put before each text unless another prompt is asked for."""
    name = stated.get("default_prompt_name")
    if name is None:
        return ""
    prompts = stated.get("prompts")
    known = {**_UNSTATED, **(prompts if isinstance(prompts, Mapping) else {})}
    if not isinstance(known.get(name) if isinstance(name, str) else None, str):
        doubts.append(f"default_prompt_name is {name}, and there is no such prompt")
        return ""
    return str(known[name])


def _count(name: str, stated: Mapping[str, Any], doubts: list[str]) -> int | None:
    value = stated.get(name)
    if value is not None and (type(value) is not int or value < 1):
        doubts.append(f"{name} is {json.dumps(value)}, it must be a whole number, at least 1")
        return None
    return value


def _read_object(path: Path) -> Mapping[str, Any]:
    found = _read(path)
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> Any:
    """What a JSON file says; None where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
