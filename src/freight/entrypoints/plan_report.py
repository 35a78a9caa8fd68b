"""A plan as a table for people, and as a record for programs.

Reads plans and forecasts; reckons nothing but money.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from freight.entrypoints.plan_weights import checkpoint_bytes, copy_bytes, planned_sources
from freight.hardware.machine import Machine
from freight.model.checkpoint import dummy_dtype
from freight.model.config import ModelConfig
from freight.model.number_format import Compression, ExactCompression
from freight.model.sources import TensorSource
from freight.plan.forecast import Forecast
from freight.plan.operation import Lane
from freight.plan.policy import Policy, Split, Tier
from freight.plan.search import Choice
from freight.plan.techniques import ALL, ROW_BY_ROW
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.quantities import format_bytes

__all__ = [
    "Question",
    "as_points",
    "as_record",
    "compare",
    "costs_of",
    "describe",
    "describe_work",
    "dollars_per_token",
    "explain",
    "flags_of",
    "policy_record",
    "time_text",
]

_TIERS: Final[tuple[Tier, ...]] = ("gpu", "cpu", "disk")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A model on a machine, with some work, budgets and wishes. ``stored`` are the tensors of a
    checkpoint that is at hand and quantised already."""

    model: str
    config: ModelConfig
    machine: Machine
    workload: Workload
    dtype: str
    budgets: dict[Tier, int]
    wishes: Wishes
    dollars_per_kwh: float
    compression: Compression | ExactCompression | None
    stored: Mapping[str, TensorSource] = field(default_factory=dict)

    @property
    def is_read(self) -> bool:
        """Whether rows have no new tokens: of each the last one is read."""
        return self.config.readout is not None

    @property
    def unit(self) -> str:
        """What is made, and paid for."""
        return "row" if self.is_read else "new token"

    @property
    def rate_name(self) -> str:
        """How programs know how fast it is made."""
        return "rows_per_s" if self.is_read else "new_tokens_per_s"

    @property
    def cost_name(self) -> str:
        return f"dollars_per_million_{'rows' if self.is_read else 'new_tokens'}"

    @property
    def num_new_tokens(self) -> float:
        return 0.0 if self.is_read else self.workload.expected_new_tokens

    @property
    def in_integers(self) -> bool:
        return self.compression is not None and self.compression.is_for_integers

    @property
    def weight_bits(self) -> int | None:
        own = self.compression
        return own.bits if isinstance(own, Compression) and not self.in_integers else None

    @property
    def is_lossless(self) -> bool:
        """Whether weights have short exponents."""
        return isinstance(self.compression, ExactCompression)

    def sources(self, config: ModelConfig) -> Mapping[str, TensorSource]:
        """Where weights lie, of the model or of a part of it."""
        return planned_sources(config, self._source_dtype, self.stored, self.compression)

    @property
    def _source_dtype(self) -> str:
        """Weights that stay bfloat16 do so whatever is computed with."""
        return self.config.dtype if self.is_lossless else self.dtype

    @property
    def model_bytes(self) -> int:
        return checkpoint_bytes(self.config, self._source_dtype, self.stored)

    def beside(self, tier: Tier) -> dict[str, int]:
        """What weights take of the disk, wherever they are in a run."""
        if tier != "disk":
            return {}
        about = self.config, self._source_dtype, self.stored
        sizes = {
            "checkpoint": self.model_bytes,
            "compressed copy": copy_bytes(*about, self.compression),
        }
        return {name: size for name, size in sizes.items() if size}

    @property
    def kept_dtype(self) -> str:
        """What the checkpoint's numbers are, by its configuration."""
        return self.config.dtype if self.is_lossless else dummy_dtype(self.config, self.dtype)

    @property
    def size_text(self) -> str:
        """What the model takes, and what it is computed in where that is wider."""
        kept, computed = self.kept_dtype, self.dtype
        if self.stored or self.config.packing is not None:
            return format_bytes(self.model_bytes)
        wider = "" if kept == computed else f", computed in {computed}"
        return f"{format_bytes(self.model_bytes)} in {kept}{wider}"


