"""Layers of any supported family over a mesh: from a configuration and a cut to a ``Sharded``.

Weights are stored with E cut by ``width`` and F and heads cut by ``inner``, whatever they are used
as: a change of cut between phases moves no stored weight. Knows no chip and no search.

Biases, gains of norms, rotations and norms of single heads act on what every chip has whole; they
move nothing and are left out. Where two norms stand side by side, they differ by gains and biases,
which belong to the matrices behind them: the stream is gathered once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.partition.layout import Mesh
from freight.partition.limits import refuse_unknown
from freight.partition.sharded import Sharded, Sizes, Writer

__all__ = [
    "Cut",
    "attention",
    "attention_weights",
    "block",
    "embedding",
    "feed_forward",
    "layer_sizes",
    "logits",
    "mlp_weights",
]

_STREAM: Final = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a layer lies over a mesh.

    ``width`` and ``inner`` cut the weights that are stored, outermost axis first. Those of their
    last axes that are ``gathered`` cut rows instead, and weights are gathered over them before they
    are used. ``batch`` are last axes of inner + width over which attention is cut by rows rather
    than heads. ``experts`` are first axes of ``inner`` that cut experts rather than their width.
    Raises InputError where axes are not the last ones, or stand twice.
    """

    width: str = "x"
    inner: str = "zy"
    gathered: str = ""
    batch: str = ""
    experts: str = ""

    def __post_init__(self) -> None:
        used, problems = set(self.gathered), []
        for part in (self.width, self.inner):
            if used & set(part) != set(part[len(part) - len(used & set(part)) :]):
                problems.append(f"weights are gathered over {self.gathered}, not last in {part}")
        if not used <= set(self.width + self.inner) or len(used) < len(self.gathered):
            problems.append(f"weights are gathered over {self.gathered or 'none'}")
        if not self.used_axes.endswith(self.batch):
            problems.append(f"attention is cut by rows over {self.batch}, not last in what is used")
        if not self.inner.startswith(self.experts):
            problems.append(f"experts are cut by {self.experts}, not first in {self.inner}")
        if 0 < len(used & set(self.experts)) < len(self.experts):
            problems.append(f"some of the experts' axes {self.experts} cut rows, some do not")
        if problems:
            raise InputError(
                f"A cut of weights over {self.width or 'none'} and {self.inner or 'none'} was "
                "described.",
                f"What is wrong with it: {'; '.join(problems)}.",
                "Write axes outermost first; what is gathered or cut by rows is innermost.",
            )

    @property
    def used_width(self) -> str:
        """Axes that cut E of the weights as they are used."""
        return _without(self.width, self.gathered)

    @property
    def used_inner(self) -> str:
        return _without(self.inner, self.gathered)

    @property
    def used_axes(self) -> str:
        """Axes that cut heads where all are computed by heads."""
        return self.used_inner + self.used_width

    @property
    def rows(self) -> str:
        """Axes that cut rows of the stream; in alphabetical order, as rows of keys are cut."""
        return "".join(sorted(self.gathered))

    @property
    def stream(self) -> str:
        """The layout of the residual stream."""
        return _text("B", self.rows) + " L " + _text("E", self.used_width + self.used_inner)


def layer_sizes(
    config: ModelConfig, *, rows: int, new_tokens: int, past: int = 0
) -> dict[str, float]:
    """Sizes of all dims, for rows of ``new_tokens`` after ``past`` ones that are kept. Raises
    InputError for layers that no layout is known for."""
    refuse_unknown(config)
    experts = config.experts
    width = config.intermediate_size if experts is None else experts.intermediate_size
    return {
        "B": rows,
        "L": new_tokens,
        "E": config.hidden_size,
        "F": width,
        "G": 2 if config.gated_mlp else 1,
        "H": config.num_heads,
        "K": config.num_kv_heads,
        "D": config.head_dim,
        "J": 2,
        "V": config.vocab_size,
        "N": 1 if experts is None else experts.num_experts,
        "Q": 1 if experts is None else experts.shared_size,
        "T": 1 if experts is None else new_tokens * experts.per_token / experts.num_experts,
        "S": past + new_tokens,
        "A": past + (new_tokens + 1) / 2,
    }


def feed_forward(mesh: Mesh, sizes: Sizes, cut: Cut) -> Sharded:
    """The MLP alone, from the stream to the stream, without norm and residual: what the closed
    forms count."""
    writer = Writer(mesh, sizes, {_STREAM: cut.stream}, mlp_weights(cut))
    writer.gather(_STREAM, "E", cut.used_inner)
    _gather_weights(writer, cut)
    _mlp(writer, cut, _STREAM)
    writer.scatter("mlp", "E", cut.used_inner)
    return writer.finish("mlp")


