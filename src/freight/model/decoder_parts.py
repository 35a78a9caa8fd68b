"""What a decoder's units are put together of: weights by their dims, and steps that use one."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from freight.model.dims import dim_sizes
from freight.model.programme import Norm, Project, Weight
from freight.model.switches import ModelConfig

__all__ = ["Parts"]


class Parts:
    """Of one model."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.sizes = dim_sizes(config)

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
        self, name: str, x: str, out: str, dims: tuple[str, str], biased: bool = False
    ) -> Project:
        """``dims`` are those of the output and of the input."""
        bias = self.vector(f"{name}_bias", dims[0]) if biased else None
        return Project(x=x, out=out, weight=self.matrix(name, *dims), bias=bias)

    def norm(self, name: str, x: str, out: str) -> Norm:
        return Norm(
            x=x,
            out=out,
            kind=self.config.norm,  # type: ignore[arg-type]
            weight=self.vector(name, "D"),
            bias=self.vector(f"{name}_bias", "D") if self.config.norm_bias else None,
            eps=self.config.norm_eps,
        )

    def latent_norm(self, name: str, x: str, dim: str) -> Norm:
        weight = self.vector(name, dim)
        latent = self.config.latent
        assert latent is not None
        return Norm(x=x, out=x, kind="rms", weight=weight, bias=None, eps=latent.eps)

    def qk_norm(self, name: str, x: str, num_heads: int, width: str) -> Norm:
        heads = "N" if x == "q" else "K"
        kind = self.config.qk_norm
        return replace(
            self.norm(name, x, x),
            weight=self.vector(name, width if kind.startswith("per_") else f"{heads}H"),
            bias=self.vector(f"{name}_bias", width) if self.config.qk_norm_bias else None,
            num_heads=1 if kind == "whole" else num_heads,
        )
