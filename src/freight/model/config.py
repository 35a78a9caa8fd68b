"""config.json, old spellings and new, through its family's table into switches.

Read raw, and everything that is wrong with it is told at once. Knows no devices, and of weights no
more than whether there is a head among them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from freight.errors import ModelError, reason_of
from freight.model.beside_config import as_files_say, quantised_beside
from freight.model.contradictions import contradictions
from freight.model.families import (
    ACTIVATIONS,
    FAMILIES,
    MOST_EXPERTS,
    MOST_LAYERS,
    PARTS,
    Family,
    Key,
    reading_part,
)
from freight.model.heads import OtherHeads, Sharing
from freight.model.kept_config import read_index, read_kept
from freight.model.layer_kinds import Experts, Latent, Recurrence, Streams
from freight.model.packing import read_packing
from freight.model.published import as_published
from freight.model.query_growth import read_growth
from freight.model.raw_config import RawConfig
from freight.model.readout import decoders_of, stated_readouts
from freight.model.rope_config import RopeConfig, read_ropes
from freight.model.slope_steps import SLOPE_COLUMNS
from freight.model.switches import (
    DTYPE_BYTES,
    ModelConfig,
    refusal,
)

__all__ = ["DTYPE_BYTES", "Experts", "ModelConfig", "RopeConfig", "parse_config", "read_config"]

_COUNTS: Final = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
    "embedding_size",
    "position_offset",
    "qkv_blocks",
    "value_width",
    "layer_inputs",
)
_FLAGS: Final = (
    "norm_bias",
    "qk_norm_bias",
    "final_norm",
    "parallel",
    "shared_norm",
    "gated_mlp",
    "fused_qkv",
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "head_bias",
    "tied_embeddings",
    "learned_positions",
    "embedding_norm",
    "attention_sinks",
    "window_sinks",
    "value_norm",
    "layer_scales",
    "limits_first",
)
_NUMBERS: Final = (
    "norm_eps",
    "embedding_scale",
    "residual_scale",
    "logits_scale",
    "gate_limit",
    "gate_slope",
    "qkv_limit",
    "slope_span",
    "attention_scalar",
    "attention_softcap",
    "logits_softcap",
)
_TEXTS: Final = ("norm", "norm_place", "qk_norm", "attention_gates", "gate_function")
_LAYER_KINDS: Final = ("full_attention", "sliding_attention")
_RECURRENT_KIND: Final = "linear_attention"
_Windows = tuple[int | None, ...]


def read_config(model_dir: Path) -> ModelConfig:
    """Read ``model_dir``/config.json, or that file itself. Raises ModelError if it is absent,
    damaged or unsupported."""
    path = Path(model_dir)
    path = path if path.is_file() else path / "config.json"
    asked = f"The model in {model_dir} was asked for."
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            asked,
            f"Its config.json cannot be read ({reason_of(error)}).",
            "Give the directory that holds config.json, tokenizer and weights.",
        ) from error
    except ValueError as error:
        raise refusal(asked, [f"its config.json is not JSON ({error})"]) from error
    if not isinstance(raw, dict):
        raise refusal(asked, ["its config.json holds no JSON object"])
    config = parse_config({**quantised_beside(path), **raw}, str(path))
    config = as_published(config, path.parent, raw)
    return as_files_say(config, FAMILIES[config.family], path.parent)


def parse_config(raw: Mapping[str, Any], place: str = "config.json") -> ModelConfig:
    """Turn the content of a config.json into switches. Raises ModelError with all problems.

    ``place`` names the file in messages.
    """
    raw = reading_part(raw)
    name, family = _find_family(raw, place)
    try:
        return _parse(raw, place, name, family)
    except OverflowError as error:
        problem = f"a number is too large to compute with ({error})"
        raise refusal(f"{place} was read as a model of the {name} family.", [problem]) from error


def _parse(raw: Mapping[str, Any], place: str, name: str, family: Family) -> ModelConfig:
    keys, raw = family.keys, family.prepare(raw)
    asked, lacking = f"{place} was read as a model of the {name} family.", _lacking(raw, family)
    config = RawConfig(raw, [*lacking])
    switches: dict[str, Any] = {
        **{field: config.count(keys[field]) for field in _COUNTS},
        **{field: config.flag(keys[field]) for field in _FLAGS},
        **{field: config.number(keys[field]) for field in _NUMBERS},
        **{field: config.text(keys[field]) for field in _TEXTS},
        "activation": _activation(config, keys["activation"]),
        "dtype": _dtype(config),
    }
    num_layers = switches["num_layers"] or 0
    if num_layers > MOST_LAYERS:
        config.problems.append(f"{num_layers} layers are given, at most {MOST_LAYERS} can be")
        num_layers = 0
    switches["sliding_windows"] = _read_windows(config, keys, num_layers)
    switches["experts"] = _read_experts(config, keys, num_layers)
    switches["latent"] = _read_latent(config, keys)
    switches["recurrence"] = _read_recurrence(config, keys) or read_kept(config, keys, switches)
    switches["streams"] = _read_streams(config, keys)
    parts = config.raw.get("layer_parts")
    switches["factors"] = _read_factors(config)
    switches["mlp_limits"] = _read_limits(config, "mlp_limits")
    switches["sharing"] = _read_sharing(config, keys, switches)
    switches["layer_inputs"] = switches["layer_inputs"] or None
    switches["query_growth"] = read_growth(config, keys)
    switches["parts"] = tuple(parts) if isinstance(parts, list) else None
    known = [*family.architectures, *PARTS]
    switches["readout"], switches["embedding"] = stated_readouts(raw, known, config.problems)
    _derive_widths(switches, config.problems)
    switches["other_heads"] = _read_other_heads(config, keys, switches)
    ropes = read_ropes(config, keys, switches, num_layers)
    if config.problems != lacking:
        raise refusal(asked, config.problems)
    if lacking:
        raise ModelError(
            asked,
            f"It asks for what Freight does not compute: {'; '.join(lacking)}.",
            "Choose another model: without it the answers would be another's.",
        )
    found = ModelConfig(
        family=name,
        ropes=ropes,
        packing=read_packing(raw, place),
        **switches,
    )
    if problems := contradictions(found):
        raise refusal(f"A model of the {name} family was described.", problems)
    return found


def _find_family(raw: Mapping[str, Any], place: str) -> tuple[str, Family]:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    # What is not known itself may have the layers of one that is, and read out something else.
    known = [item for item in architectures if isinstance(item, str)]
    if not any(item in family.architectures for family in FAMILIES.values() for item in known):
        known = [decoder for item in known for decoder in decoders_of(item)]
    found = {
        name: family
        for name, family in FAMILIES.items()
        if any(item in family.architectures for item in known)
        or (not architectures and raw.get("model_type") in family.model_types)
    }
    part = raw.get("text_config")
    kind = part.get("model_type") if isinstance(part, Mapping) else None
    # Of one architecture the part that reads may be of several families.
    own = (pair for pair in found.items() if kind in pair[1].model_types)
    for name, family in itertools.chain(own, found.items()):
        return name, family
    told = ", ".join(
        sorted({item for f in FAMILIES.values() for item in f.architectures} | {*PARTS})
    )
    stated = f"architecture {', '.join(map(str, architectures))}"
    if not architectures:
        stated = f"no architecture and model_type {raw.get('model_type')!r}"
    raise ModelError(
        f"{place} describes a model of {stated}.",
        f"Supported architectures are {told}.",
        "Choose a model of one of these.",
    )


def _lacking(raw: Mapping[str, Any], family: Family) -> list[str]:
    return [
        f"{name} is {raw[name]!r}, only {value!r} is supported"
        for name, value in family.demands.items()
        if raw.get(name, value) != value
    ]


def _activation(config: RawConfig, key: Key) -> str:
    stated = config.text(key)
    if not key.names:
        return stated
    if stated and stated not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        config.problems.append(f"activation {stated!r} is not known, supported are {known}")
    return ACTIVATIONS.get(stated, stated)


def _dtype(config: RawConfig) -> str:
    stated = config.text(Key(names=("dtype", "torch_dtype"), default="float32"))
    dtype = stated.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        config.problems.append(f"weights of type {stated!r} are not supported, only {known}")
    return dtype


def _derive_widths(switches: dict[str, Any], problems: list[str]) -> None:
    hidden, heads = switches["hidden_size"], switches["num_heads"]
    if switches["num_kv_heads"] is None:
        switches["num_kv_heads"] = heads
    if switches["embedding_size"] is None:
        switches["embedding_size"] = hidden
    if switches["head_dim"] is None and heads is not None and hidden is not None:
        switches["head_dim"] = hidden // max(heads, 1)
        if hidden % max(heads, 1):
            problems.append(f"hidden_size {hidden} does not divide into {heads} heads")
    if switches["value_width"] == switches["head_dim"]:
        switches["value_width"] = None
    if switches["head_dim"] is not None and switches["slope_span"] is not None:
        switches["head_dim"] += SLOPE_COLUMNS


def _read_windows(config: RawConfig, keys: Mapping[str, Key], num_layers: int) -> _Windows:
    uses_windows = config.flag(keys["uses_windows"])
    window = config.count(keys["window"])
    first = config.count(keys["first_window_layer"]) or 0
    if not uses_windows or window is None:
        return (None,) * num_layers
    kinds = config.raw.get("layer_types")
    if kinds is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    recurrent = () if config.count(keys["recurrent_taps"]) is None else (_RECURRENT_KIND,)
    known = (*_LAYER_KINDS, *recurrent)
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        config.problems.append(f"layer_types is {kinds!r}, it must list {', '.join(known)} layers")
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_experts(config: RawConfig, keys: Mapping[str, Key], num_layers: int) -> Experts | None:
    num_experts = config.count(keys["num_experts"])
    if not num_experts:
        return None
    if num_experts > MOST_EXPERTS:
        config.problems.append(f"{num_experts} experts are given, at most {MOST_EXPERTS} can be")
    layers = config.raw.get("expert_layers")
    if not isinstance(layers, list):
        layers = [True] * num_layers
    return Experts(
        num_experts=num_experts,
        per_token=config.count(keys["experts_per_token"]) or 0,
        intermediate_size=config.count(keys["expert_size"]) or 0,
        normalised=config.flag(keys["normalised_routes"]),
        layers=tuple(layers),
        scores=config.text(keys["route_scores"]),
        scale=config.number(keys["route_scale"]) or 0.0,
        has_bias=config.flag(keys["route_bias"]),
        has_corrections=config.flag(keys["route_corrections"]),
        by_logits=config.flag(keys["route_by_logits"]),
        num_groups=config.count(keys["expert_groups"]) or 0,
        groups_per_token=config.count(keys["groups_per_token"]) or 0,
        best_of_group=config.count(keys["best_of_group"]) or 0,
        shared_size=config.count(keys["shared_size"]) or 0,
        shared_gate=config.flag(keys["shared_gate"]),
        shared_scale=config.number(keys["shared_scale"]) or 0.0,
        weighs_input=config.flag(keys["route_inputs"]),
        margin=config.number(keys["route_margin"]),
        beside_mlp=config.flag(keys["beside_mlp"]),
        has_gains=config.flag(keys["route_gains"]),
        latent_size=config.count(keys["expert_latent"]) or 0,
        limits=_read_limits(config, "expert_limits"),
        by_token=_by_token(config),
    )


def _by_token(config: RawConfig) -> tuple[bool, ...]:
    layers = config.raw.get("token_layers")
    if not isinstance(layers, list):
        return ()
    for own in {repr(own): own for own in layers if not isinstance(own, bool)}.values():
        config.problems.append(f"experts of a layer are given by {own!r}, which is no known way")
    return tuple(layers)


def _read_other_heads(
    config: RawConfig, keys: Mapping[str, Key], switches: Mapping[str, Any]
) -> OtherHeads | None:
    """Those of layers that see all, or of those that are listed, where they differ from the
    others'."""
    width, num_kv_heads, num_heads = (
        config.count(keys[f"other_{own}"]) for own in ("head_dim", "num_kv_heads", "num_heads")
    )
    keys_are_values = config.flag(keys["keys_are_values"])
    if (width, num_kv_heads, num_heads) == (None, None, None) and not keys_are_values:
        return None
    kinds, layers = config.raw.get("layer_types"), config.raw.get("other_head_layers")
    if layers is None and isinstance(kinds, list):
        layers = [kind == "full_attention" for kind in kinds]
    return OtherHeads(
        layers=tuple(layers) if isinstance(layers, list) else (),
        num_heads=(switches["num_heads"] or 0) if num_heads is None else num_heads,
        num_kv_heads=(switches["num_kv_heads"] or 0) if num_kv_heads is None else num_kv_heads,
        head_dim=(switches["head_dim"] or 0) if width is None else width,
        keys_are_values=keys_are_values,
    )