def attention(mesh: Mesh, sizes: Sizes, cut: Cut) -> Sharded:
    """Attention alone, from the stream to the stream, without norm and residual."""
    writer = Writer(mesh, sizes, {_STREAM: cut.stream}, attention_weights(mesh, sizes, cut))
    writer.gather(_STREAM, "E", cut.used_inner)
    _gather_weights(writer, cut)
    _attention(writer, cut, _STREAM)
    writer.scatter("attention", "E", cut.used_inner)
    return writer.finish("attention")


def block(
    mesh: Mesh, sizes: Sizes, cut: Cut, config: ModelConfig, *, with_experts: bool = False
) -> Sharded:
    """A whole layer: norms, attention, MLP or experts, residual stream."""
    weights = attention_weights(mesh, sizes, cut)
    weights |= _expert_weights(cut, config) if with_experts else mlp_weights(cut)
    writer = Writer(mesh, sizes, {_STREAM: cut.stream}, weights)
    _gather_weights(writer, cut)
    if config.parallel:
        _parallel(writer, cut, config, with_experts=with_experts)
        return writer.finish("out", "keys")
    stream = _residual(writer, cut, config, _STREAM, "attention")
    stream = _residual(writer, cut, config, stream, "experts" if with_experts else "mlp")
    return writer.finish(stream, "keys")


def embedding(mesh: Mesh, sizes: Sizes, cut: Cut) -> Sharded:
    """Rows of the embedding, which is cut as V by ``inner`` and E by ``width``: each chip looks up
    the tokens that it has, as a product with single ones would."""
    tokens = f"{_text('B', cut.rows)} L V"
    table = {"embedding": f"{_text('V', cut.inner)} {_text('E', cut.width)}"}
    writer = Writer(mesh, sizes, {"tokens": tokens}, table)
    _gather_weights(writer, cut)
    writer.slice("tokens", "V", cut.used_inner)
    writer.look_up(_STREAM, "tokens", "embedding", "B L E")
    writer.scatter(_STREAM, "E", cut.used_inner)
    return writer.finish(_STREAM)


def logits(mesh: Mesh, sizes: Sizes, cut: Cut, *, centred: bool = False) -> Sharded:
    """The output head over as many tokens per row as ``sizes`` has new ones; V stays cut. Its norm
    may be ``centred``."""
    table = {"head": f"{_text('E', cut.width)} {_text('V', cut.inner)}"}
    writer = Writer(mesh, sizes, {_STREAM: cut.stream}, table)
    _gather_weights(writer, cut)
    writer.norm("normed", _STREAM, centred=centred)
    writer.gather("normed", "E", cut.used_inner)
    writer.product("logits", "normed", "head", "B L V")
    writer.scatter("logits", "V", cut.used_width)
    return writer.finish("logits")


def _residual(writer: Writer, cut: Cut, config: ModelConfig, stream: str, part: str) -> str:
    """One part of a serial block; the name of the stream behind it."""
    source, centred = stream, config.has_centred_norms
    if config.norm_place in ("before", "both", "experts"):
        source = f"{part} normed"
        writer.norm(source, stream, centred=centred)
    else:
        source = f"{part} input"
        writer.copy(source, stream)
    writer.gather(source, "E", cut.used_inner)
    match part:
        case "attention":
            _attention(writer, cut, source, whole=config.qk_norm == "whole")
        case "mlp":
            _mlp(writer, cut, source)
        case _:
            _all_experts(writer, cut, config, source)
    writer.scatter(part, "E", cut.used_inner)
    if config.norm_place in ("both", "update", part):
        writer.norm(f"{part} out normed", part, centred=centred)
        part = f"{part} out normed"
    out = f"{part} added"
    writer.add(out, stream, part)
    if config.norm_place == "after":
        writer.norm(f"{out} normed", out, centred=centred)
        out = f"{out} normed"
    return out


def _parallel(writer: Writer, cut: Cut, config: ModelConfig, *, with_experts: bool) -> None:
    """Attention and MLP, or experts, of one input: one gathering, one scattering of each kind."""
    writer.norm("normed", _STREAM, centred=config.has_centred_norms)
    writer.gather("normed", "E", cut.used_inner)
    if with_experts:
        _attention(writer, cut, "normed", whole=config.qk_norm == "whole")
        _all_experts(writer, cut, config, "normed")
    else:
        _attention_and_mlp(writer, cut, config)
    writer.add("both", "experts" if with_experts else "mlp", "attention")
    writer.scatter("both", "E", cut.used_inner)
    writer.add("out", _STREAM, "both")


