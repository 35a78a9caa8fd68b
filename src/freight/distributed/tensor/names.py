"""What ways of computing are called, on a mesh: by people who ask for one, and in summaries.

The names are those of the papers: Pope et al. for cuts, section 3.2, where weights stay or are
gathered along axes of the mesh; Ong & Kwon for schemes over one axis. How attention is cut, by
heads or by rows, is no part of a cut's name. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from freight.distributed.tensor.ways import Way
from freight.errors import InputError
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.named import Dynamic

__all__ = ["NAMES", "SCHEMES", "check_name", "describe", "name_of"]

SCHEMES: Final[Mapping[str, Dynamic]] = {
    "megatron": Dynamic(),
    "output-replicated": Dynamic(replicated=True),
    "mlp-gathered": Dynamic(gathered=True),
    "exchanged": Dynamic(replicated=True, exchanged=True),
    "exchanged-mlp-gathered": Dynamic(replicated=True, gathered=True, exchanged=True),
}
NAMES: Final = (
    "1d-weight-stationary",
    "2d-weight-stationary",
    *(f"{axes}-weight-gathered" for axes in ("x", "y", "xy", "zy", "xyz")),
    *SCHEMES,
)


def name_of(way: Way, mesh: Mesh) -> str:
    """One of ``NAMES``."""
    if isinstance(way, Dynamic):
        return next(name for name, scheme in SCHEMES.items() if scheme == way)
    if way.gathered:
        return f"{way.gathered}-weight-gathered"
    is_one = mesh.size(way.width) == 1 or mesh.size(way.inner) == 1
    return f"{1 if is_one else 2}d-weight-stationary"


def describe(way: Way, mesh: Mesh) -> str:
    """Its name, and how attention is cut where that can differ."""
    name = name_of(way, mesh)
    if isinstance(way, Cut) and mesh.size(way.batch + way.rows) > 1:
        return f"{name}, attention by rows"
    return name


def check_name(name: str) -> None:
    """InputError where nothing is called so."""
    if name not in NAMES:
        raise InputError(
            f"--pin-layout {name} was given.",
            "No layout is called so.",
            f"Use one of {', '.join(NAMES)}.",
        )
