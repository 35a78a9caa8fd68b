"""``freight run`` under torchrun: the same command on every rank, a part of the work on each.

The first rank keeps the job: it reads rows, writes the journal and the output, and tells people.
The others wait for its word, run their parts, and end with it. A rank that is lost ends the run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch

from freight.distributed.pipeline.engine import StageEngine
from freight.distributed.pipeline.planning import build_stage_engine
from freight.distributed.ranks import Connection, ConnectionLost, Place, Ranks
from freight.distributed.replicas import ReplicaEngine
from freight.distributed.tensor.names import check_name
from freight.distributed.tensor.planning import build_cut_engine, refuse_options
from freight.entrypoints.compress import compress_ahead
from freight.entrypoints.model_source import find_model
from freight.entrypoints.own_machine import nominal_s
from freight.entrypoints.profile import default_path
from freight.entrypoints.progress import Progress, format_report
from freight.entrypoints.rank_machine import rank_machine
from freight.entrypoints.run import (
    answer_rows,
    engine_options,
    exit_status,
    farewell,
    identify,
    job_spec,
)
from freight.errors import FreightError, InputError, RankError
from freight.jobs.paths import check_paths
from freight.jobs.runner import Engine
from freight.memory.process import system_memory_bytes
from freight.model.config import read_config
from freight.plan.shares import part_of
from freight.plan.workload import Workload
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions

__all__ = ["run_stages", "use_own_device"]

_MEMORY_SHARE: Final = 0.8
_GRACE_S: Final = 2.0
_UNWIND_S: Final = 4.0
_LINGER_S: Final = 5.0
_SAME_FLAGS: Final = (
    "admission",
    "batch_tokens",
    "compute",
    "cpu_attention",
    "draft_tokens",
    "group_dim",
    "group_size",
    "kv_bits",
    "lossless",
    "micro_batch_size",
    "num_micro_batches",
    "pin_layout",
    "recompute_kv",
    "no_rolling_windows",
    "no_row_moves",
    "no_shared_prefixes",
    "sparse_attention",
    "split",
    "stages",
    "task",
    "torch_compile",
    "weight_bits",
)
"""What a plan follows from that all ranks must have alike; and whether layers may be on disks."""


class _Stopped(BaseException):
    """A signal that ends the run, raised in the main thread."""

    def __init__(self, number: int) -> None:
        self.number = number


def run_stages(arguments: argparse.Namespace) -> int:
    """This rank's part of the job that the flags describe; returns the exit status."""
    place = Place.from_environment()
    assert place is not None
    use_own_device(place, arguments.device)
    _use_own_cores(place)
    if place.rank:
        _follow(arguments, place)
    return _lead(arguments, place)


def use_own_device(place: Place, device: str) -> None:
    """Let this process see one of its host's devices, before any is asked for. InputError where
    there are fewer than ranks: two on one would each plan with all of its memory."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    if not found or device in ("cpu", "sim"):
        return
    if place.local_size > len(found):
        raise InputError(
            f"{place.local_size} ranks were started on this host.",
            f"It has {len(found)} GPU{'s' if len(found) > 1 else ''}, one for each rank.",
            f"Use --nproc-per-node {len(found)}, or --device cpu.",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = found[place.local_rank]


def _use_own_cores(place: Place) -> None:
    """An equal part of the host's; torchrun itself would leave each rank one."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))


def _own_options(arguments: argparse.Namespace, place: Place) -> EngineOptions:
    """The flags, with an equal part of the host's memory where none was given, and a trace for each
    rank."""
    options = engine_options(arguments)
    if options.cpu_memory_bytes is None and place.local_size > 1:
        share = int(system_memory_bytes() * _MEMORY_SHARE) // place.local_size
        options = replace(options, cpu_memory_bytes=share)
    if options.trace_path is not None and place.rank:
        path = options.trace_path.with_suffix(f".rank{place.rank}{options.trace_path.suffix}")
        options = replace(options, trace_path=path)
    return options


# -- what all ranks must have alike ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What the first rank says when rows are to be answered."""

    workload: Workload


def _agree(
    ranks: Ranks, arguments: argparse.Namespace, options: EngineOptions, model_dir: Path
) -> None:
    """Refuse ranks that would not compute the same."""
    own = identify(options, model_dir)
    own |= {f"--{flag.replace('_', '-')}": str(getattr(arguments, flag)) for flag in _SAME_FLAGS}
    own["--disk-dir"] = str(arguments.split == "tensor" and options.disk_dir is not None)
    told = ranks.exchange("identity", own)
    for rank, theirs in enumerate(told):
        names = [name for name in {**told[0], **theirs} if told[0].get(name) != theirs.get(name)]
        if names:
            flags = [name for name in names if name.startswith("--")]
            raise RankError(
                f"{ranks.size} ranks were to run one job.",
                f"Rank {rank} ({ranks.hosts[rank]}) differs from the first in {', '.join(names)}.",
                f"Give {', '.join(flags)} to all ranks alike."
                if flags == names
                else "Install the same version on all hosts, and give all ranks the same model.",
            )


