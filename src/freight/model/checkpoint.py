"""Where each tensor of a checkpoint lies: file, byte range, type and shape.

Reads the headers of safetensors files by hand and never a weight; knows no tensors in memory and
no tiers. The format: 8 bytes little-endian length, a JSON object of that length that gives each
tensor's type, shape and byte range, then the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from freight.errors import ModelError
from freight.model.decoder import tensor_shapes
from freight.model.families import FAMILIES, Either, Fused, Place
from freight.model.switches import DTYPE_BYTES, ModelConfig

__all__ = [
    "SAFETENSORS_NAMES",
    "TensorSource",
    "imagined_sources",
    "locate",
    "open_checkpoint",
    "resolve",
]

SAFETENSORS_NAMES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

_DTYPES: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_POINTER: Final = b"version https://git-lfs"
_FETCH_AGAIN: Final = "Fetch these files again from where the model was published."
_MOST_LISTED: Final = 24
# "layers.3.mlp.up" and "layers.3.experts.7.up": layer, expert, what is left.
_NUMBERED: Final = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Bytes ``offset`` to ``offset + num_bytes`` of the file at ``path``, row-major.

    ``dtype`` is a name such as "bfloat16"; types that Freight does not run keep their safetensors
    name ("F8_E4M3").
    """

    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def rows(self, start: int, count: int) -> TensorSource:
        """The part that holds ``count`` rows (entries of the first dim) from ``start`` on."""
        num_rows = self.shape[0]
        assert 0 <= start and 0 <= count and start + count <= num_rows, (start, count, self.shape)
        row_bytes = self.num_bytes // num_rows if num_rows else 0
        return replace(
            self,
            offset=self.offset + start * row_bytes,
            num_bytes=count * row_bytes,
            shape=(count, *self.shape[1:]),
        )


def open_checkpoint(model_dir: Path) -> dict[str, TensorSource]:
    """All tensors of the checkpoint in ``model_dir`` by the names it gives them.

    Raises ModelError where there is none, or with all that is wrong with its files.
    """
    model_dir = Path(model_dir)
    problems: list[str] = []
    if (model_dir / _SINGLE).is_file():
        tensors = _read_header(model_dir / _SINGLE, problems)
    elif (model_dir / _INDEX).is_file():
        tensors = _read_shards(model_dir, problems)
    else:
        raise _absence(model_dir)
    _raise_any(f"The checkpoint in {model_dir} was opened.", problems, _FETCH_AGAIN)
    return tensors


def resolve(config: ModelConfig, model_dir: Path) -> dict[str, TensorSource]:
    """Logical name -> source, for every tensor that ``config`` asks for, fused ones cut apart.

    Extra tensors are ignored. Raises ModelError with every tensor that is absent, of another
    shape, or of a type that is not supported.
    """
    found = open_checkpoint(model_dir)
    shapes = tensor_shapes(config)
    sources: dict[str, TensorSource] = {}
    problems: dict[str, None] = {}
    for name in shapes:
        tensor, first_row, whole = locate(config, shapes, name)
        # Some checkpoints hold the model inside the head's, without its prefix.
        source = found.get(tensor) or found.get(tensor.partition(".")[2])
        problem = _mismatch(tensor, source, whole)
        if problem or source is None:
            problems[problem] = None
        else:
            sources[name] = source.rows(first_row, shapes[name][0])
    _raise_any(
        f"The checkpoint in {model_dir} was matched with its config.json.",
        list(problems),
        "Use the config.json that belongs to these weights, in bfloat16, float16 or float32.",
    )
    return sources


def imagined_sources(config: ModelConfig, dtype: str) -> dict[str, TensorSource]:
    """Where dummy weights would lie if they were in one file."""
    sources = {}
    offset = 0
    for name, shape in tensor_shapes(config).items():
        num_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        sources[name] = TensorSource(
            path=Path("dummy"), offset=offset, num_bytes=num_bytes, dtype=dtype, shape=shape
        )
        offset += num_bytes
    if config.tied_embeddings:
        sources["head.weight"] = sources["embedding"]
    return sources


def locate(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], name: str
) -> tuple[str, int, tuple[int, ...]]:
    """The checkpoint tensor that holds ``name``, the first of its rows there, and its shape."""
    if name == "head.weight" and config.tied_embeddings:
        name = "embedding"
    matched = _NUMBERED.match(name)
    layer, expert, rest = matched.groups() if matched else ("", "", "")
    prefix = f"layers.{layer}." if matched else ""
    key = name
    if matched:
        key = f"layers.{{i}}.{rest}" if expert is None else f"layers.{{i}}.experts.{{e}}.{rest}"
    place = _choose(FAMILIES[config.family].tensors[key], config)
    if not isinstance(place, Fused):
        return place.format(i=layer, e=expert), 0, shapes[name]
    rows = [shapes[prefix + part][0] for part in place.of]
    first_row = sum(rows[: place.of.index(name.removeprefix(prefix))])
    return place.tensor.format(i=layer), first_row, (sum(rows), *shapes[name][1:])


def _choose(place: Place, config: ModelConfig) -> str | Fused:
    while isinstance(place, Either):
        place = place.then if getattr(config, place.switch) else place.otherwise
    return place


def _mismatch(tensor: str, source: TensorSource | None, expected: tuple[int, ...]) -> str:
    if source is None:
        return f"{tensor} is missing"
    if source.shape != expected:
        return f"{tensor} has shape {list(source.shape)}, expected {list(expected)}"
    if source.dtype not in DTYPE_BYTES:
        return f"{tensor} is of type {source.dtype}, which is not supported"
    return ""


def _raise_any(asked: str, problems: list[str], advice: str) -> None:
    if not problems:
        return
    listed = "; ".join(problems[:_MOST_LISTED])
    more = len(problems) - _MOST_LISTED
    raise ModelError(asked, f"{listed}{f'; and {more} more' if more > 0 else ''}.", advice)


def _absence(model_dir: Path) -> ModelError:
    asked = f"The checkpoint in {model_dir} was opened."
    if not model_dir.is_dir():
        return ModelError(asked, "There is no such directory.", "Check the path of the model.")
    if any(model_dir.glob("*.bin")):
        return ModelError(
            asked,
            "It holds weights as pickled *.bin files only, which Freight does not load: they can "
            "run code.",
            "Fetch the safetensors version, or save the model as safetensors once.",
        )
    return ModelError(
        asked,
        f"It holds neither {_SINGLE} nor {_INDEX}.",
        "Fetch the weights, or ask for dummy weights.",
    )


def _read_shards(model_dir: Path, problems: list[str]) -> dict[str, TensorSource]:
    index = model_dir / _INDEX
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(shard) for shard in placed.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{_INDEX} is damaged ({type(error).__name__}: {error})")
        return {}
    headers: dict[str, dict[str, TensorSource]] = {}
    for shard in shards:
        if Path(shard).name != shard:
            problems.append(f"{_INDEX} names {shard!r}, which is outside the model's directory")
        elif not (model_dir / shard).is_file():
            problems.append(f"{_INDEX} names {shard}, which is not there")
        else:
            headers[shard] = _read_header(model_dir / shard, problems)
    if problems:
        return {}
    lost = [f"{shard} lacks {name}" for name, shard in placed.items() if name not in headers[shard]]
    problems += [f"{item}, which {_INDEX} places there" for item in lost]
    return {} if lost else {name: headers[shard][name] for name, shard in placed.items()}


def _read_header(path: Path, problems: list[str]) -> dict[str, TensorSource]:
    """The tensors of one safetensors file; what is wrong with it goes to ``problems``."""
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
