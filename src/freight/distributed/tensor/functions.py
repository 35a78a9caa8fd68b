"""What of a layer is no matter of tensors alone, on what each rank has: attention, which keeps
keys, the rows of a table, and experts.

What an expert is stands in the model's switches. Knows no layout's name and moves nothing, but for
the number of tokens that ranks whose experts exchange them agree on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from freight.distributed.tensor.attention import Attention
from freight.distributed.tensor.moves import own_range
from freight.distributed.tensor.plain import wide
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.vectors import Vectors
from freight.model.expert_layers import route
from freight.model.routes import Routes, choose_experts
from freight.model.switches import ModelConfig
from freight.partition.layout import Layout
from freight.partition.sharded import Compute

__all__ = ["LayerFunctions"]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Of a rank's tokens, flat: for each expert the ``tokens`` [N, T] that chose it and their
    ``shares`` [N, T], which are 0 where fewer did."""

    tokens: torch.Tensor
    shares: torch.Tensor


class LayerFunctions:
    """Of one layer, or of an end of a model.

    ``attention`` is left out where nothing attends. With ``agrees`` experts get as many tokens of
    each rank as of any other, as an exchange of them wants it.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        vectors: Vectors,
        attention: Attention | None = None,
        *,
        agrees: bool = False,
    ) -> None:
        self.vectors = vectors
        self.config = config
        self._ranks = ranks
        self._attention = attention
        self._agrees = agrees
        self._chosen: list[_Chosen] = []

    @property
    def capacities(self) -> list[int]:
        """Tokens that an expert could take of each own rank's, in the layer that was run last."""
        return [own.tokens.shape[1] for own in self._chosen]

    def compute(self, step: Compute, operands: list[Parts], values: Mapping[str, Parts]) -> Parts:
        """The result of a step that is not plain; ``values`` are all that there are."""
        if step.kind == "attend":
            assert self._attention is not None
            queries, keys = operands
            return self._attention.attend(step, queries, keys, self.vectors)
        if step.kind == "dispatch":
            return self._dispatch(step, operands[0], values["routes"])
        if step.kind == "combine":
            return self._combine(step, operands[0], values["routes"])
        assert step.kind == "look up"
        mine = zip(self._ranks.own, *operands, strict=True)
        return [self._look_up(step, rank, ids, table) for rank, ids, table in mine]

    def _look_up(
        self, step: Compute, rank: int, ids: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [B, L] by their numbers; those whose rows are elsewhere are 0 here."""
        count, cut = table.shape[0], step.layouts[1].cut("V")
        mesh = self._ranks.mesh
        here = own_range(mesh, rank, count * mesh.size(cut), cut)
        places = ids - here.start
        outside = (places < 0) | (places >= count)
        return F.embedding(places.clamp(0, count - 1), table).masked_fill_(outside[..., None], 0)

    # -- experts -------------------------------------------------------------------------------

    def _dispatch(self, step: Compute, x: Parts, routes: Parts) -> Parts:
        """[N, 1, T, E]: the tokens that chose each expert, of those that a rank has."""
        weights = [self._weights(own, self._real(step, index)) for index, own in enumerate(routes)]
        most = [(own > 0).sum(dim=0).max().reshape(1) for own in weights]
        if self._agrees:
            most = [torch.cat(own) for own in self._ranks.all_gather(most, self._ranks.mesh.names)]
        self._chosen = [
            _choose(own, max(1, int(count.max()))) for own, count in zip(weights, most, strict=True)
        ]
        found = [
            own.flatten(0, 1)[chosen.tokens][:, None]
            for own, chosen in zip(x, self._chosen, strict=True)
        ]
        if not self._weighs_input:
            return found
        pairs = zip(found, self._chosen, strict=True)
        return [own * chosen.shares[:, None, :, None].to(own.dtype) for own, chosen in pairs]

    @property
    def _weighs_input(self) -> bool:
        return self.config.experts is not None and self.config.experts.weighs_input

    def _real(self, step: Compute, index: int) -> torch.Tensor | None:
        """Which of a rank's tokens are no padding, [B, L]; None: all."""
        if self._attention is None:
            return None
        return self._attention.real(index, step.layouts[0].cut("B"))

    def _weights(self, routes: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """[tokens, N]: the weights of the experts that each token takes, 0 of the others."""
        experts = self.config.experts
        assert experts is not None
        scores = wide(routes.flatten(0, 1))
        size = len(scores), experts.per_token
        found = Routes(
            experts=torch.empty(size, dtype=torch.long, device=scores.device),
            weights=torch.empty(size, dtype=scores.dtype, device=scores.device),
        )
        step = route(experts, None, None, 1.0, None)
        choose_experts(step, scores, self.vectors.corrections, found)
        best = found.weights
        if real is not None:
            best = best * real.flatten()[:, None]
        return torch.zeros_like(scores).scatter_(1, found.experts, best)

    def _combine(self, step: Compute, updates: Parts, routes: Parts) -> Parts:
        """[B, L, E]: of a rank's experts the weighted sum."""
        made = []
        cut, mesh = step.layouts[0].cut("N"), self._ranks.mesh
        for rank, own, chosen, like in zip(
            self._ranks.own, updates, self._chosen, routes, strict=True
        ):
            here = own_range(mesh, rank, len(chosen.tokens), cut)
            tokens = chosen.tokens[here.start : here.stop].flatten()
            shares = chosen.shares[here.start : here.stop].flatten().to(own.dtype)
            if self._weighs_input:
                shares = (shares > 0).to(own.dtype)
            if (bias := self._bias_of(step.layouts[0], rank)) is not None:
                own = own + bias
            out = own.new_zeros(like.shape[0] * like.shape[1], own.shape[-1])
            out.index_add_(0, tokens, own.flatten(0, 2) * shares[:, None])
            made.append(out.view(*like.shape[:2], -1))
        return made

    def _bias_of(self, layout: Layout, rank: int) -> torch.Tensor | None:
        """What a rank's experts add, which is added once where sums are partial."""
        own, mesh = self.vectors.expert_bias, self._ranks.mesh
        if own is None or own_range(mesh, rank, mesh.size(layout.partial), layout.partial).start:
            return None
        return own.along(layout, mesh, rank)


def _choose(weights: torch.Tensor, capacity: int) -> _Chosen:
    """Of the weights [tokens, N] that each token gives each expert."""
    if len(weights) < capacity:
        weights = F.pad(weights, (0, 0, 0, capacity - len(weights)))
    order = torch.argsort((weights == 0).to(torch.uint8), dim=0, stable=True)[:capacity]
    shares = weights.gather(0, order)
    tokens = order.masked_fill(shares == 0, 0)
    return _Chosen(tokens.t().contiguous(), shares.t().contiguous())
