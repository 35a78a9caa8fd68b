"""The engine of a job whose model is cut over the ranks of a run: what they agree on, and its life.

Called on all ranks at once; what one of them refuses is raised on all. Rows, sampling and answers
are the first rank's, the others follow it. Knows options and ranks, no layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from freight.distributed.ranks import Ranks
from freight.distributed.tensor.engine import TensorEngine, follow
from freight.distributed.tensor.executor import Moved
from freight.distributed.tensor.fitting import Planned, TensorOptions
from freight.distributed.tensor.launch import launch
from freight.distributed.tensor.model import TensorModel
from freight.distributed.tensor.processes import ProcessRanks
from freight.distributed.tensor.ranks import Ranks as TensorRanks
from freight.distributed.tensor.regions import warm_up_compiler
from freight.distributed.tensor.stages import Passage, in_stage, passage_of
from freight.distributed.tensor.switch import Switch
from freight.distributed.tensor.tracing import Timeline, TracedRanks
from freight.distributed.tensor.wires import connector
from freight.errors import BudgetError, InputError, RankError
from freight.kernels.warm_up import warm_up
from freight.model.checkpoint import imagined_sources, resolve
from freight.model.compression import describe_fit
from freight.model.config import read_config
from freight.model.number_format import find_compressed
from freight.model.sources import TensorSource
from freight.model.task import for_task
from freight.partition.layout import Mesh
from freight.plan.workload import Workload
from freight.quantities import format_bytes
from freight.runtime.compressed_files import kept_sources
from freight.runtime.device import (
    ComputeDevice,
    choose_dtype,
    find_device,
    room_on_cpu,
    tight_allocator,
)
from freight.runtime.kernel_choice import choose_kernels
from freight.runtime.loaders import torch_dtype
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Request
from freight.runtime.tokenizer import Tokenizer, open_tokenizer

__all__ = ["CutEngine", "build_cut_engine", "refuse_options"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """What a rank has found before anything is loaded."""

    device: ComputeDevice
    dtype: str
    sources: Mapping[str, TensorSource]
    room_bytes: int
    tokenizer: Tokenizer | None
    timeline: Timeline | None


def build_cut_engine(
    model_dir: Path,
    *,
    options: EngineOptions,
    workload: Workload,
    ranks: Ranks,
    pin: str | None = None,
    compiles: bool = False,
    stages: int = 1,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> CutEngine:
    """This rank's part of the model, once all have planned it, and hold theirs. Of ``stages`` each
    has some of the layers, and as many ranks. ``compiles``: with ``torch.compile``. ``say`` is told
    of what takes time, and of matrices that are not compressed as was asked."""

    def open_own() -> _Opened:
        return _open(model_dir, options, workload, ranks, compiles, say)

    opened = ranks.share("opened", open_own)
    dtypes = ranks.exchange("dtype", opened.dtype)
    if len(set(dtypes)) > 1:
        raise RankError(
            f"{ranks.size} ranks were to work together.",
            f"They chose different types to compute in: {', '.join(dtypes)}.",
            "Give --dtype to all of them.",
        )
    asked = TensorOptions(
        memory_bytes=min(ranks.exchange("room", opened.room_bytes)),
        sources=opened.sources,
        pin=pin,
        compiles=compiles,
        rows=options.micro_batch_size,
        batch_tokens=options.batch_tokens,
        batches=stages,
        cache_dir=cache_dir,
        network=ranks.network,
        dummy_seed=options.dummy_seed,
        disk_dir=options.disk_dir,
    )
    connect, size = connector(ranks), ranks.size // stages
    first = ranks.rank // size * size if size else 0
    own_connect = in_stage(connect, first)

    def make_ranks(mesh: Mesh) -> TensorRanks:
        device = opened.device.torch_device
        plain = ProcessRanks(mesh, device, rank=ranks.rank - first, connect=own_connect)
        return plain if opened.timeline is None else TracedRanks(plain, opened.timeline)

    def build() -> CutEngine:
        layers = read_config(model_dir).num_layers
        passage = Passage.whole(layers)
        if stages > 1:
            passage = passage_of(ranks.rank, ranks.size, stages, layers, connect)
        model, switch, planned = launch(
            model_dir,
            size,
            make_ranks,
            workload=workload,
            dtype=torch_dtype(opened.dtype),
            options=asked,
            passage=passage,
            agree=lambda own: ranks.exchange("rates", own)[0],
            timeline=opened.timeline,
        )
        engine = None
        if plain := model.packed.kept_plain():
            say(f"{', '.join(plain)} cannot be cut as they are kept: these matrices stay plain")
        if not ranks.rank:
            engine = _leading(model, switch, planned, opened, options, workload)
        return CutEngine(model, engine, ranks, opened.timeline)

    return ranks.share("built", build, together=True)


def _leading(
    model: TensorModel,
    switch: Switch,
    planned: Planned,
    opened: _Opened,
    options: EngineOptions,
    workload: Workload,
) -> TensorEngine:
    return TensorEngine(
        model,
        switch,
        workload=workload,
        tokenizer=opened.tokenizer,
        rows=planned.rows,
        call_tokens=planned.call_tokens,
        batch_tokens=planned.sweep_tokens or options.batch_tokens,
        admission=options.rule,
        together=planned.sweep_tokens is not None,
    )


def _open(
    model_dir: Path,
    options: EngineOptions,
    workload: Workload,
    ranks: Ranks,
    compiles: bool,
    say: Callable[[str], None],
) -> _Opened:
    """Refuse what cannot be, before anything is loaded."""
    refuse_options(options)
    tight_allocator()
    if compiles:
        warm_up_compiler()
    config = for_task(read_config(model_dir), options.task).for_rows(workload.max_total_tokens)
    if config.readout is not None:
        raise InputError(
            f"{config.readout.name.capitalize()} were to be made over ranks that share layers.",
            "A model that is cut over ranks has the rows of its vocabulary as its head.",
            "Use --split layers or rows.",
        )
    device = find_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    if options.dummy_seed is None:
        sources: Mapping[str, TensorSource] = resolve(config, model_dir)
    else:
        sources = imagined_sources(config, dtype)
    if fit := describe_fit(config, sources, options.compression):
        say(fit)
    sources = kept_sources(config, sources, options, say)
    kept = {source.dtype for source in sources.values()}
    # Loops of ours count before the rest is planned: the compiler alone takes 100 MiB.
    if device.tier == "cpu":
        warm_up(torch_dtype(dtype), weights=kept, kv_format=None)
    if any(map(find_compressed, kept)):
        if compiles:
            raise InputError(
                "--torch-compile was given for weights that are integers.",
                "Their products are loops and kernels of their own, which it cannot compile.",
                "Leave it out.",
            )
        weights = set(map(find_compressed, kept))
        choose_kernels(device.torch_device, torch_dtype(dtype), weights=weights, steps=(), say=say)
    # Before what is left is asked for: a large vocabulary takes 100 MiB.
    tokenizer = None
    if not ranks.rank:
        tokenizer = open_tokenizer(model_dir, is_structured=workload.is_structured)
    room, own = room_on_cpu(options.cpu_memory_bytes)
    if room <= 0:
        raise BudgetError(
            f"--cpu-memory {format_bytes(options.cpu_memory_bytes or 0)} was given.",
            f"The process itself takes {format_bytes(own)}.",
            "Raise --cpu-memory.",
        )
    if device.tier == "gpu":
        if options.disk_dir is not None:
            raise InputError(
                "--disk-dir was given with --split tensor for a GPU.",
                "Layers of parts come from the disk into the CPU's memory only.",
                "Leave it out, use --device cpu, or --split layers.",
            )
        room = device.room_bytes(options.gpu_memory_bytes, config.hidden_size)
    path = options.trace_path
    timeline = None if path is None else Timeline(path, ranks.rank)
    return _Opened(
        device=device,
        dtype=dtype,
        sources=sources,
        room_bytes=room,
        tokenizer=tokenizer,
        timeline=timeline,
    )


def refuse_options(options: EngineOptions) -> None:
    """Those of an engine that offloads, or that changes numbers."""
    others = {
        "--weights": options.weights_percent is not None,
        "--kv": options.kv_percent is not None,
        "--activations": options.activations_percent is not None,
        "--num-micro-batches": options.num_micro_batches is not None,
        "--cpu-attention": options.cpu_attention_percent is not None,
        "--recompute-kv": options.recompute_percent is not None,
        f"--group-dim {options.group_dim}": options.group_dim != "input",
        "--kv-bits": options.kv_bits is not None,
        "--draft-tokens": options.draft_tokens > 0,
        "--lossless": options.lossless,
        "--sparse-attention": options.sparse_attention is not None,
        f"--compute {options.compute}": options.compute != "plain",
        "--no-overlap": not options.overlap,
        "--device sim": options.device == "sim",
    }
    given = [flag for flag, is_given in others.items() if is_given]
    if given:
        raise InputError(
            f"{', '.join(given)} was given with --split tensor.",
            "Keys and activations are then in memory, and each rank's part of all layers there or "
            "on its disk: matrices may be integers in groups of a row (--weight-bits), nothing "
            "else is.",
            "Leave it out, or use --split layers or rows.",
        )


class CutEngine:
    """One rank's part. ``run`` is called on all of them; it yields answers on the first, which has
    the ``engine``, and nothing elsewhere."""

    def __init__(
        self,
        model: TensorModel,
        engine: TensorEngine | None,
        ranks: Ranks,
        timeline: Timeline | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self._ranks = ranks
        self._timeline = timeline

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Answer rows; ``requests`` are looked at on the first rank alone."""
        try:
            if self.engine is None:
                follow(self.model)
            else:
                yield from self.engine.run(requests)
                self.engine.close()
        except BaseException:  # also where the caller has had enough
            self._ranks.abandon()
            raise
        finally:
            if self._timeline is not None:
                self._timeline.close()

    def status(self) -> str:
        return "" if self.engine is None else self.engine.status()

    def summary(self) -> str:
        """How rows were computed, and what all ranks have sent: called on all of them."""
        told = self._ranks.exchange("summary", self.model.executor.moved)
        moved: Moved = sum(told, Counter())
        sent = ", ".join(
            f"{kind} of {what} {format_bytes(size)}"
            for (kind, what), size in sorted(moved.items())
            if size
        )
        summary = "" if self.engine is None else self.engine.summary()
        read = sum(self._ranks.exchange("read", self.model.layers.traffic.moved["disk read"]))
        if read:
            sent += f"\nread by all ranks from their disks: {format_bytes(read)}"
        return f"{summary}\nsent by all ranks: {sent or 'nothing'}"

    def close(self) -> None:
        """Give what lies on the disk back; what else is held goes with the process."""
        self.model.layers.close()
