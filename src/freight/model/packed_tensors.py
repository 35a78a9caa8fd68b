"""The tensors that hold a quantised matrix in a safetensors checkpoint, and what it becomes.

AWQ and GPTQ keep it turned, [in, out], as ``qweight``, ``qzeros`` and ``scales``;
compressed-tensors as ``weight_packed``, ``weight_scale`` and, where it is not symmetric,
``weight_zero_point``. All are whole numbers in 32-bit words with a scale per group. Its numbers of
8 bits may also be a ``weight`` of bytes. MXFP4 keeps fours of bits as ``_blocks`` of 32, and their
exponents as ``_scales``. Levels are in ``packed_levels``. Knows names, types and shapes; reads no
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Final

from freight.model.number_format import (
    EIGHT_COLUMNS,
    MICRO_COLUMNS,
    EightFloats,
    Grouped,
    MicroFloats,
    RowFormat,
)
from freight.model.packed_levels import find_level_rows, levels_become
from freight.model.packing import Packing
from freight.model.sources import Packed, TensorSource

__all__ = ["PACKED_DTYPES", "becomes", "find_packed"]

_FP8: Final = "F8_E4M3"
_INT8: Final = "I8"
_EXPONENTS: Final = "F8_E8M0"
"""Powers of two, a byte each."""
_BYTES: Final = "U8"
PACKED_DTYPES: Final = (_FP8, _INT8, _BYTES)
"""Of matrices that have the name of a plain one."""

_FLOATS: Final = ("float16", "bfloat16", "float32")
_TURNED: Final[tuple[str, ...]] = ("qweight", "qzeros", "scales")
_WORD_BITS: Final = 32
Shape = tuple[int, ...]


def becomes(
    packing: Packing, columns: int, scale_dtype: str, *, of_expert: bool = False
) -> RowFormat:
    """The format that holds such a matrix exactly: float16 has room for half of the levels times a
    scale of its own, a power of two, and for no other minimum."""
    if of_expert and packing.experts_in_fours:
        return MicroFloats()
    if (levels := levels_become(packing)) is not None:
        return levels
    floats: dict[str, RowFormat] = {"mxfp4": MicroFloats(), "fp8": EightFloats()}
    return floats.get(packing.scheme) or _groups(packing, columns, scale_dtype)


def _groups(packing: Packing, columns: int, scale_dtype: str) -> Grouped:
    return Grouped(
        bits=packing.bits,
        group_size=packing.group_size or columns,
        wide=not (packing.symmetric and scale_dtype == "float16"),
    )


def find_packed(
    found: Mapping[str, TensorSource], tensor: str, shape: Shape, packing: Packing
) -> tuple[TensorSource | None, list[str]]:
    """The matrix [rows, columns] that ``tensor``, of the unquantised checkpoint, would be. None and
    no problems where the checkpoint has nothing under its name."""
    if packing.levels is not None:
        return find_level_rows(found, tensor, shape, packing)
    if packing.scheme == "mxfp4":
        return _find_fours(found, tensor, shape, packing)
    if packing.scheme == "int-quantized":
        return _find_bytes(found, tensor, shape, packing)
    if packing.scheme == "fp8":
        return _find_eights(found, tensor, shape, packing)
    base = tensor.removesuffix(".weight")
    turned = packing.scheme != "compressed-tensors"
    names = _TURNED if turned else _upright(packing)
    optional = ("g_idx", "weight_g_idx")
    parts = {n: found[f"{base}.{n}"] for n in (*names, *optional) if f"{base}.{n}" in found}
    if names[0] not in parts:
        return None, []
    problems = [f"{base}.{name} is missing" for name in names if name not in parts]
    problems = problems or _misfits(base, parts, shape, packing)
    if problems:
        return None, problems
    codes = parts[names[0]]
    scales = parts["scales" if turned else "weight_scale"]
    own = _groups(packing, shape[1], scales.dtype)
    source = TensorSource(
        path=codes.path,
        offset=codes.offset,
        num_bytes=codes.num_bytes,
        dtype=own.name,
        shape=shape,
        packed=Packed(
            scheme=packing.scheme,
            parts=parts,
            bits=packing.bits,
            group_size=own.group_size,
            zero_shift=packing.zero_shift,
        ),
    )
    return source, []


def _find_fours(
    found: Mapping[str, TensorSource], tensor: str, shape: Shape, packing: Packing
) -> tuple[TensorSource | None, list[str]]:
    """Of MXFP4; experts may have a dim of their own. compressed-tensors has other names."""
    rows, columns = shape
    sizes = {"blocks": columns // 2, "scales": columns // MICRO_COLUMNS}
    names = {name: f"{tensor}_{name}" for name in sizes}
    if names["blocks"] not in found:
        base = tensor.removesuffix(".weight")
        names = {"blocks": f"{base}.weight_packed", "scales": f"{base}.weight_scale"}
    parts = {name: found[own] for name, own in names.items() if own in found}
    if "blocks" not in parts:
        return None, []
    problems = [f"{own} is missing" for name, own in names.items() if name not in parts]
    for name, part in parts.items():
        if prod(part.shape) != rows * sizes[name] or columns % MICRO_COLUMNS:
            wanted = f"{rows} rows of {sizes[name]} bytes"
            problems.append(f"{names[name]} has shape {list(part.shape)}, not that of {wanted}")
        if part.dtype != _BYTES:
            problems.append(f"{names[name]} is of type {part.dtype}, it must be {_BYTES}")
    if problems:
        return None, problems
    flat = {name: replace(part, shape=(rows, sizes[name])) for name, part in parts.items()}
    packed = Packed(scheme="mxfp4", parts=flat, bits=4, group_size=MICRO_COLUMNS)
    return replace(flat["blocks"], dtype=MicroFloats().name, shape=shape, packed=packed), []


def _find_eights(
    found: Mapping[str, TensorSource], tensor: str, shape: Shape, packing: Packing
) -> tuple[TensorSource | None, list[str]]:
    """Of FP8: the matrix has its own name, and scales lie beside it, of blocks, or else of each row
    or of all. What they are called says nothing of whether numbers are multiplied or divided by
    them: they always are multiplied."""
    codes = found.get(tensor)
    if codes is not None and codes.dtype == _INT8:
        return _find_fours_beside(found, tensor, shape)
    if codes is None or codes.dtype != _FP8:
        return None, []
    scales = next((found[name] for name in _scale_names(tensor) if name in found), None)
    blocks = tuple(-(-size // EIGHT_COLUMNS) for size in shape)
    expected: tuple[Shape, ...] = ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
    what = "rows, or a matrix,"
    if packing.group_size is not None:
        expected, what = (blocks,), f"blocks of {EIGHT_COLUMNS}"
    problems = []
    if codes.shape != shape or shape[1] % 4:
        problems.append(f"{tensor} has shape {list(codes.shape)}, expected {list(shape)}")
    if scales is None:
        problems.append(f"{' or '.join(_scale_names(tensor))} is missing")
    elif scales.shape not in expected or scales.dtype not in (*_FLOATS, _EXPONENTS):
        shapes = " or ".join(str(list(own)) for own in expected)
        problems.append(
            f"the scale of {tensor} has shape {list(scales.shape)} and type {scales.dtype}, {what} "
            f"make it {shapes}, in one of {', '.join((*_FLOATS, _EXPONENTS))}"
        )
    if problems or scales is None:
        return None, problems
    size = packing.group_size or 0
    flat = scales if size else replace(scales, shape=(prod(scales.shape),))
    parts = {"rows": codes, "scales": flat}
    packed = Packed(scheme="fp8", parts=parts, bits=8, group_size=size)
    return replace(codes, dtype=EightFloats().name, packed=packed), []


def _find_bytes(
    found: Mapping[str, TensorSource], tensor: str, shape: Shape, packing: Packing
) -> tuple[TensorSource | None, list[str]]:
    """Of whole numbers of 8 bits, one to a byte, with scales of groups, of rows or of all."""
    codes = found.get(tensor)
    if codes is None or codes.dtype != _INT8:
        return None, []
    rows, columns = shape
    size = packing.group_size or columns
    own: tuple[Shape, ...] = ((rows, columns // size),)
    if packing.group_size is None:
        own = ((rows, 1), (rows,), (), (1,), (1, 1))
    names = ("scale",) if packing.symmetric else ("scale", "zero_point")
    parts = {name: found[f"{tensor}_{name}"] for name in names if f"{tensor}_{name}" in found}
    problems = [f"{tensor}_{name} is missing" for name in names if name not in parts]
    if codes.shape != shape or columns % size:
        problems.append(f"{tensor} has shape {list(codes.shape)}, expected {list(shape)}")
    for name, part in parts.items():
        allowed = _FLOATS if name == "scale" else (_INT8,)
        if part.shape not in own or part.dtype not in allowed:
            shapes = " or ".join(str(list(each)) for each in own)
            problems.append(
                f"{tensor}_{name} has shape {list(part.shape)} and type {part.dtype}, it must be "
                f"{shapes}, in one of {', '.join(allowed)}"
            )
    if problems:
        return None, problems
    kind = _groups(packing, columns, parts["scale"].dtype)
    groups = columns // size
    flat = {
        name: replace(part, shape=(prod(part.shape) // groups, groups))
        for name, part in parts.items()
    }
    packed = Packed(
        scheme=packing.scheme, parts={"rows": codes, **flat}, bits=8, group_size=kind.group_size
    )
    return replace(codes, dtype=kind.name, packed=packed), []


def _scale_names(tensor: str) -> tuple[str, str, str]:
    return f"{tensor}_scale_inv", f"{tensor.removesuffix('.weight')}.scale", f"{tensor}_scale"


def _find_fours_beside(
    found: Mapping[str, TensorSource], tensor: str, shape: Shape
) -> tuple[TensorSource | None, list[str]]:
    """Of experts whose numbers have 4 bits, two to a byte, among matrices of FP8 (DeepSeek-V4):
    with exponents of 32 each beside them."""
    rows, columns = shape
    name = next((own for own in _scale_names(tensor) if own in found), None)
    if name is None:
        return None, [f"{' or '.join(_scale_names(tensor))} is missing"]
    parts = {"blocks": found[tensor], "scales": found[name]}
    sizes = {"blocks": columns // 2, "scales": columns // MICRO_COLUMNS}
    known = {"blocks": (_INT8,), "scales": (_EXPONENTS, "U8")}
    called = {"blocks": tensor, "scales": name}
    problems = [
        f"{called[own]} has shape {list(part.shape)} and type {part.dtype}, it must be "
        f"{[rows, sizes[own]]} of {' or '.join(known[own])}"
        for own, part in parts.items()
        if part.shape != (rows, sizes[own]) or part.dtype not in known[own]
    ]
    if problems or columns % MICRO_COLUMNS:
        return None, problems or [f"{tensor} has {columns} columns, which 32 do not divide"]
    packed = Packed(scheme="mxfp4", parts=parts, bits=4, group_size=MICRO_COLUMNS)
    return replace(found[tensor], dtype=MicroFloats().name, shape=shape, packed=packed), []


def _upright(packing: Packing) -> tuple[str, ...]:
    names = ("weight_packed", "weight_scale")
    return names if packing.symmetric else (*names, "weight_zero_point")


def _misfits(
    base: str, parts: Mapping[str, TensorSource], shape: Shape, packing: Packing
) -> list[str]:
    """What is wrong with types and shapes; a wrong group size shows in those of the scales."""
    columns = shape[1]
    size = packing.group_size or columns
    if columns % size or (size % 2 and packing.bits == 4) or columns * packing.bits % _WORD_BITS:
        return [f"{base} has {columns} columns, which groups of {size} do not fill"]
    problems = []
    for name, expected in _expected(shape, packing, size).items():
        part = parts.get(name)
        if part is None or part.shape in expected:
            continue
        shapes = " or ".join(str(list(item)) for item in expected)
        problems.append(
            f"{base}.{name} has shape {list(part.shape)}, groups of {size} make it {shapes}"
        )
    for name, part in parts.items():
        # Older files of compressed-tensors have zero points as they are, not packed.
        words = ("I32", "I8") if name == "weight_zero_point" else ("I32",)
        allowed = _FLOATS if "scale" in name else words
        if part.dtype not in allowed:
            problems.append(
                f"{base}.{name} is of type {part.dtype}, it must be {' or '.join(allowed)}"
            )
    return problems


def _expected(shape: Shape, packing: Packing, size: int) -> dict[str, tuple[Shape, ...]]:
    """The shapes that each part may have."""
    rows, columns = shape
    groups, each = columns // size, _WORD_BITS // packing.bits
    if packing.scheme != "compressed-tensors":
        awq = packing.scheme == "awq"
        words = (columns, rows // each) if awq else (columns // each, rows)
        return {
            "qweight": (words,),
            "qzeros": ((groups, rows // each),),
            "scales": ((groups, rows),),
            "g_idx": ((columns,),),
        }
    return {
        "weight_packed": ((rows, columns // each),),
        "weight_scale": ((rows, groups),),
        "weight_zero_point": ((-(-rows // each), groups), (rows, groups)),
        "weight_g_idx": ((columns,),),
    }
