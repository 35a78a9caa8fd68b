"""The layouts that the papers name, each as an instance of the algebra, its closed form beside it.

Closed forms are written as in the papers, in elements that each chip sends; nothing here is used to
price anything: they say that the algebra and the papers mean the same. Letters are those of
``sharded``; T = B L tokens, X, Y, Z and n chips.

Pope et al., "Efficiently Scaling Transformer Inference", sections 3.2 and 3.3, appendix A.2.
Ong & Kwon, "Faster Distributed LLM Inference with Dynamic Partitioning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.sharded import Sharded, Sizes, Writer

__all__ = [
    "DYNAMIC",
    "EXCHANGED",
    "FEED_FORWARD",
    "Dynamic",
    "Moved",
    "Named",
    "attention_form",
    "best_gathering",
    "best_width",
    "block_form",
    "dynamic_form",
    "dynamic_layer",
]


@dataclass(frozen=True, slots=True)
class Moved:
    """Elements that each chip sends, of weights and of activations."""

    weights: float
    activations: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A feed-forward layout of Pope et al. ``form`` takes sizes and a mesh x, y, z."""

    cut: Cut
    form: Callable[[Sizes, Mesh], Moved]


def _one_d(sizes: Sizes, mesh: Mesh) -> Moved:
    return Moved(0, 2 * _tokens(sizes) * sizes["E"] * _moved_of(mesh.num_chips))


def _two_d(sizes: Sizes, mesh: Mesh) -> Moved:
    t, e, f, g = _tokens(sizes), sizes["E"], sizes["F"], sizes["G"]
    x, yz = mesh.size("x"), mesh.size("yz")
    return Moved(0, 2 * t * e / x * _moved_of(yz) + (g + 1) * t * f / yz * _moved_of(x))


def _gathered_x(sizes: Sizes, mesh: Mesh) -> Moved:
    t, e, f, g = _tokens(sizes), sizes["E"], sizes["F"], sizes["G"]
    x, yz = mesh.size("x"), mesh.size("yz")
    return Moved((g + 1) * e * f / yz * _moved_of(x), 2 * t * e / x * _moved_of(yz))


def _gathered_xy(sizes: Sizes, mesh: Mesh) -> Moved:
    t, e, f, g = _tokens(sizes), sizes["E"], sizes["F"], sizes["G"]
    xy, z = mesh.size("xy"), mesh.size("z")
    return Moved((g + 1) * e * f / z * _moved_of(xy), 2 * t * e / xy * _moved_of(z))


def _gathered_xyz(sizes: Sizes, mesh: Mesh) -> Moved:
    return Moved((sizes["G"] + 1) * sizes["E"] * sizes["F"] * _moved_of(mesh.num_chips), 0)


FEED_FORWARD: Final[Mapping[str, Named]] = {
    "1D weight-stationary": Named(cut=Cut(width="", inner="zyx"), form=_one_d),
    "2D weight-stationary": Named(cut=Cut(), form=_two_d),
    "X-weight-gathered": Named(cut=Cut(gathered="x"), form=_gathered_x),
    "XY-weight-gathered": Named(cut=Cut(gathered="xy"), form=_gathered_xy),
    "XYZ-weight-gathered": Named(cut=Cut(gathered="xyz"), form=_gathered_xyz),
}
"""Section 3.2. F is cut by z outside and y inside, so that gathering over x and y leaves F_z."""


