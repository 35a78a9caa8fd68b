"""Shared by the tests of jobs: a tiny tokenizer, and an engine that answers without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from freight.runtime.tokenizer import Tokenizer

from .tiny_model import write_tiny_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)
