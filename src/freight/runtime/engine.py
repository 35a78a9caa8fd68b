"""The engine: a model placed over the tiers by a plan, ready to run rows through it.

Puts the pieces together and owns what must be closed; what happens is in the scheduler, the
schedule and the executor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from freight.errors import BudgetError, InputError, ModelError
from freight.kernels.warm_up import warm_up
from freight.memory.disk import Traffic
from freight.memory.process import Keeper
from freight.memory.transfer import Link
from freight.model.adapter import refuse_adapter
from freight.model.approximation import approximate, describe_groups
from freight.model.batch import MicroBatch
from freight.model.checkpoint import dummy_dtype, imagined_sources, resolve
from freight.model.compression import describe_fit
from freight.model.config import ModelConfig, read_config
from freight.model.decoder import build_programme, tensor_shapes
from freight.model.dummy import write_dummy_checkpoint
from freight.model.layer_kinds import Recurrence
from freight.model.number_format import find_compressed
from freight.model.programme import Programme
from freight.model.sources import TensorSource
from freight.model.task import for_task
from freight.plan.admission import Lengths
from freight.plan.default import Plan
from freight.plan.forecast import Forecast
from freight.plan.operation import Operation
from freight.plan.ring import stream_model
from freight.plan.samples import rehearse
from freight.plan.schedule import schedule
from freight.plan.sweep import Awaited, Sweep
from freight.plan.verify import verify
from freight.plan.workload import Workload
from freight.quantities import format_bytes
from freight.runtime.answers import NewTokens
from freight.runtime.batches import BatchPreparer
from freight.runtime.compressed_files import compressed_sources, kept_sources, settle_compute
from freight.runtime.device import (
    ComputeDevice,
    choose_dtype,
    find_device,
    quiet_allocator,
)
from freight.runtime.drafts import Guesses
from freight.runtime.executor import Executor
from freight.runtime.kept_weights import WeightKeeper
from freight.runtime.kernel_choice import attend_steps, choose_kernels, recurrent_steps
from freight.runtime.loaders import made_in_memory, torch_dtype
from freight.runtime.meter import Meter
from freight.runtime.options import EngineOptions
from freight.runtime.params import check_tokenizer, check_vocabulary
from freight.runtime.performer import Performer
from freight.runtime.placement import Placement
from freight.runtime.planning import plan_run, rates_for
from freight.runtime.request import Completion, Request
from freight.runtime.sampler import Draw, sample
from freight.runtime.scheduler import Scheduler
from freight.runtime.scores import Scores, score
from freight.runtime.summary import describe_forecast, describe_holdings, describe_run
from freight.runtime.token_tables import check_tables
from freight.runtime.tokenizer import Tokenizer, open_tokenizer
from freight.runtime.trace import Trace

__all__ = ["Engine", "OpenedModel", "build_engine", "open_model"]

_BLOCK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model as it will be run, of which nothing is loaded yet: where its weights are, in which
    type and on which device it is computed, and the options as far as they are settled. ``config``
    is that of some layers where others are run elsewhere, ``whole`` that of all."""

    config: ModelConfig
    whole: ModelConfig
    sources: Mapping[str, TensorSource]
    dtype: str
    device: ComputeDevice
    options: EngineOptions
    tokenizer: Tokenizer | None

    def for_rows(self, longest: int) -> OpenedModel:
        """Without what rows of no more tokens than that do not need. ModelError where they need
        what the checkpoint does not have."""
        config = self.config.for_rows(longest)
        lacking = tensor_shapes(config).keys() - self.sources.keys()
        if config is self.config or not lacking:
            return replace(self, config=config)
        raise ModelError(
            f"Rows of up to {longest} tokens were to be run.",
            f"The checkpoint lacks {len(lacking)} weights that choose what such rows attend, "
            f"{min(lacking)} among them.",
            "Give shorter rows, or fetch a checkpoint that has them.",
        )


