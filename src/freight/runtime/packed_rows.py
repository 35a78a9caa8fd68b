"""Rows of a checkpoint's quantised tensors, read and put into the form that runs use.

A tensor at a time: blocks are read as rows are wanted, words that lie across the rows all at once,
which takes a matrix's size in its few bits. Nothing is rounded; what would have to be is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch

from freight.errors import ModelError
from freight.kernels.eights import are_numbers, join_eight_rows
from freight.kernels.level_packing import level_rows
from freight.kernels.micro import join_micro_blocks, join_micro_rows
from freight.kernels.unpack import Unpacked, exact_rows, unpack_blocks, unpack_words
from freight.model.gguf_tensors import BLOCKS
from freight.model.number_format import (
    EIGHT_COLUMNS,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    find_compressed,
)
from freight.model.sources import ADAPTED, HALVES, Beside, Dealt, Packed, TensorSource
from freight.quantities import MIB
from freight.runtime.loaders import CheckpointFiles

__all__ = ["check_order", "packed_rows"]

_CHUNK_VALUES: Final = 4 * MIB
_TYPES: Final = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def packed_rows(files: CheckpointFiles, name: str, source: TensorSource) -> Iterator[torch.Tensor]:
    """All rows of a packed tensor in the form that ``source.dtype`` names, some at a time, uint8
    [rows, bytes]. ModelError where a value is no number, or not held exactly."""
    assert source.packed is not None
    number_format = find_compressed(source.dtype)
    if number_format is None:
        yield from _plain_rows(files, name, source, source.packed)
        return
    if isinstance(number_format, MicroFloats):
        yield from _micro_rows(files, source, source.packed)
        return
    if isinstance(number_format, EightFloats):
        yield from _eight_rows(files, name, source, source.packed)
        return
    if isinstance(number_format, LevelFloats):
        yield from _level_rows(files, name, source, source.packed, number_format)
        return
    assert isinstance(number_format, Grouped)
    parts = _unpacked(files, source, source.packed)
    for own in parts:
        rows = exact_rows(own, number_format)
        if rows is None:
            raise ModelError(
                f"{name} of {source.path.name} was to be converted.",
                "It has scales that are infinite, no numbers, or of more digits than can be kept "
                "exactly.",
                "Fetch the weights again, or take a checkpoint with scales of 16 bits.",
            )
        yield rows


def check_order(files: CheckpointFiles, sources: Mapping[str, TensorSource]) -> None:
    """ModelError where columns do not belong to their groups in the order in which they lie."""
    for name, source in sources.items():
        packed = source.packed
        order = None if packed is None else _order(packed)
        if packed is None or order is None:
            continue
        found = _whole(files, order).flatten()
        if not torch.equal(found, torch.arange(len(found), dtype=torch.int32) // packed.group_size):
            raise ModelError(
                f"{name} of {source.path.name} was to be converted.",
                "Its columns are shared out to groups in the order of their activations (GPTQ "
                "with desc_act, act-order), which is not supported.",
                "Take a checkpoint of the same model that was quantised with desc_act false.",
            )


def _order(packed: Packed) -> TensorSource | None:
    return packed.parts.get("g_idx") or packed.parts.get("weight_g_idx")


def _unpacked(files: CheckpointFiles, source: TensorSource, packed: Packed) -> Iterator[Unpacked]:
    if packed.scheme in BLOCKS:
        size = BLOCKS[packed.scheme].num_bytes
        for raw in _raw_rows(files, source, packed):
            yield _in_order(unpack_blocks(packed.scheme, raw, size), packed)
        return
    order = _order(packed)
    parts = {name: _whole(files, part) for name, part in packed.parts.items() if part is not order}
    num_rows, columns = source.shape
    step = max(1, _CHUNK_VALUES // columns)
    for begin in range(packed.first_row, packed.first_row + num_rows, step):
        end = min(begin + step, packed.first_row + num_rows)
        yield unpack_words(packed, parts, begin, end)


def _micro_rows(
    files: CheckpointFiles, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    block = BLOCKS.get(packed.scheme)
    if block is not None:
        for raw in _raw_rows(files, source, packed):
            blocks = raw.view(len(raw), -1, block.num_bytes)
            yield join_micro_blocks(_columns_in_order(blocks, packed))
        return
    num_rows, columns = source.shape
    step = max(1, min(_CHUNK_VALUES, files.most_bytes) // (columns * packed.every))
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        blocks, scales = (
            _every_row(files, packed.parts[name], packed, begin, count)
            for name in ("blocks", "scales")
        )
        yield join_micro_rows(blocks, scales)


def _eight_rows(
    files: CheckpointFiles, name: str, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    num_rows, columns = source.shape
    scales = _whole(files, packed.parts["scales"]).float()
    step = max(1, min(_CHUNK_VALUES, files.most_bytes) // (columns * packed.every))
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        codes = _every_row(files, packed.parts["rows"], packed, begin, count)
        rows = packed.first_row + packed.every * torch.arange(begin, begin + count)
        own = _scales_of(scales, rows, columns, in_blocks=packed.group_size > 0)
        if not are_numbers(codes) or not bool(torch.isfinite(own).all()):
            raise ModelError(
                f"{name} of {source.path.name} was to be converted.",
                "It has values that are infinite or not numbers.",
                "Fetch the weights again.",
            )
        yield join_eight_rows(codes, own)


def _level_rows(
    files: CheckpointFiles, name: str, source: TensorSource, packed: Packed, own: LevelFloats
) -> Iterator[torch.Tensor]:
    num_rows, columns = source.shape
    parts = {part: _whole(files, place) for part, place in packed.parts.items() if part != "rows"}
    step = max(1, min(_CHUNK_VALUES, files.most_bytes) // (columns * packed.every))
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        codes = _every_row(files, packed.parts["rows"], packed, begin, count)
        rows = packed.first_row + packed.every * torch.arange(begin, begin + count)
        found = level_rows(codes, parts, rows, packed.scheme, own)
        if found is None:
            raise ModelError(
                f"{name} of {source.path.name} was to be converted.",
                "It has scales that are infinite or not numbers, or stands for other numbers than "
                f"{own.levels} has.",
                "Fetch the weights again.",
            )
        yield found


def _scales_of(
    scales: torch.Tensor, rows: torch.Tensor, columns: int, *, in_blocks: bool
) -> torch.Tensor:
    """Of every group of some rows, [rows, groups], from those of blocks, of rows or of all."""
    if in_blocks:
        return scales[rows // EIGHT_COLUMNS]
    flat = scales.flatten()
    own = flat.expand(len(rows)) if len(flat) == 1 else flat[rows]
    return own[:, None].expand(-1, -(-columns // EIGHT_COLUMNS))


def _plain_rows(
    files: CheckpointFiles, name: str, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    """Rows that are not quantised, but were changed."""
    if packed.scheme == HALVES:
        yield from _joined_rows(files, source, packed)
        return
    if packed.scheme == ADAPTED:
        part = packed.parts["rows"]
        for summed in _adapted_rows(files, source, packed):
            rounded = summed.to(_TYPES[source.dtype])
            if not bool(torch.isfinite(rounded).all()):
                raise ModelError(
                    f"The adapter was to be added to {name} of {part.path.name}.",
                    f"That makes numbers that are infinite, or none, in {source.dtype}.",
                    "Fetch the model and the adapter again, or merge them in a wider type.",
                )
            yield rounded.view(torch.uint8)
        return
    rows = _turned_rows if packed.turned else _raw_rows
    for raw in rows(files, source, packed):
        if packed.minus_one or packed.logarithms:
            values = raw.view(_TYPES[packed.scheme]).float()
            values = values - 1.0 if packed.minus_one else values.neg().log()
            yield values.view(torch.uint8)
        else:
            yield _columns_in_order(raw, packed)


def _adapted_rows(
    files: CheckpointFiles, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    """With what an adapter adds, in float32."""
    part, num_rows = packed.parts["rows"], source.shape[0]
    down, up, lengths = (
        _whole(files, packed.parts[name]).float() if name in packed.parts else None
        for name in ("down", "up", "lengths")
    )
    if packed.turned and down is not None and up is not None:
        down, up = up.t(), down.t()
    columns = source.shape[1] if len(source.shape) > 1 else 1
    step = max(1, min(_CHUNK_VALUES, files.most_bytes) // (columns * packed.every))
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        rows = _every_row(files, part, packed, begin, count).view(_TYPES[part.dtype]).float()
        picked = packed.first_row + packed.every * torch.arange(begin, begin + count)
        if down is not None and up is not None:
            rows = rows + packed.scale * (up[picked] @ down)
        if lengths is not None:
            rows = rows * (lengths.flatten()[picked] / rows.norm(dim=1))[:, None]
        yield rows


def _joined_rows(
    files: CheckpointFiles, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    """A head at a time, of which some rows lie as columns."""
    turned, rest = packed.parts["turned"], packed.parts["rest"]
    columns = source.shape[1]
    num_heads = turned.shape[0] // columns
    each = rest.shape[0] // num_heads
    for head in range(num_heads):
        own = _values(files, turned.rows(head * columns, columns)).t()
        rows = torch.cat([own, _values(files, rest.rows(head * each, each))])
        yield rows.contiguous().view(torch.uint8)


def _values(files: CheckpointFiles, source: TensorSource) -> torch.Tensor:
    """In float32."""
    if source.packed is None:
        return _whole(files, source).float()
    if source.packed.scheme == ADAPTED:
        return torch.cat([*_adapted_rows(files, source, source.packed)])
    parts = [
        (own.lowest[..., None] + own.codes * own.scale[..., None]).flatten(1).float()
        for own in _unpacked(files, source, source.packed)
    ]
    return torch.cat(parts)


def _in_order(own: Unpacked, packed: Packed) -> Unpacked:
    return replace(
        own,
        codes=_columns_in_order(own.codes, packed),
        scale=_columns_in_order(own.scale, packed),
        lowest=_columns_in_order(own.lowest, packed),
    )


def _columns_in_order(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """[rows, numbers of all heads, ...] with the heads of each group side by side."""
    dealt = packed.dealt
    if not isinstance(dealt, Dealt) or not dealt.of_columns:
        return x
    heads = x.reshape(len(x), dealt.each, dealt.groups, -1, *x.shape[2:])
    return heads.transpose(1, 2).reshape(x.shape)


def _raw_rows(
    files: CheckpointFiles, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    """The bytes of the rows, uint8 [rows, bytes], those of a head unwoven."""
    part = packed.parts["rows"]
    row_bytes = part.num_bytes // part.shape[0]
    whole = packed.head_rows or 1
    most = min(files.most_bytes // row_bytes, _CHUNK_VALUES // source.shape[-1])
    step = whole * max(1, most // (whole * packed.every))
    for begin in range(0, source.shape[0], step):
        count = min(step, source.shape[0] - begin)
        raw = _every_row(files, part, packed, begin, count)
        if packed.head_rows:
            raw = raw.view(-1, whole // 2, 2, row_bytes).transpose(1, 2).reshape(count, row_bytes)
        yield raw


def _every_row(
    files: CheckpointFiles, part: TensorSource, packed: Packed, begin: int, count: int
) -> torch.Tensor:
    """The bytes of ``count`` of the packed rows from the one of number ``begin`` on, in a part that
    has them by rows."""
    row_bytes, every = part.num_bytes // part.shape[0], packed.every
    if packed.dealt is not None and not packed.dealt.of_columns:
        first = packed.first_row + begin
        runs = [
            _read(files, part, place * row_bytes, length * row_bytes)
            for place, length in _runs(packed.dealt, first, count)
        ]
        return torch.cat(runs).view(count, row_bytes)
    first, passed = packed.first_row + begin * every, (count - 1) * every + 1
    raw = _read(files, part, first * row_bytes, passed * row_bytes).view(passed, row_bytes)
    return raw[::every].contiguous() if every > 1 else raw


def _runs(dealt: Dealt | Beside, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Stretches of the file that hold so many rows from one on, in their order."""
    row, end = first, first + count
    while row < end:
        place, length = dealt.find(row)
        yield place, min(length, end - row)
        row += length


def _turned_rows(
    files: CheckpointFiles, source: TensorSource, packed: Packed
) -> Iterator[torch.Tensor]:
    """Columns of a matrix, which is read whole, as rows of bytes."""
    part, count, every = packed.parts["rows"], source.shape[0], packed.every
    matrix = _whole(files, part) if part.packed is None else _values(files, part)
    columns = matrix.t()[packed.first_row :: every][:count].to(_TYPES[part.dtype])
    yield columns.contiguous().view(torch.uint8)


def _whole(files: CheckpointFiles, part: TensorSource) -> torch.Tensor:
    return _read(files, part, 0, part.num_bytes).view(_TYPES[part.dtype]).view(part.shape)


def _read(files: CheckpointFiles, part: TensorSource, offset: int, size: int) -> torch.Tensor:
    """So many bytes in a tensor of their own."""
    out = torch.empty(size, dtype=torch.uint8)
    for begin in range(0, size, files.most_bytes):
        count = min(files.most_bytes, size - begin)
        out[begin : begin + count].copy_(files.read(part, offset + begin, count))
    return out
