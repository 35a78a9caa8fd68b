"""A model's structure as plain switches, and what can be counted from them alone.

Reads config.json raw, in its old and new spellings, through the family's table; knows no tensors,
files of weights, tiers or devices. What a switch means is the business of the layer programme.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from freight.errors import ModelError
from freight.model.families import ACTIVATIONS, FAMILIES, Family, Key
from freight.model.raw_config import RawConfig
from freight.model.rope_config import RopeConfig, read_rope

__all__ = ["DTYPE_BYTES", "ModelConfig", "RopeConfig", "parse_config", "read_config"]

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

# Logical name -> its dims [rows, columns], and the switch it depends on, if any. NH and KH are the
# widths of all query and of all key/value heads.
_LAYER_TENSORS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "attention.norm": (("D",), ""),
    "attention.q": (("NH", "D"), ""),
    "attention.k": (("KH", "D"), ""),
    "attention.v": (("KH", "D"), ""),
    "attention.out": (("D", "NH"), ""),
    "attention.q_bias": (("NH",), "qkv_bias"),
    "attention.k_bias": (("KH",), "qkv_bias"),
    "attention.v_bias": (("KH",), "qkv_bias"),
    "attention.out_bias": (("D",), "out_bias"),
    "mlp.norm": (("D",), ""),
    "mlp.gate": (("F", "D"), ""),
    "mlp.up": (("F", "D"), ""),
    "mlp.down": (("D", "F"), ""),
    "mlp.gate_bias": (("F",), "mlp_bias"),
    "mlp.up_bias": (("F",), "mlp_bias"),
    "mlp.down_bias": (("D",), "mlp_bias"),
}


_COUNTS: Final = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
)
_FLAGS: Final = ("qkv_bias", "out_bias", "mlp_bias", "tied_embeddings")
_LAYER_KINDS: Final = ("full_attention", "sliding_attention")
_MOST_LAYERS: Final = 10_000
_Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The switches of one model. ``dtype`` is the checkpoint's, not that of the computation.

    ``sliding_windows`` has one entry per layer: how many of the last tokens, itself included, a
    token may look at, or None for all. Raises ModelError with every contradiction at once.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    dtype: str

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise _refusal(f"A model of the {self.family} family was described.", problems)

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's tensors, named without their "layers.{i}." prefix."""
        sizes = {
            "D": self.hidden_size,
            "F": self.intermediate_size,
            "NH": self.num_heads * self.head_dim,
            "KH": self.num_kv_heads * self.head_dim,
        }
        listed = FAMILIES[self.family].tensors
        return {
            name: tuple(sizes[dim] for dim in dims)
            for name, (dims, switch) in _LAYER_TENSORS.items()
            if f"layers.{{i}}.{name}" in listed and (not switch or getattr(self, switch))
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by logical name, in the order in which a sweep uses them."""
        layer = self.layer_shapes()
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.hidden_size)}
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["head.norm"] = (self.hidden_size,)
        shapes["head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def num_layer_parameters(self) -> int:
        """Weights of one layer."""
        return sum(math.prod(shape) for shape in self.layer_shapes().values())

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        num_vocab_matrices = 1 if self.tied_embeddings else 2
        outside = self.hidden_size * (num_vocab_matrices * self.vocab_size + 1)
        return self.num_layers * self.num_layer_parameters + outside

    def kv_bytes_per_token_per_layer(self, bytes_per_element: int = 2) -> int:
        """Keys and values that one token leaves in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_element

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Keys and values that one token leaves in all layers."""
        return self.num_layers * self.kv_bytes_per_token_per_layer(bytes_per_element)


def _refusal(asked: str, problems: list[str]) -> ModelError:
    return ModelError(
        asked,
        f"What is wrong with it: {'; '.join(problems)}.",
        "Correct config.json, or fetch the model again from where it was published.",
    )


def _contradictions(config: ModelConfig) -> list[str]:
    small = [name for name in _COUNTS if getattr(config, name) < 1]
    problems = [f"{name} is {getattr(config, name)}, it must be at least 1" for name in small]
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        problems.append(
            f"{config.num_heads} query heads cannot be shared out over "
            f"{config.num_kv_heads} key/value heads"
        )
    if config.rope.rotary_dim > config.head_dim:
        problems.append(
            f"rotary width {config.rope.rotary_dim} exceeds head width {config.head_dim}"
        )
    if not config.norm_eps > 0:
        problems.append(f"norm_eps is {config.norm_eps}, it must be more than 0")
    for name, known in (("activation", set(ACTIVATIONS.values())), ("dtype", set(DTYPE_BYTES))):
        if getattr(config, name) not in known:
            problems.append(
                f"{name} is {getattr(config, name)!r}, supported are {', '.join(sorted(known))}"
            )
    if len(config.sliding_windows) != config.num_layers:
        problems.append(
            f"{len(config.sliding_windows)} attention windows are given for "
            f"{config.num_layers} layers"
        )
    if any(window is not None and window < 1 for window in config.sliding_windows):
        problems.append("an attention window is below 1")
    return problems


def read_config(model_dir: Path) -> ModelConfig:
    """Read ``model_dir``/config.json. Raises ModelError if it is absent, damaged or unsupported."""
    path = Path(model_dir) / "config.json"
    asked = f"The model in {model_dir} was asked for."
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            asked,
            f"Its config.json cannot be read ({reason}).",
            "Give the directory that holds config.json, tokenizer and weights.",
        ) from error
    except ValueError as error:
        raise _refusal(asked, [f"its config.json is not JSON ({error})"]) from error
    if not isinstance(raw, dict):
        raise _refusal(asked, ["its config.json holds no JSON object"])
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], place: str = "config.json") -> ModelConfig:
    """Turn the content of a config.json into switches. Raises ModelError with all problems.

    ``place`` names the file in messages.
    """
    name, family = _find_family(raw, place)
    config = RawConfig(raw, _unsupported(raw))
    switches: dict[str, Any] = {
        **{field: config.count(family.keys[field]) for field in _COUNTS},
        **{field: config.flag(family.keys[field]) for field in _FLAGS},
        "norm_eps": config.number(family.keys["norm_eps"]),
        "activation": _activation(config, family.keys["activation"]),
        "dtype": _dtype(config),
    }
    rotary_share = config.number(family.keys["rotary_share"])
    rope = read_rope(config, family.keys["rope_theta"], switches["max_positions"])
    windows = _read_windows(config, family.keys, switches["num_layers"] or 0)
    _derive_heads(switches, config.problems)
    if config.problems:
        raise _refusal(f"{place} was read as a model of the {name} family.", config.problems)
    rotary_dim = int(switches["head_dim"] * (rotary_share or 1.0))
    return ModelConfig(
        family=name,
        rope=RopeConfig(rotary_dim=rotary_dim, **rope),
        sliding_windows=windows,
        **switches,
    )


def _find_family(raw: Mapping[str, Any], place: str) -> tuple[str, Family]:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    for name, family in FAMILIES.items():
        if any(item in family.architectures for item in architectures) or (
            not architectures and raw.get("model_type") in family.model_types
        ):
            return name, family
    known = ", ".join(sorted(item for f in FAMILIES.values() for item in f.architectures))
    stated = ", ".join(map(str, architectures)) or f"model_type {raw.get('model_type')!r}"
    raise ModelError(
        f"{place} describes a model of architecture {stated}.",
        f"Supported architectures are {known}.",
        "Choose a model of one of these.",
    )


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    quantization = raw.get("quantization_config")
    if not quantization:
        return []
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return [f"the checkpoint is quantised ({method or 'quantization_config'}), not supported yet"]


def _activation(config: RawConfig, key: Key) -> str:
    stated = config.text(key)
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


def _derive_heads(switches: dict[str, Any], problems: list[str]) -> None:
    hidden, heads = switches["hidden_size"], switches["num_heads"]
    if switches["num_kv_heads"] is None:
        switches["num_kv_heads"] = heads
    if switches["head_dim"] is not None or heads is None or hidden is None:
        return
    switches["head_dim"] = hidden // max(heads, 1)
    if hidden % max(heads, 1):
        problems.append(f"hidden_size {hidden} does not divide into {heads} heads")


def _read_windows(config: RawConfig, keys: Mapping[str, Key], num_layers: int) -> _Windows:
    uses_windows = config.flag(keys["uses_windows"])
    window = config.count(keys["window"])
    first = config.count(keys["first_window_layer"]) or 0
    if num_layers > _MOST_LAYERS:
        config.problems.append(f"{num_layers} layers are given, at most {_MOST_LAYERS} can be")
        return ()
    if not uses_windows or window is None:
        return (None,) * num_layers
    kinds = config.raw.get("layer_types")
    if kinds is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(kinds, list) or any(kind not in _LAYER_KINDS for kind in kinds):
        known = ", ".join(_LAYER_KINDS)
        config.problems.append(f"layer_types is {kinds!r}, it must list {known} layers")
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