def build_engine(
    model_dir: Path,
    *,
    options: EngineOptions,
    workload: Workload,
    say: Callable[[str], None] = lambda _: None,
    keeper: WeightKeeper | None = None,
) -> Engine:
    """Plan, take the memory, and place the weights. Everything that can be refused is refused
    before anything is loaded; ``say`` is told of what takes long before. On a CPU a ``keeper`` has
    weights of this model's last run, and will have this one's."""
    model = open_model(model_dir, options=options, say=say, is_structured=workload.is_structured)
    model = model.for_rows(workload.max_total_tokens)
    keeper = keeper if model.device.kind == "cpu" else None
    plan, told = plan_run(
        model.config,
        model.sources,
        model.dtype,
        model.device,
        model.options,
        workload,
        held_bytes=0 if keeper is None else keeper.held_bytes,
    )
    return Engine(model, plan=plan, told=told, keeper=keeper)


def open_model(
    model_dir: Path,
    *,
    options: EngineOptions,
    say: Callable[[str], None],
    is_structured: bool = False,
) -> OpenedModel:
    """Read what is known of a model, and load all that the process will need beside it; where
    answers are structured, what keeps them so."""
    quiet_allocator()
    config = approximate(
        for_task(read_config(model_dir), options.task),
        kv_bits=options.kv_bits,
        group_size=options.group_size,
        attended_share=options.sparse_attention,
    )
    if groups := describe_groups(config, options.group_size):
        say(groups)
    device = find_device(options.device)
    if device.kind == "cpu" and options.gpu_memory_bytes is not None:
        raise InputError(
            f"--gpu-memory {format_bytes(options.gpu_memory_bytes)} was given.",
            "No CUDA device is usable here: the CPU computes, and has no other memory.",
            "Leave it out, or give --device sim to try what a device would do.",
        )
    dtype = choose_dtype(options.dtype, device)
    if options.dummy_seed is None:
        sources: Mapping[str, TensorSource] = resolve(config, model_dir)
        check_tables(config, sources)
    else:
        refuse_adapter(model_dir)
        sources = imagined_sources(config, dtype)
    options = settle_compute(options, sources, device, dtype, say)
    if fit := describe_fit(config, sources, options.compression):
        say(fit)
    sources = kept_sources(config, sources, options, say)
    # Before the plan, which measures what the process has taken: the compiler takes 100 MiB, a
    # tokenizer with a large vocabulary as much.
    kept = {source.dtype for source in sources.values()}
    weights = set(map(find_compressed, kept))
    warm_up(
        torch_dtype(dtype),
        weights=kept,
        kv_format=config.kv_format,
        widths=[own.width for own in config.all_heads],
        keeps_states=isinstance(config.recurrence, Recurrence),
        has_experts=config.experts is not None,
        has_streams=config.streams is not None,
        cpu_computes=device.kind != "cuda",
    )
    programme = build_programme(config)
    choose_kernels(
        device.torch_device,
        torch_dtype(dtype),
        weights=weights,
        steps=attend_steps(programme),
        recurrences=recurrent_steps(programme),
        has_experts=config.experts is not None,
        say=say,
    )
    tokenizer = open_tokenizer(model_dir, is_structured=is_structured)
    return OpenedModel(
        config=config,
        whole=config,
        sources=sources,
        dtype=dtype,
        device=device,
        options=options,
        tokenizer=tokenizer,
    )


