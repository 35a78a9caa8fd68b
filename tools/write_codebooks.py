"""Writes src/freight/kernels/codebooks.npz: the codebooks of ggml's types of one to three bits, as
the gguf package has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import quants

KINDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
PATH = Path(__file__).parents[1] / "src" / "freight" / "kernels" / "codebooks.npz"


def codebook(kind: str) -> np.ndarray:
    """int8 [rows, neighbours]."""
    own = getattr(quants, kind)
    own.init_grid()
    return own.grid.reshape(own.grid_shape).astype(np.int8)


if __name__ == "__main__":
    np.savez_compressed(PATH, **{kind: codebook(kind) for kind in KINDS})
