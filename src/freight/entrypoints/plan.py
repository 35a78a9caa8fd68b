"""``freight plan``: what a model, a machine and some work come to, before anything is bought.

Needs no weights, no torch and no such machine: a ``config.json`` and a preset, or a profile.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from freight.entrypoints.bundled import check_model, find_bundled
from freight.entrypoints.frontier import draw, frontiers, require_plots
from freight.entrypoints.plan_report import (
    Question,
    as_points,
    as_record,
    compare,
    describe,
    dollars_per_token,
    explain,
)
from freight.entrypoints.plan_workload import read_workload
from freight.entrypoints.profile import default_path, read_kept_profile
from freight.entrypoints.shares import parse_shares
from freight.errors import BudgetError, InputError
from freight.hardware.machine import Machine
from freight.hardware.storage import find_machine
from freight.model.adapter import has_adapter
from freight.model.approximation import approximate
from freight.model.checkpoint import resolve
from freight.model.compression import packed_formats
from freight.model.config import ModelConfig, read_config
from freight.model.decoder import build_programme
from freight.model.gguf_tensors import find_gguf
from freight.model.number_format import (
    Compression,
    ExactCompression,
    check_groups,
    find_compression,
)
from freight.model.sources import TensorSource
from freight.model.task import for_task
from freight.plan.copies import useful_copies
from freight.plan.default import Planner
from freight.plan.policy import Split, Tier, find_rule
from freight.plan.samples import rehearse
from freight.plan.search import Choice, Search
from freight.plan.techniques import ALL, price_techniques
from freight.plan.wishes import Wishes
from freight.quantities import GIB, MIB, format_bytes, parse_bytes
from freight.runtime.trace import Trace

__all__ = ["plan_policy", "search_for"]

_PROCESS_BYTES: Final = 448 * MIB
_TAKEN_BESIDE_GPU: Final[dict[Tier, int]] = {"cpu": 1 * GIB, "gpu": 768 * MIB}
"""What a process has of RAM before the first weight: that of a GPU has libraries of its own there,
and a context on it."""
_USABLE_SHARE: Final = 0.95


def plan_policy(arguments: argparse.Namespace) -> int:
    """Answer for each machine that was named; returns the exit status."""
    config, stored = _find_model(arguments.model, arguments.task, arguments.lora)
    machines = [*_find_machines([*arguments.machine, *arguments.compare])]
    workload, wishes = read_workload(arguments, config), _read_wishes(arguments)
    workload = workload.as_shared() if wishes.shares_prefixes else workload.as_alone()
    check_groups(
        group_size=arguments.group_size,
        weight_bits=arguments.weight_bits,
        kv_bits=arguments.kv_bits,
    )
    if arguments.lossless and config.dtype != "bfloat16":
        raise InputError(
            f"--lossless was given for {arguments.model}.",
            f"Its weights are {config.dtype} by its config.json; only bfloat16's exponents can be "
            "short.",
            "Leave it out.",
        )
    config = approximate(
        config,
        kv_bits=arguments.kv_bits,
        group_size=arguments.group_size,
        attended_share=arguments.sparse_attention,
    )
    questions = [
        Question(
            model=arguments.model,
            config=config.for_rows(workload.max_total_tokens),
            machine=machine,
            workload=workload,
            dtype=_dtype_on(machine, arguments.dtype),
            budgets=dict(_budgets(machine, arguments)),
            wishes=wishes,
            dollars_per_kwh=_read_electricity(arguments.electricity),
            compression=_read_compression(arguments, machine),
            stored=stored,
        )
        for machine in machines
    ]
    max_block_s = _read_latency(arguments.max_latency)
    if arguments.objective == "electricity" and not arguments.electricity:
        raise InputError(
            "--objective electricity was given with --electricity 0.",
            "All machines cost the same then, nothing.",
            "Give dollars above 0 per kilowatt hour, or another objective.",
        )
    if arguments.chips is not None:
        # What several chips need is imported where it is asked for, here and below: a plan is
        # wanted at once.
        from freight.entrypoints.plan_parallel import parallel_for, plan_chips

        chips = [
            parallel_for(own, arguments, max_block_s, _taken_on(own.machine)) for own in questions
        ]
        return plan_chips(list(zip(questions, chips, strict=True)), arguments)
    _refuse_chip_flags(arguments)
    if arguments.explain or arguments.frontier or arguments.trace:
        if len(questions) > 1:
            raise InputError(
                f"{len(questions)} machines were given.",
                "--explain, --frontier and --trace are for one machine.",
                "Name one machine, or leave them out.",
            )
        return _show_one(questions[0], search_for(questions[0], max_block_s), arguments)
    answers, refusals = [], {}
    for question in questions:
        try:
            answers.append((question, search_for(question, max_block_s).best()))
        except BudgetError as error:
            refusals[question.machine.name] = error
    if not answers:
        raise next(iter(refusals.values()))
    # One machine that is too small says nothing of the others.
    for name, refusal in refusals.items():
        print(f"freight: {name}: {' '.join(str(refusal).split())}", file=sys.stderr)
    if arguments.objective != "throughput":
        answers.sort(key=lambda own: dollars_per_token(own[0], own[1], arguments.objective))
    elif arguments.compare:
        answers.sort(key=lambda own: -own[1].forecast.tokens_per_s)
    if arguments.json:
        records = [as_record(question, choice) for question, choice in answers]
        print(json.dumps(records[0] if len(questions) == 1 else records, indent=1))
    elif len(questions) == 1:
        print("\n".join(describe(*answers[0])))
    else:
        print("\n".join(compare(answers)))
    return 0


def _refuse_chip_flags(arguments: argparse.Namespace) -> None:
    """Those that say something of several chips, where there are not any."""
    given = [name for name in ("host_chips", "chip") if getattr(arguments, name) is not None]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} {getattr(arguments, given[0])} was given.",
            "It is of plans for several chips.",
            "Say how many with --chips, or leave it out.",
        )


def _show_one(question: Question, search: Search, arguments: argparse.Namespace) -> int:
    """More than the best plan: what it owes to which technique, how it trades latency, when each
    lane is busy."""
    for flag in ("frontier", "trace"):
        path = getattr(arguments, flag)
        if path and not Path(path).absolute().parent.is_dir():
            raise InputError(
                f"--{flag} {path} was given.",
                f"It cannot be written: there is no directory {Path(path).parent}.",
                "Make it first, or name another file.",
            )
    if arguments.frontier:
        require_plots()
    priced = price_techniques(search) if arguments.explain else {ALL: search.best()}
    shorter = _with_short_exponents(question, search) if arguments.explain else None
    best = priced[ALL]
    assert best is not None
    record = as_record(question, best)
    if not arguments.json:
        print("\n".join(describe(question, best)))
    if arguments.explain:
        record["without"] = {
            name: None if choice is None else as_record(question, choice)
            for name, choice in priced.items()
            if name != ALL
        }
        record["with_lossless"] = shorter and as_record(*shorter)
        if not arguments.json:
            print("\n" + "\n".join(explain(question, priced, shorter and shorter[1])))
    if arguments.frontier:
        curves = frontiers(search)
        record["frontier"] = as_points(question, curves)
        title = f"{question.model} on {question.machine.name}"
        draw(curves, Path(arguments.frontier), title, f"{question.unit}s per second")
    if arguments.trace:
        trace = Trace(Path(arguments.trace))
        trace.predict(rehearse(best.plan, search.machine, question.config, question.dtype))
        trace.close()
    if arguments.json:
        print(json.dumps(record, indent=1))
    return 0


def _with_short_exponents(question: Question, search: Search) -> tuple[Question, Choice] | None:
    """The best plan for the same weights in fewer bits; None where they have these, or cannot."""
    config = question.config
    is_plain = question.compression is None and config.packing is None and not question.stored
    if not is_plain or {config.dtype, question.kept_dtype} != {"bfloat16"}:
        return None
    shorter = replace(question, compression=ExactCompression())
    try:
        return shorter, search_for(shorter, search.max_block_s).best()
    except BudgetError:
        return None


def search_for(question: Question, max_block_s: float = math.inf) -> Search:
    """The search for the best plan."""
    config, machine = question.config, question.machine
    planner = Planner(
        config=config,
        programme=build_programme(config),
        sources=question.sources(config),
        dtype=question.dtype,
        workload=question.workload,
        compute_tier="gpu" if "gpu" in machine.units else "cpu",
        room=_rooms(question),
        taken=_taken_on(machine),
        has_disk_dir=True,
        wishes=question.wishes,
    )
    return Search(
        planner=planner, machine=machine, max_block_s=max_block_s, at_once=useful_copies()
    )


def _find_model(
    name: str | None, task: str, lora: str | None
) -> tuple[ModelConfig, Mapping[str, TensorSource]]:
    """A bundled one by name, a config.json, or a model's directory or GGUF file; the tensors where
    they are there and quantised."""
    if lora is None and name is not None and (config := find_bundled(name)) is not None:
        return for_task(config, task), {}
    name = check_model(name, "A plan is for a model.")
    path = Path(name)
    is_described = path.name == "config.json" or not (path.is_dir() or path.suffix == ".gguf")
    if lora is None and is_described:
        return for_task(read_config(path), task), {}
    from freight.entrypoints.model_source import find_model

    path = find_model(name, lora)
    config = for_task(read_config(path), task)
    is_changed = config.packing is not None or has_adapter(path)
    is_packed = is_changed and any(path.glob("*.safetensors"))
    stored = resolve(config, path) if is_packed or find_gguf(path) is not None else {}
    return config, stored if packed_formats(stored) else {}


def _find_machines(names: list[str]) -> Iterator[Machine]:
    if not names and not default_path().exists():
        raise InputError(
            "No machine was given.",
            "This one has not been measured yet.",
            "Measure it with freight profile, or name a preset with --machine.",
        )
    if not names:
        yield read_kept_profile(lambda text: print(f"freight: {text}", file=sys.stderr))
    for name in names:
        yield find_machine(name)


def _read_electricity(dollars: float) -> float:
    if not 0 <= dollars < math.inf:
        raise InputError(
            f"--electricity {dollars:g} was given.",
            "A kilowatt hour costs no less than nothing.",
            "Give dollars from 0 on, or leave it out.",
        )
    return dollars


def _read_latency(seconds: float | None) -> float:
    if seconds is None:
        return math.inf
    if not seconds > 0:
        raise InputError(
            f"--max-latency {seconds:g} was given.",
            "A block takes more than no time.",
            "Give seconds above 0, or leave it out.",
        )
    return seconds


def _read_wishes(arguments: argparse.Namespace) -> Wishes:
    def split(flag: str, text: str | None) -> Split | None:
        shares = parse_shares(flag, text)
        return None if shares is None else Split.of_percent(*shares)

    return Wishes(
        weights=split("--weights", arguments.weights),
        kv=split("--kv", arguments.kv),
        activations=split("--activations", arguments.activations),
        micro_batch_size=arguments.micro_batch_size,
        num_micro_batches=1 if arguments.admission == "row" else arguments.num_micro_batches,
        cpu_attention=None if arguments.cpu_attention is None else arguments.cpu_attention / 100,
        recomputed=None if arguments.recompute_kv is None else arguments.recompute_kv / 100,
        admission=find_rule(arguments.admission),
        batch_tokens=arguments.batch_tokens,
        rolls_windows=not arguments.no_rolling_windows,
        moves_rows=not arguments.no_row_moves,
        shares_prefixes=not arguments.no_shared_prefixes,
        overlap=not arguments.no_overlap,
    )


def _read_compression(
    arguments: argparse.Namespace, machine: Machine
) -> Compression | ExactCompression | None:
    if arguments.compute == "int8" and "gpu" in machine.units:
        raise InputError(
            f"--compute {arguments.compute} was given for the machine {machine.name}.",
            "Its GPU computes, and integer products are made on CPUs.",
            "Leave it out, or name a machine without a GPU.",
        )
    return find_compression(
        weight_bits=arguments.weight_bits,
        group_size=arguments.group_size,
        group_dim=arguments.group_dim,
        compute=arguments.compute,
        lossless=arguments.lossless,
    )


def _dtype_on(machine: Machine, asked: str) -> str:
    """16 bits where the machine computes in them."""
    if asked != "auto":
        return asked
    nearest = machine.compute_unit.nearest_dtype("bfloat16")
    return "bfloat16" if "16" in nearest else "float32"


def _budgets(machine: Machine, arguments: argparse.Namespace) -> Iterator[tuple[Tier, int]]:
    """What each tier may use, flags before what there is."""
    asked: dict[Tier, str | None] = {"gpu": arguments.gpu_memory, "cpu": arguments.cpu_memory}
    for tier, text in asked.items():
        if tier not in machine.units:
            continue
        there = machine.units[tier].memory_bytes
        budget = (
            int(_USABLE_SHARE * there)
            if text is None
            else parse_bytes(text, name=f"--{tier}-memory")
        )
        if budget > there:
            raise InputError(
                f"--{tier}-memory {text} was given.",
                f"The machine {machine.name} has {format_bytes(there)}.",
                "Lower it, leave it out, or name another machine.",
            )
        yield tier, budget
    yield "disk", machine.disk_bytes


def _taken_on(machine: Machine) -> Mapping[Tier, int]:
    return _TAKEN_BESIDE_GPU if "gpu" in machine.units else {"cpu": _PROCESS_BYTES}


def _rooms(question: Question) -> dict[Tier, int]:
    """Budgets less what the process, the device's context and the checkpoint take."""
    rooms = dict(question.budgets)
    for tier, num_bytes in _taken_on(question.machine).items():
        rooms[tier] -= num_bytes
    beside = question.beside("disk")
    rooms["disk"] -= sum(beside.values())
    if rooms["disk"] < 0:
        copy = beside.get("compressed copy", 0)
        more = f", and what runs make of it {format_bytes(copy)}" if copy else ""
        raise BudgetError(
            f"{question.model} takes {question.size_text}{more}.",
            f"The disk of {question.machine.name} has {format_bytes(question.machine.disk_bytes)}.",
            "Take a machine with a larger disk, or a smaller model.",
        )
    return rooms
