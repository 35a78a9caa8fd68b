"""Layers cut every way that the planner knows, and what they must come to: in plain torch, whole.

Imports nothing from other tests: processes that are ranks import it by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from freight.distributed.tensor.attention import Attention, Rows
from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.functions import LayerFunctions
from freight.distributed.tensor.model import TensorModel
from freight.distributed.tensor.moves import own_part
from freight.distributed.tensor.ranks import Ranks
from freight.distributed.tensor.regions import Regions
from freight.distributed.tensor.vectors import Affine, Vector, Vectors
from freight.distributed.tensor.ways import Way
from freight.model.config import ModelConfig, parse_config
from freight.partition.fabric import Fabric
from freight.partition.layers import (
    Cut,
    attention,
    block,
    embedding,
    feed_forward,
    layer_sizes,
    logits,
)
from freight.partition.layout import Layout, Mesh
from freight.partition.named import DYNAMIC, EXCHANGED, FEED_FORWARD, dynamic_layer
from freight.partition.planner import cuts
from freight.partition.scheme_search import find_schemes
from freight.partition.schemes import LITERAL, PAPER
from freight.partition.searched import route_layer, scheme_layer
from freight.partition.sharded import Sharded
from freight.partition.shortest import Prices, best_route

Tensors = Mapping[str, torch.Tensor]
WIDTH, ROWS, NEW = 64, 64, 2
CUTS = (
    Cut(gathered="xyz"),  # prefill, weights gathered
    Cut(),  # heads, weight-stationary
    Cut(batch="zyx"),  # rows
    Cut(gathered="x", batch="y"),
    Cut(batch="yx"),
    Cut(gathered="zy", batch="x"),
)


def config(
    heads: int = 64, key_heads: int = 64, *, head_dim: int = 64, experts: int = 0, **switches
) -> ModelConfig:
    """A head's width divides by the number of chips: no more of it than that costs time alone."""
    raw = {
        "model_type": "mixtral" if experts else "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "num_local_experts": experts or None,
        "num_experts_per_tok": 2,
    }
    return replace(parse_config(raw), **{"ropes": (None,), **switches})


def beside_experts(own: ModelConfig) -> ModelConfig:
    """With an MLP beside its experts, which counts by a share of its own."""
    experts = replace(own.experts, shared_size=WIDTH, shared_gate=True)
    return replace(own, experts=experts)


@dataclass(frozen=True)
class Case:
    """``own`` leaves ``out``, which must be what ``plain`` makes of the same tensors."""

    name: str
    config: ModelConfig
    own: Sharded
    out: str
    plain: Callable[[ModelConfig, Tensors], torch.Tensor]

    @property
    def vectors(self) -> Vectors:
        """Those that it cannot be computed without."""
        own = self.config
        if own.qk_norm != "whole":
            return Vectors()
        norms = {}
        for name, dim, count in (("queries", "H", own.num_heads), ("keys", "K", own.num_kv_heads)):
            gain = torch.ones(count, own.head_dim, dtype=torch.float64)
            norms[name] = Affine(Vector((dim, "D"), gain), width=count * own.head_dim)
        return Vectors(norms=norms)


def cases(mesh: Mesh, *, some: bool = False) -> Iterator[Case]:
    """All named layouts on a mesh x, y, z and every cut of whole layers; of these ``some`` only."""
    for gated in (False, True):
        for name, named in FEED_FORWARD.items():
            own = config(head_dim=mesh.num_chips, gated_mlp=gated)
            sizes = layer_sizes(own, rows=ROWS, new_tokens=NEW)
            yield Case(name, own, feed_forward(mesh, sizes, named.cut), "mlp", plain_mlp)
    for key_heads in (64, 4, 1):
        own = config(64, key_heads, head_dim=mesh.num_chips)
        sizes = layer_sizes(own, rows=ROWS, new_tokens=NEW)
        for cut in (Cut(), Cut(batch="zyx"), Cut(batch="yx"), Cut(gathered="x", batch="y")):
            part = attention(mesh, sizes, cut)
            yield Case(f"attention {cut}", own, part, "attention", plain_attention)
    yield from blocks(mesh, some=some)
    for cut in (Cut(), Cut(gathered="xy")):
        own = config(head_dim=mesh.num_chips)
        sizes = layer_sizes(own, rows=ROWS, new_tokens=NEW)
        yield Case(f"embedding {cut}", own, embedding(mesh, sizes, cut), "x", plain_embedding)
        yield Case(f"logits {cut}", own, logits(mesh, sizes, cut), "logits", plain_logits)


