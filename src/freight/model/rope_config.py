"""Rotary position embedding as configured: the values, and how config.json spells them.

Old files hold "rope_theta" beside "rope_scaling" (kind under "type" or "rope_type"), new ones hold
all of it in "rope_parameters". Computes no frequencies: that is ``rope``'s work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from freight.errors import ModelError
from freight.model.families import Key
from freight.model.raw_config import RawConfig

__all__ = ["RopeConfig", "RopeKind", "depends_on_length", "read_ropes"]

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]

_NUMBERS: Final = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_NUMBERS_TOO: Final = ("attention_factor", "mscale", "mscale_all_dim")
_UNSET_BY_0: Final = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
_FACTORS: Final = ("short_factor", "long_factor")

_MOST_TIMES: Final = 1e6
"""What a wave is stretched by, or a score scaled, at the most: past it frequencies overflow."""

_LARGEST_BASE: Final = 1e15
_LONGEST: Final = 2**40

_OTHER_NAMES: Final = {"su": "longrope", "mrope": "default"}
"""Three directions of positions are the same in text."""

# What a kind cannot do without. yarn and longrope can derive their factor from the two lengths.
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first ``rotary_dim`` elements of each head.

    Fields that a kind does not use are None or empty. ``original_max_positions`` is the length of
    the pre-training, for the kinds that extend it. ``pairs``: neighbours are rotated together, and
    not an element of the first half with one of the second. Of proportional ones a ``share`` of the
    frequencies turns, the fastest of those of the whole head. ``gains`` multiply the frequencies,
    where weights say so.
    """

    rotary_dim: int
    pairs: bool = False
    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0
    gains: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise ModelError(
                f"Rotary embedding of kind {self.kind!r} was described.",
                f"{'; '.join(problems)}.",
                "Correct the rope entries of config.json.",
            )