def attention_form(sizes: Sizes, mesh: Mesh, key_parts: int, batch: int) -> Moved:
    """Weight-stationary attention by heads, over ``batch`` chips by rows (section 3.3); key heads
    are cut into ``key_parts`` at most, their width over the other chips.

    With K = 1 and ``batch`` = n it is the paper's batch-sharded layout, with ``batch`` = 1 its
    head-sharded one, in which every chip gets all keys; K = H gives multi-head attention.
    """
    t, e = _tokens(sizes), sizes["E"]
    queries, keys = t * sizes["H"] * sizes["D"], 2 * t * sizes["K"] * sizes["D"]
    x, yz, n = mesh.size("x"), mesh.size("yz"), mesh.num_chips
    by_width = min(batch, n // key_parts)
    left = n // key_parts // by_width
    exchanged = 2 * queries / n * _moved_of(batch)
    exchanged += keys / n * (_moved_of(by_width) + _moved_of(batch // by_width))
    copied = keys / (key_parts * by_width) * _moved_of(left)
    projected = 2 * t * e / x * _moved_of(yz) + (2 * queries + keys) / yz * _moved_of(x)
    return Moved(0, projected + exchanged + copied)


def block_form(sizes: Sizes, mesh: Mesh, key_parts: int, batch: int, *, parallel: bool) -> Moved:
    """A weight-stationary block: attention and MLP, in a parallel block with one gathering and one
    scattering of the stream instead of two (section 3.4), and two numbers per token and norm."""
    t = _tokens(sizes)
    attended = attention_form(sizes, mesh, key_parts, batch).activations
    both = attended + _two_d(sizes, mesh).activations
    spared = 2 * t * sizes["E"] / mesh.size("x") * _moved_of(mesh.size("yz"))
    norm = 2 * t * _moved_of(mesh.num_chips)
    return Moved(0, both - spared + norm if parallel else both + 2 * norm)


def best_width(sizes: Sizes, num_chips: int) -> float:
    """The X at which 2D weight-stationary moves least, where parts are many (appendix A.2.1):
    0.5 sqrt(n) for a plain MLP with F = 4 E."""
    return float((2 * num_chips * sizes["E"] / ((sizes["G"] + 1) * sizes["F"])) ** 0.5)


def best_gathering(sizes: Sizes, num_chips: int) -> float:
    """The number of chips over which to gather weights of a plain MLP (appendix A.2.2)."""
    return float((_tokens(sizes) * num_chips / sizes["F"]) ** 0.5)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A scheme over one axis, x, as Ong & Kwon's: ``replicated`` is the output projection, and the
    MLP's weights are ``gathered``. ``exchanged``: heads of what was attended are exchanged for
    tokens, which a replicated projection then computes once, where all of it was gathered."""

    replicated: bool = False
    gathered: bool = False
    exchanged: bool = False


DYNAMIC: Final[Mapping[str, Dynamic]] = {
    "Megatron attention, Megatron MLP": Dynamic(),
    "output-projection-replicated attention, Megatron MLP": Dynamic(replicated=True),
    "Megatron attention, weight-gathered MLP": Dynamic(gathered=True),
}


EXCHANGED: Final[Mapping[str, Dynamic]] = {
    "exchanged attention, Megatron MLP": Dynamic(replicated=True, exchanged=True),
    "exchanged attention, weight-gathered MLP": Dynamic(
        replicated=True, gathered=True, exchanged=True
    ),
}
"""Better ones, which the search finds with an all-to-all among its moves."""


def dynamic_layer(mesh: Mesh, sizes: Sizes, scheme: Dynamic, *, centred: bool = False) -> Sharded:
    """A serial layer with norms before its parts, which may be ``centred``. The stream is whole on
    every chip; behind it a weight-gathered MLP has some tokens each."""
    heads = "H" if scheme.replicated else "H_x"
    weights = {
        "queries in": "E H_x D",
        "keys in": "E J K_x D",
        "attention out": f"{heads} D E",
        "mlp in": "E G F_x",
        "mlp out": "F_x E",
    }
    writer = Writer(mesh, sizes, {"x": "B L E"}, weights)
    writer.norm("attention normed", "x", centred=centred)
    writer.product("queries", "attention normed", "queries in", "B L H D")
    writer.product("keys", "attention normed", "keys in", "B L J K D")
    writer.attend("attended", "queries", "keys")
    if scheme.exchanged:
        writer.exchange("attended", "H", "L", "x")
    elif scheme.replicated:
        writer.gather("attended", "H", "x")
    writer.product("attention", "attended", "attention out", "B L E")
    stream = "x"
    if scheme.gathered:
        stream = "x of some tokens"
        writer.copy(stream, "x")
        writer.slice(stream, "L", "x")
        writer.gather("mlp in", "F", "x")
        writer.gather("mlp out", "F", "x")
    if scheme.exchanged:
        writer.gather("attention", "L", "" if scheme.gathered else "x")
    elif not scheme.replicated and scheme.gathered:
        writer.scatter("attention", "L", "x")
    elif not scheme.replicated:
        writer.reduce("attention", "x")
    elif scheme.gathered:
        writer.slice("attention", "L", "x")
    writer.add("with attention", stream, "attention")
    writer.norm("mlp normed", "with attention", centred=centred)
    writer.product("hidden", "mlp normed", "mlp in", "B L G F")
    writer.activate("gated", "hidden")
    writer.product("mlp", "gated", "mlp out", "B L E")
    writer.reduce("mlp", writer.layouts["mlp"].partial)
    writer.add("out", "with attention", "mlp")
    writer.gather("out", "L", "x" if scheme.gathered else "")
    return writer.finish("out")


@dataclass(frozen=True, slots=True)
class DynamicForm:
    """FLOPs of products and weights per chip, elements that each sends."""

    flops: float
    moved: float
    weights: float


def dynamic_form(scheme: Dynamic, *, s: float, h: float, f: float, p: int) -> DynamicForm:
    """Of s tokens through a layer with K = H, H D = h and a gated MLP of width f, on p chips."""
    flops, weights = (8 * h * h + 6 * h * f) * s / p, (4 * h * h + 3 * h * f) / p
    attention, mlp = 2 * s * h, 2 * s * h
    if scheme.replicated:
        weights += h * h * _moved_of(p)
        attention = s * h
    if scheme.replicated and not scheme.exchanged:
        flops += 2 * s * h * h * _moved_of(p)
    if scheme.gathered:
        mlp = s * h + 3 * h * f
        attention = s * h
    if scheme.exchanged:
        attention = s * h / p + (0 if scheme.gathered else s * h)
    return DynamicForm(flops, (attention + mlp) * _moved_of(p), weights)


def _tokens(sizes: Sizes) -> float:
    return sizes["B"] * sizes["L"]


def _moved_of(chips: float) -> float:
    """The share of what K chips have together that each must send: (K - 1) / K."""
    return 1 - 1 / chips
