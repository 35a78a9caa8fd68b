"""``freight run``: turns flags into values, runs the job, and ends cleanly when it is stopped.

Knows which flag is which field; no model code and no row format.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

from freight.entrypoints.compress import compress_ahead
from freight.entrypoints.flags import MAX_TOKENS
from freight.entrypoints.model_source import find_model, open_tokenizer, row_limits
from freight.entrypoints.own_machine import keep_recalibrated, nominal_s, own_machine
from freight.entrypoints.progress import Progress, format_report
from freight.entrypoints.shares import parse_shares
from freight.entrypoints.version import freight_version
from freight.errors import InputError, reason_of
from freight.hardware.machine import Machine
from freight.jobs.identity import model_identity
from freight.jobs.json_values import read_biases
from freight.jobs.paths import check_paths
from freight.jobs.readings import READING, Form
from freight.jobs.runner import Engine, JobReport, JobSpec, run_job
from freight.model.config import read_config
from freight.model.readout import Readout
from freight.model.task import for_task, refuse_other
from freight.plan.workload import Workload
from freight.quantities import parse_bytes
from freight.runtime.options import EngineOptions
from freight.runtime.request import SamplingParams
from freight.runtime.structured_outputs import StructuredOutputs

__all__ = [
    "answer_rows",
    "engine_options",
    "exit_status",
    "farewell",
    "identify",
    "job_spec",
    "run",
]


_ROWS_FAILED: Final = 3
_FLAGS: Final = {"stop_token_ids": "--stop-token-id"}
"""Those that are not called as their parameters are."""
_STRUCTURES: Final = {
    "json": "--json-schema",
    "regex": "--regex",
    "choice": "--choice",
    "grammar": "--grammar",
}
"""What answers must look like, by vLLM's names."""


class _Terminated(BaseException):
    """SIGTERM, raised where Ctrl-C would raise KeyboardInterrupt."""


def run(arguments: argparse.Namespace) -> int:
    """Run the job that the flags describe; returns the exit status."""
    if (arguments.stages or 1) > 1:
        raise InputError(
            f"--stages {arguments.stages} was given.",
            "One process runs this job, and stages are of several.",
            "Start it with torchrun and --split tensor, or leave --stages out.",
        )
    if arguments.torch_compile:
        raise InputError(
            "--torch-compile was given.",
            "One process runs this job, by kernels of its own.",
            "Start it with torchrun and --split tensor, or leave --torch-compile out.",
        )
    if arguments.pin_layout is not None:
        raise InputError(
            f"--pin-layout {arguments.pin_layout} was given.",
            "One process runs this job, and layouts are of tensors that several share.",
            "Start it with torchrun and --split tensor, or leave --pin-layout out.",
        )
    spec, options = job_spec(arguments), engine_options(arguments)
    check_paths(spec.source, spec.sink, options.trace_path)
    model_dir = find_model(arguments.model, arguments.lora)
    with _sigterm_raises(), Progress(sys.stderr, is_quiet=arguments.quiet) as progress:
        try:
            report = _run_job(
                spec, options, model_dir, progress, recalibrates=arguments.recalibrate
            )
        except (KeyboardInterrupt, _Terminated) as stop:
            progress.say(farewell(spec, progress))
            return 130 if isinstance(stop, KeyboardInterrupt) else 143
        except BrokenPipeError:
            progress.say(f"the output's reader has gone: {farewell(spec, progress)}")
            raise
        for line in format_report(report):
            progress.say(line)
    return exit_status(report, fails_on_error=arguments.fail_on_error)


def exit_status(report: JobReport, *, fails_on_error: bool) -> int:
    """3 where no row was answered, or with ``fails_on_error`` where one was not; else 0.

    The output is complete in any case. One bad row in a large dataset is a row like others, but a
    job that answered nothing was given the wrong file.
    """
    has_failed = report.num_failed == report.num_rows
    return _ROWS_FAILED if has_failed or (fails_on_error and report.num_failed) else 0