def _contradictions(rope: RopeConfig) -> list[str]:
    problems = []
    if rope.kind not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        problems.append(f"rope type {rope.kind!r} is not known, supported are {known}")
    if rope.rotary_dim < 2 or rope.rotary_dim % 2:
        problems.append(
            f"{rope.rotary_dim} elements of a head would be rotated, it must be an even number "
            "above zero"
        )
    if not 1 <= rope.theta <= _LARGEST_BASE or (rope.kind == "yarn" and rope.theta == 1):
        least = "more than 1" if rope.kind == "yarn" else "at least 1"
        problems.append(f"theta is {rope.theta}, it must be {least}, at most {_LARGEST_BASE:g}")
    if rope.kind == "proportional" and not 0 < rope.share <= 1:
        problems.append(f"a share of {rope.share} of the frequencies would turn")
    if rope.kind == "dynamic" and rope.rotary_dim == 2:
        problems.append("dynamic scaling needs more than two rotated elements")
    missing = [name for name in _REQUIRED.get(rope.kind, ()) if not getattr(rope, name)]
    problems += [f"{name} is missing or zero" for name in missing]
    problems += [
        f"{name} is {value}, it must be from {1 / _MOST_TIMES:g} to {_MOST_TIMES:g}"
        for name, value in _given(rope)
        if not 1 / _MOST_TIMES <= value <= _MOST_TIMES and not (value == 0 and name in _UNSET_BY_0)
    ]
    if rope.kind in ("yarn", "longrope", "llama3"):
        problems += _length_problems(rope.original_max_positions)
    if rope.kind == "llama3" and None in (rope.low_freq_factor, rope.high_freq_factor):
        problems.append("low_freq_factor or high_freq_factor is missing")
    if rope.kind == "longrope":
        problems += [
            f"{name} has {len(getattr(rope, name))} entries, it needs {rope.rotary_dim // 2}"
            for name in ("short_factor", "long_factor")
            if len(getattr(rope, name)) != rope.rotary_dim // 2
        ]
    if len(rope.gains) not in (0, rope.rotary_dim // 2):
        problems.append(f"{len(rope.gains)} of {rope.rotary_dim // 2} frequencies have gains")
    return problems


def _given(rope: RopeConfig) -> list[tuple[str, float]]:
    """Each number that stretches or scales, by its name."""
    single = [(name, getattr(rope, name)) for name in (*_NUMBERS, *_NUMBERS_TOO)]
    by_wave = [(name, value) for name in (*_FACTORS, "gains") for value in getattr(rope, name)]
    return [(name, value) for name, value in (*single, *by_wave) if value is not None]


def _length_problems(length: int | None) -> list[str]:
    """Of the pre-training's: its logarithm divides."""
    if not length:
        return ["original_max_position_embeddings is missing"]
    if not 1 < length <= _LONGEST:
        return [f"original_max_position_embeddings is {length}, it must be from 2 to {_LONGEST}"]
    return []


def depends_on_length(rope: RopeConfig) -> bool:
    """Whether a sequence's frequencies change as it grows."""
    return rope.kind in ("dynamic", "longrope")


def read_ropes(
    config: RawConfig, keys: Mapping[str, Key], switches: Mapping[str, Any], num_layers: int
) -> tuple[RopeConfig | None, ...]:
    """How each of so many layers rotates. What is wrong goes to ``config``.

    The parameters are one flat set, or one for each kind of layer by ``layer_types``; a list
    ``rope_layers`` of flags says which layers rotate at all.
    """
    if switches["learned_positions"] or switches["slope_span"] is not None:
        return (None,) * num_layers
    name = "rope_scaling" if config.raw.get("rope_scaling") else "rope_parameters"
    raw, kinds = config.raw.get(name) or {}, ["" for _ in range(num_layers)]
    sets: Mapping[str, Any] = {"": raw}
    if isinstance(raw, Mapping) and any(isinstance(value, Mapping) for value in raw.values()):
        sets, kinds = raw, config.raw.get("layer_types") or kinds
    is_apart = sets is raw or switches["other_heads"] is None
    known = (
        is_apart
        and isinstance(kinds, list)
        and all(isinstance(kind, str) and isinstance(sets.get(kind), Mapping) for kind in kinds)
    )
    if not known:
        config.problems.append(
            f"{name} is {raw!r}, it must be one flat set of parameters, or one for each of the "
            "layer_types"
        )
        return ()
    ropes = {
        kind: _read_rope(
            config,
            RawConfig(sets[kind], config.problems, name),
            keys,
            {**switches, "head_dim": _head_dim(switches, kinds.index(kind))},
        )
        for kind in dict.fromkeys(kinds)
    }
    rotates = config.raw.get("rope_layers")
    if not isinstance(rotates, list):
        rotates = [True] * num_layers
    return tuple(ropes[kind] if own else None for kind, own in zip(kinds, rotates, strict=False))


def _head_dim(switches: Mapping[str, Any], layer: int) -> Any:
    """Of a layer, the first of its kind."""
    own = switches["other_heads"]
    is_other = own is not None and any(own.layers[layer : layer + 1])
    return own.head_dim if is_other else switches["head_dim"]


def _read_rope(
    config: RawConfig, rope: RawConfig, keys: Mapping[str, Key], switches: Mapping[str, Any]
) -> RopeConfig | None:
    theta, share = config.number(keys["rope_theta"]), config.number(keys["rotary_share"])
    fields: dict[str, Any] = {
        field: rope.number(Key(names=(field,))) for field in (*_NUMBERS, *_NUMBERS_TOO)
    }
    kind = rope.text(Key(names=("rope_type", "type"), default="default"))
    fields["kind"] = _OTHER_NAMES.get(kind, kind)
    fields["theta"] = rope.number(Key(names=("rope_theta",), default=theta))
    fields["truncate"] = rope.flag(Key(names=("truncate",), default=True))
    fields["short_factor"] = rope.numbers(Key(names=("short_factor",)))
    fields["long_factor"] = rope.numbers(Key(names=("long_factor",)))
    fields["pairs"] = config.flag(keys["rotary_pairs"])
    if fields["kind"] in ("yarn", "longrope", "llama3"):
        length = Key(names=("original_max_position_embeddings",), default=switches["max_positions"])
        # A length beside the rope entries, as Phi-3 has it, goes before one among them.
        outside = "original_max_position_embeddings" in config.raw
        fields["original_max_positions"] = (config if outside else rope).count(length)
    share = rope.number(Key(names=("partial_rotary_factor",), default=share)) or 1.0
    width = config.count(keys["rotary_width"])
    if rope.problems:
        return None
    if fields["kind"] == "proportional":
        width, fields["share"] = switches["head_dim"], share
    if width is None:
        width = int(min(switches["head_dim"] * share, sys.maxsize))
    return RopeConfig(rotary_dim=width, **fields)
