"""A GGUF file's tensors by the names of the model's families, and what they become.

The types that keep whole numbers in blocks become groups that hold the same values exactly. What
the converter of llama.cpp changed is noted, to be put back: rows of queries and keys are woven for
its rotary embedding, Gemma's gains have one added. Reads no weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

from freight.errors import ModelError
from freight.model.families import Fused, Place, Stacked
from freight.model.gguf import GgufFile, GgufTensor
from freight.model.number_format import Grouped
from freight.model.safetensors_files import INDEX, SINGLE
from freight.model.sources import Packed, TensorSource
from freight.model.switches import DTYPE_BYTES, ModelConfig

__all__ = ["BLOCKS", "Block", "adapt", "find_gguf", "gguf_tensors", "names_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``values`` in ``num_bytes``, which become groups of this format."""

    values: int
    num_bytes: int
    becomes: Grouped


def _narrow(bits: int) -> Grouped:
    """A block has a scale in float16, and a minimum that float16 holds as well."""
    return Grouped(bits=bits, group_size=32)


BLOCKS: Final[Mapping[str, Block]] = {
    "Q4_0": Block(values=32, num_bytes=18, becomes=_narrow(4)),
    "Q4_1": Block(values=32, num_bytes=20, becomes=_narrow(4)),
    "Q5_0": Block(values=32, num_bytes=22, becomes=_narrow(8)),
    "Q5_1": Block(values=32, num_bytes=24, becomes=_narrow(8)),
    "Q8_0": Block(values=32, num_bytes=34, becomes=_narrow(8)),
    "Q4_K": Block(values=256, num_bytes=144, becomes=Grouped(bits=4, group_size=32, wide=True)),
    "Q5_K": Block(values=256, num_bytes=176, becomes=Grouped(bits=8, group_size=32, wide=True)),
    "Q6_K": Block(values=256, num_bytes=210, becomes=Grouped(bits=8, group_size=16, wide=True)),
}

