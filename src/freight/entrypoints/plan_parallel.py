"""``freight plan --chips``: ways of sharing a model and its work over chips, compared.

Reads flags, asks ``plan.parallel``, and shows what it says as a table or a record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from freight.distributed.tensor.limits import refuse_what_cannot_be_cut
from freight.entrypoints.plan_report import (
    Question,
    costs_of,
    describe_work,
    flags_of,
    policy_record,
    time_text,
)
from freight.errors import InputError
from freight.hardware.chip import Chip, chip_names, find_chip
from freight.hardware.machine import Machine
from freight.model.config import ModelConfig
from freight.model.sources import TensorSource
from freight.plan.parallel import Answer, Parallel, Refused, Stage
from freight.plan.policy import Tier
from freight.quantities import format_bytes

__all__ = ["parallel_for", "plan_chips"]

_OTHERS: Final = ("explain", "frontier", "trace")
_HOSTS: Final = "cpu-host"
_RATES: Final = "rates"
_LINKS: Final = "links"
_OF_LINKS: Final = (
    "link_bytes_per_s",
    "link_latency_s",
    "outer_bytes_per_s",
    "outer_latency_s",
)


def parallel_for(
    question: Question,
    arguments: argparse.Namespace,
    max_block_s: float,
    taken: Mapping[Tier, int],
) -> Parallel:
    """The question asked of several chips, ``taken`` what a process has of each tier."""
    extra = [name for name in _OTHERS if getattr(arguments, name)]
    if extra:
        raise InputError(
            f"--{extra[0]} was given with --chips.",
            "It is of one chip.",
            "Leave one of the two out.",
        )
    machine = question.machine

    def of_model(config: ModelConfig) -> Mapping[str, TensorSource]:
        if config != question.config:
            refuse_what_cannot_be_cut(question.config)
        if question.stored and config != question.config:
            raise InputError(
                "Matrices of a checkpoint were to be cut over chips.",
                "They are quantised already, in groups that a cut may go through.",
                "Share the model by rows or layers.",
            )
        if question.is_lossless and config != question.config:
            raise InputError(
                "--lossless was given for matrices that are cut over chips.",
                "Exponents without a code belong to whole rows.",
                "Share the model by rows or layers, or leave it out.",
            )
        return question.sources(config)

    host_chips = arguments.host_chips
    if host_chips is not None and host_chips > arguments.chips > 0:
        raise InputError(
            f"--host-chips {host_chips} was given with --chips {arguments.chips}.",
            "A host has no more chips than there are in all.",
            "Lower it, or raise --chips.",
        )
    return Parallel(
        config=question.config,
        workload=question.workload,
        machine=machine,
        budgets=question.budgets,
        taken=taken,
        wishes=question.wishes,
        dtype=question.dtype,
        sources=of_model,
        chip=_chip_of(machine, arguments.chip),
        model_bytes=question.model_bytes,
        num_chips=arguments.chips,
        host_chips=max(1, machine.num_gpus) if host_chips is None else host_chips,
        max_block_s=max_block_s,
    )


def plan_chips(asked: Sequence[tuple[Question, Parallel]], arguments: argparse.Namespace) -> int:
    """Answer for each machine; returns the exit status."""
    records = []
    for question, parallel in asked:
        answers = parallel.answers()
        best = parallel.best(answers)
        if arguments.json:
            records.append(_as_record(question, parallel, answers, best))
        else:
            print("\n".join(_describe(question, parallel, answers, best)))
    if arguments.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
    return 0


def _chip_of(machine: Machine, name: str | None) -> Chip:
    """Which chip's links the machine's chips have."""
    if name is not None:
        return find_chip(name)
    if "gpu" not in machine.units:
        return find_chip(_HOSTS)
    named = [own for own in chip_names() if own in machine.name]
    if not named:
        raise InputError(
            f"The links between chips of {machine.name} were asked for.",
            "No preset of a chip has a name that is in the machine's.",
            f"Name one whose links they have with --chip: {', '.join(chip_names())}.",
        )
    return find_chip(max(named, key=len))


def _describe(
    question: Question, parallel: Parallel, answers: list[Answer | Refused], best: Answer
) -> Iterator[str]:
    work = question.workload
    hosts = -(-parallel.num_chips // parallel.host_chips)
    yield (f"model    {question.model}: {question.config.num_layers} layers, {question.size_text}")
    yield (
        f"chips    {parallel.num_chips}, {parallel.host_chips} to each of {hosts} "
        f"host{'' if hosts == 1 else 's'} like "
        f"{question.machine.name}: {question.machine.description}"
    )
    yield f"links    {parallel.chip.name}: {parallel.chip.description}"
    yield f"work     {describe_work(work, is_read=question.is_read)}"
    yield ""
    price = f"$/M{question.unit.removeprefix('new ')}"
    yield (
        f"{'shared by':24} {question.unit + '/s':>11} {'block':>9} {price:>9}"
        f" {'gpu':>10} {'cpu':>10} {'disk':>10}  binds"
    )
    for own in answers:
        yield _line(question, parallel, own)
    yield from _legend(question, parallel, answers)
    yield ""
    mark = "~" if _uncalibrated(question, best) else ""
    yield (
        f"best     {best.shares}: in all {mark}{time_text(best.seconds)}"
        + (f", {best.in_flight} blocks in flight" if best.shares.stages > 1 else "")
    )
    for stage in best.stages:
        yield f"layers   {stage.first} to {stage.last}: {flags_of(stage.choice.plan.policy)}"
        yield f"         weights {_placed(stage)}; {stage.binding} binds"


def _line(question: Question, parallel: Parallel, own: Answer | Refused) -> str:
    if isinstance(own, Refused):
        return f"{own.shares!s:24} {'-':>11}  {own.why.limit}"
    memory = "".join(f" {format_bytes(_used(own, tier)):>10}" for tier in ("gpu", "cpu", "disk"))
    costs = _costs(question, parallel, own)
    rent = next((f"{cost:.3g}" for how, cost in costs.items() if "rented" in how), "-")
    late = ", block over the bound" if own.block_s > parallel.max_block_s else ""
    mark = "~" if _uncalibrated(question, own) else ""
    speed, block = f"{mark}{own.tokens_per_s:.3g}", f"{mark}{time_text(own.block_s)}"
    rent = rent if rent == "-" else mark + rent
    return (
        f"{own.shares!s:24} {speed:>11} {block:>9} {rent:>9}"
        f"{memory}  {own.slowest.binding}{late}{', sketched' if own.is_rough else ''}"
    )


def _uncalibrated(question: Question, own: Answer) -> list[str]:
    """What a way's figures rest on that was not measured on such machines."""
    found = [] if question.machine.host else [_RATES]
    return found + ([_LINKS] if own.shares.stages * own.shares.ranks > 1 else [])


