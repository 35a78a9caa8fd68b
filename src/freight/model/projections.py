"""What makes the queries, keys and values of a layer, and the gates of what it attends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freight.model.decoder_parts import Parts
from freight.model.latent_steps import AbsorbKeys, JoinLatent, SplitLatent
from freight.model.layer_kinds import Latent
from freight.model.programme import Clip, Grow, GrowHeads, Level, Rotate, Split, Step
from freight.model.recurrent_steps import Deal, Dealt, deal_blocks

__all__ = ["Projections"]


class Projections(Parts):
    """Of one model."""

    def gated_queries(self, prefix: str, x: str) -> list[Step]:
        """Queries and gates, which take turns head by head."""
        c = self.config
        width, columns = c.head_dim, c.num_heads * c.head_dim
        parts = tuple(
            Dealt(out=out, begin=begin, width=width, first=0, num_columns=columns)
            for out, begin in (("q", 0), ("gates", width))
        )
        return [
            self.project(f"{prefix}.q", x, "queries", ("2NH", "D"), c.qkv_bias),
            Deal(x="queries", num_groups=c.num_heads, parts=parts),
        ]

    def head_dims(self, layer: int) -> tuple[str, str, str]:
        """Query heads of a layer, its key/value heads, and how wide all of them are."""
        own = self.config.other_heads
        return ("N", "K", "H") if own is None or not own.layers[layer] else ("n", "k", "h")

    def queries_keys_values(self, prefix: str, x: str, layer: int) -> list[Step]:
        c, rope = self.config, self.config.ropes[layer]
        num_heads, num_kv_heads = c.query_heads(layer), c.heads(layer).num_kv
        of_queries, of_keys, width = self.head_dims(layer)
        # Keys are normed into a value of their own where values are made of them too.
        others = None if of_keys == "K" else c.other_heads
        keys = "v" if others is not None and others.keys_are_values else "k"
        steps: list[Step] = []
        if c.qkv_blocks is not None:
            product = self.project(f"{prefix}.qkv", x, "qkv", ("SH", "D"), c.qkv_bias)
            steps += [product, deal_blocks("qkv", "qvk", c.qkv_blocks, c.num_heads * c.head_dim)]
        elif c.fused_qkv:
            split = Split(
                x="qkv",
                q="q",
                k="k",
                v="v",
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.projected_width,
            )
            steps += [self.project(f"{prefix}.qkv", x, "qkv", ("SH", "D"), c.qkv_bias), split]
        else:
            names = [("q", "q", of_queries + width)]
            names += [("k", keys, of_keys + width)] if c.keeping[layer] else []
            if keys == "k" and c.keeping[layer]:
                names.append(("v", "v", of_keys + (width if c.value_width is None else "U")))
            if c.attention_gates == "queries":
                steps += self.gated_queries(prefix, x)
                del names[0]
            elif c.gates_attention:
                of_gates = of_queries + (width if c.attention_gates == "apart" else "")
                names.append(("gates", "gates", of_gates))
            for name, out, rows in names:
                biased = c.qkv_bias and name != "gates"
                steps.append(self.project(f"{prefix}.{name}", x, out, (rows, "D"), biased))
        if c.qkv_limit is not None:
            steps += [Clip(x=name, limit=c.qkv_limit) for name in "qkv"]
        heads = {"q": num_heads, **({"k": num_kv_heads} if c.keeping[layer] else {})}
        for name, count in heads.items():
            turns = [] if rope is None else [Rotate(x=name, num_heads=count, rope=rope)]
            if c.qk_norm in ("none", "rotated"):
                steps += turns
                if c.qk_norm == "rotated" and turns:
                    steps.append(Level(x=name, num_heads=count, eps=c.norm_eps))
                continue
            norm = self.qk_norm(f"{prefix}.{name}_norm", name, count, width)
            if name == "k":
                norm = replace(norm, x=keys)
            steps += [*turns, norm] if c.qk_norm == "per_rotated_head" else [norm, *turns]
        steps += self.grown(prefix, "q", num_heads)
        if c.value_norm and c.keeping[layer]:
            steps.append(Level(x="v", num_heads=num_kv_heads, eps=c.norm_eps))
        return steps

    def latent_queries_keys(self, prefix: str, x: str, latent: Latent, layer: int) -> list[Step]:
        c, rope = self.config, self.config.ropes[layer]
        turned = (("q", c.num_heads), ("turned", 1))
        turns = [] if rope is None else [Rotate(x=y, num_heads=n, rope=rope) for y, n in turned]
        widths = {"latent_width": latent.rank, "turned_width": c.head_dim - latent.rank}
        steps: list[Step] = []
        source, dims, gates = x, "D", "N" if c.attention_gates == "heads" else "NU"
        if latent.query_rank is not None:
            name = f"{prefix}.q_down"
            steps.append(self.project(name, x, "narrow", ("Q", "D"), c.qkv_bias))
            steps.append(self.latent_norm(f"{name}_norm", "narrow", "Q"))
            source, dims = "narrow", "Q"
        is_alone = self._is_alone(layer)
        kept, rows = ("latent", "C") if is_alone else ("kept", "A")
        split = SplitLatent(x="kept", latent="latent", turned="turned", **widths)
        return [
            *steps,
            self.project(f"{prefix}.q", source, "queries", ("NW", dims)),
            *self.grown(prefix, "q", c.num_heads, "queries"),
            AbsorbKeys(x="queries", out="q", **self.of_heads(prefix, latent, layer)),
            *([self.project(f"{prefix}.gates", x, "gates", (gates, "D"))] * c.gates_attention),
            self.project(f"{prefix}.kv_down", x, kept, (rows, "D"), c.qkv_bias),
            *([] if is_alone else [split]),
            self.latent_norm(f"{prefix}.kv_norm", "latent", "C"),
            *turns,
            JoinLatent(x="latent", turned=None if is_alone else "turned", out="k", **widths),
        ]

    def _is_alone(self, layer: int) -> bool:
        """Whether the layer's latents have no key beside them."""
        latent = self.config.latent
        return latent is not None and latent.alone_unturned and self.config.ropes[layer] is None

    def grown(self, prefix: str, name: str, num_heads: int, value: str | None = None) -> list[Step]:
        """Queries, called ``value``, by their position."""
        own = self.config.query_growth
        if own is None:
            return []
        if own.rate is not None:
            return [Grow(x=value or name, rate=own.rate, span=own.span)]
        names = (f"{prefix}.{name}_growth_{part}" for part in ("rate", "bias"))
        rate, bias = (self.vector(own, "N" if name == "q" else "l") for own in names)
        return [GrowHeads(x=value or name, num_heads=num_heads, rate=rate, bias=bias)]

    def of_heads(self, prefix: str, latent: Latent, layer: int) -> dict[str, Any]:
        """What makes keys and values of a latent."""
        turned, is_alone = self.config.head_dim - latent.rank, self._is_alone(layer)
        return {
            "weight": self.matrix(f"{prefix}.kv_up", "Nf" if is_alone else "NB", "C"),
            "num_heads": self.config.num_heads,
            "key_width": latent.key_width + turned * is_alone,
            "value_width": latent.value_width,
            "turned_width": turned,
        }
