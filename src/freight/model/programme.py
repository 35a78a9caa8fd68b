"""The layer as data: steps over named values, each with the weights it uses.

This is the one description of the model. Parameters, FLOPs and bytes are counted from it, tensors
are computed by interpreting it (``layers``), and partitionings insert moves into it. It knows no
torch, no tier, no rank and no place in a schedule.

Dims are letters: D model width, F feed-forward width, N query heads, K key/value heads, H head
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from freight.model.config import ModelConfig

__all__ = [
    "Activate",
    "Add",
    "Attend",
    "Embed",
    "Multiply",
    "Norm",
    "Programme",
    "Project",
    "Rotate",
    "Step",
    "Unit",
    "UnitKind",
    "Weight",
    "build_programme",
]

UnitKind = Literal["embedding", "attention", "mlp", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter: a matrix whose rows are ``out_dims`` and whose columns are ``in_dims``.

    A vector (a norm's gain, a bias) is a matrix of one row. ``name`` is the logical name that the
    family table maps to the checkpoint; ``first_row`` is not 0 where a unit uses rows of a tensor.
    """

    name: str
    out_dims: tuple[str, ...]
    in_dims: tuple[str, ...]
    num_rows: int
    num_columns: int
    first_row: int = 0

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def is_matrix(self) -> bool:
        return bool(self.out_dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed:
    """out[t] = weight[token t]"""

    out: str
    weight: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """out = x / rms(x) * weight, in float32 inside"""

    x: str
    out: str
    weight: Weight
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """out = x weight^T + bias"""

    x: str
    out: str
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotate:
    """Rotary position embedding of the heads of x, in place"""

    x: str
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attend:
    """out = softmax(q k^T / sqrt(H)) v over the row's keys so far, k and v appended to them"""

    q: str
    k: str
    v: str
    out: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate:
    """x = function(x), in place"""

    x: str
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """x = x * y, in place"""

    x: str
    y: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """x = x + y, in place"""

    x: str
    y: str


Step = Embed | Norm | Project | Rotate | Attend | Activate | Multiply | Add


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Steps that run together on one micro-batch: the smallest thing whose weights are loaded.

    ``layer`` is the decoder layer, or None for the embedding and the head. The residual stream is
    the value ``x``; a head unit leaves its columns of the logits in ``logits``.
    """

    name: str
    kind: UnitKind
    layer: int | None
    steps: tuple[Step, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for step in self.steps for weight in _weights_of(step))

    @property
    def num_elements(self) -> int:
        return sum(weight.num_elements for weight in self.weights)

    def matmul_flops(self, num_tokens: int) -> int:
        """Multiply-adds counted as two, projections only."""
        elements = sum(s.weight.num_elements for s in self.steps if isinstance(s, Project))
        return 2 * num_tokens * elements

    def attention_flops(self, num_query_key_pairs: int) -> int:
        """Of scores and weighted values, for that many (query, key) pairs over all rows."""
        steps = [s for s in self.steps if isinstance(s, Attend)]
        return sum(4 * s.num_heads * s.head_dim * num_query_key_pairs for s in steps)


def _weights_of(step: Step) -> Iterator[Weight]:
    if isinstance(step, Embed | Norm):
        yield step.weight
    elif isinstance(step, Project):
        yield step.weight
        if step.bias is not None:
            yield step.bias


@dataclass(frozen=True, kw_only=True, slots=True)
class Programme:
    """A whole decoder: embedding, layers, output head in chunks, in the order of computation."""

    units: tuple[Unit, ...]

    @property
    def embedding(self) -> Unit:
        return self.units[0]


_HEAD_CHUNK_MIN_ROWS: Final = 256


class _Builder:
    """Makes weights of one model by their dims."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.sizes: Mapping[str, int] = {
            "D": config.hidden_size,
            "F": config.intermediate_size,
            "N": config.num_heads,
            "K": config.num_kv_heads,
            "H": config.head_dim,
            "V": config.vocab_size,
        }

    def matrix(self, name: str, out_dims: str, in_dims: str) -> Weight:
        return Weight(
            name=name,
            out_dims=tuple(out_dims),
            in_dims=tuple(in_dims),
            num_rows=prod(self.sizes[dim] for dim in out_dims),
            num_columns=prod(self.sizes[dim] for dim in in_dims),
        )

    def vector(self, name: str, dims: str) -> Weight:
        columns = prod(self.sizes[dim] for dim in dims)
        return Weight(name=name, out_dims=(), in_dims=tuple(dims), num_rows=1, num_columns=columns)

    def project(
        self, prefix: str, name: str, x: str, out: str, dims: tuple[str, str], biased: bool
    ) -> Project:
        """``dims`` are those of the output and of the input."""
        bias = self.vector(f"{prefix}.{name}_bias", dims[0]) if biased else None
        return Project(x=x, out=out, weight=self.matrix(f"{prefix}.{name}", *dims), bias=bias)

    def norm(self, prefix: str) -> Norm:
        weight = self.vector(f"{prefix}.norm", "D")
        return Norm(x="x", out="normed", weight=weight, eps=self.config.norm_eps)

    def attention(self, layer: int) -> Unit:
        c, prefix = self.config, f"layers.{layer}.attention"
        steps = (
            self.norm(prefix),
            self.project(prefix, "q", "normed", "q", ("NH", "D"), c.qkv_bias),
            self.project(prefix, "k", "normed", "k", ("KH", "D"), c.qkv_bias),
            self.project(prefix, "v", "normed", "v", ("KH", "D"), c.qkv_bias),
            Rotate(x="q", num_heads=c.num_heads),
            Rotate(x="k", num_heads=c.num_kv_heads),
            Attend(
                q="q",
                k="k",
                v="v",
                out="attended",
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                window=c.sliding_windows[layer],
            ),
            self.project(prefix, "out", "attended", "update", ("D", "NH"), c.out_bias),
            Add(x="x", y="update"),
        )
        return Unit(name=prefix, kind="attention", layer=layer, steps=steps)

    def mlp(self, layer: int) -> Unit:
        c, prefix = self.config, f"layers.{layer}.mlp"
        steps = (
            self.norm(prefix),
            self.project(prefix, "gate", "normed", "gate", ("F", "D"), c.mlp_bias),
            Activate(x="gate", function=c.activation),
            self.project(prefix, "up", "normed", "up", ("F", "D"), c.mlp_bias),
            Multiply(x="gate", y="up"),
            self.project(prefix, "down", "gate", "update", ("D", "F"), c.mlp_bias),
            Add(x="x", y="update"),
        )
        return Unit(name=prefix, kind="mlp", layer=layer, steps=steps)

    def head(self, first_row: int, num_rows: int) -> Unit:
        rows = Weight(
            name="head.weight",
            out_dims=("V",),
            in_dims=("D",),
            num_rows=num_rows,
            num_columns=self.config.hidden_size,
            first_row=first_row,
        )
        steps = (self.norm("head"), Project(x="normed", out="logits", weight=rows))
        return Unit(name=f"head.{first_row}", kind="head", layer=None, steps=steps)


def build_programme(config: ModelConfig) -> Programme:
    """The decoder's units. The head is cut so that no chunk is larger than the largest layer unit,
    for the slots that weights stream through are as large as the largest unit."""
    builder = _Builder(config)
    table = builder.matrix("embedding", "V", "D")
    units = [
        Unit(name="embedding", kind="embedding", layer=None, steps=(Embed(out="x", weight=table),))
    ]
    for layer in range(config.num_layers):
        units += [builder.attention(layer), builder.mlp(layer)]
    largest = max(unit.num_elements for unit in units[1:])
    chunk = max(_HEAD_CHUNK_MIN_ROWS, largest // config.hidden_size)
    num_chunks = -(-config.vocab_size // chunk)
    chunk = -(-config.vocab_size // num_chunks)
    for first in range(0, config.vocab_size, chunk):
        units.append(builder.head(first, min(chunk, config.vocab_size - first)))
    return Programme(units=tuple(units))
