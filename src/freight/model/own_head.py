"""Whether a checkpoint has a head of its own, though its config.json says that the embedding is it.

Configurations of several parts contradict themselves here, and what their classes leave out differs
by version; the weights do not. transformers keeps both where both are there and differ. Knows names
and bytes, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from freight.model.adapter import read_adapter
from freight.model.families import Place
from freight.model.places import spellings
from freight.model.safetensors_files import read_safetensors
from freight.model.sources import TensorSource

__all__ = ["has_own_head"]

_COMPARED_BYTES: Final = 1 << 16
"""At the beginning and at the end: trained ones differ everywhere."""


def has_own_head(model_dir: Path, tensors: Mapping[str, Place]) -> bool:
    """Whether the safetensors of ``model_dir`` hold a head, by the family's table, that is not the
    embedding, or an adapter makes it so. Damaged ones are for others to refuse."""
    found = read_safetensors(model_dir, [])
    if found is None:
        return False
    head, embedding = (_find(found, tensors.get(name)) for name in ("head.weight", "embedding"))
    adapter = read_adapter(model_dir)
    if adapter is not None and embedding is not None:
        own, other = (_name(tensors.get(name)) for name in ("head.weight", "embedding"))
        saved = adapter.find(own), adapter.find(other)
        if None not in saved and not any(map(adapter.adds_to, (own, other))):
            head, embedding = saved
        elif adapter.unties(own, other, embedding.shape[0]):
            return True
    if head is None or embedding is None:
        return False
    alike = (head.dtype, head.shape, head.num_bytes)
    if alike != (embedding.dtype, embedding.shape, embedding.num_bytes):
        return head.shape == embedding.shape
    try:
        return _ends(head) != _ends(embedding)
    except OSError:
        return False


def _find(found: Mapping[str, TensorSource], place: Place | None) -> TensorSource | None:
    return next((found[name] for name in spellings(_name(place)) if name in found), None)


def _name(place: Place | None) -> str:
    return place if isinstance(place, str) else ""


def _ends(source: TensorSource) -> tuple[bytes, bytes]:
    size = min(source.num_bytes, _COMPARED_BYTES)
    with source.path.open("rb") as file:
        file.seek(source.offset)
        first = file.read(size)
        file.seek(source.offset + source.num_bytes - size)
        return first, file.read(size)
