"""What a run holds and what it has moved, in words for people.

Reads plans and counters; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from freight.plan.default import Plan
from freight.plan.forecast import Forecast
from freight.plan.policy import Policy
from freight.quantities import format_bytes
from freight.runtime.drafts import Guesses
from freight.runtime.meter import Meter

__all__ = ["describe_forecast", "describe_holdings", "describe_run"]

_WEIGHT_PURPOSES = ("weights", "weight slots", "weight staging", "decoded weights")


def describe_holdings(plan: Plan) -> str:
    """What each tier holds, in a few words."""
    parts = []
    for tier, usage in plan.geometry.usage.items():
        held = sum(usage.values())
        if tier == "disk":
            held += plan.layout.tier_bytes()["disk"]
        if held:
            parts.append(f"{tier} {format_bytes(held)}")
    return ", ".join(parts)


def describe_run(plan: Plan, moved: Mapping[str, int], guesses: Guesses) -> str:
    """The policy, where the weights were, and what crossed each link; one line each, and one for
    guesses if there were any."""
    policy = plan.policy
    links = ", ".join(f"{link} {format_bytes(n)}" for link, n in moved.items())
    drafts = f"drafts: {guesses.num_true} of {guesses.num_tried} guessed tokens came true"
    return (
        f"policy: {policy.admission}, {_describe_blocks(policy)} of "
        f"{policy.num_micro_batches} x {policy.micro_batch_size} rows, "
        f"KV {policy.kv}, activations {policy.activations} % on gpu/cpu/disk"
        f"{_describe_rows_elsewhere(policy)}\n"
        f"{_describe_weights(plan)}\n"
        f"moved: {links or 'nothing'}" + (f"\n{drafts}" if policy.draft_tokens else "")
    )


def _describe_blocks(policy: Policy) -> str:
    count = policy.blocks_in_flight
    return "block" if count == 1 else f"{count} blocks in flight, each"


def _describe_rows_elsewhere(policy: Policy) -> str:
    if policy.cpu_attention:
        return f", {policy.cpu_attention:.0%} of the rows elsewhere attended by the CPU"
    if policy.recomputed and policy.kv.share(policy.compute_tier) < 1:
        return f", keys elsewhere computed again in {policy.recomputed:.0%} of the layers"
    return ""


def describe_forecast(forecast: Forecast, meter: Meter) -> str:
    """Prediction beside measurement: phases, then how long each lane worked, where it is known."""
    phases = [("in all", forecast.seconds, meter.seconds)]
    if forecast.prefill_s:
        phases = [
            ("prefill", forecast.prefill_s, meter.prefill_s),
            ("decode", forecast.decode_s, meter.decode_s),
            *phases,
        ]
    times = ", ".join(f"{name} {told:.1f} ({was:.1f})" for name, told, was in phases)
    work = ", ".join(
        f"{lane.value} {busy:.1f} ({meter.busy_s.get(lane, 0.0):.1f})"
        for lane, busy in forecast.busy_s.items()
    )
    return f"predicted (measured) seconds: {times}\npredicted (measured) work: {work}"


def _describe_weights(plan: Plan) -> str:
    """Shares as they came out, and the memory taken by weights that stay or pass through."""
    held = plan.layout.tier_bytes()
    total = sum(held.values())
    shares = "/".join(f"{100 * held[tier] / total:.1f}" for tier in ("gpu", "cpu", "disk"))
    memory = {
        tier: sum(plan.geometry.usage[tier].get(purpose, 0) for purpose in _WEIGHT_PURPOSES)
        for tier in ("gpu", "cpu")
    }
    in_memory = " and ".join(f"{format_bytes(n)} of {tier}" for tier, n in memory.items() if n)
    return f"weights: {shares} % on gpu/cpu/disk; at no time more than {in_memory} memory"