def _attention_and_mlp(writer: Writer, cut: Cut, config: ModelConfig) -> None:
    """Of one input: what either sends goes beside what the other does."""
    writer.product("hidden", "normed", "mlp in", "B L G F")
    writer.scatter("hidden", "F", cut.used_width)
    writer.together()
    _project_heads(writer, cut, "normed", whole=config.qk_norm == "whole")
    writer.activate("gated", "hidden")
    _attend(writer, cut)
    writer.gather("gated", "F", cut.used_width)
    writer.together()
    _gather_attended(writer, cut)
    writer.product("mlp", "gated", "mlp out", "B L E")
    writer.product("attention", "attended", "attention out", "B L E")


def _mlp(writer: Writer, cut: Cut, source: str) -> None:
    writer.product("hidden", source, "mlp in", "B L G F")
    writer.scatter("hidden", "F", cut.used_width)
    writer.activate("gated", "hidden")
    writer.gather("gated", "F", cut.used_width)
    writer.product("mlp", "gated", "mlp out", "B L E")


def _all_experts(writer: Writer, cut: Cut, config: ModelConfig, source: str) -> None:
    """Those that tokens choose, and the MLP beside them."""
    own = config.experts
    is_beside = own is not None and own.shared_size > 0
    _experts(writer, cut, source, "routed" if is_beside else "experts")
    if own is not None and is_beside:
        _beside_experts(writer, cut, source, has_share=own.shared_gate)


def _experts(writer: Writer, cut: Cut, source: str, out: str) -> None:
    """Rows that are cut by the experts' axes are exchanged; other rows are on all their chips, of
    which each takes what its experts need."""
    exchanged = bool(cut.experts) and set(cut.experts) <= set(cut.rows)
    writer.product("routes", source, "router", "B L N")
    writer.reduce("routes", writer.layouts["routes"].partial)
    writer.dispatch("dispatched", source)
    if exchanged:
        writer.exchange("dispatched", "B", "N", cut.experts)
    else:
        writer.slice("dispatched", "N", cut.experts)
    writer.product("hidden", "dispatched", "experts in", "N B T G F")
    writer.scatter("hidden", "F", cut.used_width)
    writer.activate("gated", "hidden")
    writer.gather("gated", "F", cut.used_width)
    writer.product("expert", "gated", "experts out", "N B T E")
    if exchanged:
        back = "".join(axis for axis in cut.rows if axis in cut.experts)
        writer.exchange("expert", "N", "B", back)
    writer.combine(out, "expert", "routes")


def _beside_experts(writer: Writer, cut: Cut, source: str, *, has_share: bool) -> None:
    """An MLP that all tokens take, by a share of its own where it ``has_share``: its sums are as
    partial as those of the experts, which it comes to."""
    writer.product("shared hidden", source, "shared in", "B L G Q")
    writer.scatter("shared hidden", "Q", cut.used_width)
    writer.activate("shared gated", "shared hidden")
    writer.gather("shared gated", "Q", cut.used_width)
    writer.product("shared", "shared gated", "shared out", "B L E")
    part = "shared"
    if has_share:
        own, part = "share of each token", "shared weighed"
        writer.product(own, source, "share", "B L")
        writer.reduce(own, writer.layouts[own].partial)
        writer.weigh(part, "shared", own)
    writer.add("experts", "routed", part)


def _attention(writer: Writer, cut: Cut, source: str, *, whole: bool = False) -> None:
    _project_heads(writer, cut, source, whole=whole)
    _attend(writer, cut)
    _gather_attended(writer, cut)
    writer.product("attention", "attended", "attention out", "B L E")


def _project_heads(writer: Writer, cut: Cut, source: str, *, whole: bool) -> None:
    """Queries, keys and values, no longer partial. They are cut by heads as far as there are any
    to cut, then by the width of a head. Queries and keys may be normalised as a ``whole``."""
    writer.product("queries", source, "queries in", "B L H D")
    writer.product("keys", source, "keys in", "B L J K D")
    _scatter_heads(writer, cut, "queries", "H")
    writer.together()
    _scatter_heads(writer, cut, "keys", "K")
    if whole:
        writer.norm_heads("queries", "H")
        writer.norm_heads("keys", "K")


