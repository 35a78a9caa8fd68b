"""A GGUF file's tensors by the names of the model's families, and what they become.

The types that keep whole numbers in blocks become groups that hold the same values exactly, MXFP4
stays what it is. What the converter of llama.cpp changed is noted, to be put back: rows of queries
and keys are woven for its rotary embedding, some gains have one added, heads that keep a state lie
in another order. Reads no weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from freight.errors import ModelError
from freight.model.families import Place
from freight.model.gguf import GgufFile, GgufTensor, parts_of
from freight.model.gguf_architectures import ARCHITECTURES
from freight.model.layer_kinds import Recurrence
from freight.model.number_format import MICRO_COLUMNS, Grouped, MicroFloats
from freight.model.safetensors_files import INDEX, SINGLE
from freight.model.sources import Beside, Dealt, Packed, TensorSource
from freight.model.switches import DTYPE_BYTES, ModelConfig

__all__ = ["BLOCKS", "Block", "adapt", "find_gguf", "gguf_tensors", "names_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``values`` in ``num_bytes``, which become rows of this format."""

    values: int
    num_bytes: int
    becomes: Grouped | MicroFloats


def _narrow(bits: int) -> Grouped:
    """A block has a scale in float16, and a minimum that float16 holds as well."""
    return Grouped(bits=bits, group_size=32)


def _wide(bits: int, group_size: int) -> Grouped:
    """A group's scale is a product of two numbers of the block."""
    return Grouped(bits=bits, group_size=group_size, wide=True)


BLOCKS: Final[Mapping[str, Block]] = {
    "Q4_0": Block(values=32, num_bytes=18, becomes=_narrow(4)),
    "Q4_1": Block(values=32, num_bytes=20, becomes=_narrow(4)),
    "Q5_0": Block(values=32, num_bytes=22, becomes=_narrow(8)),
    "Q5_1": Block(values=32, num_bytes=24, becomes=_narrow(8)),
    "Q8_0": Block(values=32, num_bytes=34, becomes=_narrow(8)),
    "Q2_K": Block(values=256, num_bytes=84, becomes=_wide(4, 16)),
    "Q3_K": Block(values=256, num_bytes=110, becomes=_wide(4, 16)),
    "Q4_K": Block(values=256, num_bytes=144, becomes=_wide(4, 32)),
    "Q5_K": Block(values=256, num_bytes=176, becomes=_wide(8, 32)),
    "Q6_K": Block(values=256, num_bytes=210, becomes=_wide(8, 16)),
    "IQ4_NL": Block(values=32, num_bytes=18, becomes=_narrow(8)),
    "IQ4_XS": Block(values=256, num_bytes=136, becomes=_wide(8, 32)),
    # Points of codebooks: of two bits they are no whole steps apart that four bits could count.
    "IQ1_S": Block(values=256, num_bytes=50, becomes=_wide(4, 32)),
    "IQ1_M": Block(values=256, num_bytes=56, becomes=_wide(4, 16)),
    "IQ2_XXS": Block(values=256, num_bytes=66, becomes=_wide(8, 32)),
    "IQ2_XS": Block(values=256, num_bytes=74, becomes=_wide(8, 16)),
    "IQ2_S": Block(values=256, num_bytes=82, becomes=_wide(8, 16)),
    "IQ3_XXS": Block(values=256, num_bytes=98, becomes=_wide(8, 32)),
    "IQ3_S": Block(values=256, num_bytes=110, becomes=_wide(4, 32)),
    "MXFP4": Block(values=MICRO_COLUMNS, num_bytes=17, becomes=MicroFloats()),
}

_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def find_gguf(model_dir: Path) -> Path | None:
    """The directory's GGUF file, or the first of one model's, where it has no safetensors. Raises
    ModelError if it has more."""
    if (model_dir / SINGLE).is_file() or (model_dir / INDEX).is_file():
        return None
    files = sorted(model_dir.glob("*.gguf"))
    if len(files) > 1 and set(files) - set(parts_of(files[0])):
        raise ModelError(
            f"The model in {model_dir} was opened.",
            f"It has {len(files)} GGUF files, {files[0].name} and {files[1].name} among them.",
            "Name the one to use.",
        )
    return files[0] if files else None


def names_of(config: ModelConfig, file: GgufFile) -> Mapping[str, Place]:
    """Where the logical tensors lie. Raises ModelError where the file holds another kind of model
    than ``config`` describes, or one that is not known."""
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None or config.family not in architecture.families:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{file.path} was matched with a config.json of the {config.family} family.",
            f"It holds a model of architecture {file.architecture}; files are read of {known}, "
            "with a config.json of the same.",
            "Use the config.json that belongs to it, or the model's safetensors.",
        )
    for key in architecture.refuses:
        if f"{file.architecture}.{key}" in file.metadata:
            raise ModelError(
                f"The file {file.path} was opened.",
                f"It says {key}, and the tensors of such models of architecture "
                f"{file.architecture} lie in another order, which is not known.",
                "Use the model's safetensors.",
            )
    return architecture.tensors


def gguf_tensors(file: GgufFile) -> dict[str, TensorSource]:
    """All tensors by the file's names. Raises ModelError where the file is cut short."""
    tensors = {name: _source(tensor) for name, tensor in file.tensors.items()}
    for path, size in file.sizes.items():
        ends = (own.offset + own.num_bytes for own in tensors.values() if own.path == path)
        end = max(ends, default=0)
        if end > size:
            raise ModelError(
                f"The file {path} was opened.",
                f"It is cut short: its header asks for {end} bytes, it has {size}.",
                "Fetch the file again from where it was published.",
            )
    return tensors


