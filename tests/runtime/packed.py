"""Tiny checkpoints that are quantised as others do it, packed here by the words of their formats.

Each packer is a loop over single numbers, after the code that writes such files: AutoAWQ's
WQLinear_GEMM.from_linear, GPTQModel's QuantLinear.pack, compressed-tensors' pack_to_int32. What a
matrix means is (code - zero) * scale in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """codes [out, in]; zeros and scales [out, groups]."""

    codes: Array
    zeros: Array
    scales: torch.Tensor
    group_size: int
    bits: int

    @property
    def plain(self) -> torch.Tensor:
        """(code - zero) * scale, in float32."""
        out, columns = self.codes.shape
        codes = self.codes.reshape(out, -1, self.group_size).astype(np.float32)
        scales = self.scales.float().numpy()[..., None]
        found = (codes - self.zeros[..., None].astype(np.float32)) * scales
        return torch.from_numpy(found.reshape(out, columns))


def quantise(
    weight: torch.Tensor,
    *,
    bits: int,
    group_size: int = -1,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    has_one_scale: bool = False,
) -> Quantised:
    """Whole numbers near ``weight``; how near does not matter here."""
    out, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = weight.float().reshape(out, -1, size)
    lowest, highest = groups.amin(-1), groups.amax(-1)
    levels = 2**bits - 1
    if symmetric:
        most = groups.abs().amax(-1)
        most = most.amax().expand_as(most) if has_one_scale else most
        scales = (most * 2 / levels).to(dtype)
        zeros = torch.full(scales.shape, 2.0 ** (bits - 1))
    else:
        scales = ((highest - lowest) / levels).to(dtype)
        zeros = (-lowest / scales.float()).round().clamp(0, levels)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, levels)
    return Quantised(
        codes=codes.reshape(out, columns).numpy().astype(np.uint32),
        zeros=zeros.numpy().astype(np.uint32),
        scales=scales,
        group_size=size,
        bits=bits,
    )


def pack(numbers: Array, bits: int, order: Iterable[int] | None = None) -> torch.Tensor:
    """[n, columns] -> int32 words [n, columns * bits / 32], the first number lowest."""
    each = 32 // bits
    places = list(order or range(each))
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // each)), np.uint32)
    for word in range(words.shape[1]):
        for i, place in enumerate(places):
            if word * each + place < numbers.shape[1]:
                words[:, word] |= numbers[:, word * each + place].astype(np.uint32) << (bits * i)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(own: Quantised) -> Tensors:
    return {
        "qweight": pack(own.codes.T, 4, AWQ_ORDER),
        "qzeros": pack(own.zeros.T, 4, AWQ_ORDER),
        "scales": own.scales.T.contiguous(),
    }


def gptq(own: Quantised, less: int = 1) -> Tensors:
    """``less``: the first version of the format stores zero points less one, taken from whole words
    as GPTQModel's convert_gptq_v2_to_v1_format does."""
    one = less * sum(1 << place for place in range(0, 32, own.bits))
    groups = torch.arange(own.codes.shape[1], dtype=torch.int32) // own.group_size
    return {
        "qweight": pack(own.codes, own.bits).T.contiguous(),
        "qzeros": pack(own.zeros.T, own.bits) - one,
        "scales": own.scales.T.contiguous(),
        "g_idx": groups,
    }


def compressed_tensors(own: Quantised, symmetric: bool = True, packs_zeros: bool = True) -> Tensors:
    tensors = {
        "weight_packed": pack(own.codes, own.bits),
        "weight_scale": own.scales,
        "weight_shape": torch.tensor(own.codes.shape),
    }
    if symmetric:
        return tensors
    zeros = pack(own.zeros.T, own.bits).T.contiguous()
    if not packs_zeros:
        half = 2 ** (own.bits - 1)
        zeros = torch.from_numpy(own.zeros.astype(np.int64) - half).to(torch.int8)
    return {**tensors, "weight_zero_point": zeros}


def in_bytes(own: Quantised, symmetric: bool = True, has_one_scale: bool = False) -> Tensors:
    """As compressed-tensors' int-quantized; ``has_one_scale``: a scale for the whole matrix."""
    half = 2 ** (own.bits - 1)
    codes, zeros = (
        torch.from_numpy(x.astype(np.int64) - half).to(torch.int8) for x in (own.codes, own.zeros)
    )
    scales = own.scales[0, 0].clone() if has_one_scale else own.scales
    tensors = {"weight": codes, "weight_scale": scales}
    return tensors if symmetric else {**tensors, "weight_zero_point": zeros}


def rewrite(
    model: PreTrainedModel,
    directory: Path,
    config: Mapping[str, Any],
    turn: Callable[[torch.Tensor], tuple[Quantised, Tensors]],
    *,
    stays: Callable[[str], bool] = lambda name: False,
) -> PreTrainedModel:
    """Quantise the layers' matrices in ``directory``, where ``model`` was saved, and put what they
    mean into ``model``. ``stays`` names modules that are left as they are."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, module in model.named_modules():
        is_packed = isinstance(module, torch.nn.Linear) and ".layers." in name
        if not is_packed or stays(name):
            continue
        own, parts = turn(tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        with torch.no_grad():
            module.weight.copy_(own.plain)
    save_file(tensors, path)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return model
