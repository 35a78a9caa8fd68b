"""The headers of a checkpoint's safetensors files: each tensor's place, type and shape.

Read by hand, and never a weight; knows no model. The format: 8 bytes little-endian length, a JSON
object of that length that gives each tensor's type, shape and byte range, then the data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from freight.model.sources import TensorSource
from freight.model.switches import DTYPE_BYTES

__all__ = [
    "INDEX",
    "INTEGERS",
    "SAFETENSORS_NAMES",
    "SINGLE",
    "read_safetensors",
    "read_safetensors_file",
]

SAFETENSORS_NAMES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

INTEGERS: Final = ("I64", "I32")
"""What tables of numbers are kept as, which are no weights."""
_DTYPES: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_POINTER: Final = b"version https://git-lfs"


def read_safetensors(model_dir: Path, problems: list[str]) -> dict[str, TensorSource] | None:
    """All tensors of the checkpoint in ``model_dir`` by its names, what is wrong in ``problems``;
    None where there is none."""
    if (model_dir / SINGLE).is_file():
        return read_safetensors_file(model_dir / SINGLE, problems)
    if (model_dir / INDEX).is_file():
        return _read_shards(model_dir, problems)
    return None


def _read_shards(model_dir: Path, problems: list[str]) -> dict[str, TensorSource]:
    index = model_dir / INDEX
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(shard) for shard in placed.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{INDEX} is damaged ({type(error).__name__}: {error})")
        return {}
    headers: dict[str, dict[str, TensorSource]] = {}
    for shard in shards:
        if Path(shard).name != shard:
            problems.append(f"{INDEX} names {shard!r}, which is outside the model's directory")
        elif not (model_dir / shard).is_file():
            problems.append(f"{INDEX} names {shard}, which is not there")
        else:
            headers[shard] = read_safetensors_file(model_dir / shard, problems)
    if problems:
        return {}
    lost = [f"{shard} lacks {name}" for name, shard in placed.items() if name not in headers[shard]]
    problems += [f"{item}, which {INDEX} places there" for item in lost]
    return {} if lost else {name: headers[shard][name] for name, shard in placed.items()}


def read_safetensors_file(path: Path, problems: list[str]) -> dict[str, TensorSource]:
    """The tensors of one file; what is wrong with it goes to ``problems``."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
        header_bytes = int.from_bytes(start[:8], "little")
        if start == _POINTER:
            problems.append(f"{path.name} is a git-lfs pointer, not the weights")
        elif size < 8:
            problems.append(f"{path.name} is cut short: it has {size} bytes, not even a header")
        elif header_bytes > size - 8:
            problems.append(
                f"{path.name} is damaged or cut short: it announces {header_bytes} bytes of "
                f"header and has {size} bytes in all"
            )
        else:
            file.seek(8)
            return _parse_header(path, size, file.read(header_bytes), problems)
    return {}


def _parse_header(
    path: Path, size: int, header: bytes, problems: list[str]
) -> dict[str, TensorSource]:
    data_start = 8 + len(header)
    try:
        entries = dict(json.loads(header))
        entries.pop("__metadata__", None)
        tensors = {name: _parse_entry(path, data_start, item) for name, item in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"the header of {path.name} is damaged ({type(error).__name__}: {error})")
        return {}
    expected = max((item.offset + item.num_bytes for item in tensors.values()), default=data_start)
    if expected > size:
        problems.append(
            f"{path.name} is cut short: its header asks for {expected} bytes, it has {size}"
        )
        return {}
    return tensors


def _parse_entry(path: Path, data_start: int, entry: Mapping[str, Any]) -> TensorSource:
    """One tensor of a header. Raises ValueError, KeyError or TypeError where it makes no sense."""
    first, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = _DTYPES.get(entry["dtype"], str(entry["dtype"]))
    num_bytes = end - first
    if first < 0 or num_bytes < 0 or any(size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {list(shape)} at bytes {first} to {end}")
    if dtype in DTYPE_BYTES and num_bytes != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{num_bytes} bytes for a {dtype} tensor of shape {list(shape)}")
    return TensorSource(
        path=path, offset=data_start + first, num_bytes=num_bytes, dtype=dtype, shape=shape
    )