class Engine:
    """Runs rows. One at a time may use it; ``close`` gives files and memory back."""

    def __init__(
        self,
        model: OpenedModel,
        *,
        plan: Plan,
        told: Forecast | None,
        programme: Programme | None = None,
        keeper: WeightKeeper | None = None,
    ) -> None:
        self.config = config = model.config
        self._whole = model.whole
        self.plan = plan
        self.programme = programme or build_programme(config)
        self.dtype = torch_dtype(model.dtype)
        self.device = device = model.device
        self.tokenizer = model.tokenizer
        self.traffic = Traffic()
        self._options = options = model.options
        self._memory: Keeper | None = None
        if (limit := options.cpu_memory_bytes) is not None:
            self._memory = Keeper(limit, with_libraries=device.kind != "cuda")
        dtype = model.dtype
        self._dummy_dir: tempfile.TemporaryDirectory[str] | None = None
        self.meter = Meter(has_phases=not plan.policy.is_continuous)
        self.forecast = told
        self.guesses = Guesses()
        # Before the weights, which take minutes to place: the path may be wrong.
        self._trace = None if options.trace_path is None else Trace(options.trace_path)
        rates = rates_for(options, device)
        if self._trace is not None and told is not None and rates is not None:
            self._trace.predict(rehearse(plan, rates, config, dtype))
        sources = self._real_sources(model.sources, dtype)
        self.placement = Placement(
            config=config,
            sources=sources,
            dtype=dtype,
            device=device,
            plan=self.plan,
            disk_dir=options.disk_dir,
            # What was compressed into a file is read from it.
            dummy_seed=None if self._dummy_dir and _are_compressed(sources) else options.dummy_seed,
            traffic=self.traffic,
            keeper=keeper,
        )
        self.load_traffic = dict(self.traffic.moved)

    @property
    def compute(self) -> str:
        """What products are made of, as it was settled: "plain" or "int8"."""
        return self._options.compute

    # -- building ------------------------------------------------------------------------------

    def _real_sources(
        self, sources: Mapping[str, TensorSource], dtype: str
    ) -> Mapping[str, TensorSource]:
        """Dummy weights of which some are on disk, or are made from a file, are written first."""
        disk_bytes = self.plan.layout.tier_bytes()["disk"]
        compression = self._options.compression
        if self._options.dummy_seed is None or (not disk_bytes and made_in_memory(sources)):
            return sources
        parent = self._options.disk_dir
        try:
            self._dummy_dir = tempfile.TemporaryDirectory(prefix="freight-dummy-", dir=parent)
        except OSError as error:
            raise BudgetError(
                f"Random weights were to be written to {parent or tempfile.gettempdir()}.",
                f"The system refused: {error.strerror}.",
                "Name a directory that can be written with --disk-dir.",
            ) from error
        directory = Path(self._dummy_dir.name)
        kept = dummy_dtype(self._whole, dtype)
        write_dummy_checkpoint(self._whole, directory, self._options.dummy_seed, kept)
        sources = compressed_sources(
            self._whole,
            resolve(self._whole, directory),
            compression,
            directory=directory / "compressed",
            say=lambda _: None,
        )
        self.plan = self.plan.with_sources(self.config, sources, dtype)
        return sources

    # -- running -------------------------------------------------------------------------------

    def run(
        self, requests: Iterator[Request], on_batch: Callable[[int, MicroBatch], None] | None = None
    ) -> Iterator[Completion]:
        """Answer rows in an order of the engine's choosing, each exactly once. ``on_batch`` is told
        of every sweep and micro-batch as soon as its tokens are known."""
        lengths = self.plan.workload.answers()
        scheduler, performer = self._lane(0, self._check(requests), lengths)
        executor = self._executor(performer.perform)
        stream = self._stream(scheduler.sweeps(), scheduler.expects_more, performer.chosen)
        for operation, made in executor.run(stream):
            assert operation.batch is not None
            if on_batch is not None:
                on_batch(operation.sweep, operation.batch)
            yield from scheduler.update(operation.batch, made)
            self._keep_budget()

    def _eos_ids(self) -> frozenset[int]:
        """Those that the model can make: configurations name others, too."""
        if self.tokenizer is None or self.config.readout is not None:
            return frozenset()
        known = self.tokenizer.eos_token_ids
        return frozenset(own for own in known if own < self.config.vocab_size)

    def _keep_budget(self) -> None:
        if self._memory is not None:
            self._memory.keep()

    def _lane(
        self, lane: int, requests: Iterator[Request], lengths: Lengths
    ) -> tuple[Scheduler, Performer]:
        """What makes up the sweeps of one of the blocks in flight, and what does their work."""
        kv_cache, geometry = self.placement.kv_caches[lane], self.plan.geometry
        # A run leaves beginnings of prompts, and one that was given up its rows.
        kv_cache.release_all()
        batches = BatchPreparer(
            self.config,
            self.plan.policy,
            kv_cache=kv_cache,
            page_bytes=(geometry.page_bytes, geometry.input_page_bytes, geometry.state_bytes),
            windows=geometry.windows,
            activations=self.placement.activations,
            tables=self.placement.tables,
            device=self.device.torch_device,
            dtype=self.dtype,
            programme=self.programme,
        )
        scheduler = Scheduler(
            requests,
            policy=self.plan.policy,
            kv_cache=kv_cache,
            slot_pages=geometry.kv_slot_pages,
            tokenizer=self.tokenizer,
            eos_ids=self._eos_ids(),
            lengths=lengths,
            is_structured=self.plan.workload.is_structured,
            describe=batches.describe,
            shares_elsewhere=geometry.shared_page > 0,
            guesses=self.guesses,
        )
        return scheduler, self._performer(batches, scheduler, lane)

    def _executor(self, perform: Callable[[Operation], NewTokens | None]) -> Executor[NewTokens]:
        return Executor(
            perform,
            device=self.device.torch_device,
            overlap=self.plan.policy.overlap,
            record=self._record,
        )

    def _stream(
        self,
        sweeps: Iterator[Sweep | Awaited],
        expects_more: Callable[[], bool],
        chosen: Callable[[int], Collection[int]],
    ) -> Iterator[Operation]:
        model = stream_model(self.plan.layout, self.plan.policy, rolls=self.plan.geometry.rolls)
        stream = schedule(sweeps, model, expects_more, chosen)
        return verify(stream, self.placement.rings()) if self._options.verify else stream

    def _record(self, operation: Operation, started_s: float, ended_s: float) -> None:
        self.meter.record(operation, started_s, ended_s)
        if self._trace is not None:
            self._trace.record(operation, started_s, ended_s)

    def _check(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            check_vocabulary(request.params, self.config.vocab_size)
            check_tokenizer(request.params, self.tokenizer)
            yield request

    def _make(self, batch: MicroBatch, logits: torch.Tensor, scheduler: Scheduler) -> NewTokens:
        """What is made of the logits: tokens, or what a readout leaves in their place."""
        if self.config.readout is None:
            return self._sample(logits, scheduler.draws(batch))
        return NewTokens(vectors=logits.cpu().numpy().copy())

    def _sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> NewTokens:
        """Choose a token for each draw, and score those that are to be."""
        token_ids = sample(logits, draws)
        scored = [i for i, draw in enumerate(draws) if draw.params.logprobs is not None]
        if not scored:
            return NewTokens(token_ids=token_ids)
        num_top = max(draws[i].params.logprobs or 0 for i in scored)
        places = [draws[i].place for i in scored]
        scores = score(logits, places, [token_ids[i] for i in scored], num_top)
        return NewTokens(token_ids=token_ids, scores=scores)

    def _performer(self, batches: BatchPreparer, scheduler: Scheduler, lane: int) -> Performer:
        def finish(
            batch: MicroBatch, logits: torch.Tensor, prompt_scores: Scores | None
        ) -> NewTokens:
            made = self._make(batch, logits, scheduler)
            return replace(made, prompt_scores=prompt_scores)

        on_device = self.device.tier == "gpu"
        rate = self._options.sim_bytes_per_s
        return Performer(
            config=self.config,
            programme=self.programme,
            placement=self.placement,
            batches=batches,
            to_device=Link("host to device", self.traffic, rate if on_device else None),
            from_device=Link("device to host", self.traffic, rate if on_device else None),
            finish=finish,
            lane=lane,
        )

    # -- telling -------------------------------------------------------------------------------

    def status(self) -> str:
        """What each tier holds, in a few words."""
        return describe_holdings(self.plan)

    def summary(self) -> str:
        """The policy, where the weights were, and what crossed each link."""
        told = describe_run(self.plan, self.traffic.moved, self.guesses)
        if self.forecast is None or not self.meter.seconds:
            return told
        return f"{told}\n{describe_forecast(self.forecast, self.meter)}"

    def close(self) -> None:
        self.placement.close()
        if self._trace is not None:
            self._trace.close()
        if self._dummy_dir is not None:
            self._dummy_dir.cleanup()


def _are_compressed(sources: Mapping[str, TensorSource]) -> bool:
    """Whether some are."""
    return any(find_compressed(source.dtype) for source in sources.values())
