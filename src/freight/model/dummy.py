"""Dummy weights: a model of the right shape out of a config.json alone, any part of it on its own.

Knows shapes and names, nothing of tiers. Values are normal with deviation 0.02, norms and scales
are ones. They are not drawn one by one: a pool of normal values is drawn once per seed and every
block of rows is cut from it at a hashed place. So any rows of any tensor cost one copy, come out
the same however a tensor is split, and a model of any size is made without ever being held. The
price is that values repeat between blocks, which weights that mean nothing can bear.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import torch

from freight.errors import BudgetError, InputError
from freight.model.decoder import tensor_shapes
from freight.model.families import FAMILIES
from freight.model.places import locate
from freight.model.safetensors_files import SAFETENSORS_NAMES
from freight.model.switches import DTYPE_BYTES, ModelConfig
from freight.quantities import MIB, align_up, format_bytes

__all__ = ["DUMMY_STD", "dummy_rows", "write_dummy_checkpoint"]

DUMMY_STD: Final = 0.02

# A prime, so that rows of no width fall into step with the pool.
_POOL_VALUES: Final = 1_048_573
# Part of what a seed means: another block size gives other weights.
_BLOCK_VALUES: Final = 512 * 1024
# Values are copied as bits and by numpy: its copies start no threads, which on a busy machine cost
# more than the copy.
_BITS: Final = {2: torch.int16, 4: torch.int32}
_Bits = npt.NDArray[np.signedinteger[Any]]
_WRITE_BYTES: Final = 8 * MIB
_FLUSH_BYTES: Final = 256 * MIB
_LAST_BITS: Final = 255
"""Of a bfloat16, as likely one number as another, and all of them numbers that it can be."""


def dummy_rows(
    name: str, start_row: int, seed: int, out: torch.Tensor, kept: torch.dtype | None = None
) -> None:
    """Fill ``out`` with the rows of tensor ``name`` (a logical name) from ``start_row`` on.

    ``out`` is contiguous, [rows, ...] with the tensor's whole width, of any float type. A value
    depends on seed, name, row and width alone, and is rounded to ``kept``, what the tensor is kept
    as, if that is narrower. For a tied head, ask for the rows of "embedding".
    """
    assert out.is_contiguous() and out.device.type == "cpu"
    if name.endswith(("norm", ".scale", ".gains")):
        out.fill_(1.0)
        return
    pool = _pool(seed, out.dtype, kept or out.dtype)
    width = math.prod(out.shape[1:])
    block_rows = max(1, _BLOCK_VALUES // max(width, 1))
    flat = out.view(-1).view(_BITS[out.dtype.itemsize]).numpy()
    row, end_row = start_row, start_row + out.shape[0]
    while row < end_row:
        block, skipped = divmod(row, block_rows)
        num_rows = min(block_rows - skipped, end_row - row)
        first = (row - start_row) * width
        place = _block_place(seed, name, block) + skipped * width
        _cut(pool, place, flat[first : first + num_rows * width])
        row += num_rows
    if name.endswith(".table"):
        out.copy_(out.to(torch.bfloat16).view(torch.int16).bitwise_and_(_LAST_BITS))


def _cut(pool: _Bits, place: int, out: _Bits) -> None:
    """Copy from ``pool`` as from an endless repetition of it."""
    done = 0
    while done < out.size:
        start = (place + done) % pool.size
        count = min(out.size - done, pool.size - start)
        out[done : done + count] = pool[start : start + count]
        done += count


def _block_place(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _POOL_VALUES


@lru_cache(maxsize=2)
def _pool(seed: int, dtype: torch.dtype, kept: torch.dtype) -> _Bits:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(_POOL_VALUES, generator=generator, dtype=torch.float32)
    return (values * DUMMY_STD).to(kept).to(dtype).view(_BITS[dtype.itemsize]).numpy()


def write_dummy_checkpoint(
    config: ModelConfig, directory: Path, seed: int = 0, dtype: str | None = None
) -> Path:
    """Write ``directory``/model.safetensors for ``config`` and return its path.

    ``dtype`` defaults to the configuration's. Memory stays bounded, page cache included. Raises
    InputError where weights are there already or cannot be written, BudgetError on a full disk.
    """
    directory = Path(directory)
    dtype = dtype or config.dtype
    layout, published = _layout(config)
    header = _header(layout, published, dtype)
    values = sum(math.prod(shape) for parts in layout.values() for _, shape in parts)
    _check_room(directory, len(header) + values * DTYPE_BYTES[dtype])
    path = directory / "model.safetensors"
    partial = directory / "model.safetensors.partial"
    try:
        with partial.open("wb", buffering=0) as file:
            _write_all(file, memoryview(header))
            num_experts = 0 if config.experts is None else config.experts.num_experts
            _write_tensors(file, layout, seed, getattr(torch, dtype), num_experts)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"Dummy weights were to be written to {path}.",
            f"The system refuses: {error.strerror or error}.",
            "Give a directory that can be written and has room.",
        ) from error
    return path


_Part = tuple[str, tuple[int, ...]]
_Layout = dict[str, list[_Part]]
_Shapes = dict[str, tuple[int, ...]]


def _layout(config: ModelConfig) -> tuple[_Layout, _Shapes]:
    """Checkpoint tensor -> the logical tensors that are stacked in it, in order; itself where its
    rows take turns. And the shapes of those that have more dims than that."""
    shapes = tensor_shapes(config.complete)
    published: _Shapes = {}
    placed: dict[str, dict[int, _Part]] = {}
    for name in shapes:
        place = locate(FAMILIES[config.family].tensors, config, shapes, name)
        parts = placed.setdefault(place.tensor, {})
        if place.published and not place.turned:
            published[place.tensor] = place.published
        if place.turned or place.every > 1:
            parts[0] = (place.tensor, place.published if place.turned else place.shape)
        else:
            parts.setdefault(place.first_row, (name, shapes[name]))
    layout = {tensor: [parts[row] for row in sorted(parts)] for tensor, parts in placed.items()}
    return layout, published


def _header(layout: _Layout, published: _Shapes, dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, parts in layout.items():
        flat = [sum(part[0] for _, part in parts), *parts[0][1][1:]]
        shape = [*published.get(tensor, flat)]
        assert math.prod(shape) == math.prod(flat), (tensor, shape, flat)
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[tensor] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text = text.ljust(align_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text


def _check_room(directory: Path, num_bytes: int) -> None:
    asked = f"Dummy weights of {format_bytes(num_bytes)} were to be written to {directory}."
    if not directory.is_dir():
        raise InputError(asked, "There is no such directory.", "Create it, with a config.json.")
    if any(directory.glob("*.safetensors")):
        raise InputError(
            asked, "It holds weights already.", "Give a directory with a config.json only."
        )
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise BudgetError(asked, f"{format_bytes(free)} is free.", "Free some disk space.")


def _write_tensors(
    file: BinaryIO, layout: _Layout, seed: int, dtype: torch.dtype, num_experts: int
) -> None:
    unflushed = 0
    for name, rows in _batches(layout, seed, dtype):
        if name.endswith(".table"):
            # Whoever else reads the file takes no remainders.
            rows.remainder_(num_experts)
        data = memoryview(rows.view(-1).view(torch.uint8).numpy().data)
        _write_all(file, data)
        unflushed += len(data)
        if unflushed >= _FLUSH_BYTES:
            _flush(file)
            unflushed = 0
    _flush(file)


def _batches(layout: _Layout, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and numbers of all rows in file order, some at a time; one memory serves all numbers,
    so use each at once."""
    widest = max(math.prod(shape[1:]) for parts in layout.values() for _, shape in parts)
    buffer = torch.empty(max(_WRITE_BYTES // dtype.itemsize, widest), dtype=dtype)
    for parts in layout.values():
        for name, shape in parts:
            width = math.prod(shape[1:])
            most = buffer.numel() // width
            for start in range(0, shape[0], most):
                num_rows = min(most, shape[0] - start)
                rows = buffer[: num_rows * width].view(num_rows, *shape[1:])
                dummy_rows(name, start, seed, rows)
                yield name, rows


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _flush(file: BinaryIO) -> None:
    # Written pages leave the page cache: they would count as memory of whoever writes.
    os.fdatasync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
