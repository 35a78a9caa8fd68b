"""Tables of the experts of each token, looked at before a run: a number that no expert has would
end it in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from freight.errors import ModelError
from freight.model.config import ModelConfig
from freight.model.sources import TensorSource

__all__ = ["check_tables"]

_KINDS: Final = {"I64": "<i8", "I32": "<i4", "float32": "<f4"}


def check_tables(config: ModelConfig, sources: Mapping[str, TensorSource]) -> None:
    """ModelError where a table names what is no expert; of types that are read as they are."""
    if config.experts is None:
        return
    for name, source in sources.items():
        if not name.endswith(".router.table") or source.dtype not in _KINDS:
            continue
        count = source.num_bytes // np.dtype(_KINDS[source.dtype]).itemsize
        with source.path.open("rb") as file:
            file.seek(source.offset)
            numbers = np.fromfile(file, _KINDS[source.dtype], count)
        known = (numbers >= 0) & (numbers < config.experts.num_experts)
        if not known.all():
            raise ModelError(
                f"{name} of {source.path.name} says which experts each token has.",
                f"It has {numbers[~known][0]:g} among them; there are "
                f"{config.experts.num_experts}, from 0 on.",
                "Fetch the weights again.",
            )