def _check_flags(arguments: argparse.Namespace) -> None:
    """Those that say how tensors are cut, and those of one machine."""
    if arguments.recalibrate:
        raise InputError(
            f"--recalibrate was given for {os.environ['WORLD_SIZE']} ranks.",
            "It corrects the profile of one machine by its own run.",
            "Leave it out. Ways over ranks are measured anew where their rates have changed.",
        )
    given = {
        f"--pin-layout {arguments.pin_layout}": arguments.pin_layout is not None,
        f"--stages {arguments.stages}": arguments.stages is not None,
        "--torch-compile": arguments.torch_compile,
    }
    for flag, is_given in given.items():
        if is_given and arguments.split != "tensor":
            raise InputError(
                f"{flag} was given with --split {arguments.split}.",
                "It is about tensors that are cut, which they are not then.",
                "Add --split tensor, or leave it out.",
            )
    if arguments.pin_layout is not None:
        check_name(arguments.pin_layout)
    if arguments.stages is not None and arguments.stages < 1:
        raise InputError(
            f"--stages {arguments.stages} was given.",
            "A model has at least one stage.",
            "Give a number from 1 on, or leave it out.",
        )


def _build(
    ranks: Ranks,
    arguments: argparse.Namespace,
    options: EngineOptions,
    model_dir: Path,
    workload: Workload,
    progress: Progress,
) -> Engine:
    _agree(ranks, arguments, options, model_dir)
    if arguments.split == "tensor":
        refuse_options(options)
    # What is compressed is kept for all ranks of a host: one of them does it.
    if ranks.place.local_rank == 0:
        compress_ahead(options, model_dir, progress.say)
    ranks.exchange("compressed", None)
    if arguments.split == "tensor":
        return build_cut_engine(
            model_dir,
            options=options,
            workload=workload,
            ranks=ranks,
            pin=arguments.pin_layout,
            compiles=arguments.torch_compile,
            stages=arguments.stages or 1,
            cache_dir=default_path().parent,
            say=progress.say,
        )
    work_s = nominal_s(read_config(model_dir), workload) / ranks.size
    options = replace(
        options, machine=rank_machine(ranks, options, model_dir, work_s, progress.say)
    )
    if arguments.split == "layers":
        return build_stage_engine(
            model_dir, options=options, workload=workload, ranks=ranks, say=progress.say
        )
    own = part_of(workload, min(ranks.size, workload.num_rows), is_apart=True)

    def build() -> ReplicaEngine:
        engine = build_engine(model_dir, options=options, workload=own, say=progress.say)
        return ReplicaEngine(engine, ranks)

    return ranks.share("built", build)


# -- the first rank --------------------------------------------------------------------------------


def _lead(arguments: argparse.Namespace, place: Place) -> int:
    spec = job_spec(arguments)
    guard = _Guard()
    ranks = Ranks(place, Connection.from_environment(place), guard.on_loss)
    status = 1
    layers: list[range] = []
    with Progress(sys.stderr, is_quiet=arguments.quiet) as progress:

        def tell(error: RankError | ConnectionLost) -> None:
            part = _part(arguments, ranks, layers)
            _print_error(_explained(error, ranks, part, farewell(spec, progress)))

        guard.watch(ranks, tell)
        try:
            options = _own_options(arguments, place)
            _check_flags(arguments)
            check_paths(spec.source, spec.sink, options.trace_path)
            model_dir = find_model(arguments.model, arguments.lora)

            def build(workload: Workload) -> Engine:
                ranks.say("start", _Start(workload=workload))
                engine = _build(ranks, arguments, options, model_dir, workload, progress)
                if isinstance(engine, StageEngine):
                    layers.extend(engine.all_layers)
                return engine

            report = answer_rows(spec, options, model_dir, progress, build)
            ranks.say("start", None)  # unless rows were to be answered, and the others know
            guard.rest()
            ranks.close()
            for line in format_report(report):
                progress.say(line)
            return exit_status(report, fails_on_error=arguments.fail_on_error)
        except (RankError, ConnectionLost) as error:
            guard.rest()
            tell(error)
        except FreightError as error:
            guard.rest()
            _print_error(error)
            status = 2 if isinstance(error, InputError) else 1
        except _Stopped as stop:
            guard.rest()
            progress.say(farewell(spec, progress))
            status = 128 + stop.number
        except BaseException:
            guard.rest()
            traceback.print_exc()
    _leave(status)