def _legend(
    question: Question, parallel: Parallel, answers: list[Answer | Refused]
) -> Iterator[str]:
    """What marks say, as far as there are any."""
    told = [own for own in answers if isinstance(own, Answer)]
    marks = {mark for own in told for mark in _uncalibrated(question, own)}
    if _RATES in marks:
        yield f"~        not calibrated: {_rates_text(question)}"
    if _LINKS in marks:
        yield (
            f"{'~' if len(marks) == 1 else ' '}        not calibrated: what crosses between chips, "
            f"at the peak of {parallel.chip.name} by its data sheet, its fixed times estimates"
        )
    if any(own.is_rough for own in told):
        yield "sketched from fewer sweeps and policies: not near the best"


def _rates_text(question: Question) -> str:
    """Of a preset, how many of its values nobody has published."""
    sources = question.machine.sources.values()
    guessed = sum("estimate" in own for own in sources)
    return (
        f"rates are the preset's, {guessed} of its {len(sources)} values estimates; "
        "freight profile measures them"
    )


def _used(own: Answer, tier: Tier) -> int:
    """The most that a chip has of a tier; of the disk with the weights that are read in place."""
    plans = [stage.choice.plan for stage in own.stages]
    weights = [plan.layout.tier_bytes()["disk"] if tier == "disk" else 0 for plan in plans]
    held = [plan.geometry.total(tier) for plan in plans]
    return max(map(sum, zip(held, weights, strict=True)))


def _placed(stage: Stage) -> str:
    held = stage.choice.plan.layout.tier_bytes()
    return ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in held.items() if size)


def _costs(question: Question, parallel: Parallel, own: Answer) -> dict[str, float]:
    """Of all machines; none where they have other numbers of chips than what has the price."""
    if parallel.host_chips != max(1, question.machine.num_gpus):
        return {}
    hosts = -(-parallel.num_chips // parallel.host_chips)
    return costs_of(question, own.tokens_per_s / hosts)


def _as_record(
    question: Question, parallel: Parallel, answers: list[Answer | Refused], best: Answer
) -> dict[str, Any]:
    """Seconds, bytes and shares in [0, 1]; ``ways`` are fastest first. ``uncalibrated`` says of a
    way what its figures rest on that was not measured, and above, where that is from."""
    return {
        "model": question.model,
        "machine": question.machine.name,
        "dtype": question.dtype,
        "num_chips": parallel.num_chips,
        "host_chips": parallel.host_chips,
        "num_rows": question.workload.num_rows,
        "prompt_tokens": question.workload.max_prompt_tokens,
        "new_tokens": 0 if question.is_read else question.workload.max_new_tokens,
        "best": str(best.shares),
        "uncalibrated": {
            _RATES: None if question.machine.host else _rates_text(question),
            _LINKS: {name: parallel.chip.sources.get(name) for name in _OF_LINKS},
        },
        "ways": [_way(question, parallel, own) for own in answers],
    }


def _way(question: Question, parallel: Parallel, own: Answer | Refused) -> dict[str, Any]:
    shares = own.shares
    record: dict[str, Any] = {
        "shared_by": str(shares),
        "data": shares.data,
        "stages": shares.stages,
        "ranks": shares.ranks,
    }
    if isinstance(own, Refused):
        return record | {"refused": str(own.why)}
    return record | {
        "seconds": {
            "prefill": own.prefill_s,
            "decode": own.decode_s,
            "generate": own.seconds,
            "block": own.block_s,
        },
        question.rate_name: own.tokens_per_s,
        "blocks_in_flight": own.in_flight,
        "is_sketch": own.is_rough,
        "uncalibrated": _uncalibrated(question, own),
        "keeps_to_latency": own.block_s <= parallel.max_block_s,
        question.cost_name: _costs(question, parallel, own),
        "chips": [
            {
                "first_layer": stage.first,
                "last_layer": stage.last,
                "policy": policy_record(question, stage.choice.plan.policy),
                "binding": stage.binding,
                "sent_seconds": sum(stage.sent_s),
                "memory_bytes": {
                    tier: stage.choice.plan.geometry.total(tier) for tier in question.budgets
                },
                "weight_bytes": dict(stage.choice.plan.layout.tier_bytes()),
            }
            for stage in own.stages
        ],
    }
