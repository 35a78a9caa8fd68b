"""Where each tensor that a model asks for lies in its checkpoint: file, byte range, type and shape.

Matches the tensors of safetensors files or of a GGUF file with the names of the model's family.
Never reads a weight; knows no tensors in memory and no tiers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from freight.errors import ModelError
from freight.model.adapter import adapted, directory_of, inner_name, read_adapter
from freight.model.decoder import tensor_shapes
from freight.model.families import FAMILIES, Fused, Place
from freight.model.gguf import read_gguf
from freight.model.gguf_tensors import adapt, find_gguf, gguf_tensors, names_of
from freight.model.number_format import find_compressed, is_widened
from freight.model.packed_tensors import PACKED_DTYPES, find_packed
from freight.model.places import Located, locate, spellings
from freight.model.safetensors_files import INDEX, INTEGERS, SINGLE, read_safetensors
from freight.model.sources import ADAPTED, TensorSource, join_halves
from freight.model.switches import DTYPE_BYTES, ModelConfig

__all__ = ["TensorSource", "dummy_dtype", "imagined_sources", "open_checkpoint", "resolve"]

_FETCH_AGAIN: Final = "Fetch these files again from where the model was published."
_MOST_LISTED: Final = 24
_MOST_OF_ADAPTERS: Final = 4
"""What one of its modules lacks, the others often lack, too."""
_LAYER: Final = re.compile(r"(.*?)\.(\d+)\.(.+)")


def open_checkpoint(model_dir: Path) -> dict[str, TensorSource]:
    """All tensors of the safetensors checkpoint in ``model_dir`` by the names it gives them.

    Raises ModelError where there is none, or with all that is wrong with its files.
    """
    model_dir = Path(model_dir)
    problems: list[str] = []
    tensors = read_safetensors(model_dir, problems)
    if tensors is None:
        raise _absence(model_dir)
    _raise_any(f"The checkpoint in {model_dir} was opened.", problems, _FETCH_AGAIN)
    return tensors


def resolve(config: ModelConfig, model_dir: Path) -> dict[str, TensorSource]:
    """Logical name -> source, for every tensor that ``config`` asks for, fused ones cut apart.

    Quantised ones are ``packed``: they must be converted before they can be used. Extra tensors are
    ignored, unless they are layers like others. Raises ModelError with every tensor that is absent,
    of another shape, or of a type that is not supported.
    """
    path = find_gguf(Path(model_dir))
    if path is None:
        tensors = FAMILIES[config.family].tensors
        found = _with_adapter(open_checkpoint(model_dir), tensors, Path(model_dir))
        sources, problems = _match(config, found, tensors)
        problems += _left_layers(config, found, tensors)
        problems = _of_labels(config, problems)
        _refuse_headless(config, model_dir, tensors, problems)
    else:
        file = read_gguf(path)
        sources, problems = _match(config, gguf_tensors(file), names_of(config, file))
        sources = adapt(config, file, sources)
    _raise_any(
        f"The checkpoint in {model_dir} was matched with its config.json.",
        problems,
        "Use the config.json that belongs to these weights, in bfloat16, float16 or float32, or "
        "quantised in a way that Freight reads.",
    )
    return sources


def _with_adapter(
    found: dict[str, TensorSource], tensors: Mapping[str, Place], model_dir: Path
) -> dict[str, TensorSource]:
    """With what the adapter beside the weights makes of them, where there is one."""
    adapter = read_adapter(model_dir)
    if adapter is None:
        return found
    head, embedding = (tensors.get(name) for name in ("head.weight", "embedding"))
    own, problems = adapted(
        found,
        adapter,
        head=head if isinstance(head, str) else None,
        embedding=embedding if isinstance(embedding, str) else None,
        is_turned=_turned_names(tensors),
    )
    _raise_any(
        f"The adapter in {directory_of(model_dir)} was to be added to the model.",
        problems,
        "Give the model that it was trained on, not quantised (--weight-bits 4 makes it small "
        "here), or merge it with PEFT (merge_and_unload) and save that.",
        _MOST_OF_ADAPTERS,
    )
    return own


def _turned_names(tensors: Mapping[str, Place]) -> Callable[[str], bool]:
    """Which tensors of a family are kept as [columns, rows]."""
    named = {own.tensor for own in tensors.values() if isinstance(own, Fused) and own.turned}
    patterns = [re.escape(inner_name(name)).replace(r"\{i\}", r"\d+") for name in named]

    def is_turned(name: str) -> bool:
        return any(re.fullmatch(pattern, inner_name(name)) for pattern in patterns)

    return is_turned


def _match(
    config: ModelConfig, found: Mapping[str, TensorSource], tensors: Mapping[str, Place]
) -> tuple[dict[str, TensorSource], list[str]]:
    shapes, needed = tensor_shapes(config.complete), tensor_shapes(config)
    sources: dict[str, TensorSource] = {}
    problems: dict[str, None] = {}
    for name in shapes:
        place, count = locate(tensors, config, shapes, name), shapes[name][0]
        while place.otherwise is not None and not _is_there(found, place.tensor):
            place = place.otherwise
        turned = _find_turned(found, place, count) if place.turned else None
        if turned is not None:
            sources[name] = turned
            continue
        source, wrong = _find(config, found, place.tensor, place.shape)
        # What only longer rows need is looked for when there are such.
        problems |= dict.fromkeys(wrong) if name in needed else {}
        if source is not None and place.halves is not None:
            rest, wrong = _find(config, found, *place.halves)
            problems |= dict.fromkeys(wrong)
            if rest is not None:
                sources[name] = join_halves(source, rest, shapes[name])
        elif source is not None:
            sources[name] = source.every_row(place.every, place.first_row, count)
    return sources, list(problems)


def _left_layers(
    config: ModelConfig, found: Mapping[str, TensorSource], tensors: Mapping[str, Place]
) -> list[str]:
    """Layers beyond the last one that ``config`` has, with the tensors of one before it: an answer
    without them would be another model's. Those that guess several tokens have others besides."""
    shapes = tensor_shapes(config.complete)
    last = f"layers.{config.num_layers - 1}."
    named = {
        locate(tensors, config, shapes, name).tensor for name in shapes if name.startswith(last)
    }
    spelt = [own for tensor in named for own in spellings(tensor) if own in found]
    stacks = {match[1] for own in spelt if (match := _LAYER.fullmatch(own))}
    layers: dict[int, set[str]] = {}
    for own in found:
        if (match := _LAYER.fullmatch(own)) and match[1] in stacks:
            layers.setdefault(int(match[2]), set()).add(match[3])
    kinds = [layers[index] for index in layers if index < config.num_layers]
    count = sum(layers[index] in kinds for index in layers if index >= config.num_layers)
    if not count:
        return []
    return [f"it has {config.num_layers + count} layers, expected {config.num_layers}"]


