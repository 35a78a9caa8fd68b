"""Everything a run holds, placed as planned: arenas, caches, rings of slots, weights.

Takes what the plan sized, no more, before any row comes. Knows no rows and no schedule.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from freight.memory.activations import Activations
from freight.memory.disk import BLOCK, DirectFile, Traffic, create_scratch
from freight.memory.kv_cache import KVCache
from freight.memory.passage import Home
from freight.memory.tier import Arena, device_arena, host_arena
from freight.model.checkpoint import dummy_dtype
from freight.model.config import ModelConfig
from freight.model.sources import TensorSource
from freight.model.workspace import Workspace
from freight.plan.default import Plan
from freight.plan.kept_pages import held_beginnings, keeps_kv
from freight.plan.policy import Tier
from freight.plan.ring import size_ring
from freight.plan.scoreboard import RING_SLOTS
from freight.plan.verify import Ring
from freight.quantities import align_up
from freight.runtime.buffers import Buffers
from freight.runtime.device import ComputeDevice
from freight.runtime.kept_weights import InPlace, WeightKeeper
from freight.runtime.loaders import (
    CheckpointFiles,
    DummyWeights,
    RowLoader,
    bounce_bytes,
    torch_dtype,
)
from freight.runtime.recompute import Recomputation
from freight.runtime.weights import EmbeddingTable, WeightStore

__all__ = ["Placement"]

_ALL_TOKENS: Final = 1 << 62
"""A page of what has one size, however many tokens a row has."""

_Layers = list[torch.Tensor]
"""Pages of each layer, uint8 [P, page bytes]."""


class Placement:
    """What is where. ``near`` is the compute tier's memory, ``host`` the cpu tier's."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        sources: Mapping[str, TensorSource],
        dtype: str,
        device: ComputeDevice,
        plan: Plan,
        disk_dir: Path | None,
        dummy_seed: int | None,
        traffic: Traffic,
        keeper: WeightKeeper | None = None,
    ) -> None:
        self.plan = plan
        self.dtype = torch_dtype(dtype)
        self._config = config
        self._device = device
        self._disk_dir = disk_dir
        self._traffic = traffic
        self._scratch_files: list[DirectFile] = []
        self._keeper = keeper
        self.host = self._take_host(sources)
        try:
            self._take_memory(sources)
            self._make_caches()
            self.buffers = self._make_buffers()
            self.workspace = Workspace(self.near.take(plan.geometry.workspace_bytes, "workspace"))
            self.recomputation = self._make_recomputation()
            attention = self.host.take(plan.geometry.attention_bytes, "attention")
            self.host_workspace = Workspace(attention)
            self._place_weights(sources, dummy_seed)
            if self._device.kind == "cuda":
                torch.cuda.empty_cache()  # what was needed to make them is in no plan
        except BaseException:
            if self._device.kind == "cuda":
                torch.cuda.synchronize(self._device.torch_device)
            self.host.close()  # memory that stays pinned cannot be pinned again
            raise

    def close(self) -> None:
        """Close files and unpin memory; whoever uses it must have stopped."""
        self.files.close()
        if self._device.kind == "cuda":
            # A run that was given up may have copies under way out of memory that is let go now.
            torch.cuda.synchronize(self._device.torch_device)
        self.host.close()
        self.near.close()
        if self._keeper is not None:
            self._keeper.take_back(self._home, self.plan.layout)
            self._keeper = None  # another run may have it when this is closed once more
        for file in self._scratch_files:
            file.close()

    def _take_host(self, sources: Mapping[str, TensorSource]) -> Arena:
        size = self.plan.geometry.total("cpu") + bounce_bytes(sources)
        if self._keeper is not None:
            size -= self.plan.layout.held_bytes["cpu"]
        return host_arena(size, pinned=self._device.kind == "cuda")

    def _take_memory(self, sources: Mapping[str, TensorSource]) -> None:
        geometry = self.plan.geometry
        if self._device.kind == "cpu":
            self.near = self.host
        elif self._device.kind == "sim":
            self.near = host_arena(geometry.total("gpu"))
        else:
            self.near = device_arena(geometry.total("gpu"), self._device.torch_device)
        bounce = self.host.take(bounce_bytes(sources), "read buffer")
        self.files = CheckpointFiles(sources, self._traffic, bounce)

    def _make_caches(self) -> None:
        policy, geometry = self.plan.policy, self.plan.geometry
        disk_bytes = geometry.usage["disk"]
        near_pages = geometry.kv_pages[policy.compute_tier]
        near = _take_pages(self.near, "KV cache", near_pages, geometry.kv_page_bytes)
        pools: dict[Home, _Layers] = {"compute": self._near_pages(near)}
        if policy.compute_tier == "gpu":
            whole = [not rolls for rolls in self._rolling]
            pools["cpu"] = self._layers_on_host("KV cache", geometry.kv_pages["cpu"], whole)
        every = [True] * self._config.num_layers
        tails = self._layers_on_host("KV tails", geometry.num_tails, every)
        states, windows = self._state_caches(), self._window_caches(tails)
        self.kv_caches = [
            self._kv_cache(lane, pools, tails, states[lane], windows[lane])
            for lane in range(policy.blocks_in_flight)
        ]
        columns = self.plan.layout.stream_columns
        row_bytes = columns * self.dtype.itemsize
        block, rows = policy.num_micro_batches, geometry.activation_rows
        home = align_up(rows[policy.compute_tier] * row_bytes, BLOCK)
        host = align_up(rows["cpu"] * row_bytes, BLOCK) if policy.compute_tier == "gpu" else 0
        self.activations = Activations(
            resident=_take(self.near, "activations", block, home),
            cpu=_take(self.host, "activations", block, host),
            file=self._scratch(disk_bytes["activations"]),
            disk_stride=geometry.activation_disk_stride,
            num_columns=columns,
            dtype=self.dtype,
        )

    @property
    def _rolling(self) -> list[bool]:
        """By layer, whether it keeps the pages alone that its window reaches."""
        rolls = self.plan.geometry.windows.pages > 0
        return [rolls and self._config.has_window(i) for i in range(self._config.num_layers)]

    def _near_pages(self, pages: _Layers) -> _Layers:
        """By layer those of the compute tier: layers without pages of their own all have the first
        one's, or those of the layer whose keys they attend, and layers that attend nothing, or keep
        less, none."""
        keys, rolling = self._config.key_layers, self._rolling
        whole = [layer == own and not rolling[layer] for layer, own in enumerate(keys)]
        own_pages = iter(pages if len(pages) == sum(whole) else pages[:1] * sum(whole))
        num_pages = self.plan.geometry.kv_pages[self.plan.policy.compute_tier]
        nothing = torch.empty(num_pages, 0, dtype=torch.uint8, device=self.near.device)
        found = [next(own_pages) if is_whole else nothing for is_whole in whole]
        return [nothing if own is None else found[own] for own in keys]

    def _layers_on_host(self, purpose: str, num_pages: int, layers: Sequence[bool]) -> _Layers:
        """So many pages of each of these layers."""
        sizes = self._far_page_bytes(layers)
        return _take_pages(self.host, purpose, num_pages, sizes)

    def _far_page_bytes(self, layers: Sequence[bool]) -> list[int]:
        """Of these layers, and 0 of others."""
        sizes = self.plan.geometry.far_page_bytes
        return [size * own for size, own in zip(sizes, layers, strict=True)]

    def _window_caches(self, tails: _Layers) -> Sequence[KVCache | None]:
        """For each of the blocks in flight what its rows keep in layers with a window."""
        policy, g = self.plan.policy, self.plan.geometry
        own, lanes, rolling = g.windows, policy.blocks_in_flight, self._rolling
        if not own.pages:
            return [None] * lanes
        num_pages = {tier: rows * own.pages for tier, rows in own.rows.items()}
        count = num_pages[policy.compute_tier]
        near = iter(_take_pages(self.near, "KV windows", count, g.window_page_bytes))
        nothing = torch.empty(count, 0, dtype=torch.uint8)
        pools: dict[Home, _Layers] = {
            "compute": [next(near) if rolls else nothing for rolls in rolling]
        }
        if policy.compute_tier == "gpu":
            pools["cpu"] = self._layers_on_host("KV windows", num_pages["cpu"], rolling)
        return [
            KVCache(
                pools={home: _part(pool, lane, lanes) for home, pool in pools.items()},
                tails=_part(tails, lane, lanes),
                file=self._scratch(g.usage["disk"]["KV windows"] // lanes),
                num_disk_pages=num_pages["disk"] // lanes,
                page_tokens=policy.page_tokens,
                far_page_bytes=self._far_page_bytes(rolling),
                disk_extent_pages=own.pages if policy.is_continuous else 0,
                row_pages=own.pages,
                holds_beginnings=held_beginnings(policy, self.plan.workload) > 0,
            )
            for lane in range(lanes)
        ]

    def _state_caches(self) -> Sequence[KVCache | None]:
        """For each of the blocks in flight what its rows keep in layers without keys, one page
        each. Where none are kept all layers have the first one's."""
        policy, g, config = self.plan.policy, self.plan.geometry, self._config
        if config.recurrence is None:
            return [None] * policy.blocks_in_flight
        numbers = [sum(config.recurrence.layers[:layer]) for layer in range(config.num_layers)]

        def pages(arena: Arena, tier: Tier) -> _Layers:
            """Those of each layer; none where it keeps no state."""
            own = _take(arena, "row states", g.state_layers, g.state_rows[tier], g.state_bytes)
            nothing = own.new_empty(g.state_rows[tier], 0)
            own = own.expand(config.num_recurrent_layers, -1, -1)
            return [
                own[number] if config.keeps_state(layer) else nothing
                for layer, number in enumerate(numbers)
            ]

        pools: dict[Home, _Layers] = {"compute": pages(self.near, policy.compute_tier)}
        if policy.compute_tier == "gpu":
            pools["cpu"] = pages(self.host, "cpu")
        is_kept = keeps_kv(policy, self.plan.workload)
        lanes = policy.blocks_in_flight if is_kept else 1
        on_disk = g.state_rows["disk"] // lanes
        tails = torch.empty(on_disk, 0, dtype=torch.uint8)
        return [
            KVCache(
                pools={home: _part(pool, lane, lanes) for home, pool in pools.items()},
                tails=[tails],
                file=self._scratch(g.usage["disk"]["row states"] // lanes),
                num_disk_pages=on_disk,
                page_tokens=_ALL_TOKENS,
                far_page_bytes=[g.state_bytes * own for own in config.recurrence.layers],
                is_kept=is_kept,
                holds_beginnings=held_beginnings(policy, self.plan.workload) > 0,
            )
            for lane in range(policy.blocks_in_flight)
        ]

    def _kv_cache(
        self,
        lane: int,
        pools: Mapping[Home, _Layers],
        tails: _Layers,
        states: KVCache | None,
        windows: KVCache | None,
    ) -> KVCache:
        """The pages of one of the blocks in flight: an equal part of all. Where none are kept all
        blocks use the same."""
        policy, geometry = self.plan.policy, self.plan.geometry
        is_kept = keeps_kv(policy, self.plan.workload)
        lanes = policy.blocks_in_flight if is_kept else 1
        return KVCache(
            pools={home: _part(pool, lane, lanes) for home, pool in pools.items()},
            tails=_part(tails, lane, lanes),
            file=self._scratch(geometry.usage["disk"]["KV cache"] // lanes),
            num_disk_pages=geometry.kv_pages["disk"] // lanes,
            page_tokens=policy.page_tokens,
            far_page_bytes=self._far_page_bytes([not rolls for rolls in self._rolling]),
            disk_extent_pages=geometry.disk_extent_pages,
            is_kept=is_kept,
            states=states,
            windows=windows,
        )

    @property
    def kv_cache(self) -> KVCache:
        """That of the only block, where one at a time is in flight."""
        return self.kv_caches[0]

    def _scratch(self, num_bytes: int) -> DirectFile | None:
        if not num_bytes:
            return None
        directory = self._disk_dir or Path(tempfile.gettempdir())
        self._scratch_files.append(create_scratch(directory, num_bytes, self._traffic))
        return self._scratch_files[-1]

    def _make_buffers(self) -> Buffers:
        policy, g = self.plan.policy, self.plan.geometry
        near, host = self.near, self.host
        on_device = policy.compute_tier == "gpu"
        staged = align_up(g.usage["cpu"].get("weight staging", 0), BLOCK)
        staging_slots = policy.staging_pieces
        pages, page = g.kv_slot_pages, max(g.far_page_bytes)
        in_slot = g.kv_slot_bytes if g.num_tails and on_device else 0
        in_bytes = g.activation_slot_bytes if g.activation_rows["disk"] and on_device else 0
        embedding_bytes = g.embedding_bytes
        departing_bytes = g.departing_bytes
        block, rows = policy.num_micro_batches, g.logit_rows
        columns, vocab = self.plan.layout.stream_columns, self._config.head_size

        def ring(arena: Arena, purpose: str, name: str, *shape: int) -> torch.Tensor:
            return _take(arena, purpose, RING_SLOTS[name], *shape)

        queries = align_up(g.query_bytes, BLOCK)
        needed, state = rows + g.scored_tokens, g.score_bytes
        picked = _take(near, "logits", block, needed, columns * self.dtype.itemsize)
        scores = _take(near, "scores", block, g.scored_tokens, state)
        recomputed_pages = pages * any(policy.recomputes(self._config.num_layers))
        return Buffers(
            weight_staging=_take(
                host, "weight staging", staging_slots, staged // staging_slots if staged else 0
            ),
            embedding_rows=self.activations.resident
            if g.embeds_in_place
            else _take(host, "embedding rows", g.embedding_slots, embedding_bytes),
            embedding_slot=ring(
                near, "embedding rows", "embedding slot", embedding_bytes if on_device else 0
            ),
            departing_rows=_take(host, "departing rows", block, departing_bytes),
            departing_slot=ring(
                near, "departing rows", "departing slot", departing_bytes if on_device else 0
            ),
            kv_slot=ring(near, "KV slots", "kv slot", g.kv_slot_bytes),
            recomputed_kv=_take(near, "recomputed KV", recomputed_pages, g.page_bytes),
            window_scratch=_take(near, "window scratch", g.windows.scratch_pages, g.page_bytes),
            kv_in=ring(host, "KV staging", "kv in", in_slot),
            kv_out=ring(host, "KV staging", "kv out", in_slot),
            delegated_kv=ring(host, "delegated KV", "delegated kv", g.delegated_pages, page),
            delegated=_take(near, "delegated rows", block, queries),
            delegated_on_cpu=_take(host, "delegated rows", block, queries),
            attended=_take(near, "attended rows", block, g.attended_bytes),
            activation_slot=ring(
                near, "activation slots", "activation slot", g.activation_slot_bytes
            ),
            activations_in=ring(host, "activation staging", "activations in", in_bytes),
            activations_out=ring(host, "activation staging", "activations out", in_bytes),
            picked=picked.view(self.dtype).view(block, needed, columns),
            logits=_take(near, "logits", block, rows, vocab * 4).view(torch.float32),
            scores=scores.view(torch.float32),
        )

    def _make_recomputation(self) -> Recomputation | None:
        policy = self.plan.policy
        if not policy.recomputed:
            return None
        return Recomputation(
            self._config,
            self.buffers.recomputed_kv,
            page_tokens=policy.page_tokens,
            most_tokens=self.plan.workload.max_total_tokens,
            chunk_tokens=policy.chunk_tokens,
            dtype=self.dtype,
            workspace=self.workspace,
        )

    def _place_weights(self, sources: Mapping[str, TensorSource], dummy_seed: int | None) -> None:
        loader: RowLoader = self.files
        if dummy_seed is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            loader = DummyWeights(
                dummy_seed,
                torch_dtype(dummy_dtype(self._config, dtype)),
                tied_embeddings=self._config.tied_embeddings,
                sources=sources,
                device=self._device.torch_device,
            )
        layout = self.plan.layout
        self._home = self.near
        if self._keeper is not None:
            self._home, is_filled = self._keeper.lend(layout)
            loader = InPlace() if is_filled else loader
        self.weights = WeightStore(
            layout,
            home=self._home,
            near=self.near,
            host=self.host,
            ring=size_ring(layout, self.plan.policy.piece_bytes),
            loader=loader,
            files=self.files,
        )
        self.tables = [
            EmbeddingTable(
                table,
                layout,
                self.weights,
                near=self._home,
                host=self.host,
                loader=loader,
                files=self.files,
            )
            for table in layout.tables
        ]

    def rings(self) -> dict[str, Ring]:
        """The rings as they were allocated, for the verifier."""
        b = self.buffers
        sizes = {
            "decoded weights": self.plan.layout.decoded_bytes,
            "embedding slot": b.embedding_slot[0].numel(),
            "departing slot": b.departing_slot[0].numel(),
            "kv slot": b.kv_slot[0].numel(),
            "kv in": b.kv_in[0].numel(),
            "kv out": b.kv_out[0].numel(),
            "delegated kv": b.delegated_kv[0].numel(),
            "activation slot": b.activation_slot[0].numel(),
            "activations in": b.activations_in[0].numel(),
            "activations out": b.activations_out[0].numel(),
        }
        rings = {
            name: Ring(num_slots=RING_SLOTS[name], slot_bytes=size) for name, size in sizes.items()
        }
        own = {
            "weight staging": b.weight_staging,
            "embedding rows": b.embedding_rows,
            "departing rows": b.departing_rows,
        }
        for name, rows in own.items():
            rings[name] = Ring(num_slots=len(rows), slot_bytes=rows[0].numel())
        ring = self.weights.ring
        slots = Ring(num_slots=ring.num_blocks, slot_bytes=ring.block_bytes)
        return {**rings, "weights": slots}


def _part(layers: _Layers, number: int, parts: int) -> _Layers:
    """One of as many equal parts of the pages [P, page bytes] of all layers."""
    size = len(layers[0]) // parts
    first = number % parts * size
    return [pages[first : first + size] for pages in layers]


def _take_pages(arena: Arena, purpose: str, num_pages: int, sizes: Sequence[int]) -> _Layers:
    """So many pages [P, page bytes] of each of these sizes, one after the other."""
    if not sizes:
        return []
    room = _take(arena, purpose, num_pages * sum(sizes))
    counts = [num_pages * size for size in sizes]
    stretches = room.split(counts)  # type: ignore[no-untyped-call]
    return [own.view(num_pages, size) for own, size in zip(stretches, sizes, strict=True)]


def _take(arena: Arena, purpose: str, *shape: int) -> torch.Tensor:
    """A uint8 tensor of this shape."""
    num_bytes = 1
    for size in shape:
        num_bytes *= size
    return arena.take(num_bytes, purpose).view(shape)