def blocks(mesh: Mesh, *, some: bool) -> Iterator[Case]:
    make = partial(config, head_dim=mesh.num_chips)
    models = {
        "multi-head": make(),
        "multi-query, parallel": make(64, 1, parallel=True),
        "grouped": make(8, 2, norm_place="both"),
        "layer norm after": make(4, 4, norm="layer", norm_place="after"),
        "experts": make(64, 8, experts=16),
        "experts and an MLP": beside_experts(make(64, 8, experts=16)),
        "heads as a whole": make(16, 4, qk_norm="whole", norm_place="update"),
    }
    for number, (name, own) in enumerate(models.items()):
        sizes = layer_sizes(own, rows=ROWS, new_tokens=NEW)
        for place, cut in enumerate(cuts(mesh, own)):
            if not some or place % len(models) == number:
                part = block(mesh, sizes, cut, own, with_experts=own.experts is not None)
                yield Case(f"{name} {cut}", own, part, next(iter(part.outputs)), plain_block)


def schemes(chips: int) -> Iterator[Case]:
    """Of Ong & Kwon, over one axis."""
    mesh = Mesh.of(x=chips)
    own = config(head_dim=chips)
    sizes = layer_sizes(own, rows=1, new_tokens=ROWS)
    for name, scheme in {**DYNAMIC, **EXCHANGED}.items():
        yield Case(name, own, dynamic_layer(mesh, sizes, scheme), "out", plain_block)


def searched(mesh: Mesh, *, literal: bool) -> Iterator[Case]:
    """What searches have found: routes from few tokens to many, over links fast and slow, and
    schemes by the paper's rules and with all-to-all, ``literal`` ones too."""
    own = config(head_dim=mesh.num_chips)
    names = set()
    for tokens in (1, 4, 64, 1024):
        sizes = {**layer_sizes(own, rows=ROWS, new_tokens=NEW), "L": tokens}
        for flops in (1e9, 1e13):
            rates = {axis: 1e9 for axis in mesh.names}
            fabric = Fabric(mesh, rates, dict.fromkeys(mesh.names, 0.0))
            route = best_route(sizes, Prices(fabric=fabric, flops=flops))
            name = f"route {route.stream}: {'; '.join(route.steps)}"
            if name not in names:
                names.add(name)
                own_sizes = {**sizes, "L": NEW}
                yield Case(name, own, route_layer(route, mesh, own_sizes), "mlp", plain_mlp)
    axis = Mesh.of(x=mesh.num_chips)
    for rules in (*([LITERAL] if literal else []), PAPER, replace(PAPER, all_to_all=True)):
        for number, scheme in enumerate(find_schemes(own, axis.num_chips, rules)):
            sizes = layer_sizes(own, rows=1, new_tokens=ROWS)
            part = scheme_layer(scheme, axis, sizes)
            moved = part.moved(weights=False) + part.moved(weights=True)
            norms = sum(t.elements for t in part.transfers if t.value.endswith("sums"))
            assert not norms
            counted = (scheme.moved + scheme.gathered).at(ROWS)
            assert abs(moved - counted) <= 1e-9 * counted, (scheme.moves, moved, counted)
            yield Case(f"scheme {number}: {'; '.join(scheme.moves)}", own, part, "out", plain_block)


def draw(own: Sharded) -> dict[str, torch.Tensor]:
    """All inputs and weights, whole; matrices small enough for sums to stay near one."""
    torch.manual_seed(7)
    layouts: dict[str, Layout] = {**own.inputs, **own.weights}
    found = {}
    for name, layout in layouts.items():
        shape = tuple(int(own.sizes[dim]) for dim in layout.dims)
        small = 0.2 if name in own.weights else 1.0
        found[name] = torch.randn(shape, dtype=torch.float64) * small
        if name == "tokens":
            found[name] = torch.randint(0, shape[-1], shape[:-1])
    return found


def whole(case: Case) -> tuple[Tensors, torch.Tensor]:
    """All that goes in, and what is to come out."""
    tensors = draw(case.own)
    return tensors, case.plain(case.config, tensors)


def check(
    ranks: Ranks,
    case: Case,
    known: tuple[Tensors, torch.Tensor] | None = None,
    *,
    looped: bool = False,
    regions: Regions | None = None,
) -> Counter:
    """The own ranks' parts of the result are those of the plain computation, ``whole`` where it is
    not ``known``; bytes that they sent, less those that the algebra counts on average, by kind."""
    own, (tensors, wanted) = case.own, known or whole(case)
    layouts = {**own.inputs, **own.weights}
    given = {
        name: [
            own_part(tensors[name], layout.dims[: tensors[name].dim()], layout, own.mesh, rank)
            for rank in ranks.own
        ]
        for name, layout in layouts.items()
    }
    executor = Executor(ranks, looped=looped, regions=regions)
    rows = Rows(
        width=int(own.sizes["L"]),
        num_new=torch.full((int(own.sizes["B"]),), int(own.sizes["L"])),
        kv_lens=torch.zeros(int(own.sizes["B"]), dtype=torch.long),
    )
    agrees = any(t.value == "dispatched" and t.move.kind == "all-to-all" for t in own.transfers)
    functions = LayerFunctions(
        case.config, ranks, case.vectors, Attention(case.config, ranks, rows), agrees=agrees
    )
    found = executor.run(own, given, functions)[case.out]
    scale, layout = wanted.abs().max(), own.outputs[case.out]
    for rank, part in zip(ranks.own, found, strict=True):
        mine = own_part(wanted, layout.dims, layout, own.mesh, rank)
        assert part.shape == mine.shape, case.name
        assert ((part - mine).abs().max() / scale) < 1e-12, case.name
    counted = Counter(executor.moved)
    for transfer in own.transfers:
        what = "weights" if transfer.is_weight else "activations"
        elements = transfer.elements
        if transfer.value in ("dispatched", "hidden", "gated", "expert") and own.sizes["N"] > 1:
            # The planner's tokens per expert are a mean; what was moved is what experts could take.
            apart = own.mesh.size(case.own.inputs["x"].cut("B"))
            tokens = sum(functions.capacities) / len(ranks.own) * apart / own.sizes["B"]
            elements *= tokens / own.sizes["T"]
        counted[transfer.move.kind, what] -= elements * 8 * len(ranks.own)
    return counted