def describe(question: Question, choice: Choice) -> Iterator[str]:
    """Some lines for a person."""
    work, told, is_read = question.workload, choice.forecast, question.is_read
    unit = question.unit
    yield (
        f"model    {question.model}: {question.config.num_layers} layers, "
        f"{question.size_text}{_compression(question)}{_task(question)}"
    )
    yield f"machine  {question.machine.name}: {question.machine.description}"
    yield f"work     {describe_work(work, is_read=is_read)}"
    yield ""
    yield f"policy   {flags_of(choice.plan.policy)}"
    yield f"         weights come out as {_weights(choice)} % on gpu/cpu/disk"
    yield (
        f"time     {_phases(told)}in all {time_text(told.seconds)}; "
        f"loading {time_text(told.load_s)}"
    )
    prompts = "token/s of prompts" if is_read else "with prompts"
    yield (
        f"speed    {told.tokens_per_s:.3g} {unit}/s, {_all_tokens_per_s(question, choice):.3g} "
        f"{prompts}; a block of {_rows_text(_block_rows(question, choice))} takes "
        f"{time_text(_latency_s(question, choice))}"
    )
    yield f"busy     {', '.join(_busy(choice))}"
    for tier in _TIERS:
        if tier in question.budgets:
            yield f"memory   {_memory(question, choice, tier)}"
    yield f"moved    {_moved(choice)}"
    costs = costs_of(question, choice.forecast.tokens_per_s)
    if costs:
        dollars = ", ".join(f"${own:.3g} {how}" for how, own in costs.items())
        yield f"cost     per million {unit}s {dollars}"


def explain(
    question: Question, priced: Mapping[str, Choice | None], shorter: Choice | None
) -> Iterator[str]:
    """What each technique is worth: one line with all, one for each that is left out, and one for
    the same weights in fewer bits."""
    best = priced[ALL]
    assert best is not None
    yield f"{'the best plan':36} {question.unit + '/s':>11} {'share':>6}  policy"
    lines = {
        name if name in (ALL, ROW_BY_ROW) else f"without {name}": choice
        for name, choice in priced.items()
    }
    if shorter is not None:
        lines["with --lossless"] = shorter
    for what, choice in lines.items():
        if choice is None:
            yield f"{what:36} {'-':>11} {'-':>6}  does not fit"
            continue
        speed = choice.forecast.tokens_per_s
        share = speed / best.forecast.tokens_per_s
        yield f"{what:36} {speed:11.3g} {share:6.1%}  {flags_of(choice.plan.policy)}"


def as_points(
    question: Question, curves: Mapping[str, Sequence[Choice]]
) -> dict[str, list[dict[str, float | int]]]:
    """The points of a frontier, for JSON."""
    return {
        name: [
            {
                "block_seconds": choice.forecast.block_s,
                question.rate_name: choice.forecast.tokens_per_s,
                "micro_batch_size": choice.plan.policy.micro_batch_size,
                "num_micro_batches": choice.plan.policy.num_micro_batches,
            }
            for choice in choices
        ]
        for name, choices in curves.items()
    }


def dollars_per_token(question: Question, choice: Choice, objective: str) -> float:
    """What ranks machines by cost; infinite where a machine has no price."""
    price = {
        "rent": question.machine.dollars_per_hour,
        "electricity": (question.machine.watts or 0) / 1000 * question.dollars_per_kwh or None,
    }[objective]
    speed = choice.forecast.tokens_per_s
    return math.inf if price is None or not speed else price / speed


def compare(answers: Sequence[tuple[Question, Choice]]) -> Iterator[str]:
    """One line for each machine."""
    unit = answers[0][0].unit
    rented = f"$/M{unit.removeprefix('new ')} rented"
    yield (
        f"{'machine':14} {unit + '/s':>11} {'in all':>9} {'binds':15} "
        f"{rented:>15} {'electricity':>11}  policy"
    )
    for question, choice in answers:
        costs = list(costs_of(question, choice.forecast.tokens_per_s).items())
        rent = next((f"{own:.3g}" for how, own in costs if "rent" in how), "-")
        power = next((f"{own:.3g}" for how, own in costs if "electricity" in how), "-")
        yield (
            f"{question.machine.name:14} {choice.forecast.tokens_per_s:11.3g} "
            f"{time_text(choice.forecast.seconds):>9} {choice.forecast.binding.value:15} "
            f"{rent:>15} {power:>11}  {flags_of(choice.plan.policy)}"
        )


