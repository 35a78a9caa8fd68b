"""The tensors that hold a matrix of levels in a safetensors checkpoint, codes of 4 bits for the
sixteen numbers of a table, and what it becomes.

NVFP4 keeps codes as bytes, with scales of 16 neighbours as floats of 8 bits, and a number that
multiplies these (Model Optimizer), or divides them (compressed-tensors). bitsandbytes keeps a
matrix flat, with scales of blocks beside it, which may be codes themselves. Knows names, types and
shapes; reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Final

from freight.model.number_format import LevelFloats
from freight.model.packing import Packing
from freight.model.sources import Packed, TensorSource

__all__ = ["BITSANDBYTES", "DIVIDED", "NVFP4", "find_level_rows", "levels_become"]

NVFP4: Final = "nvfp4"
DIVIDED: Final = "nvfp4, divided"
"""As compressed-tensors has it."""
BITSANDBYTES: Final = "bitsandbytes"

_BYTES: Final = "U8"
_EIGHTS: Final = "F8_E4M3"
_STATE: Final = "quant_state.bitsandbytes__"
Found = tuple[TensorSource | None, list[str]]


def levels_become(packing: Packing) -> LevelFloats | None:
    """The format that holds such a matrix, as far as config.json says; None of other packings."""
    if packing.levels is None:
        return None
    size = packing.group_size or 0
    return LevelFloats(
        levels=packing.levels, group_size=size, in_bytes=packing.scheme != BITSANDBYTES
    )


def find_level_rows(
    found: Mapping[str, TensorSource], tensor: str, shape: tuple[int, ...], packing: Packing
) -> Found:
    """The matrix [rows, columns] that ``tensor``, of the unquantised checkpoint, would be. None and
    no problems where the checkpoint has nothing under its name."""
    if packing.scheme == BITSANDBYTES:
        return _find_blocks(found, tensor, shape)
    return _find_nvfp4(found, tensor, shape, packing)


def _find_nvfp4(
    found: Mapping[str, TensorSource], tensor: str, shape: tuple[int, ...], packing: Packing
) -> Found:
    own, (rows, columns) = levels_become(packing), shape
    assert own is not None
    base = tensor.removesuffix(".weight")
    codes, scheme, beside = found.get(tensor), NVFP4, "weight_scale_2"
    if codes is None:
        codes, scheme, beside = found.get(f"{base}.weight_packed"), DIVIDED, "weight_global_scale"
    if codes is None or codes.dtype != _BYTES:
        return None, []
    expected: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
        "rows": (((rows, columns // 2),), _BYTES),
        "scales": (((rows, columns // own.group_size),), _EIGHTS),
        "factor": (((), (1,), (1, 1)), "float32"),
    }
    names = {"scales": f"{base}.weight_scale", "factor": f"{base}.{beside}"}
    parts = {"rows": codes} | {part: found[name] for part, name in names.items() if name in found}
    problems = [f"{name} is missing" for part, name in names.items() if part not in parts]
    for part, source in parts.items():
        shapes, kind = expected[part]
        if source.shape not in shapes or source.dtype != kind:
            wanted = " or ".join(str(list(each)) for each in shapes)
            problems.append(
                f"{names.get(part, tensor)} has shape {list(source.shape)} and type "
                f"{source.dtype}, it must be {wanted} of {kind}"
            )
    if f"{base}.pre_quant_scale" in found:
        problems.append(f"{base}.pre_quant_scale multiplies what the matrix meets: not computed")
    if not own.fits(columns):
        problems.append(f"{base} has {columns} columns, which {4 * own.group_size} do not divide")
    if problems:
        return None, problems
    packed = Packed(scheme=scheme, parts=parts, bits=4, group_size=own.group_size)
    return replace(codes, dtype=own.name, shape=shape, packed=packed), []


def _find_blocks(found: Mapping[str, TensorSource], tensor: str, shape: tuple[int, ...]) -> Found:
    rows, columns = shape
    codes = found.get(tensor)
    names = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = {name: found[f"{tensor}.{name}"] for name in names if f"{tensor}.{name}" in found}
    kind = next((own for own in ("nf4", "fp4") if f"{tensor}.{_STATE}{own}" in found), None)
    if codes is None or (not parts and kind is None):
        return None, []
    lacking = [name for name in ("absmax", "quant_map") if name not in parts]
    if len(parts) == 3:
        lacking += [name for name in names if name not in parts]
    problems = [f"{tensor}.{name} is missing" for name in lacking]
    if kind is None:
        problems.append(f"{tensor}.{_STATE}nf4 is missing")
    if codes.dtype != _BYTES or 2 * prod(codes.shape) != rows * columns:
        problems.append(
            f"{tensor} has shape {list(codes.shape)} and type {codes.dtype}, a matrix of "
            f"{list(shape)} has half as many bytes (bnb_4bit_quant_storage uint8)"
        )
    if problems or kind is None:
        return None, problems
    is_nested = "nested_absmax" in parts
    types = {name: "float32" for name in parts} | ({"absmax": _BYTES} if is_nested else {})
    problems = [
        f"{tensor}.{name} is of type {part.dtype}, it must be {types[name]}"
        for name, part in parts.items()
        if part.dtype != types[name]
    ]
    blocks = prod(parts["absmax"].shape)
    size = rows * columns // blocks if blocks else 0
    own = LevelFloats(levels=kind, group_size=max(1, size))
    if size * blocks != rows * columns or size % 16 or not own.fits(columns):
        problems.append(f"{tensor} has {columns} columns, which blocks of {size} do not fill")
    if problems:
        return None, problems
    flat = {
        "rows": replace(codes, shape=(rows, columns // 2)),
        **parts,
        "absmax": replace(parts["absmax"], shape=(rows, columns // size)),
        "state": found[f"{tensor}.{_STATE}{kind}"],
    }
    packed = Packed(scheme=BITSANDBYTES, parts=flat, bits=4, group_size=size)
    return replace(codes, dtype=own.name, shape=shape, packed=packed), []