def _explained(
    error: RankError | ConnectionLost, ranks: Ranks, part: Callable[[int], str], kept: str
) -> FreightError:
    """Which rank was lost, its part, and how to go on; a broken connection by itself says less."""
    if isinstance(error, RankError) and not ranks.lost:
        return error
    rank = ranks.wait_for_failure(_GRACE_S)
    if rank is None:
        return RankError(
            f"{ranks.size} ranks were at work.", f"A connection has broken: {error}", kept
        )
    loss = ranks.loss(rank)
    return RankError(
        loss.asked,
        f"{loss.limit} It ran {part(rank)}. The job is {kept.split('. ')[0]}.",
        f"Go on with any number of ranks: {_command(ranks.place)}",
    )


def _part(
    arguments: argparse.Namespace, ranks: Ranks, layers: Sequence[range]
) -> Callable[[int], str]:
    """What a rank had of the work; ``layers`` are those of the stages, once they are known."""

    def part(rank: int) -> str:
        number = f"{rank + 1} of {ranks.size}"
        if arguments.split == "tensor":
            count = arguments.stages or 1
            size = max(1, ranks.size // count)
            place = f"part {rank % size + 1} of {size} of every layer"
            return place if count == 1 else f"{place} of stage {rank // size + 1} of {count}"
        if arguments.split == "rows":
            return f"replica {number}"
        if not layers:
            return f"stage {number}"
        own = layers[rank]
        return f"stage {number}, layers {own.start}-{own.stop - 1}"

    return part


def _command(place: Place) -> str:
    return f"torchrun --nproc-per-node {place.local_size} -m freight {shlex.join(sys.argv[1:])}"


class _Guard:
    """Ends what the main thread does when a rank is lost or a signal comes: whatever it waits for
    might never come. A rank that dies also makes torchrun send signals; the death counts.

    The main thread is told by a signal, so that it unwinds and speaks itself. Where that does not
    happen soon (it may be deep in a library, or the exception may have met a place that drops it)
    another thread speaks, and ends the process."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._tell: Callable[[RankError], None] | None = None
        self._main = threading.main_thread().ident
        self._unwound = threading.Event()

    def watch(self, ranks: Ranks, tell: Callable[[RankError], None]) -> None:
        self._ranks, self._tell = ranks, tell
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if ranks.lost:  # before anybody was told
            self.on_loss(ranks.lost[0])

    def on_loss(self, rank: int) -> None:
        """Called in another thread."""
        if self._ranks is not None and self._main is not None:
            signal.pthread_kill(self._main, signal.SIGUSR1)
            self._end_later()

    def rest(self) -> None:
        """The main thread has unwound; no signal interrupts any more what is little."""
        self._unwound.set()
        self._ignore_signals()

    def _ignore_signals(self) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> NoReturn:
        assert self._ranks is not None
        self._ignore_signals()
        self._end_later()
        is_lost = bool(self._ranks.lost)
        if number == signal.SIGTERM:
            is_lost = self._ranks.wait_for_loss(_GRACE_S / 2)
        self._ranks.abandon()
        if is_lost:
            raise self._ranks.loss()
        raise _Stopped(number)

    def _end_later(self) -> None:
        threading.Thread(target=self._end_if_stuck, daemon=True).start()

    def _end_if_stuck(self) -> None:
        assert self._ranks is not None and self._tell is not None
        if self._unwound.wait(_UNWIND_S):
            return
        self._unwound.set()  # one such thread is enough
        if self._ranks.lost:
            self._tell(self._ranks.loss())
        _leave(1)


# -- all others ------------------------------------------------------------------------------------


def _follow(arguments: argparse.Namespace, place: Place) -> NoReturn:
    """Run a part until the first rank ends; with it this process ends at once."""
    signal.signal(signal.SIGTERM, _linger)
    signal.signal(signal.SIGINT, _linger)
    ranks = Ranks(place, Connection.from_environment(place), lambda rank: _leave(1))
    try:
        options = _own_options(arguments, place)
        start = ranks.hear("start")
        if start is not None:
            with Progress(sys.stderr, is_quiet=True) as progress:
                model_dir = find_model(arguments.model, arguments.lora)
                engine: Any = _build(ranks, arguments, options, model_dir, start.workload, progress)
                with closing(engine):
                    for _ in engine.run(iter(())):
                        pass
                    engine.summary()
        ranks.close()
        _leave(0)
    except (FreightError, ConnectionLost) as error:
        if isinstance(error, FreightError):  # it may have come before any is shared
            ranks.note_failure(str(error))
        ranks.wait_for_loss(_LINGER_S)  # the first rank tells it, and ends
    except BaseException as error:
        traceback.print_exc()
        ranks.note_failure(f"{type(error).__name__}: {error}")
    _leave(1)


def _linger(number: int, frame: FrameType | None) -> NoReturn:
    """Stay for a moment, so that the first rank can tell who was lost from who was told to stop."""
    threading.Event().wait(_GRACE_S)
    _leave(128 + number)


def _leave(status: int) -> NoReturn:
    """End without waiting for threads that wait for messages."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _print_error(error: FreightError) -> None:
    print(f"freight: error: {error.asked}\n  {error.limit}\n  {error.advice}", file=sys.stderr)
