"""The engine: a model placed over the tiers by a plan, ready to run rows through it.

Puts the pieces together and owns what must be closed; what happens is in the scheduler, the
schedule and the executor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from freight.memory.activations import Activations
from freight.memory.disk import DirectFile, Traffic, create_scratch
from freight.memory.kv_cache import KVCache
from freight.memory.tier import Arena, device_arena, host_arena
from freight.memory.transfer import Link
from freight.model.batch import MicroBatch
from freight.model.checkpoint import TensorSource, resolve
from freight.model.config import DTYPE_BYTES, ModelConfig, read_config
from freight.model.dummy import write_dummy_checkpoint
from freight.model.programme import build_programme
from freight.model.workspace import Workspace
from freight.plan.default import Plan, Planner, Wishes
from freight.plan.geometry import ring_blocks
from freight.plan.operation import Operation
from freight.plan.policy import Split, Tier
from freight.plan.schedule import schedule
from freight.plan.scoreboard import RING_SLOTS
from freight.plan.sweep import StreamModel, StreamPiece, StreamUnit
from freight.plan.verify import Ring, verify
from freight.plan.workload import Workload
from freight.quantities import align_up
from freight.runtime.batches import BatchPreparer
from freight.runtime.device import (
    ComputeDevice,
    choose_dtype,
    find_device,
    quiet_allocator,
    room_on_cpu,
)
from freight.runtime.executor import Executor
from freight.runtime.loaders import (
    BOUNCE_BYTES,
    CheckpointFiles,
    DummyWeights,
    RowLoader,
    torch_dtype,
)
from freight.runtime.options import EngineOptions, Shares
from freight.runtime.performer import Buffers, Performer
from freight.runtime.request import Completion, Request, SamplingParams
from freight.runtime.sampler import sample
from freight.runtime.scheduler import Scheduler
from freight.runtime.summary import describe_holdings, describe_run
from freight.runtime.tokenizer import Tokenizer, has_tokenizer
from freight.runtime.weights import EmbeddingTable, WeightStore

__all__ = ["Engine", "build_engine"]

_BLOCK = 4096


def build_engine(model_dir: Path, *, options: EngineOptions, workload: Workload) -> Engine:
    """Plan, take the memory, and place the weights. Everything that can be refused is refused
    before anything is loaded."""
    quiet_allocator()
    config = read_config(model_dir)
    device = find_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    if options.dummy_seed is None:
        sources: Mapping[str, TensorSource] = resolve(config, model_dir)
    else:
        sources = _imagined_sources(config, dtype)
    plan = _plan(config, sources, dtype, device, options, workload)
    return Engine(
        config=config,
        sources=sources,
        dtype=dtype,
        device=device,
        plan=plan,
        options=options,
        tokenizer=Tokenizer(model_dir) if has_tokenizer(model_dir) else None,
    )


def _imagined_sources(config: ModelConfig, dtype: str) -> dict[str, TensorSource]:
    """Where dummy weights would lie if they were in one file."""
    sources = {}
    offset = 0
    for name, shape in config.tensor_shapes().items():
        num_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        sources[name] = TensorSource(
            path=Path("dummy"), offset=offset, num_bytes=num_bytes, dtype=dtype, shape=shape
        )
        offset += num_bytes
    if config.tied_embeddings:
        sources["head.weight"] = sources["embedding"]
    return sources


def _plan(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    dtype: str,
    device: ComputeDevice,
    options: EngineOptions,
    workload: Workload,
) -> Plan:
    room_bytes, own_bytes = room_on_cpu(options.cpu_memory_bytes)
    row_bytes = max(weight.num_bytes // weight.shape[0] for weight in sources.values())
    room: dict[Tier, int] = {"cpu": room_bytes - _bounce_bytes(row_bytes)}
    if device.tier == "gpu":
        room["gpu"] = device.room_bytes(options.gpu_memory_bytes)
    planner = Planner(
        config=config,
        programme=build_programme(config),
        sources=sources,
        dtype=dtype,
        workload=workload,
        compute_tier=device.tier,
        room=room,
        taken_bytes=own_bytes + _bounce_bytes(row_bytes),
        has_disk_dir=options.disk_dir is not None,
        wishes=Wishes(
            weights=_split(options.weights_percent),
            kv=_split(options.kv_percent),
            activations=_split(options.activations_percent),
            micro_batch_size=options.micro_batch_size,
            num_micro_batches=options.num_micro_batches,
            overlap=options.overlap,
        ),
    )
    return planner.plan()


def _bounce_bytes(row_bytes: int) -> int:
    return max(BOUNCE_BYTES, align_up(row_bytes, _BLOCK) + 2 * _BLOCK)


def _split(shares: Shares | None) -> Split | None:
    if shares is None:
        return None
    gpu, cpu, disk = (share / 100 for share in shares)
    return Split(gpu=gpu, cpu=cpu, disk=disk)


class Engine:
    """Runs rows. One at a time may use it; ``close`` gives files and memory back."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        sources: Mapping[str, TensorSource],
        dtype: str,
        device: ComputeDevice,
        plan: Plan,
        options: EngineOptions,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.dtype = torch_dtype(dtype)
        self.device = device
        self.tokenizer = tokenizer
        self.traffic = Traffic()
        self._options = options
        self._dummy_dir: tempfile.TemporaryDirectory[str] | None = None
        self._requests: dict[int, Request] = {}
        sources = self._real_sources(sources, dtype)
        self._take_memory(sources)
        self._make_caches()
        self._place_weights(sources)
        self._record: Callable[[Operation, float, float], None] | None = None

    # -- building ------------------------------------------------------------------------------

    def _real_sources(
        self, sources: Mapping[str, TensorSource], dtype: str
    ) -> Mapping[str, TensorSource]:
        """Dummy weights of which some are on disk are written there first."""
        disk_bytes = self.plan.layout.tier_bytes()["disk"]
        if self._options.dummy_seed is None or not disk_bytes:
            return sources
        parent = self._options.disk_dir
        self._dummy_dir = tempfile.TemporaryDirectory(prefix="freight-dummy-", dir=parent)
        directory = Path(self._dummy_dir.name)
        write_dummy_checkpoint(self.config, directory, self._options.dummy_seed, dtype)
        sources = resolve(self.config, directory)
        self.plan = self.plan.with_sources(self.config, sources, dtype)
        return sources

    def _take_memory(self, sources: Mapping[str, TensorSource]) -> None:
        row_bytes = max(weight.num_bytes // weight.shape[0] for weight in sources.values())
        geometry = self.plan.geometry
        pinned = self.device.kind == "cuda"
        size = geometry.total("cpu") + _bounce_bytes(row_bytes)
        self._host = host_arena(size, pinned=pinned)
        if self.device.kind == "cpu":
            self._near = self._host
        elif self.device.kind == "sim":
            self._near = host_arena(geometry.total("gpu"))
        else:
            self._near = device_arena(geometry.total("gpu"), self.device.torch_device)
        bounce = self._host.take(_bounce_bytes(row_bytes), "read buffer")
        self._files = CheckpointFiles(sources, self.traffic, bounce)

    def _make_caches(self) -> None:
        policy, geometry = self.plan.policy, self.plan.geometry
        disk_bytes = geometry.usage["disk"]
        layers, page = self.config.num_layers, geometry.page_bytes
        near_pages = geometry.kv_pages[policy.compute_tier]
        pools = {"compute": _take(self._near, "KV cache", layers, near_pages, page)}
        if policy.compute_tier == "gpu":
            pools["cpu"] = _take(self._host, "KV cache", layers, geometry.kv_pages["cpu"], page)
        self.kv_cache = KVCache(
            pools=pools,  # type: ignore[arg-type]
            tails=_take(self._host, "KV tails", layers, geometry.num_tails, page),
            file=self._scratch(disk_bytes["KV cache"]),
            num_disk_pages=geometry.kv_pages["disk"],
            page_tokens=policy.page_tokens,
            page_bytes=page,
        )
        row_bytes = self.config.hidden_size * self.dtype.itemsize
        block, rows = policy.num_micro_batches, geometry.activation_rows
        home = align_up(rows[policy.compute_tier] * row_bytes, _BLOCK)
        host = align_up(rows["cpu"] * row_bytes, _BLOCK) if policy.compute_tier == "gpu" else 0
        self._activations = Activations(
            resident=_take(self._near, "activations", block, home),
            cpu=_take(self._host, "activations", block, host),
            file=self._scratch(disk_bytes["activations"]),
            disk_stride=geometry.activation_disk_stride,
            num_columns=self.config.hidden_size,
            dtype=self.dtype,
        )
        self._buffers = self._make_buffers()
        self._workspace = Workspace(self._near.take(geometry.workspace_bytes, "workspace"))

    def _scratch(self, num_bytes: int) -> DirectFile | None:
        if not num_bytes:
            return None
        directory = self._options.disk_dir or Path(tempfile.gettempdir())
        return create_scratch(directory, num_bytes, self.traffic)

    def _make_buffers(self) -> Buffers:
        policy, g = self.plan.policy, self.plan.geometry
        near, host = self._near, self._host
        on_device = policy.compute_tier == "gpu"
        staged = align_up(g.usage["cpu"].get("weight staging", 0), _BLOCK)
        staging_slots = RING_SLOTS["weight staging"]
        pages, page = g.kv_slot_pages, g.page_bytes
        in_pages = pages if g.num_tails and on_device else 0
        in_bytes = g.activation_slot_bytes if g.activation_rows["disk"] and on_device else 0
        embedding_bytes = g.embedding_bytes
        block, rows = policy.num_micro_batches, policy.micro_batch_size
        width, vocab = self.config.hidden_size, self.config.vocab_size

        def ring(arena: Arena, purpose: str, name: str, *shape: int) -> torch.Tensor:
            return _take(arena, purpose, RING_SLOTS[name], *shape)

        last = _take(near, "logits", block, rows, width * self.dtype.itemsize)
        return Buffers(
            weight_staging=_take(
                host, "weight staging", staging_slots, staged // staging_slots if staged else 0
            ),
            embedding_rows=ring(host, "embedding rows", "embedding rows", embedding_bytes),
            embedding_slot=ring(
                near, "embedding rows", "embedding slot", embedding_bytes if on_device else 0
            ),
            kv_slot=ring(near, "KV slots", "kv slot", pages, page),
            kv_in=ring(host, "KV staging", "kv in", in_pages, page),
            kv_out=ring(host, "KV staging", "kv out", in_pages, page),
            activation_slot=ring(
                near, "activation slots", "activation slot", g.activation_slot_bytes
            ),
            activations_in=ring(host, "activation staging", "activations in", in_bytes),
            activations_out=ring(host, "activation staging", "activations out", in_bytes),
            last=last.view(self.dtype).view(block, rows, width),
            logits=_take(near, "logits", block, rows, vocab * 4).view(torch.float32),
        )

    def _place_weights(self, sources: Mapping[str, TensorSource]) -> None:
        loader: RowLoader = self._files
        if self._options.dummy_seed is not None:
            loader = DummyWeights(
                self._options.dummy_seed, tied_embeddings=self.config.tied_embeddings
            )
        layout = self.plan.layout
        self._weights = WeightStore(
            layout,
            near=self._near,
            host=self._host,
            num_blocks=ring_blocks(layout, self.plan.policy),
            block_bytes=self.plan.policy.piece_bytes,
            dtype=self.dtype,
            loader=loader,
            files=self._files,
        )
        self._embedding = EmbeddingTable(
            layout,
            self._weights,
            near=self._near,
            host=self._host,
            dtype=self.dtype,
            loader=loader,
            files=self._files,
        )
        self.load_traffic = dict(self.traffic.moved)

    # -- running -------------------------------------------------------------------------------

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Answer rows in an order of the engine's choosing, each exactly once."""
        policy = self.plan.policy
        batches = BatchPreparer(
            self.config,
            policy,
            kv_cache=self.kv_cache,
            activations=self._activations,
            embedding=self._embedding,
            device=self.device.torch_device,
            dtype=self.dtype,
        )
        scheduler = Scheduler(
            self._remember(requests),
            policy=policy,
            kv_cache=self.kv_cache,
            tokenizer=self.tokenizer,
            eos_ids=frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids,
            describe=batches.describe,
        )
        executor = Executor(
            self._performer(batches).perform,
            device=self.device.torch_device,
            overlap=policy.overlap,
            record=self._record,
        )
        stream = schedule(scheduler.sweeps(), self._stream_model(), scheduler.expects_more)
        if self._options.verify:
            stream = verify(stream, self._rings())
        for operation, token_ids in executor.run(stream):
            assert operation.batch is not None
            for completion in scheduler.update(operation.batch, token_ids):
                del self._requests[completion.index]
                yield completion

    def _remember(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            self._requests[request.index] = request
            yield request

    def _sample(self, batch: MicroBatch, logits: torch.Tensor) -> list[int]:
        params: list[SamplingParams] = []
        positions = []
        for span in batch.rows:
            params.append(self._requests[span.row].params)
            positions.append(span.total_len)
        return sample(logits, params, positions)

    def _performer(self, batches: BatchPreparer) -> Performer:
        on_device = self.device.tier == "gpu"
        rate = self._options.sim_bytes_per_s
        return Performer(
            config=self.config,
            programme=build_programme(self.config),
            policy=self.plan.policy,
            weights=self._weights,
            embedding=self._embedding,
            kv_cache=self.kv_cache,
            activations=self._activations,
            buffers=self._buffers,
            workspace=self._workspace,
            batches=batches,
            to_device=Link("host to device", self.traffic, rate if on_device else None),
            from_device=Link("device to host", self.traffic, rate if on_device else None),
            sample=self._sample,
        )

    def _stream_model(self) -> StreamModel:
        units = [StreamUnit(kind="embedding", layer=None)]
        for layout in self.plan.layout.units:
            units.append(
                StreamUnit(
                    kind=layout.unit.kind,
                    layer=layout.unit.layer,
                    pieces=tuple(
                        StreamPiece(
                            tier=piece.tier, num_bytes=piece.num_bytes, offset=piece.slot_offset
                        )
                        for piece in layout.pieces
                    ),
                    needs_decode=layout.decoded_bytes > 0,
                )
            )
        return StreamModel(
            units=tuple(units),
            compute_tier=self.plan.policy.compute_tier,
            ring_blocks=self._weights.ring_blocks,
            block_bytes=self.plan.policy.piece_bytes,
        )

    def _rings(self) -> dict[str, Ring]:
        """The rings as they were allocated, for the verifier."""
        b = self._buffers
        sizes = {
            "decoded weights": self.plan.layout.decoded_bytes,
            "weight staging": b.weight_staging[0].numel(),
            "embedding rows": b.embedding_rows[0].numel(),
            "embedding slot": b.embedding_slot[0].numel(),
            "kv slot": b.kv_slot[0].numel(),
            "kv in": b.kv_in[0].numel(),
            "kv out": b.kv_out[0].numel(),
            "activation slot": b.activation_slot[0].numel(),
            "activations in": b.activations_in[0].numel(),
            "activations out": b.activations_out[0].numel(),
        }
        rings = {
            name: Ring(num_slots=RING_SLOTS[name], slot_bytes=size) for name, size in sizes.items()
        }
        blocks, size = self._weights.ring_blocks, self.plan.policy.piece_bytes
        return {**rings, "weights": Ring(num_slots=blocks, slot_bytes=size)}

    # -- telling -------------------------------------------------------------------------------

    def status(self) -> str:
        """What each tier holds, in a few words."""
        return describe_holdings(self.plan)

    def summary(self) -> str:
        """The policy, where the weights were, and what crossed each link."""
        return describe_run(self.plan, self.traffic.moved)

    def close(self) -> None:
        self._files.close()
        if self._dummy_dir is not None:
            self._dummy_dir.cleanup()


def _take(arena: Arena, purpose: str, *shape: int) -> torch.Tensor:
    """A uint8 tensor of this shape."""
    num_bytes = 1
    for size in shape:
        num_bytes *= size
    return arena.take(num_bytes, purpose).view(shape)