def _source(tensor: GgufTensor) -> TensorSource:
    """A tensor as it lies there, stacked matrices as one; blocks that are not read keep their name
    as a type, and so do those of a vector, which never are."""
    count, block = prod(tensor.shape), BLOCKS.get(tensor.kind)
    shape = tensor.shape
    if len(shape) > 2:
        shape = (prod(shape[:-1]), shape[-1])
    if block is None or len(shape) < 2:
        dtype = _PLAIN.get(tensor.kind, tensor.kind)
        return TensorSource(
            path=tensor.path,
            offset=tensor.offset,
            num_bytes=count * DTYPE_BYTES.get(dtype, 0),
            dtype=dtype,
            shape=shape,
        )
    if tensor.shape[-1] % block.values:
        raise ModelError(
            f"The file {tensor.path} was opened.",
            f"A row of {tensor.shape[-1]} values is no whole number of {tensor.kind} blocks.",
            "Fetch the file again from where it was published.",
        )
    blocks = TensorSource(
        path=tensor.path,
        offset=tensor.offset,
        num_bytes=count // block.values * block.num_bytes,
        dtype=tensor.kind,
        shape=shape,
    )
    packed = Packed(scheme=tensor.kind, parts={"rows": blocks})
    if isinstance(block.becomes, Grouped):
        own = block.becomes
        packed = replace(packed, bits=own.bits, group_size=own.group_size)
    return replace(blocks, dtype=block.becomes.name, packed=packed)


def adapt(
    config: ModelConfig, file: GgufFile, sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """``sources`` by logical names, with notes on what is to be put back."""
    own = ARCHITECTURES[file.architecture]
    dealt = _dealt(config) if own.deals_heads else {}
    beside = _beside(config) if own.joins_heads else {}
    adapted = dict(sources)
    for name, source in sources.items():
        last = name.split(".", 2)[-1] if name.startswith("layers.") else name
        joined, rows = beside.get(last, ("", None))
        if rows is not None and (tensor := file.tensors.get(_in_layer(name, joined))):
            whole = _source(tensor)
            packed = whole.packed or Packed(scheme=whole.dtype, parts={"rows": whole})
            adapted[name] = replace(whole, shape=source.shape, packed=replace(packed, dealt=rows))
            continue
        changes: dict[str, Any] = {}
        if last in own.woven:
            changes["head_rows"] = config.head_dim
        if own.plus_one and last.endswith("norm") and last not in own.plain_norms:
            changes["minus_one"] = True
        if last in own.negated:
            changes["logarithms"] = True
        if last in dealt:
            changes["dealt"] = dealt[last]
            _check_groups(file, name, source, dealt[last])
        if changes:
            packed = source.packed or Packed(scheme=source.dtype, parts={"rows": source})
            adapted[name] = replace(source, packed=replace(packed, **changes))
    return adapted


def _in_layer(name: str, tensor: str) -> str:
    """A tensor of the layer that a logical one is of."""
    return f"blk.{name.split('.')[1]}.{tensor}"


def _check_groups(file: GgufFile, name: str, source: TensorSource, dealt: Dealt) -> None:
    """ModelError where a group has columns of two heads, which are to be exchanged."""
    packed = source.packed
    block = None if packed is None else BLOCKS.get(packed.scheme)
    if not dealt.of_columns or block is None:
        return
    own = block.becomes
    size = own.group_size if isinstance(own, Grouped) else MICRO_COLUMNS
    if dealt.width % size:
        raise ModelError(
            f"The file {file.path} was opened.",
            f"{name} has groups of {size} columns, and heads of {dealt.width}.",
            "Use a file with plain numbers, or the model's safetensors.",
        )


def _dealt(config: ModelConfig) -> dict[str, Dealt]:
    """What has rows or columns of value heads, of which each key head has more than one."""
    own = config.recurrence
    if not isinstance(own, Recurrence) or own.num_heads == own.num_key_heads:
        return {}
    one = Dealt(groups=own.num_key_heads, each=own.num_heads // own.num_key_heads, width=1)
    whole = replace(one, width=own.value_width)
    values = 2 * own.num_key_heads * own.key_width
    of_channels = replace(one, width=own.value_width * own.taps, first=values * own.taps)
    return {
        **{f"recurrence.{name}": one for name in ("a", "b", "decay", "decay_bias")},
        "recurrence.gate": whole,
        "recurrence.mixed": replace(whole, first=values),
        "recurrence.convolution": of_channels,
        "recurrence.out": replace(whole, of_columns=True),
    }


def _beside(config: ModelConfig) -> dict[str, tuple[str, Beside]]:
    """Which tensor of a layer has the rows of each key head together, and where: its query and key,
    and the values and gates that share them; likewise their rates."""
    own = config.recurrence
    if not isinstance(own, Recurrence):
        return {}
    groups, share, keys = own.num_key_heads, own.num_heads // own.num_key_heads, own.key_width
    values = share * own.value_width
    rates = Beside(groups=groups, group_rows=2 * share, parts=((share, 0),))
    mixed = Beside(
        groups=groups,
        group_rows=2 * (keys + values),
        parts=((keys, 0), (keys, keys), (values, 2 * keys)),
    )
    return {
        "recurrence.b": ("ssm_ba.weight", rates),
        "recurrence.a": ("ssm_ba.weight", replace(rates, parts=((share, share),))),
        "recurrence.mixed": ("ssm_in.weight", mixed),
        "recurrence.gate": (
            "ssm_in.weight",
            replace(mixed, parts=((values, 2 * keys + values),)),
        ),
    }