def greedy(
    model: TensorModel, prompts: Sequence[Sequence[int]], steps: int, ways: Sequence[Way]
) -> Iterator[list[int]]:
    """The rows' tokens, step by step; each step in the next of the ways."""
    batch = model.begin(len(prompts), max(map(len, prompts)) + steps)
    new: Sequence[Sequence[int]] = prompts
    for step in range(steps):
        made = model.step(batch, new, ways[step % len(ways)]).argmax(dim=-1).tolist()
        yield made
        new = [[token] for token in made]


# -- the same without a mesh --------------------------------------------------------------------


def plain_mlp(own: ModelConfig, tensors: Tensors, x: torch.Tensor | None = None) -> torch.Tensor:
    x = tensors["x"] if x is None else x
    hidden = torch.einsum("ble,egf->blgf", x, tensors["mlp in"])
    return torch.einsum("blf,fe->ble", _activate(hidden), tensors["mlp out"])


def plain_attention(
    own: ModelConfig, tensors: Tensors, x: torch.Tensor | None = None
) -> torch.Tensor:
    x = tensors["x"] if x is None else x
    q = torch.einsum("ble,ehd->bhld", x, tensors["queries in"])
    k, v = torch.einsum("ble,ejkd->jbkld", x, tensors["keys in"])
    if own.qk_norm == "whole":
        q, k = (part * _factor(own, part) for part in (q, k))
    done = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=own.attention_scale, enable_gqa=True
    )
    return torch.einsum("bhld,hde->ble", done, tensors["attention out"])


def plain_experts(own: ModelConfig, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    shares = torch.softmax(x @ tensors["router"], dim=-1)
    best, chosen = shares.topk(own.experts.per_token, dim=-1)
    shares = torch.zeros_like(shares).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
    hidden = torch.einsum("ble,negf->nblgf", x, tensors["experts in"])
    outs = torch.einsum("nblf,nfe->nble", _activate(hidden), tensors["experts out"])
    made = torch.einsum("nble,bln->ble", outs, shares)
    if "shared in" not in tensors:
        return made
    beside = {"mlp in": tensors["shared in"], "mlp out": tensors["shared out"]}
    share = torch.sigmoid(x @ tensors["share"])[..., None]
    return made + share * plain_mlp(own, beside, x)


def plain_block(own: ModelConfig, tensors: Tensors) -> torch.Tensor:
    x = tensors["x"]
    if own.parallel:
        normed = _norm(own, x)
        return x + plain_attention(own, tensors, normed) + plain_mlp(own, tensors, normed)
    for part in (plain_attention, plain_mlp if own.experts is None else plain_experts):
        is_before = own.norm_place in ("before", "both")
        made = part(own, tensors, _norm(own, x) if is_before else x)
        x = x + (_norm(own, made) if own.norm_place in ("both", "update") else made)
        x = _norm(own, x) if own.norm_place == "after" else x
    return x


def plain_embedding(own: ModelConfig, tensors: Tensors) -> torch.Tensor:
    return tensors["embedding"][tensors["tokens"]]


def plain_logits(own: ModelConfig, tensors: Tensors) -> torch.Tensor:
    return _norm(own, tensors["x"]) @ tensors["head"]


def _activate(hidden: torch.Tensor) -> torch.Tensor:
    gate = F.silu(hidden[..., 0, :])
    return gate * hidden[..., 1, :] if hidden.shape[-2] == 2 else gate


def _factor(own: ModelConfig, heads: torch.Tensor) -> torch.Tensor:
    """Over the root mean square of all heads [B, H, L, D] of a token."""
    return torch.rsqrt(heads.square().mean(dim=(1, 3), keepdim=True) + own.norm_eps)


def _norm(own: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    if own.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=own.norm_eps)
    return F.rms_norm(x, x.shape[-1:], eps=own.norm_eps)
