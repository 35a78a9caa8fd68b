"""The engine of one stage: some layers of the model on this process's tiers, in step with others.

The operations, their schedule and the executor are those of one machine; here are what enters and
what leaves a stage, and the blocks in flight. The first stage has the requests and gives the
answers; the others follow the same sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from freight.distributed.pipeline.lanes import Lanes
from freight.distributed.pipeline.wires import Requests, Wires
from freight.distributed.ranks import Ranks
from freight.memory.activations import gather, scatter
from freight.memory.transfer import Link
from freight.model.batch import MicroBatch
from freight.model.passing import handed_columns, handed_on
from freight.plan.default import Plan
from freight.plan.forecast import Forecast
from freight.plan.operation import Kind, Operation
from freight.plan.stages import StageModel
from freight.runtime.answers import NewTokens
from freight.runtime.engine import Engine, OpenedModel
from freight.runtime.request import Completion, Request
from freight.runtime.residual import by_name

__all__ = ["StageEngine"]


class StageEngine(Engine):
    """One stage; ``all_layers`` are those of each. ``run`` is called on all ranks; the completions
    that it yields are the same on all, and the first rank's are those that are kept."""

    def __init__(
        self,
        model: OpenedModel,
        *,
        stage: StageModel,
        all_layers: list[range],
        plan: Plan,
        told: Forecast | None,
        ranks: Ranks,
        wires: Wires,
    ) -> None:
        self.stage = stage
        self.all_layers = all_layers
        self._ranks = ranks
        self._wires = wires
        self._made: dict[tuple[int, int], NewTokens] = {}
        super().__init__(model, plan=plan, told=None, programme=stage.programme)
        self.forecast = told  # of all stages: no stage can be rehearsed by itself
        self._from_device = Link("device to host", self.traffic, model.options.sim_bytes_per_s)

    def run(
        self, requests: Iterator[Request], on_batch: Callable[[int, MicroBatch], None] | None = None
    ) -> Iterator[Completion]:
        """As of one machine; ``requests`` are looked at on the first rank alone."""
        try:
            yield from self._run(self._wires.requests(self._check(requests)), on_batch)
            self._wires.finish()
        except BaseException:  # also where the caller has had enough
            self._ranks.abandon()
            raise

    def _run(
        self, requests: Requests, on_batch: Callable[[int, MicroBatch], None] | None
    ) -> Iterator[Completion]:
        lengths = self.plan.workload.answers()
        count = self.plan.policy.blocks_in_flight
        parts = [self._lane(lane, requests, lengths) for lane in range(count)]
        lanes = Lanes(parts, requests.has_more)
        executor = self._executor(lambda operation: self._perform(operation, lanes))
        stream = self._stream(lanes.turns(), lanes.expects_more, lanes.chosen)
        for operation, made in executor.run(self._watched(stream)):
            assert operation.batch is not None
            if operation.kind is not Kind.TAKE_TOKENS:
                self._made[operation.sweep, operation.batch.index] = made
                self._wires.keep_tokens(made)
                continue
            if on_batch is not None:
                on_batch(operation.sweep, operation.batch)
            yield from lanes.update(operation, made)
            self._keep_budget()

    def _watched(self, stream: Iterator[Operation]) -> Iterator[Operation]:
        """Where the stream cannot go on, nobody waits for what it would have sent."""
        try:
            yield from stream
        except BaseException:
            self._ranks.abandon()
            raise

    # -- operations ------------------------------------------------------------------------------

    def _perform(self, operation: Operation, lanes: Lanes) -> NewTokens | None:
        try:
            return self._perform_own(operation, lanes)
        except BaseException:
            self._ranks.abandon()
            raise

    def _perform_own(self, operation: Operation, lanes: Lanes) -> NewTokens | None:
        buffers, size = self.placement.buffers, operation.num_bytes
        match operation.kind:
            case Kind.TAKE_TOKENS:
                return self._wires.take_tokens()
            case Kind.SEND_TOKENS:
                assert operation.batch is not None
                self._wires.send_tokens(self._made.pop((operation.sweep, operation.batch.index)))
            case Kind.RECEIVE_HIDDEN:
                self._wires.receive_rows(buffers.embedding_rows[operation.slot, :size])
            case Kind.SEND_HIDDEN:
                self._wires.send_rows(buffers.departing_rows[operation.source_slot, :size])
            case Kind.COPY_DEPARTING:
                source = buffers.departing_slot[operation.source_slot, :size]
                self._from_device.move([(source, buffers.departing_rows[operation.slot, :size])])
            case _:
                return self._compute(operation, lanes)
        return None

    def _compute(self, operation: Operation, lanes: Lanes) -> NewTokens | None:
        if operation.batch is None:  # weights
            return lanes.any_performer.perform(operation)
        performer, own = lanes.own(operation)
        if operation.kind is not Kind.COMPUTE:
            return performer.perform(own)
        lanes.begin(operation.sweep)
        unit = self.programme.units[operation.unit]
        if unit.steps:
            return performer.perform(own)
        with torch.inference_mode():
            parts = performer.stream(own)
            carried = [(first, by_name(self.programme.carried, rows)) for first, rows in parts]
            is_first, rows = unit.kind == "embedding", self._passing_rows(operation, unit.kind)
            for name, columns in by_name(handed_on(self.config), rows).items():
                stream = [(first, values[name]) for first, values in carried]
                (scatter if is_first else gather)(stream, 0, columns)
        return None

    def _passing_rows(self, operation: Operation, kind: str) -> torch.Tensor:
        """What was received and becomes the residual stream, or that as it goes on."""
        assert operation.batch is not None
        buffers = self.placement.buffers
        if kind == "embedding":
            ring = buffers.embedding_slot if self._is_staged else buffers.embedding_rows
            place = ring[operation.source_slot]
        elif self._is_staged:
            place = buffers.departing_slot[0]
        else:
            place = buffers.departing_rows[operation.batch.index]
        return self._rows(place, operation.batch.num_tokens)

    @property
    def _is_staged(self) -> bool:
        """Whether messages are in another memory than the arithmetic."""
        return self.plan.policy.compute_tier == "gpu"

    @property
    def _width(self) -> int:
        return handed_columns(self.config)

    def _rows(self, place: torch.Tensor, count: int) -> torch.Tensor:
        used = place[: count * self._width * self.dtype.itemsize]
        return used.view(self.dtype).view(count, self._width)

    # -- telling -------------------------------------------------------------------------------

    def status(self) -> str:
        return f"{self._name()}: {super().status()}"

    def summary(self) -> str:
        """That of every stage: called on all ranks."""
        told = f"{self._name()}\n{super().summary()}"
        return "\n".join(self._ranks.exchange("summary", told))

    def _name(self) -> str:
        layers = self.stage.layers
        number = f"stage {self._ranks.rank + 1} of {self._ranks.size}"
        return f"{number}, layers {layers.start}-{layers.stop - 1}"