def _read_sharing(
    config: RawConfig, keys: Mapping[str, Key], switches: Mapping[str, Any]
) -> Sharing | None:
    """Of the last layers, which attend the keys of those before."""
    count, is_wide = config.count(keys["sharing_layers"]), config.flag(keys["sharing_doubles_mlp"])
    if not count:
        return None
    width = switches["intermediate_size"] or 0
    return Sharing(first=(switches["num_layers"] or 0) - count, mlp_size=width * (1 + is_wide))


def _read_latent(config: RawConfig, keys: Mapping[str, Key]) -> Latent | None:
    rank = config.count(keys["latent_rank"])
    if rank is None:
        return None
    return Latent(
        rank=rank,
        key_width=config.count(keys["latent_key_width"]) or 0,
        value_width=config.count(keys["latent_value_width"]) or 0,
        query_rank=config.count(keys["query_rank"]),
        eps=config.number(keys["latent_eps"]) or 0.0,
        index=read_index(config, keys),
        alone_unturned=config.flag(keys["latent_alone_unturned"]),
    )


def _read_streams(config: RawConfig, keys: Mapping[str, Key]) -> Streams | None:
    count = config.count(keys["streams"])
    if count is None:
        return None
    return Streams(
        count=count,
        floor=config.number(keys["stream_floor"]) or 0.0,
        magnitude=config.number(keys["stream_magnitude"]) or 0.0,
        least_share=config.number(keys["stream_least"]) or 0.0,
        rounds=config.count(keys["stream_rounds"]) or 0,
        weighs_last=config.flag(keys["stream_head"]),
    )


