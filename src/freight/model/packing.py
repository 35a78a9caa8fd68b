"""What config.json says of a checkpoint whose matrices are quantised already.

AWQ, GPTQ and compressed-tensors are read where they keep whole numbers of 4 or 8 bits for the
weights, bitsandbytes where it keeps 4, and floats of 8 or 4 bits however they are told of. Tokens,
and keys and values, with which some of these checkpoints were run in fewer bits, too, stay plain.
Everything else is refused by its name. Knows no files and no bytes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from freight.errors import ModelError
from freight.model.number_format import EIGHT_COLUMNS

__all__ = ["Packing", "read_packing"]

_READABLE: Final = (
    "Freight reads AWQ (gemm), GPTQ (4 and 8 bits, without act-order), compressed-tensors "
    "(pack-quantized, weights of 4 and 8 bits, and int-quantized), bitsandbytes (4 bits, nf4 and "
    "fp4), MXFP4, NVFP4, FP8 (e4m3, with scales of blocks of 128, of rows or of matrices) and GGUF."
)
_FP8_BITS: Final = 8
_FOUR_BITS: Final = 4
_BLOCK: Final = 64
"""Of bitsandbytes, unless its files say otherwise."""
_FP8_BLOCKS: Final = ([EIGHT_COLUMNS, EIGHT_COLUMNS], (EIGHT_COLUMNS, EIGHT_COLUMNS))
_ADVICE: Final = (
    "Fetch the model in one of these, or as it was before: --weight-bits 4 makes it small here."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """``scheme``: "awq", "gptq", "compressed-tensors", "int-quantized", "mxfp4", "nvfp4",
    "bitsandbytes" or "fp8". ``group_size`` None: a row is one group, or more are. Of codes for
    numbers of a table ``levels`` is its name.

    ``zero_shift`` is what a stored zero point lacks. ``symmetric``: there are no zero points.
    ``skipped``: patterns of the modules that stay plain. Experts may have fours of bits, with
    exponents of 32 each, whatever the others have.
    """

    scheme: str
    bits: int
    group_size: int | None
    symmetric: bool = False
    zero_shift: int = 0
    skipped: tuple[str, ...] = ()
    experts_in_fours: bool = False
    levels: str | None = None

    def skips(self, module: str) -> bool:
        return any(re.search(pattern, module) for pattern in self.skipped)


_MICRO: Final = Packing(scheme="mxfp4", bits=4, group_size=32)
_NVFP4: Final = Packing(scheme="nvfp4", bits=4, group_size=16, levels="e2m1")


def read_packing(raw: Mapping[str, Any], place: str) -> Packing | None:
    """How the matrices are packed, by the ``quantization_config`` of a config.json; None where they
    are not. Raises ModelError that names the way where it is not one that is read."""
    given = raw.get("quantization_config", raw.get("compression_config"))
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise _refusal(place, f"quantization_config {given!r}")
    method = str(given.get("quant_method"))
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
        "mxfp4": _mxfp4,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8_rows,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "bitsandbytes": _bitsandbytes,
    }
    if method not in readers:
        raise _refusal(place, method if "quant_method" in given else "an unnamed way")
    try:
        found = readers[method](given, place)
        found.skips("")  # whatever is no pattern shows
        return found
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise _refusal(place, f"{method}, in a form that is not known ({error!r})") from error


def _awq(given: Mapping[str, Any], place: str) -> Packing:
    version = str(given.get("version", given.get("format", "gemm"))).lower()
    if version != "gemm" or given.get("backend") == "llm-awq":
        raise _refusal(place, f"awq ({'llm-awq' if version == 'gemm' else version})")
    skipped = given.get("modules_to_not_convert") or ()
    return Packing(
        scheme="awq",
        bits=_bits(given["bits"] if "bits" in given else given["w_bit"], (4,), "awq", place),
        group_size=_group_size(given.get("group_size", given.get("q_group_size"))),
        skipped=tuple(re.escape(str(name)) for name in skipped),
    )


def _gptq(given: Mapping[str, Any], place: str) -> Packing:
    stored = str(given.get("checkpoint_format") or given.get("format") or "gptq").lower()
    if given.get("is_marlin_format"):
        stored = "marlin"
    if stored not in ("gptq", "gptq_v2"):
        raise _refusal(place, f"gptq ({stored})")
    own = dict(given.get("dynamic") or {})
    if any(not name.startswith("-:") for name in own):
        raise _refusal(place, "gptq (dynamic: other bits or groups for some modules)")
    return Packing(
        scheme="gptq",
        bits=_bits(given["bits"], (4, 8), "gptq", place),
        group_size=_group_size(given.get("group_size")),
        # The first version of the format stores zero points less one.
        zero_shift=1 if stored == "gptq" else 0,
        skipped=tuple(name.removeprefix("-:") for name in own),
    )


def _compressed_tensors(given: Mapping[str, Any], place: str) -> Packing:
    if given.get("transform_config"):
        raise _refusal(place, "compressed-tensors (transform_config)")
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refusal(place, f"compressed-tensors ({sparsity})")
    groups = list(given["config_groups"].values())
    skipped = tuple(_pattern(str(name)) for name in given.get("ignore") or ())
    if groups and all(map(_has_fours, groups)):
        return _compressed_fours(groups, given.get("format"), skipped, place)
    if any(map(_has_fours, groups)):
        raise _refusal(place, "compressed-tensors (floats of 4 bits for some modules only)")
    if groups and all(map(_has_eights, groups)):
        return _compressed_eights(groups, given.get("format"), skipped, place)
    if given.get("kv_cache_scheme"):
        raise _refusal(place, "compressed-tensors (kv_cache_scheme)")
    found = {_scheme_of(group, given.get("format"), place) for group in groups}
    if len(found) != 1:
        raise _refusal(place, f"compressed-tensors ({len(found)} different schemes)")
    scheme, bits, group_size, symmetric = found.pop()
    return Packing(
        scheme=scheme,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        skipped=skipped,
    )


def _has_eights(group: Mapping[str, Any]) -> bool:
    weights = group["weights"] or {}
    return weights.get("type") == "float" and weights.get("num_bits") == _FP8_BITS


def _has_fours(group: Mapping[str, Any]) -> bool:
    weights = group["weights"] or {}
    return weights.get("type") == "float" and weights.get("num_bits") == _FOUR_BITS


def _compressed_fours(
    groups: Sequence[Mapping[str, Any]],
    stored: str | None,
    skipped: tuple[str, ...],
    place: str,
) -> Packing:
    """Floats of 4 bits, with exponents of 32 each, or with scales of 16."""
    found: set[tuple[Any, Any]] = set()
    for group in groups:
        own, weights = group.get("format") or stored, group["weights"]
        if not weights.get("symmetric", True):
            raise _refusal(place, f"compressed-tensors ({own}, with zero points)")
        found.add((own, weights.get("group_size")))
    kinds: dict[Any, Packing] = {
        ("mxfp4-pack-quantized", 32): _MICRO,
        ("nvfp4-pack-quantized", 16): _NVFP4,
    }
    if len(found) == 1 and (kind := kinds.get(found.pop())) is not None:
        return replace(kind, skipped=skipped)
    ways = ", ".join(sorted({str(group.get("format") or stored) for group in groups}))
    raise _refusal(place, f"compressed-tensors ({ways}, of floats of 4 bits)")


def _compressed_eights(
    groups: Sequence[Mapping[str, Any]],
    stored: str | None,
    skipped: tuple[str, ...],
    place: str,
) -> Packing:
    """Floats of 8 bits; scales show by their shapes whether they are of rows or of matrices."""
    sizes: set[int | None] = set()
    for group in groups:
        own = group.get("format") or stored
        if own not in ("float-quantized", "naive-quantized"):
            raise _refusal(place, f"compressed-tensors ({own})")
        weights = group["weights"]
        strategy = weights.get("strategy")
        if strategy == "block" and weights.get("block_structure") in _FP8_BLOCKS:
            sizes.add(EIGHT_COLUMNS)
        elif strategy in ("tensor", "channel"):
            sizes.add(None)
        else:
            raise _refusal(place, f"compressed-tensors (one scale for each {strategy})")
    if len(sizes) != 1:
        raise _refusal(place, "compressed-tensors (blocks for some modules only)")
    return Packing(scheme="fp8", bits=_FP8_BITS, group_size=sizes.pop(), skipped=skipped)


def _mxfp4(given: Mapping[str, Any], place: str) -> Packing:
    skipped = given.get("modules_to_not_convert") or ()
    patterns = (re.escape(str(name)).replace(r"\*", r"[^.]*") for name in skipped)
    return replace(_MICRO, skipped=tuple(patterns))


def _fp8(given: Mapping[str, Any], place: str) -> Packing:
    if given.get("fmt", "e4m3") != "e4m3":
        raise _refusal(place, f"fp8 ({given['fmt']})")
    blocks = given.get("weight_block_size")
    if blocks is None:
        return _fp8_rows(given, place)
    if blocks not in _FP8_BLOCKS:
        raise _refusal(place, f"fp8 (blocks of {blocks})")
    in_fours = given.get("expert_dtype") == "fp4"
    rows = _fp8_rows(given, place)
    return replace(rows, group_size=EIGHT_COLUMNS, experts_in_fours=in_fours)


def _fp8_rows(given: Mapping[str, Any], place: str) -> Packing:
    """With scales of rows or of whole matrices."""
    skipped = given.get("modules_to_not_convert") or given.get("ignored_layers") or ()
    patterns = tuple(re.escape(str(name)) for name in skipped)
    return Packing(scheme="fp8", bits=_FP8_BITS, group_size=None, skipped=patterns)


def _modelopt(given: Mapping[str, Any], place: str) -> Packing:
    inner = given.get("quantization")
    given = {**given, **inner} if isinstance(inner, Mapping) else given
    algorithm = str(given.get("quant_algo")).upper()
    is_nvfp4 = algorithm == "NVFP4" and given.get("group_size") in (None, _NVFP4.group_size)
    if not is_nvfp4 and algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise _refusal(place, f"modelopt ({given.get('quant_algo')})")
    names = given.get("exclude_modules") or given.get("ignore") or ()
    skipped = tuple(f"^{fnmatch.translate(str(name))}" for name in names)
    if is_nvfp4:
        return replace(_NVFP4, skipped=skipped)
    return Packing(scheme="fp8", bits=_FP8_BITS, group_size=None, skipped=skipped)


def _bitsandbytes(given: Mapping[str, Any], place: str) -> Packing:
    if not (given.get("load_in_4bit") or given.get("_load_in_4bit")):
        raise _refusal(place, "bitsandbytes (8 bits)")
    stored = given.get("bnb_4bit_quant_storage") or "uint8"
    if stored != "uint8":
        raise _refusal(place, f"bitsandbytes (bnb_4bit_quant_storage {stored})")
    levels = str(given.get("bnb_4bit_quant_type", "fp4"))
    if levels not in ("nf4", "fp4"):
        raise _refusal(place, f"bitsandbytes ({levels})")
    skipped = given.get("llm_int8_skip_modules") or ("lm_head",)
    return Packing(
        scheme="bitsandbytes",
        bits=4,
        group_size=_BLOCK,
        levels=levels,
        skipped=tuple(re.escape(str(name)) for name in skipped),
    )


def _scheme_of(
    group: Mapping[str, Any], stored: str | None, place: str
) -> tuple[str, int, int | None, bool]:
    """Scheme, bits, group size and whether there are no zero points."""
    stored = group.get("format") or stored
    if stored not in ("pack-quantized", "int-quantized"):
        raise _refusal(place, f"compressed-tensors ({stored})")
    is_packed = stored == "pack-quantized"
    weights = group["weights"]
    has_others = group.get("input_activations") or group.get("output_activations")
    if is_packed and has_others:
        raise _refusal(place, "compressed-tensors (quantised activations)")
    if weights.get("type", "int") != "int":
        raise _refusal(place, f"compressed-tensors (weights of type {weights['type']})")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel", *(() if is_packed else ("tensor",))):
        raise _refusal(place, f"compressed-tensors (one scale for each {strategy})")
    known = (4, 8) if is_packed else (8,)
    bits = _bits(weights["num_bits"], known, "compressed-tensors", place)
    group_size = _group_size(weights["group_size"]) if strategy == "group" else None
    scheme = "compressed-tensors" if is_packed else "int-quantized"
    return scheme, bits, group_size, bool(weights.get("symmetric", True))


def _pattern(name: str) -> str:
    """An entry of ``ignore``: a module's name, or an expression that its name begins with."""
    if name.startswith("re:"):
        return f"^(?:{name.removeprefix('re:')})"
    return f"^{re.escape(name)}$"


def _bits(value: object, known: tuple[int, ...], method: str, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in known:
        raise _refusal(place, f"{method} ({value} bits)")
    return value


def _group_size(value: object) -> int | None:
    """-1 stands for a whole row. Raises ValueError where it is no size, or a tiny one."""
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value >= 16):
        raise ValueError(f"group_size {value!r}")
    return None if value == -1 else value


def _refusal(place: str, way: str) -> ModelError:
    return ModelError(
        f"{place} describes a checkpoint that is quantised with {way}.", _READABLE, _ADVICE
    )
