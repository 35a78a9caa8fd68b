"""Configurations that the package has: models that can be planned by name, without a file."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from freight.demo import MODEL_DIR as DEMO_DIR
from freight.errors import InputError
from freight.model.config import ModelConfig, read_config

__all__ = ["bundled_configs", "bundled_path", "check_model", "find_bundled"]


def bundled_configs() -> list[str]:
    """Names of the models that can be planned without a file."""
    folder = resources.files("freight.model") / "configs"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def find_bundled(name: str) -> ModelConfig | None:
    """The configuration of that name; "demo" is the model in the package."""
    if name == "demo":
        return read_config(DEMO_DIR)
    path = bundled_path(name)
    return None if path is None else read_config(path)


def bundled_path(name: str | None) -> Path | None:
    """The file of the configuration of that name."""
    if name not in bundled_configs():
        return None
    return Path(str(resources.files("freight.model") / "configs" / f"{name}.json"))


def check_model(name: str | None, why: str) -> str:
    """The name of a path that is there; InputError, with names that are close, where it is not.
    ``why`` a model is wanted is said where none was given."""
    known = bundled_configs()
    if name is None:
        raise InputError(
            "No model was given.",
            why,
            f"Pass --model with a config.json, a directory, or one of {', '.join(known)}.",
        )
    if not Path(name).exists():
        close = difflib.get_close_matches(name.lower(), known, n=3)
        raise InputError(
            f"--model {name} was given.",
            "There is no such file or directory, and no bundled configuration of that name.",
            f"Did you mean {' or '.join(close)}?" if close else f"Bundled are {', '.join(known)}.",
        )
    return name