def job_spec(arguments: argparse.Namespace) -> JobSpec:
    """The job that the flags describe."""
    return JobSpec(
        source=_standard("input").buffer if arguments.input == "-" else Path(arguments.input),
        sink=_standard("output").fileno() if arguments.output == "-" else Path(arguments.output),
        sampling=SamplingParams(
            max_tokens=arguments.max_tokens,
            n=arguments.n,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            presence_penalty=arguments.presence_penalty,
            frequency_penalty=arguments.frequency_penalty,
            logit_bias=_parse_biases(arguments.logit_bias),
            seed=arguments.seed,
            stop=tuple(arguments.stop),
            stop_token_ids=tuple(arguments.stop_token_id),
            min_tokens=arguments.min_tokens,
            ignore_eos=arguments.ignore_eos,
            logprobs=arguments.logprobs,
            prompt_logprobs=arguments.prompt_logprobs,
            structured_outputs=_parse_structure(arguments),
        ),
        form=Form(dimensions=arguments.dimensions, encoding_format=arguments.encoding_format),
        job_dir=None if arguments.job_dir is None else Path(arguments.job_dir),
        unordered=arguments.unordered,
        restart=arguments.restart,
    )


def _standard(name: str) -> TextIO:
    """Standard input or output; Python has None in its place where the caller has closed it."""
    stream = sys.stdin if name == "input" else sys.stdout
    if stream is None:
        raise InputError(
            f"- was given for standard {name}.",
            f"Standard {name} is closed.",
            "Name a file, or start the command with that stream open.",
        )
    return stream


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """What the flags ask of the engine."""
    return EngineOptions(
        task=getattr(arguments, "task", "auto"),
        device=arguments.device,
        dtype=arguments.dtype,
        cpu_memory_bytes=_parse_size("--cpu-memory", arguments.cpu_memory),
        gpu_memory_bytes=_parse_size("--gpu-memory", arguments.gpu_memory),
        disk_dir=_existing_directory(arguments.disk_dir),
        weights_percent=parse_shares("--weights", arguments.weights),
        kv_percent=parse_shares("--kv", arguments.kv),
        activations_percent=parse_shares("--activations", arguments.activations),
        micro_batch_size=arguments.micro_batch_size,
        num_micro_batches=arguments.num_micro_batches,
        cpu_attention_percent=arguments.cpu_attention,
        recompute_percent=arguments.recompute_kv,
        admission=arguments.admission,
        batch_tokens=arguments.batch_tokens,
        draft_tokens=getattr(arguments, "draft_tokens", 0),
        share_prefixes=not arguments.no_shared_prefixes,
        roll_windows=not arguments.no_rolling_windows,
        move_rows=not arguments.no_row_moves,
        lossless=arguments.lossless,
        weight_bits=arguments.weight_bits,
        kv_bits=arguments.kv_bits,
        group_size=arguments.group_size,
        group_dim=arguments.group_dim,
        sparse_attention=arguments.sparse_attention,
        compute=arguments.compute,
        compressed_dir=_parse_path(getattr(arguments, "compressed_dir", None)),
        overlap=not arguments.no_overlap,
        sim_bytes_per_s=_parse_size("--sim-bandwidth", arguments.sim_bandwidth),
        trace_path=None if arguments.trace is None else Path(arguments.trace),
        dummy_seed=0 if arguments.dummy_weights else None,
    )


def _parse_biases(text: str | None) -> Mapping[int, float]:
    if text is None:
        return {}
    try:
        return read_biases("logit_bias", json.loads(text))
    except ValueError as error:  # InputError is one, too
        reason = f"{error.asked} {error.limit}" if isinstance(error, InputError) else "It is none."
        raise InputError(
            f"--logit-bias {text} was given.",
            f"It must be a JSON object of token ids with numbers from -100 to 100. {reason}",
            """Write it like '{"50256": -100}'.""",
        ) from error


def _parse_structure(arguments: argparse.Namespace) -> StructuredOutputs | None:
    """What answers must look like, of the flags of which one may be given. InputError names the
    flag, and the file where it has one."""
    given = {
        flag: (name, getattr(arguments, flag.removeprefix("--").replace("-", "_")))
        for name, flag in _STRUCTURES.items()
    }
    # Empty texts are refused: a script whose variable is not set does not want any answer at all.
    given = {flag: own for flag, own in given.items() if own[1] not in (None, [])}
    if len(given) > 1:
        raise InputError(
            f"{' and '.join(given)} were given.",
            "An answer has one form.",
            "Leave all but one of them out.",
        )
    for flag, (name, value) in given.items():
        shown = value if isinstance(value, str) else " ".join(map(repr, value))
        asked = f"{flag} {shown or repr(shown)} was given."
        own = _read_text(flag, value) if name in ("json", "grammar") and value else value
        if not own or (name == "choice" and "" in own):
            raise InputError(asked, "It is empty.", "Write something, or leave it out.")
        try:
            return StructuredOutputs.of({name: own})
        except InputError as error:
            raise InputError(asked, error.limit, error.advice) from error
    return None


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{flag} {path} was given.",
            f"It cannot be read as text: {reason_of(error)}.",
            "Name a file that is there, in UTF-8.",
        ) from error


