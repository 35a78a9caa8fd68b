"""A whole model over ranks: tokens in, logits out, each call computed in a way of its own.

Every rank has its part of the weights, in memory or on its disk, and of the keys of a batch of
rows. A call may be computed otherwise than the one before: weights stay where they are, keys are
laid out anew where attention wants them otherwise. A sweep of several calls computes a layer for
all of them before the next one. Knows no sampling and no queue of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch

from freight.distributed.tensor.ahead import WeightsAhead, weights_in_order
from freight.distributed.tensor.attention import Attention, Rows
from freight.distributed.tensor.blueprint import Blueprint
from freight.distributed.tensor.cache import KVCache, moves_between
from freight.distributed.tensor.calls import Batch, Left, ModelCall, prepare
from freight.distributed.tensor.executor import Executor
from freight.distributed.tensor.functions import LayerFunctions
from freight.distributed.tensor.layers import OnDisk, StoredLayers
from freight.distributed.tensor.limits import refuse_what_cannot_be_cut
from freight.distributed.tensor.moves import own_part, own_range
from freight.distributed.tensor.packed import PackedWeights, mean_bytes, mlp_group
from freight.distributed.tensor.ranks import Parts, Ranks
from freight.distributed.tensor.reading import CheckpointReader, DummyReader, Reader
from freight.distributed.tensor.regions import Regions
from freight.distributed.tensor.scoring import Scored, pick, score_parts
from freight.distributed.tensor.stages import Passage
from freight.distributed.tensor.tracing import Timeline
from freight.distributed.tensor.vectors import Vector, Vectors
from freight.distributed.tensor.ways import Programmes, Way, Ways
from freight.distributed.tensor.weights import Loader, Stored, given_weights
from freight.errors import InputError
from freight.model.checkpoint import imagined_sources, resolve
from freight.model.config import ModelConfig, read_config
from freight.model.rope import is_same_up_to
from freight.model.sources import TensorSource
from freight.partition.layers import Cut
from freight.partition.layout import Layout
from freight.partition.moves import Move, move
from freight.partition.padding import pad
from freight.partition.sharded import Sharded
from freight.quantities import align_up

__all__ = ["TensorModel", "load_model"]


def load_model(
    model_dir: Path,
    ranks: Ranks,
    ways: Sequence[Way],
    *,
    dtype: torch.dtype,
    config: ModelConfig | None = None,
    sources: Mapping[str, TensorSource] | None = None,
    looped: bool = False,
    compiles: bool = False,
    dummy_seed: int | None = None,
    passage: Passage | None = None,
    on_disk: OnDisk | None = None,
    timeline: Timeline | None = None,
) -> TensorModel:
    """Read the own ranks' parts of a checkpoint, padded to the mesh, or make them up from a seed.
    ``config`` is its own for rows of some length, or else that for rows of any. ``sources`` are its
    tensors where they are not read in place: matrices of integers in groups are kept and moved as
    such. InputError where it cannot be cut so. ``passage``: of the layers those of a stage;
    ``on_disk``: some of these are not in memory. ``compiles``: between moves, with
    ``torch.compile``. ``timeline`` is told."""
    config = read_config(model_dir) if config is None else config
    reader: Reader
    if dummy_seed is None:
        reader = CheckpointReader(sources or resolve(config, model_dir))
    else:
        name = str(dtype).removeprefix("torch.")
        reader = DummyReader(config, sources or imagined_sources(config, name), dummy_seed, name)
    executor = Executor(
        ranks, looped=looped, regions=Regions() if compiles else None, timeline=timeline
    )
    return TensorModel(
        config,
        reader,
        executor,
        ways,
        dtype=dtype,
        passage=passage,
        on_disk=on_disk,
        timeline=timeline,
    )


class TensorModel:
    """``moved`` of its executor counts bytes that left the own ranks, ``bytes_read`` those of the
    checkpoint that they read. Of a model in stages it is the part that the ``passage`` says, and
    hands the stream on."""

    def __init__(
        self,
        config: ModelConfig,
        reader: Reader,
        executor: Executor,
        ways: Sequence[Way],
        *,
        dtype: torch.dtype,
        passage: Passage | None = None,
        on_disk: OnDisk | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        refuse_what_cannot_be_cut(config)
        self.passage = passage or Passage.whole(config.num_layers)
        first = ways[0] if isinstance(ways[0], Cut) else Cut(width="", inner="x")
        self.config = config
        self.executor = executor
        ranks = executor.ranks
        self.padding = pad(config, ranks.mesh, first, group=mlp_group(reader.sources))
        self._ways = Ways(self.padding.config, ranks.mesh, ways)
        self._ranks = ranks
        # In stages all ranks make it now: later each would wait for those that wait for it.
        in_stages = self.passage.stage.count > 1
        self._ahead = WeightsAhead(self.executor) if in_stages else None
        layers = self.passage.stage.layers
        self._kinds = [config.has_experts(layer) for layer in layers]
        self.dtype = dtype
        self.value_bytes = dtype.itemsize
        blueprint = Blueprint(config, self.padding.config)
        self.packed = packed = PackedWeights(blueprint, self._ways, reader.sources)
        self.weight_bytes = mean_bytes(reader.sources, dtype.itemsize)
        loader = Loader(ranks, blueprint, reader, dtype=dtype, packed=packed)
        sizes = [
            [*map(ceil, packed.stored_bytes(layer, self.value_bytes).values())] * len(ranks.own)
            for layer in layers
        ]
        self.layers = StoredLayers(sizes, on_disk, ranks.device, timeline, first=layers.start)
        for layer in layers:
            self.layers.append(self._load_layer(loader, layer))
        self._ends = self._load_ends(loader)
        self._positions: torch.Tensor | None = None
        if config.learned_positions:
            name = "embedding.positions"
            numbers = (torch.arange(size).numpy() for size in reader.sources[name].shape)
            whole = reader.matrix(name, *numbers)
            self._positions = whole.to(dtype).to(ranks.device)
        self.bytes_read = reader.bytes_read
        reader.close()

    def _load_layer(self, loader: Loader, layer: int) -> Stored:
        has_experts = self.config.has_experts(layer)
        layouts = self._ways.stored(with_experts=has_experts)
        moved = self._ways.moved(with_experts=has_experts)
        return loader.load(layer, layouts, self._ways.sizes(1, 1, has_experts), moved)

    def _load_ends(self, loader: Loader) -> Stored:
        """The table and the head, one tensor where they are tied; of a stage those it has."""
        layouts, sizes = self._ways.ends(), self._ways.sizes(1, 1, False)
        stage = self.passage.stage
        here = {"embedding": stage.is_first, "head": stage.is_last}
        if not self.config.tied_embeddings or not any(here.values()):
            own = {name: layout for name, layout in layouts.items() if here[name]}
            return loader.load(None, own, sizes)
        stored = loader.load(None, {"embedding": layouts["embedding"]}, sizes)
        head = [part.t() for part in stored.parts["embedding"]]
        parts = {**stored.parts, "head": head}
        return replace(stored, parts=parts, layouts=layouts)

    @property
    def stored(self) -> list[Mapping[str, Parts]]:
        """The matrices that the own ranks have in memory, by layer, the ends last."""
        return [own.parts for own in (*self.layers.here, self._ends)]

    @property
    def ways(self) -> tuple[Way, ...]:
        return self._ways.ways

    @property
    def row_parts(self) -> int:
        """Into so many equal parts rows are cut at most."""
        return self._ways.row_parts

    def token_parts(self, way: Way) -> int:
        """Tokens of a row are padded to a multiple of this."""
        return self._ways.token_parts(way)

    @property
    def weights_held(self) -> int:
        """Bytes of memory that a rank has for matrices."""
        parts = {own[0].data_ptr(): own[0] for layer in self.stored for own in layer.values()}
        return sum(own.nbytes for own in parts.values()) + self.layers.slot_bytes

    def keeps_keys(self, ways: Sequence[Way]) -> bool:
        """Whether keys lie alike in all of some ways."""
        layouts = {
            _layout_of_keys(own)
            for way in ways
            for own in self._ways.programmes(
                way, self.row_parts, self._ways.token_parts(way)
            ).layers.values()
        }
        return len(layouts) == 1

    def programmes(self, way: Way, num_tokens: int) -> Programmes:
        """The planner's, for a call of so many tokens in the fewest rows that all ways can cut."""
        rows = self._ways.row_parts
        width = align_up(-(-num_tokens // rows), self._ways.token_parts(way))
        return self._ways.programmes(way, rows, width)

    def layers_of(self, way: Way, num_tokens: int) -> list[Sharded]:
        """Those of all layers."""
        layers = self.programmes(way, num_tokens).layers
        return [layers[own] for own in self._kinds]

    def trial(self, way: Way, num_tokens: int) -> Callable[[], object]:
        """A call that computes the first layer on so many random tokens, without a cache."""
        own = self.layers_of(way, num_tokens)[0]
        ranks, layout = self._ranks, own.inputs["x"]
        shape = [int(size) for size in layout.shape(own.sizes, own.mesh)]
        x = [torch.randn(shape, dtype=self.dtype, device=ranks.device) for _ in ranks.own]
        batch = Batch(int(own.sizes["B"]), self._cache(int(own.sizes["B"]), 0))
        call = self.prepare(batch, [[0] * int(own.sizes["L"])] * len(batch.lengths), way)
        attention = Attention(self.padding.config, ranks, call.rows)
        stored = self.layers.read(0)
        return lambda: self._run(own, {"x": x}, stored, attention)

    # -- running -------------------------------------------------------------------------------

    def begin(self, num_rows: int, capacity: int) -> Batch:
        """Rows without tokens, which may come to have ``capacity`` of them each."""
        c, ropes = self.padding.config, self.config.rotations
        if not all(is_same_up_to(rope, capacity, c.max_positions) for rope in ropes):
            raise InputError(
                f"Rows of up to {capacity} tokens were to be computed over ranks.",
                "The model's rotary frequencies change with a row's length at that length.",
                "Ask for shorter rows, or run the model on one rank.",
            )
        rows = align_up(num_rows, self._ways.row_parts)
        return Batch(rows, self._cache(rows, capacity))

    def _cache(self, num_rows: int, capacity: int) -> KVCache:
        c = self.padding.config
        return KVCache(
            self.executor,
            layers=self.passage.stage.layers,
            sizes={"B": num_rows, "J": 2, "K": c.num_kv_heads, "D": c.head_dim},
            capacity=capacity,
            dtype=self.dtype,
        )

    def prepare(
        self,
        batch: Batch,
        tokens: Sequence[Sequence[int]],
        way: Way,
        seats: Sequence[int] | None = None,
        *,
        to_logits: bool = True,
        scored: Scored | None = None,
    ) -> ModelCall:
        """A call that brings new ``tokens`` of each of some rows: the batch's ``seats``, of each of
        its ``row_parts`` equal parts as many, in their order; or all of them."""
        return prepare(
            batch,
            tokens,
            way,
            seats,
            ways=self._ways,
            config=self.config,
            dtype=self.dtype,
            device=self._ranks.device,
            to_logits=to_logits,
            scored=scored,
        )

    def step(
        self,
        batch: Batch,
        tokens: Sequence[Sequence[int]],
        way: Way,
        seats: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Logits of a sweep of one call."""
        return self.sweep(batch, [self.prepare(batch, tokens, way, seats)])[0].logits

    @torch.inference_mode()
    def sweep(self, batch: Batch, calls: Sequence[ModelCall]) -> list[Left]:
        """Of each call logits [R, V] after the last new token of each row, on every rank; of a row
        that brings none they mean nothing. Where nobody wants what comes ``to_logits`` there are
        none, nor on a stage that is not the last; likewise of scores. Each layer is computed for
        all calls in turn, so that its weights come once."""
        streams = [self._entering(call) for call in calls]
        uses = [
            (place, call.programmes.layers[kind])
            for place, kind in enumerate(self._kinds)
            for call in calls
        ]
        weights = weights_in_order(self.layers, uses, self._ranks, self._gatherer)
        for layer in self.passage.stage.layers:
            for number, call in enumerate(calls):
                stored, own, given = next(weights)
                x, layout = streams[number]
                x = self._between(x, layout, own)
                keys = _layout_of_keys(own)
                batch.cache.lay(layer, keys, used=call.used, longest=call.longest)
                attention = Attention(
                    self.padding.config, self._ranks, call.rows, layer=layer, cache=batch.cache
                )
                streams[number] = self._compute(own, {"x": x, **given}, stored.vectors, attention)
        for _ in weights:  # gives the last one back
            raise AssertionError
        return [self._leaving(call, *stream) for call, stream in zip(calls, streams, strict=True)]

    def _leaving(self, call: ModelCall, x: Parts, layout: Layout) -> Left:
        """What passes on behind the own layers, and what is left of the call there."""
        if self.passage.after is not None:
            self.passage.after.send(x)
        nothing = torch.empty(0)
        if not self.passage.stage.is_last:
            return Left(nothing, nothing)
        return Left(
            self._logits(call, x, layout) if call.to_logits else nothing,
            nothing if call.scored is None else self._states(call.scored, x, layout),
        )

    def _states(self, scored: Scored, x: Parts, layout: Layout) -> torch.Tensor:
        """[B, C, state] of the tokens that are scored, some at a time."""
        found = []
        for places, targets in scored.in_turn():
            programme = self._ways.scores(*places.shape)
            some = self._between(pick(self._ranks, x, layout, places), layout, programme)
            logits, lain = self._run(programme, {"x": some}, self._ends)
            logits = [self._scaled(part)[:, : targets.shape[1]] for part in logits]
            sizes = {"vocab_size": self.config.vocab_size, "num_top": scored.num_top}
            found.append(score_parts(self.executor, logits, lain, targets, **sizes))
        return torch.cat(found, dim=1)

    def _logits(self, call: ModelCall, x: Parts, layout: Layout) -> torch.Tensor:
        x = [
            self._last(part, layout, call.rows, rank)
            for part, rank in zip(x, self._ranks.own, strict=True)
        ]
        programme = call.programmes.logits
        x = self._between(x, layout, programme)
        logits, layout = self._run(programme, {"x": x}, self._ends)
        return self._whole_logits(logits, layout)[: call.num_rows]

    def _gatherer(self) -> WeightsAhead:
        if self._ahead is None:
            self._ahead = WeightsAhead(self.executor)
        return self._ahead

    def _entering(self, call: ModelCall) -> tuple[Parts, Layout]:
        """The stream before the own layers: embedded here, or as the stage before leaves it."""
        if self.passage.before is None:
            return self._embed(call.programmes.embedding, call.ids, call.rows)
        kind = self.config.has_experts(self.passage.stage.layers.start - 1)
        own = call.programmes.layers[kind]
        layout = next(iter(own.outputs.values()))
        shape = [int(size) for size in layout.shape(own.sizes, own.mesh)]
        device = call.ids.device
        like = [torch.empty(shape, dtype=self.dtype, device=device) for _ in self._ranks.own]
        return self.passage.before.receive(like), layout

    def _embed(self, own: Sharded, ids: torch.Tensor, rows: Rows) -> tuple[Parts, Layout]:
        mesh, layout = self._ranks.mesh, own.inputs["tokens"]
        tokens = [own_part(ids, ("B", "L"), layout, mesh, rank) for rank in self._ranks.own]
        x, layout = self._run(own, {"tokens": tokens}, self._ends)
        factor = torch.tensor(self.config.embedding_scale or 1.0, dtype=self.dtype).item()
        x = [part.to(self.dtype) * factor for part in x]
        if self._positions is not None:
            places = rows.kv_lens[:, None] + torch.arange(rows.width, device=ids.device)
            places = places.clamp(max=self.config.max_positions - 1) + self.config.position_offset
            added = Vector(("B", "L", "E"), self._positions[places])
            pairs = zip(self._ranks.own, x, strict=True)
            x = [part + added.along(layout, mesh, rank) for rank, part in pairs]
        return x, layout

    def _run(
        self,
        own: Sharded,
        inputs: Mapping[str, Parts],
        stored: Stored,
        attention: Attention | None = None,
    ) -> tuple[Parts, Layout]:
        """A programme's first output, from stored weights."""
        given = {**inputs, **given_weights(self._ranks, own, stored)}
        return self._compute(own, given, stored.vectors, attention)

    def _compute(
        self,
        own: Sharded,
        given: Mapping[str, Parts],
        vectors: Vectors,
        attention: Attention | None,
    ) -> tuple[Parts, Layout]:
        agrees = any(
            step.value == "dispatched" and step.move.kind == "all-to-all" for step in own.transfers
        )
        functions = LayerFunctions(
            self.padding.config, self._ranks, vectors, attention, agrees=agrees
        )
        name = next(iter(own.outputs))
        return self.executor.run(own, given, functions)[name], own.outputs[name]

    def _between(self, x: Parts, layout: Layout, own: Sharded) -> Parts:
        """The stream as the next programme wants it."""
        wanted = own.inputs["x"]
        sizes = tuple((dim, int(own.sizes[dim])) for dim in layout.dims)
        for step in moves_between(layout, wanted, sizes, own.mesh):
            x = self.executor.move(x, layout, step, "between layers")
            layout = move(layout, step)
        return x

    def _last(self, part: torch.Tensor, layout: Layout, rows: Rows, rank: int) -> torch.Tensor:
        """[B, 1, E]: of each row its last new token."""
        mine = own_range(self._ranks.mesh, rank, len(rows.num_new), layout.cut("B"))
        places = (rows.num_new[mine.start : mine.stop] - 1).clamp(min=0)
        return part[torch.arange(len(part), device=part.device), places][:, None]

    def _whole_logits(self, logits: Parts, layout: Layout) -> torch.Tensor:
        """[B, V] on every rank."""
        for dim in layout.dims:
            if axes := layout.cut(dim):
                step = Move("all-gather", axes, source=dim)
                logits = self.executor.move(logits, layout, step, "between layers")
                layout = move(layout, step)
        return self._scaled(logits[0][:, 0, : self.config.vocab_size])

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        scale, cap = self.config.logits_scale, self.config.logits_softcap
        found = logits if scale is None else logits * scale
        return found if cap is None else torch.tanh(found / cap) * cap


def _layout_of_keys(own: Sharded) -> Layout:
    return next(step.layouts[1] for step in own.computes if step.kind == "attend")
