"""The weights that each rank keeps: its part of every matrix, read once, and small vectors whole.

They are stored in the layout that all ways of computing share: what is gathered, sliced or left in
place for a call is the planner's business. A matrix of integers in groups stays one where it can,
and one that the checkpoint has in fewer bits than are computed with is kept in these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from freight.distributed.tensor.blueprint import Blueprint, Matrix
from freight.distributed.tensor.moves import own_range
from freight.distributed.tensor.packed import PackedWeight, PackedWeights, own_weight_part
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.reading import Reader
from freight.distributed.tensor.vectors import Affine, HeadNorm, Vector, Vectors
from freight.model.number_format import is_widened
from freight.model.switches import ModelConfig
from freight.partition.layout import Layout
from freight.partition.sharded import Sharded

__all__ = ["Loader", "Stored", "given_weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Of a layer, or of an end of the model: matrices laid out as ``layouts``, and vectors."""

    parts: Mapping[str, Parts]
    layouts: Mapping[str, Layout]
    vectors: Vectors


def given_weights(ranks: Ranks, own: Sharded, stored: Stored) -> dict[str, Parts]:
    """Weights as a programme wants them: of those that are stored whole and used cut each rank
    takes its part."""
    given = {}
    for name, wanted in own.weights.items():
        given[name] = stored.parts[name]
        before, packed = stored.layouts[name], stored.vectors.packed.get(name)
        if before == wanted:
            continue
        pairs = zip(ranks.own, stored.parts[name], strict=True)
        given[name] = [
            own_weight_part(part, packed, before, wanted, own.mesh, rank) for rank, part in pairs
        ]
    return given