def _existing_directory(text: str | None) -> Path | None:
    """Asked for early: a directory that no policy comes to need would never be missed."""
    if text is None or Path(text).is_dir():
        return _parse_path(text)
    raise InputError(
        f"--disk-dir {text} was given.",
        "It is a file." if Path(text).exists() else "There is no such directory.",
        "Make it first, or name another one on a fast disk.",
    )


def _parse_path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _parse_size(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text, name=flag)


def _run_job(
    spec: JobSpec,
    options: EngineOptions,
    model_dir: Path,
    progress: Progress,
    *,
    recalibrates: bool,
) -> JobReport:
    config = for_task(read_config(model_dir), options.task)
    built: list[tuple[Engine, Machine | None]] = []

    def build(workload: Workload) -> Engine:
        # torch takes seconds to import; a finished or refused job never needs it.
        from freight.runtime.engine import build_engine

        compress_ahead(options, model_dir, progress.say)
        machine = own_machine(options, model_dir, nominal_s(config, workload), progress.say)
        planned = replace(options, machine=machine)
        engine = build_engine(model_dir, options=planned, workload=workload, say=progress.say)
        built.append((engine, machine))
        return engine

    report = answer_rows(spec, options, model_dir, progress, build)
    for engine, machine in built if recalibrates else ():
        keep_recalibrated(engine, machine, progress.say)
    return report


def answer_rows(
    spec: JobSpec,
    options: EngineOptions,
    model_dir: Path,
    progress: Progress,
    build: Callable[[Workload], Engine],
) -> JobReport:
    """Run the job with the engine that ``build`` makes for its rows, if any is to be answered."""
    config = for_task(read_config(model_dir), options.task)
    identity = identify(options, model_dir)
    if config.readout is not None:
        spec = replace(spec, sampling=_unsampled(spec.sampling, config.readout))
        identity["what is made"] = config.readout.description
        if not config.readout.labels:
            form = spec.form.stated(config.readout, config.head_size)
            identity["its form"] = form.description
    return run_job(
        spec,
        tokenizer=open_tokenizer(model_dir, options),
        limits=row_limits(config, model_dir, spec.form),
        identity=identity,
        build_engine=build,
        observer=progress,
    )


def _unsampled(sampling: SamplingParams, readout: Readout) -> SamplingParams:
    """The parameters of rows of which no token is chosen. InputError where one was asked for."""
    usual = SamplingParams(max_tokens=MAX_TOKENS)
    for own in fields(SamplingParams):
        if getattr(sampling, own.name) != getattr(usual, own.name):
            flag = _FLAGS.get(own.name, f"--{own.name.replace('_', '-')}")
            structure = sampling.structured_outputs
            if own.name == "structured_outputs" and isinstance(structure, StructuredOutputs):
                (kind,) = structure.as_mapping()
                flag = _STRUCTURES[kind]
            refuse_other(readout, "generate", f"{flag} was given.", spare="leave it out")
    return READING


def identify(options: EngineOptions, model_dir: Path) -> dict[str, str]:
    """Whose answers they are: all that changes tokens besides the rows and their parameters."""
    identity = {
        **model_identity(model_dir, dummy_seed=options.dummy_seed),
        "dtype": options.dtype,
        "Freight's version": freight_version(),
    }
    if options.weight_bits is not None:
        identity["the weights' bits"] = f"{options.weight_bits}, groups of {options.group_size}"
        if options.group_dim != "input":
            identity["the dimension of the weights' groups"] = options.group_dim
    if options.kv_bits is not None:
        identity["the keys' bits"] = f"{options.kv_bits}, groups of {options.group_size}"
    if options.sparse_attention is not None:
        identity["the share of keys that count"] = f"{options.sparse_attention:g}"
    if options.compute != "plain":
        identity["the arithmetic of products"] = options.compute
    return identity


def farewell(spec: JobSpec, progress: Progress) -> str:
    """What a job that was stopped leaves."""
    if progress.num_rows is None:
        return "stopped before the first row. Run the same command again."
    done = f"stopped with {progress.num_done} of {progress.num_rows} rows done"
    if isinstance(spec.sink, int) and spec.job_dir is None:
        return f"{done}. They were not kept: the output is a stream. Give --job-dir to keep them."
    return f"{done} and kept. Run the same command again to go on."


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def raise_terminated(signal_number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