_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_TENSORS: Final[Mapping[str, Place]] = {
    "embedding": "token_embd.weight",
    "layers.{i}.attention.norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.attention.q": "blk.{i}.attn_q.weight",
    "layers.{i}.attention.k": "blk.{i}.attn_k.weight",
    "layers.{i}.attention.v": "blk.{i}.attn_v.weight",
    "layers.{i}.attention.q_bias": "blk.{i}.attn_q.bias",
    "layers.{i}.attention.k_bias": "blk.{i}.attn_k.bias",
    "layers.{i}.attention.v_bias": "blk.{i}.attn_v.bias",
    "layers.{i}.attention.q_norm": "blk.{i}.attn_q_norm.weight",
    "layers.{i}.attention.k_norm": "blk.{i}.attn_k_norm.weight",
    "layers.{i}.attention.out": "blk.{i}.attn_output.weight",
    "layers.{i}.attention.out_bias": "blk.{i}.attn_output.bias",
    "layers.{i}.mlp.norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.mlp.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.mlp.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.mlp.down": "blk.{i}.ffn_down.weight",
    "layers.{i}.mlp.gate_bias": "blk.{i}.ffn_gate.bias",
    "layers.{i}.mlp.up_bias": "blk.{i}.ffn_up.bias",
    "layers.{i}.mlp.down_bias": "blk.{i}.ffn_down.bias",
    "layers.{i}.router.weight": "blk.{i}.ffn_gate_inp.weight",
    "layers.{i}.experts.{e}.gate": Stacked(tensor="blk.{i}.ffn_gate_exps.weight"),
    "layers.{i}.experts.{e}.up": Stacked(tensor="blk.{i}.ffn_up_exps.weight"),
    "layers.{i}.experts.{e}.down": Stacked(tensor="blk.{i}.ffn_down_exps.weight"),
    "head.norm": "output_norm.weight",
    "head.weight": "output.weight",
}
_QKV: Final = Fused(
    tensor="blk.{i}.attn_qkv.weight", of=("attention.q", "attention.k", "attention.v")
)
_GATE_UP: Final = Fused(tensor="blk.{i}.ffn_up.weight", of=("mlp.gate", "mlp.up"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """One of GGUF's: the families that it serves, its names, and what its converter changes."""

    families: tuple[str, ...]
    tensors: Mapping[str, Place]
    woven: tuple[str, ...] = ()
    plus_one: bool = False


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture(
        families=("llama", "mistral", "mixtral"),
        tensors=_TENSORS,
        woven=("attention.q", "attention.k", "attention.q_bias", "attention.k_bias"),
    ),
    "qwen2": _Architecture(families=("qwen2",), tensors=_TENSORS),
    "qwen3": _Architecture(families=("qwen3",), tensors=_TENSORS),
    "qwen3moe": _Architecture(families=("qwen3_moe",), tensors=_TENSORS),
    "phi3": _Architecture(
        families=("phi3",),
        tensors={
            **_TENSORS,
            "layers.{i}.attention.q": _QKV,
            "layers.{i}.attention.k": _QKV,
            "layers.{i}.attention.v": _QKV,
            "layers.{i}.mlp.gate": _GATE_UP,
            "layers.{i}.mlp.up": _GATE_UP,
        },
    ),
    "gemma2": _Architecture(
        families=("gemma2",),
        tensors={
            **_TENSORS,
            "layers.{i}.attention.post_norm": "blk.{i}.post_attention_norm.weight",
            "layers.{i}.mlp.post_norm": "blk.{i}.post_ffw_norm.weight",
        },
        plus_one=True,
    ),
}


def find_gguf(model_dir: Path) -> Path | None:
    """The directory's GGUF file, where it has no safetensors. Raises ModelError if it has more."""
    if (model_dir / SINGLE).is_file() or (model_dir / INDEX).is_file():
        return None
    files = sorted(model_dir.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(
            f"The model in {model_dir} was opened.",
            f"It has {len(files)} GGUF files, {files[0].name} and {files[1].name} among them.",
            "Keep the one to use; put the parts of one model together with llama-gguf-split "
            "--merge.",
        )
    return files[0] if files else None


def names_of(config: ModelConfig, file: GgufFile) -> Mapping[str, Place]:
    """Where the logical tensors lie. Raises ModelError where the file holds another kind of model
    than ``config`` describes, or one that is not known."""
    architecture = _ARCHITECTURES.get(file.architecture)
    if architecture is None or config.family not in architecture.families:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(
            f"{file.path} was matched with a config.json of the {config.family} family.",
            f"It holds a model of architecture {file.architecture}; files are read of {known}, "
            "with a config.json of the same.",
            "Use the config.json that belongs to it, or the model's safetensors.",
        )
    return architecture.tensors


def gguf_tensors(file: GgufFile) -> dict[str, TensorSource]:
    """All tensors by the file's names. Raises ModelError where the file is cut short."""
    tensors = {name: _source(file, tensor) for name, tensor in file.tensors.items()}
    end = max((own.offset + own.num_bytes for own in tensors.values()), default=0)
    if end > file.num_bytes:
        raise ModelError(
            f"The file {file.path} was opened.",
            f"It is cut short: its header asks for {end} bytes, it has {file.num_bytes}.",
            "Fetch the file again from where it was published.",
        )
    return tensors


def _source(file: GgufFile, tensor: GgufTensor) -> TensorSource:
    """A tensor as it lies there, stacked matrices as one; blocks that are not read keep their name
    as a type, and so do those of a vector, which never are."""
    count, block = prod(tensor.shape), BLOCKS.get(tensor.kind)
    shape = tensor.shape
    if len(shape) > 2:
        shape = (prod(shape[:-1]), shape[-1])
    if block is None or len(shape) < 2:
        dtype = _PLAIN.get(tensor.kind, tensor.kind)
        return TensorSource(
            path=file.path,
            offset=tensor.offset,
            num_bytes=count * DTYPE_BYTES.get(dtype, 0),
            dtype=dtype,
            shape=shape,
        )
    if tensor.shape[-1] % block.values:
        raise ModelError(
            f"The file {file.path} was opened.",
            f"A row of {tensor.shape[-1]} values is no whole number of {tensor.kind} blocks.",
            "Fetch the file again from where it was published.",
        )
    blocks = TensorSource(
        path=file.path,
        offset=tensor.offset,
        num_bytes=count // block.values * block.num_bytes,
        dtype=tensor.kind,
        shape=shape,
    )
    packed = Packed(
        scheme=tensor.kind,
        parts={"rows": blocks},
        bits=block.becomes.bits,
        group_size=block.becomes.group_size,
    )
    return replace(blocks, dtype=block.becomes.name, packed=packed)


def adapt(
    config: ModelConfig, file: GgufFile, sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """``sources`` by logical names, with notes on what is to be put back."""
    own = _ARCHITECTURES[file.architecture]
    adapted = dict(sources)
    for name, source in sources.items():
        last = name.split(".", 2)[-1] if name.startswith("layers.") else name
        if last in own.woven:
            adapted[name] = _changed(source, head_rows=config.head_dim)
        elif own.plus_one and last.endswith("norm"):
            adapted[name] = _changed(source, minus_one=True)
    return adapted


def _changed(source: TensorSource, *, head_rows: int = 0, minus_one: bool = False) -> TensorSource:
    packed = source.packed or Packed(scheme=source.dtype, parts={"rows": source})
    return replace(source, packed=replace(packed, head_rows=head_rows, minus_one=minus_one))