def describe_work(work: Workload, *, is_read: bool = False) -> str:
    """Rows and their lengths; of rows whose last token ``is_read`` nothing is new."""
    prompt = _length(work.max_prompt_tokens, _mean_prompt(work))
    new = _length(work.max_new_tokens, work.expected_new_tokens / work.num_rows)
    lengths = f"{prompt} tokens" if is_read else f"{prompt} prompt and {new} new tokens"
    told = f"{_rows_text(work.num_rows)} of {lengths}"
    if (own := work.beginnings) is not None:
        mean = round(work.mean_shared_tokens(1))
        told += f"; rows begin alike, with {_length(own.most_tokens, mean)} tokens"
        told += f" of {own.all.beginnings} beginnings" * (own.all.beginnings > 1)
    return told


def _rows_text(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _mean_prompt(work: Workload) -> float:
    """Tokens, by row: that of several samples counts for each."""
    if not work.lengths:
        return work.mean_row_prompt_tokens
    return sum(count * prompt for count, prompt, _ in work.lengths) / work.num_rows


def _length(most: int, mean: float) -> str:
    return f"{most}" if round(mean) == most else f"up to {most} (about {mean:.0f})"


def as_record(question: Question, choice: Choice) -> dict[str, Any]:
    """All of it, for JSON. Seconds, bytes and shares in [0, 1]."""
    told, plan = choice.forecast, choice.plan
    policy = plan.policy
    return {
        "model": question.model,
        "machine": question.machine.name,
        "dtype": question.dtype,
        "num_rows": question.workload.num_rows,
        "prompt_tokens": question.workload.max_prompt_tokens,
        "new_tokens": 0 if question.is_read else question.workload.max_new_tokens,
        "mean_prompt_tokens": _mean_prompt(question.workload),
        "expected_new_tokens": question.num_new_tokens / question.workload.num_rows,
        "shared_prefix_tokens": round(question.workload.mean_shared_tokens(1)),
        "policy": policy_record(question, policy),
        "seconds": {
            "load": told.load_s,
            "prefill": told.prefill_s,
            "decode": told.decode_s,
            "generate": told.seconds,
            "block": _latency_s(question, choice),
        },
        question.rate_name: told.tokens_per_s,
        "total_tokens_per_s": _all_tokens_per_s(question, choice),
        "utilisation": {lane.value: share for lane, share in told.utilisation().items()},
        "binding": told.binding.value,
        "moved_bytes": {
            lane.value: round(size) for lane, size in told.num_bytes.items() if lane.is_link
        },
        "memory_bytes": {
            tier: {"used": _used(question, choice, tier), "budget": question.budgets[tier]}
            for tier in question.budgets
        },
        question.cost_name: costs_of(question, choice.forecast.tokens_per_s),
    }


def policy_record(question: Question, policy: Policy) -> dict[str, Any]:
    """A policy with the approximations that were asked for."""
    kv_format = question.config.kv_format
    return {
        "compute_tier": policy.compute_tier,
        "micro_batch_size": policy.micro_batch_size,
        "num_micro_batches": policy.num_micro_batches,
        "chunk_tokens": policy.chunk_tokens,
        "overlap": policy.overlap,
        "rolls_windows": policy.rolls_windows,
        "moves_rows": policy.moves_rows,
        "cpu_attention": policy.cpu_attention,
        "recompute_kv": policy.recomputed,
        "admission": policy.admission,
        "lossless": question.is_lossless,
        "weight_bits": question.weight_bits,
        "kv_bits": kv_format and kv_format.bits,
        "sparse_attention": question.config.attended_share,
        "compute": "int8" if question.in_integers else "plain",
        "weights": _shares(policy.weights),
        "kv": _shares(policy.kv),
        "activations": _shares(policy.activations),
    }


def flags_of(policy: Policy) -> str:
    """The policy as ``freight run`` takes it."""
    return (
        f"--weights {policy.weights} --kv {policy.kv} --activations {policy.activations} "
        f"--micro-batch-size {policy.micro_batch_size} "
        f"--num-micro-batches {policy.num_micro_batches}"
        + (f" --cpu-attention {100 * policy.cpu_attention:.4g}" if policy.cpu_attention else "")
        + (f" --recompute-kv {100 * policy.recomputed:.4g}" if policy.recomputed else "")
        + f" --admission {policy.admission}"
        + ("" if policy.rolls_windows else " --no-rolling-windows")
        + ("" if policy.moves_rows else " --no-row-moves")
        + ("" if policy.overlap else " --no-overlap")
    )


def _phases(told: Forecast) -> str:
    """Where prompts have sweeps of their own, the time of both kinds."""
    if not told.prefill_s:
        return ""
    return f"prefill {time_text(told.prefill_s)}, decode {time_text(told.decode_s)}, "


def _task(question: Question) -> str:
    readout = question.config.readout
    return "" if readout is None else f", for {readout.name}"


def _compression(question: Question) -> str:
    told = ""
    if question.stored or question.config.packing is not None:
        told += ", quantised by its checkpoint"
    if question.is_lossless:
        told += f", {question.compression}"
    elif question.compression is not None:
        products = ", integer products" if question.in_integers else ""
        told += f", matrices in {question.compression}{products}"
    kept, share = question.config.kv_format, question.config.attended_share
    if kept is not None:
        told += f", KV in {kept.bits} bits, groups of {kept.group_size}"
    return told + (f", {share:.4g} of the keys attended" if share < 1 else "")


def _shares(split: Split) -> dict[str, float]:
    return {tier: split.share(tier) for tier in _TIERS}


def _weights(choice: Choice) -> str:
    held = choice.plan.layout.tier_bytes()
    total = sum(held.values())
    return "/".join(f"{100 * held[tier] / total:.1f}" for tier in _TIERS)


def _block_rows(question: Question, choice: Choice) -> int:
    return min(choice.plan.policy.block_rows, question.workload.num_rows)


def _latency_s(question: Question, choice: Choice) -> float:
    """From when a block enters to its last token."""
    return choice.forecast.block_s


def _all_tokens_per_s(question: Question, choice: Choice) -> float:
    tokens = question.workload.total_prompt_tokens + question.num_new_tokens
    return tokens / choice.forecast.seconds


def _busy(choice: Choice) -> Iterator[str]:
    told = choice.forecast
    for lane, share in sorted(told.utilisation().items(), key=lambda item: -item[1]):
        binds = " (binds)" if lane is told.binding else ""
        # Told from samples, a lane that never rests may come out a little above the whole time.
        yield f"{lane.value} {min(share, 1.0):.0%}{binds}"


def _used(question: Question, choice: Choice, tier: Tier) -> int:
    return choice.plan.geometry.total(tier) + sum(question.beside(tier).values())


def _memory(question: Question, choice: Choice, tier: Tier) -> str:
    held = {**choice.plan.geometry.usage[tier], **question.beside(tier)}
    items = sorted(((size, name) for name, size in held.items()), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in items[:4] if size)
    what = f" ({parts})" if parts else ""
    used = format_bytes(_used(question, choice, tier))
    return f"{tier} {used} of {format_bytes(question.budgets[tier])}{what}"


def _moved(choice: Choice) -> str:
    moved = choice.forecast.num_bytes
    parts = [
        f"{lane.value} {format_bytes(moved[lane])}"
        for lane in Lane
        if lane in moved and lane.is_link
    ]
    return ", ".join(parts) or "nothing"


def costs_of(question: Question, tokens_per_s: float) -> dict[str, float]:
    """Dollars per million of what is made, by how they are paid; of one machine."""
    if not tokens_per_s:
        return {}
    hours = 1e6 / tokens_per_s / 3600
    machine, costs = question.machine, {}
    if machine.dollars_per_hour is not None:
        costs["rented"] = hours * machine.dollars_per_hour
    if machine.watts is not None:
        power = hours * machine.watts / 1000 * question.dollars_per_kwh
        costs[f"of electricity at ${question.dollars_per_kwh:g} per kWh"] = power
    return costs


def time_text(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