def _scatter_heads(writer: Writer, cut: Cut, value: str, heads: str) -> None:
    by_heads = _by_heads(writer.mesh, writer.sizes[heads], cut.used_axes)
    writer.scatter(value, heads, _common(cut.used_width, by_heads))
    writer.together()
    writer.scatter(value, "D", _without(cut.used_width, by_heads))


def _attend(writer: Writer, cut: Cut) -> None:
    """By heads, and over ``batch`` by rows; what is attended is then cut by heads again.

    Rows are cut in one order, for queries and keys: by axes that cut the width of query heads,
    then by others that cut that of key heads, then by the rest.
    """
    queries, keys = (_by_heads(writer.mesh, writer.sizes[own], cut.used_axes) for own in "HK")
    narrow = _without(cut.batch, queries)
    middle, last = _without(_common(cut.batch, queries), keys), _common(cut.batch, keys)
    first, second, third = ("".join(sorted(own)) for own in (narrow, middle, last))
    writer.exchange("queries", "D", "B", first)
    writer.together()
    writer.exchange("queries", "H", "B", second + third)
    writer.together()
    writer.exchange("keys", "D", "B", first + second)
    writer.together()
    writer.exchange("keys", "K", "B", third)
    left = writer.layouts["queries"].cut("D")
    writer.gather("queries", "D", left)
    writer.gather("keys", "D", writer.layouts["keys"].cut("D"))
    writer.attend("attended", "queries", "keys")
    writer.exchange("attended", "B", "H", _common(cut.batch, queries))
    writer.together()
    writer.slice("attended", "D", left)
    writer.together()
    writer.exchange("attended", "B", "D", narrow)


def _gather_attended(writer: Writer, cut: Cut) -> None:
    """Over the axes that cut the width of the output projection as it is used."""
    by_heads = _by_heads(writer.mesh, writer.sizes["H"], cut.used_axes)
    writer.gather("attended", "H", _common(cut.used_width, by_heads))
    writer.together()
    writer.gather("attended", "D", _without(cut.used_width, by_heads))


def _by_heads(mesh: Mesh, num_heads: float, axes: str) -> str:
    """The first of some axes: those that cut whole heads."""
    taken = ""
    for axis in axes:
        if num_heads % mesh.size(taken + axis):
            break
        taken += axis
    return taken


def mlp_weights(cut: Cut) -> dict[str, str]:
    """Layouts of the MLP's weights as they are stored."""
    width, inner = _text("E", cut.width), _text("F", cut.inner)
    return {"mlp in": f"{width} G {inner}", "mlp out": f"{inner} {width}"}


def _expert_weights(cut: Cut, config: ModelConfig) -> dict[str, str]:
    width, inner = _text("E", cut.width), _text("F", _without(cut.inner, cut.experts))
    experts, own = _text("N", cut.experts), config.experts
    beside: dict[str, str] = {}
    if own is not None and own.shared_size:
        whole = _text("Q", cut.inner)
        beside = {"shared in": f"{width} G {whole}", "shared out": f"{whole} {width}"}
        beside |= {"share": width} if own.shared_gate else {}
    return {
        **beside,
        "router": f"{width} N",
        "experts in": f"{experts} {width} G {inner}",
        "experts out": f"{experts} {inner} {width}",
    }


def attention_weights(mesh: Mesh, sizes: Sizes, cut: Cut) -> dict[str, str]:
    """Layouts of attention's weights as they are stored: by heads as far as these divide."""
    width = _text("E", cut.width)

    def cut_by(heads: str) -> tuple[str, str]:
        by_heads = _by_heads(mesh, sizes[heads], cut.inner)
        return _text(heads, by_heads), _text("D", _without(cut.inner, by_heads))

    queries, keys = (" ".join(cut_by(heads)) for heads in "HK")
    return {
        "queries in": f"{width} {queries}",
        "keys in": f"{width} J {keys}",
        "attention out": f"{queries} {width}",
    }


def _gather_weights(writer: Writer, cut: Cut) -> None:
    """Experts stay where they are: what they need comes to them."""
    for name, layout in writer.weights.items():
        for dim, axes in zip(layout.dims, layout.cuts, strict=True):
            if dim != "N":
                writer.gather(name, dim, "".join(axis for axis in axes if axis in cut.gathered))


def _common(axes: str, others: str) -> str:
    return "".join(axis for axis in axes if axis in others)


def _without(axes: str, others: str) -> str:
    return "".join(axis for axis in axes if axis not in others)


def _text(dim: str, axes: str) -> str:
    return f"{dim}_{axes}" if axes else dim