def _of_labels(config: ModelConfig, problems: list[str]) -> list[str]:
    """With what a matrix of labels has rows for."""
    count = 0 if config.readout is None else len(config.readout.labels)
    wrong = "score.weight has shape"
    told = f" for {count} labels by id2label or num_labels (where both are left out, 2)"
    return [own + told * (count > 0 and own.startswith(wrong)) for own in problems]


def _refuse_headless(
    config: ModelConfig, model_dir: Path, tensors: Mapping[str, Place], problems: list[str]
) -> None:
    """What generates by its config.json, and lacks nothing but what it would do so by."""
    if config.readout is not None or config.tied_embeddings:
        return
    head = locate(tensors, config, tensor_shapes(config), "head.weight").tensor
    if problems == [f"{head} is missing"]:
        raise ModelError(
            f"The checkpoint in {model_dir} was to generate: its config.json names no architecture "
            "that does anything else.",
            f"It has no head, {head} is missing, as where a model was saved to embed.",
            "Run it with the task embed, or have config.json name the architecture it was saved "
            'as, like "architectures": ["Qwen3Model"].',
        )


def _is_there(found: Mapping[str, TensorSource], tensor: str) -> bool:
    return any(name in found for name in spellings(tensor))


def _find_turned(
    found: Mapping[str, TensorSource], place: Located, count: int
) -> TensorSource | None:
    """Rows of a turned tensor; None where it is not there as such."""
    source = next((found[name] for name in spellings(place.tensor) if name in found), None)
    if source is None or source.shape != place.published or source.dtype not in DTYPE_BYTES:
        return None
    *_, columns, each = place.published
    flat = _reshaped(source, (prod(place.published) // each, each))
    expert, first = divmod(place.first_row, each)
    return flat.rows(expert * columns, columns).columns_as_rows(place.every, first, count)


def _find(
    config: ModelConfig, found: Mapping[str, TensorSource], tensor: str, shape: tuple[int, ...]
) -> tuple[TensorSource | None, list[str]]:
    names = spellings(tensor)
    source = next((found[name] for name in names if name in found), None)
    is_packed = source is None or source.dtype in PACKED_DTYPES
    if is_packed and config.packing is not None and len(shape) == 2:
        for name in names:
            packed, problems = find_packed(found, name, shape, config.packing)
            if packed is not None or problems:
                return packed, problems
    is_whole = source is not None and (source.packed is None or source.packed.scheme == ADAPTED)
    if source is not None and is_whole and _is_stacked(source.shape, shape):
        source = _reshaped(source, shape)
    problem = _mismatch(tensor, source, shape)
    return (None, [problem]) if problem else (source, [])


def _reshaped(source: TensorSource, shape: tuple[int, ...]) -> TensorSource:
    """The same numbers in other dims, also where they are converted."""
    own = source.packed
    if own is None:
        return replace(source, shape=shape)
    parts = {**own.parts, "rows": replace(own.parts["rows"], shape=shape)}
    return replace(source, shape=shape, packed=replace(own, parts=parts))


def _is_stacked(own: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a shape is the expected one with the rows of several in a dim of their own: those of
    experts, or gains of heads; or one row without its dim."""
    columns = len(expected) - 1
    return (1, *own) == expected or (
        len(own) > len(expected)
        and prod(own) == prod(expected)
        and own[len(own) - columns :] == expected[1:]
    )


def imagined_sources(config: ModelConfig, dtype: str) -> dict[str, TensorSource]:
    """Where dummy weights would lie if they were in one file, for a computation in ``dtype``."""
    sources = {}
    offset = 0
    dtype = dummy_dtype(config, dtype)
    for name, shape in tensor_shapes(config.complete).items():
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


def dummy_dtype(config: ModelConfig, dtype: str) -> str:
    """What dummy weights are kept as: real ones would be as the configuration says, and are kept so
    where a computation in ``dtype`` widens them."""
    return config.dtype if is_widened(config.dtype, dtype) else dtype


def _mismatch(tensor: str, source: TensorSource | None, expected: tuple[int, ...]) -> str:
    if source is None:
        return f"{tensor} is missing"
    if source.shape != expected:
        return f"{tensor} has shape {list(source.shape)}, expected {list(expected)}"
    is_table = source.dtype in INTEGERS and len(expected) == 1
    if source.dtype not in DTYPE_BYTES and find_compressed(source.dtype) is None and not is_table:
        return f"{tensor} is of type {source.dtype}, which is not supported"
    return ""


def _raise_any(asked: str, problems: list[str], advice: str, most: int = _MOST_LISTED) -> None:
    if not problems:
        return
    listed = "; ".join(problems[:most])
    more = len(problems) - most
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
        f"It holds neither {SINGLE} nor {INDEX}, nor a .gguf file.",
        "Fetch the weights, or ask for dummy weights.",
    )