def _read_recurrence(config: RawConfig, keys: Mapping[str, Key]) -> Recurrence | None:
    kinds = config.raw.get("layer_types")
    taps = config.count(keys["recurrent_taps"])
    if taps is None:
        return None
    known = (_RECURRENT_KIND, *_LAYER_KINDS[: 1 + config.flag(keys["uses_windows"])])
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        config.problems.append(f"layer_types is {kinds!r}, it must list {', '.join(known)} layers")
        return None
    if _RECURRENT_KIND not in kinds:
        return None
    return Recurrence(
        layers=tuple(kind == _RECURRENT_KIND for kind in kinds),
        num_key_heads=config.count(keys["recurrent_key_heads"]) or 0,
        num_heads=config.count(keys["recurrent_heads"]) or 0,
        key_width=config.count(keys["recurrent_key_width"]) or 0,
        value_width=config.count(keys["recurrent_value_width"]) or 0,
        taps=taps,
        rule=config.text(keys["recurrent_rule"]),
        has_bias=config.flag(keys["recurrent_bias"]),
        is_dealt=config.flag(keys["recurrent_deal"]),
        is_apart=config.flag(keys["recurrent_apart"]),
        strength=config.number(keys["recurrent_strength"]) or 0.0,
        by_row=config.flag(keys["recurrent_by_row"]),
        rate_rank=config.count(keys["recurrent_rate_rank"]),
        rate_bound=config.number(keys["recurrent_rate_bound"]),
        read_eps=config.number(keys["recurrent_read_eps"]),
        is_normed=config.flag(keys["recurrent_norm"]),
        is_beside=config.flag(keys["recurrent_beside"]),
    )


def _read_limits(config: RawConfig, name: str) -> tuple[float | None, ...]:
    """A number for each layer, None where it has none; nothing where no layer has one."""
    limits = config.raw.get(name)
    if not isinstance(limits, list):
        return ()
    read: dict[str, float | None] = {}
    for limit in limits:
        if repr(limit) not in read:
            own = RawConfig({name: limit}, config.problems)
            read[repr(limit)] = own.number(Key(names=(name,)))
    found = tuple(read[repr(limit)] for limit in limits)
    return found if any(limit is not None for limit in found) else ()


def _read_factors(config: RawConfig) -> tuple[tuple[str, float], ...]:
    own = config.raw.get("matrix_factors")
    if not isinstance(own, dict):
        return ()
    given = RawConfig(own, config.problems)
    found = {name: given.number(Key(names=(name,), default=1.0)) or 0.0 for name in own}
    return tuple((name, factor) for name, factor in found.items() if factor != 1)