class Loader:
    """Reads for the own ranks. ``dtype`` is what is computed with; ``packed`` says which weights
    are kept as integers."""

    def __init__(
        self,
        ranks: Ranks,
        blueprint: Blueprint,
        reader: Reader,
        *,
        dtype: torch.dtype,
        packed: PackedWeights,
    ) -> None:
        self._ranks = ranks
        self._blueprint = blueprint
        self._sources = reader.sources
        self._reader = reader
        self._dtype = dtype
        self._packed = packed

    def load(
        self,
        layer: int | None,
        layouts: Mapping[str, Layout],
        sizes: Mapping[str, float],
        moved: Collection[str] = (),
    ) -> Stored:
        """The weights of ``layouts`` of a layer, or of an end where ``layer`` is None. Those that
        are to be ``moved`` lie as messages do, others as in the checkpoint."""
        parts: dict[str, Parts] = {}
        packed: dict[str, PackedWeight] = {}
        for name, layout in layouts.items():
            if (own := self._packed.find(name, layer)) is not None:
                packed[name] = own
            mine = [self._part(name, layer, layout, sizes, rank, own) for rank in self._ranks.own]
            if name in moved:
                mine = [part.contiguous() for part in mine]
            parts[name] = mine
        vectors = self._vectors(layer, packed)
        return Stored(parts=parts, layouts=layouts, vectors=vectors)

    # -- matrices ------------------------------------------------------------------------------

    def _part(
        self,
        name: str,
        layer: int | None,
        layout: Layout,
        sizes: Mapping[str, float],
        rank: int,
        packed: PackedWeight | None,
    ) -> torch.Tensor:
        """A rank's part of one weight, as it lies in the checkpoint, or in bytes."""
        mesh, blueprint = self._ranks.mesh, self._blueprint
        ranges = {
            dim: own_range(mesh, rank, int(sizes[dim]), layout.cut(dim)) for dim in layout.dims
        }
        stack = blueprint.stack(name)
        read, dims = [], stack
        for chosen in product(*(ranges[dim] for dim in stack)):
            matrix = blueprint.matrix(name, layer, chosen)
            rows, columns = (
                blueprint.numbers(matrix, own, ranges)
                for own in (matrix.row_dims, matrix.column_dims)
            )
            if packed is not None:
                read.append(self._reader.packed(matrix.name, rows, columns))
                continue
            found = self._reader.matrix(matrix.name, rows, columns)
            is_kept = name not in ("router", "share") and self._is_widened(found)
            read.append(found if is_kept else found.to(self._dtype))
            dims = stack + matrix.row_dims + matrix.column_dims
        if packed is not None:
            bytes_of = torch.stack(read).view([*(len(ranges[dim]) for dim in packed.dims), -1])
            return bytes_of.to(self._ranks.device)
        whole = torch.stack(read).view([len(ranges[dim]) for dim in dims])
        return whole.to(self._ranks.device).permute([dims.index(dim) for dim in layout.dims])

    def _is_widened(self, found: torch.Tensor) -> bool:
        """Whether numbers are kept in fewer bits than are computed with, which hold all of them."""
        names = (str(own).removeprefix("torch.") for own in (found.dtype, self._dtype))
        return self._dtype != torch.float64 and is_widened(*names)

    # -- vectors -------------------------------------------------------------------------------

    def _vectors(self, layer: int | None, packed: Mapping[str, PackedWeight]) -> Vectors:
        c = self._blueprint.config
        if layer is None:
            norm = self._affine("head.norm")
            return Vectors(
                norms={} if norm is None else {"normed": norm},
                biases=self._head_bias(),
                packed=packed,
                no_norms=frozenset() if c.final_norm else frozenset(["normed"]),
            )
        prefix = f"layers.{layer}"
        attention = self._affine(f"{prefix}.attention.norm")
        is_shared = c.parallel and c.shared_norm
        mlp = attention if is_shared else self._affine(f"{prefix}.mlp.norm")
        norms: dict[str, Affine | None] = {}
        inputs: dict[str, Affine | None] = {}
        if is_shared:
            norms = {"normed": attention}
        elif c.parallel:
            inputs = {"queries in": attention, "keys in": attention, "mlp in": mlp}
            inputs |= dict.fromkeys(("router", "experts in", "shared in", "share"), mlp)
        elif c.norm_place == "after":
            norms = {"attention added normed": attention, "mlp added normed": mlp}
        elif c.norm_place == "update":
            norms = {f"{part} out normed": mlp for part in ("mlp", "experts")}
            norms["attention out normed"] = attention
        else:
            norms = {"attention normed": attention, "mlp normed": mlp, "experts normed": mlp}
        if c.norm_place == "both":
            norms["attention out normed"] = self._affine(f"{prefix}.attention.post_norm")
        if c.norm_place in ("both", "experts"):
            after = self._affine(f"{prefix}.mlp.post_norm")
            norms |= {f"{part} out normed": after for part in ("mlp", "experts")}
        norms |= self._whole_norms(f"{prefix}.attention")
        return Vectors(
            norms={name: own for name, own in norms.items() if own is not None},
            inputs={name: own for name, own in inputs.items() if own is not None},
            biases=self._biases(layer),
            packed=packed,
            corrections=self._corrections(layer),
            expert_bias=self._expert_bias(layer),
            limits=(c.mlp_limit(layer), None if c.experts is None else c.experts.limit(layer)),
            heads=self._head_norms(f"{prefix}.attention"),
            sinks=self._sinks(layer),
        )

    def _head_norms(self, prefix: str) -> dict[str, HeadNorm]:
        """Of queries and keys, those that have weights."""
        c, found = self._blueprint.config, {}
        if c.qk_norm in ("none", "rotated", "whole"):
            return {}
        for name, letter, dim in (("queries", "q", "H"), ("keys", "k", "K")):
            affine = self._affine(f"{prefix}.{letter}_norm")
            assert affine is not None
            gain, bias = affine.gain.tensor, None if affine.bias is None else affine.bias.tensor
            if c.qk_norm == "each_head":
                gain = self._of_heads(gain.view(-1, c.head_dim), dim)
            found[name] = HeadNorm(gain, bias)
        return found

    def _whole_norms(self, prefix: str) -> dict[str, Affine]:
        """Of queries and keys that are normalised as a whole."""
        c, found = self._blueprint.config, {}
        for name, letter, dim in (("queries", "q", "H"), ("keys", "k", "K")):
            own = self._affine(f"{prefix}.{letter}_norm") if c.qk_norm == "whole" else None
            if own is not None:
                gain = self._of_heads(own.gain.tensor.view(-1, c.head_dim), dim)
                found[name] = Affine(Vector((dim, "D"), gain), width=own.gain.tensor.numel())
        return found

    def _sinks(self, layer: int) -> torch.Tensor | None:
        if not self._blueprint.config.has_sinks(layer):
            return None
        return self._of_heads(self._whole(f"layers.{layer}.attention.sinks", wide=True), "H")

    def _of_heads(self, numbers: torch.Tensor, dim: str) -> torch.Tensor:
        """What each head has, [heads, ...], with those that are padding."""
        padded = self._blueprint.padded
        count = padded.num_heads if dim == "H" else padded.num_kv_heads
        places = torch.tensor([self._blueprint.head(own, dim) for own in range(count)])
        return numbers[places.clamp(min=0).to(numbers.device)]

    def _affine(self, name: str) -> Affine | None:
        """A norm's, in 32 bits at least."""
        if name not in self._sources:
            return None
        gain = self._whole(name, wide=True)
        if self._blueprint.config.norm.endswith("plus_one"):
            gain = gain + 1
        if f"{name}_bias" not in self._sources:
            return Affine(Vector(("E",), gain))
        bias = self._whole(f"{name}_bias", wide=True)
        return Affine(Vector(("E",), gain), Vector(("E",), bias))

    def _biases(self, layer: int) -> dict[str, Vector]:
        """Those of products: rows of a matrix have one each."""
        padded = self._blueprint.padded
        sizes = {
            "H": padded.num_heads,
            "K": padded.num_kv_heads,
            "D": padded.head_dim,
            "E": padded.hidden_size,
            "F": padded.intermediate_size,
            "G": 2 if padded.gated_mlp else 1,
            "J": 2,
        }
        names = ["queries in", "keys in", "attention out", "mlp in", "mlp out"]
        if padded.has_experts(layer):
            names = [*names[:3], "router", "experts in"]
            if padded.experts is not None and padded.experts.shared_size:
                names += ["shared in", "shared out"]
            sizes |= _sizes_of_experts(padded)
        found = {name: self._bias(name, layer, sizes) for name in names}
        return {name: own for name, own in found.items() if own is not None}

    def _expert_bias(self, layer: int) -> Vector | None:
        padded = self._blueprint.padded
        if not padded.has_experts(layer):
            return None
        sizes = {"E": padded.hidden_size, **_sizes_of_experts(padded)}
        return self._bias("experts out", layer, sizes)

    def _bias(self, name: str, layer: int, sizes: Mapping[str, int]) -> Vector | None:
        """That of a product, where the checkpoint has one."""
        stack = self._blueprint.stack(name)
        chosen = [*product(*(range(sizes[dim]) for dim in stack))]
        first = self._blueprint.matrix(name, layer, chosen[0])
        if _bias_name(first) not in self._sources:
            return None
        dims = stack + first.row_dims
        rows = [self._bias_rows(name, layer, own, sizes) for own in chosen]
        return Vector(tuple(dims), torch.stack(rows).view([sizes[dim] for dim in dims]))

    def _head_bias(self) -> dict[str, Vector]:
        if "head.bias" not in self._sources:
            return {}
        whole = self._whole("head.bias")
        lacking = self._blueprint.padded.vocab_size - len(whole)
        return {"head": Vector(("V",), torch.nn.functional.pad(whole, (0, lacking)))}

    def _corrections(self, layer: int) -> torch.Tensor | None:
        name = f"layers.{layer}.router.corrections"
        return self._whole(name, wide=True) if name in self._sources else None

    def _bias_rows(
        self, name: str, layer: int, chosen: Sequence[int], sizes: Mapping[str, int]
    ) -> torch.Tensor:
        matrix = self._blueprint.matrix(name, layer, chosen)
        ranges = {dim: range(size) for dim, size in sizes.items()}
        whole = self._whole(_bias_name(matrix))
        numbers = torch.from_numpy(self._blueprint.numbers(matrix, matrix.row_dims, ranges))
        numbers = numbers.to(whole.device)
        return whole[numbers.clamp(min=0)].masked_fill_(numbers < 0, 0)

    def _whole(self, name: str, *, wide: bool = False) -> torch.Tensor:
        found = self._reader.vector(name)
        dtype = self._dtype
        if wide and dtype != torch.float64:
            dtype = torch.float32
        return found.to(dtype).to(self._ranks.device)


def _bias_name(matrix: Matrix) -> str:
    name, is_alone = matrix.name, matrix.name.endswith(".weight")
    return f"{name.removesuffix('.weight')}.bias" if is_alone else f"{name}_bias"


def _sizes_of_experts(config: ModelConfig) -> dict[str, int]:
    assert config.experts is not None
    own = config.experts
    return {"N": own.num_experts, "F": own.intermediate_size, "Q": own.shared_size}
