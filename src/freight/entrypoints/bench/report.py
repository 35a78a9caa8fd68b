"""What a benchmark says: lines for people, and the one JSON object at the end.

Knows results as the runs gave them; measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from freight.entrypoints.bench.work import Work
from freight.quantities import format_bytes

__all__ = [
    "byte_ratios",
    "describe_ceiling",
    "describe_pace",
    "describe_run",
    "describe_setting",
    "share_of_pace",
    "speeds",
    "summarise",
]


def speeds(result: Mapping[str, Any], work: Work) -> dict[str, float]:
    """Tokens per second: of prompts in sweeps that bring some, beside which others may decode; of
    new ones in sweeps in which only they are made; and over the whole time new ones, and all. 0 of
    phases that a run has not."""
    prompts, new = work.total_prompt_tokens, work.total_new_tokens
    decoded = result.get("decoded_tokens", new - work.num_rows)
    return {
        "prefill_tokens_per_s": _rate(prompts, result["prefill_s"]),
        "decode_tokens_per_s": _rate(decoded, result["decode_s"]),
        "new_tokens_per_s": _rate(new, result["generate_s"]),
        "total_tokens_per_s": _rate(prompts + new, result["generate_s"]),
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def byte_ratios(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Bytes that crossed each link over what the closed form says; 1.0 is exact, None where it says
    that nothing does."""
    moved, expected = result["moved_bytes"], result["expected_bytes"]
    links = [link for link in {**moved, **expected} if moved.get(link) or expected.get(link)]
    return {
        link: moved.get(link, 0) / expected[link] if expected.get(link) else None for link in links
    }


def describe_ceiling(probed: Mapping[str, Any], work: Work) -> list[str]:
    """The machine's rates, then the bound they allow."""
    ceiling = probed["ceiling"]
    lines = [
        f"model:    {format_bytes(probed['weight_bytes'])} of matrices a sweep, "
        f"{format_bytes(probed['kv_bytes'])} of KV cache and states for all {work.num_rows} rows, "
        f"{probed['dtype']} on {probed['device']}"
        f"{', products in int8' if probed['compute'] == 'int8' else ''}",
        *(f"note:     {note}" for note in probed["notes"]),
    ]
    for path in probed["paths"]:
        depth = probed["disk_requests_in_flight"] if path["name"] == "disk" else 1
        lines.append(
            f"{path['name'] + ':':<9} {path['bytes_per_s'] / 1e9:.2f} GB/s alone"
            f"{f' ({depth} requests in flight)' if depth > 1 else ''}, "
            f"{format_bytes(path['room_bytes'])} of memory for weights and KV cache"
        )
    rates = [f"{rate / 1e12:.3f} at {rows}" for rows, rate in probed["product_flops"].items()]
    lines.append(f"products: TFLOP/s alone: {', '.join(rates)} rows")
    new = work.total_new_tokens
    lines.append(
        f"ceiling:  {new / ceiling['seconds']:.2f} new token/s, {ceiling['seconds']:.4g} s "
        f"(by {ceiling['limited_by']}, {ceiling['block_rows']} rows a sweep)"
        f"; with loading {ceiling['with_loading_s']:.4g} s"
    )
    bounds = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in ceiling["bounds"].items())
    lines.append(f"          no policy is faster than: {bounds}")
    return lines


def describe_run(
    name: str, result: Mapping[str, Any], work: Work, ceiling_s: float | None
) -> list[str]:
    """One run in a few lines."""
    rates = speeds(result, work)
    share = "" if ceiling_s is None else f", {ceiling_s / result['generate_s']:.3f} of the ceiling"
    setting = result.get("policy", result.get("batch_size"))
    batch = "" if setting is None else f" ({describe_setting(setting)})"
    lines = [
        f"{name + batch}: load {result['load_s']:.2f} s, generate {result['generate_s']:.3f} s"
        f"{share}, peak {format_bytes(_peak(result))}",
        f"  {_phases(rates)}new {rates['new_tokens_per_s']:.2f}, "
        f"total {rates['total_tokens_per_s']:.1f} token/s",
    ]
    if "plan" in result:
        lines.append(f"  {result['plan']}{_predicted(result)}")
    if idle := result.get("idle_shares"):
        shares = ", ".join(f"{share:.2f} of {phase}" for phase, share in idle.items())
        lines.append(f"  nothing is computed in {shares}")
    if "moved_bytes" in result:
        ratios = byte_ratios(result)
        moved = [
            f"{link} {format_bytes(result['moved_bytes'].get(link, 0))} (x {_written(ratio)})"
            for link, ratio in ratios.items()
        ]
        lines.append(f"  bytes (against the closed form): {', '.join(moved) or 'none'}")
    return lines


def describe_setting(setting: int | str) -> str:
    """What a peer ran with: rows of a batch, or FlexGen's flags."""
    return setting if isinstance(setting, str) else f"batch of {setting}"


def describe_pace(runs: Sequence[Mapping[str, Any]], usual_s: Sequence[float]) -> list[str]:
    """The ceiling at the machine's usual pace, before the first run and after each."""
    return [
        f"usual:    at what the machine did on average before and after these runs the ceiling is "
        f"{statistics.fmean(usual_s):.4g} s ({min(usual_s):.4g} to {max(usual_s):.4g}): "
        f"{share_of_pace(runs, usual_s):.3f} of that"
    ]


def share_of_pace(runs: Sequence[Mapping[str, Any]], usual_s: Sequence[float]) -> float:
    """What is reached of the ceiling at the machine's usual pace: means of both."""
    return statistics.fmean(usual_s) / statistics.fmean(run["generate_s"] for run in runs)


def _predicted(result: Mapping[str, Any]) -> str:
    told = result["forecast_s"]
    return "" if told is None else f"; predicted {told:.1f} s"


def _phases(rates: Mapping[str, float]) -> str:
    phases = ("prefill", "decode")
    told = {phase: rates[f"{phase}_tokens_per_s"] for phase in phases}
    return "".join(f"{phase} {rate:.1f}, " for phase, rate in told.items() if rate)


def _written(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.6g}"


def _peak(result: Mapping[str, Any]) -> int:
    return int(result.get("group_peak_bytes") or result["peak_bytes"])


def summarise(runs: Sequence[Mapping[str, Any]], work: Work, ceiling_s: float) -> dict[str, Any]:
    """Medians of a system's runs, and all single values."""
    kept = [{k: v for k, v in run.items() if k != "first_tokens"} for run in runs]
    if not runs:
        return {"runs": [], "median": None}
    each = [{**speeds(run, work), **_times(run)} for run in runs]
    median = {key: statistics.median(run[key] for run in each) for key in each[0]}
    median["share_of_ceiling"] = ceiling_s / median["generate_s"]
    return {
        "median": median,
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "group_peak_bytes": max(run.get("group_peak_bytes") or 0 for run in runs) or None,
        "runs": [{**run, **speeds(run, work)} for run in kept],
    }


def _times(run: Mapping[str, Any]) -> dict[str, float]:
    return {key: run[key] for key in ("load_s", "generate_s", "prefill_s", "decode_s")}
