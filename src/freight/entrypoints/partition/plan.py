"""``freight partition plan``: the fastest mesh and layouts, as a table or a record.

Needs no weights, no torch and no such chips.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.partition.inputs import (
    Work,
    provenance,
    read_mesh,
    read_model,
    read_setting,
    read_work,
)
from freight.model.decoder import count_parameters
from freight.partition.cost import Cost, Line, parameters_of_token
from freight.partition.handover import hand_over
from freight.partition.layers import feed_forward
from freight.partition.named import FEED_FORWARD
from freight.partition.planner import best_plan, prices_of, with_shortest_layers
from freight.partition.shortest import best_route, seconds_of
from freight.quantities import format_bytes

__all__ = ["plan_partition"]

_BETTER: Final = 0.99
"""Of the time of the plan: a path that takes less is written out."""


def plan_partition(arguments: argparse.Namespace) -> int:
    """Answer for each step; returns the exit status."""
    config, work = read_model(arguments.model), read_work(arguments)
    setting, mesh = read_setting(arguments, config), read_mesh(arguments.mesh, arguments.chips)
    plans = best_plan(config, arguments.chips, work.steps, setting, mesh)
    if not arguments.json:
        print("\n".join(_describe(arguments.model, plans, work)))
    charts: dict[str, Any] = {}
    if arguments.sweep is not None:
        from freight.entrypoints.partition.sweep import describe_sweep, sweep

        charts["sweep"] = sweep(arguments, config, setting)
        if not arguments.json:
            print("\n".join(describe_sweep(charts["sweep"], Path(arguments.sweep))))
    if arguments.json:
        record: dict[str, Any] = {
            "model": arguments.model,
            "steps": [as_record(own) for own in plans],
            **_total_record(plans, work),
            **charts,
        }
        print(json.dumps(record, indent=1))
    return 0


def as_record(own: Cost) -> dict[str, Any]:
    """Everything that is known of a step, for JSON."""
    step, cut = own.step, own.cut
    return {
        "phase": step.phase,
        "rows": step.rows,
        "new_tokens": step.new_tokens,
        "past": step.past,
        "chip": own.setting.chip.name,
        "mesh": dict(own.mesh.axes),
        "layout": _layout_name(own),
        "gathered": cut.gathered,
        "attention_by_rows_over": cut.batch,
        "experts_over": cut.experts,
        "stored": {name: str(layout) for name, layout in own.layers[0][0].weights.items()},
        "padding": list(own.padding.notes),
        "padded_parameters": own.padding.added_parameters(own.config),
        "seconds": own.seconds,
        "compute_s": own.compute_s / own.efficiency.compute,
        "memory_s": own.memory_s / own.efficiency.memory,
        "links_s": own.waited_s,
        "fixed_s": own.efficiency.layer_s * own.config.num_layers,
        "binds": own.binds,
        "mfu": own.mfu,
        "chip_seconds_per_token": own.chip_seconds_per_token,
        "dollars_per_token": own.dollars_per_token,
        "memory_bytes": {
            "weights": own.weight_bytes,
            "keys and values": own.kv_bytes,
            "working": own.working_bytes,
            "room": own.room_bytes,
        },
        "max_context": own.max_context(),
        "mlp_alone": _mlp_alone(own),
        "shortest": _shortest(own),
        "efficiency": {
            "compute": own.efficiency.compute,
            "memory": own.efficiency.memory,
            "link": own.efficiency.link,
            "overlap": own.efficiency.overlap,
            "source": own.efficiency.source,
            "is_calibrated": own.efficiency.chip == own.setting.chip.name,
        },
        "parts": [_part(*part) for part in own.lines()],
    }


def _part(name: str, count: int, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "part": name,
        "count": count,
        "steps": [
            {
                "what": line.what,
                "layout": line.layout,
                "bytes": line.num_bytes,
                "seconds": line.seconds,
                "waited_s": line.waited_s,
            }
            for line in lines
        ],
    }


def _mlp_alone(own: Cost) -> dict[str, Any] | None:
    """The layer's MLP as it is cut, beside the shortest path over all layouts; None for experts."""
    if own.config.experts is not None:
        return None
    sizes, prices = own.layers[0][0].sizes, prices_of(own)
    route = best_route(sizes, prices)
    return {
        "seconds": seconds_of(feed_forward(own.mesh, sizes, own.cut), prices),
        "shortest_seconds": route.seconds,
        "shortest_steps": route.steps,
    }


def _shortest(own: Cost) -> dict[str, Any] | None:
    """The step with layers as the shortest path over all layouts has them; None for experts."""
    if own.config.experts is not None:
        return None
    found = with_shortest_layers(own)
    ((layer, _), *_) = found.layers
    return {
        "seconds": found.seconds,
        "mfu": found.mfu,
        "memory_bytes": found.memory_bytes,
        "fits": found.memory_bytes <= found.room_bytes,
        "stream": str(layer.inputs["x"]),
        "moves": [f"{step.move} of {step.value}" for step in layer.transfers],
    }


def _layout_name(own: Cost) -> str:
    """What the paper calls the feed-forward layout."""
    if own.mesh.num_chips == 1:
        return "one chip"
    if not own.cut.gathered:
        is_one = own.mesh.size("x") == 1
        return f"{'1D' if is_one else '2D'} weight-stationary"
    for name, named in FEED_FORWARD.items():
        if sorted(named.cut.gathered) == sorted(own.cut.gathered):
            return name
    return f"{''.join(sorted(own.cut.gathered)).upper()}-weight-gathered"


def _total_record(plans: list[Cost], work: Work) -> dict[str, Any]:
    if not work.new_tokens:
        return {}
    prefill, decode = plans
    handed = hand_over(prefill, decode)
    seconds = prefill.seconds + handed.seconds + decode.seconds * work.new_tokens
    tokens = prefill.step.new_tokens + work.new_tokens
    per_row = prefill.seconds / prefill.step.rows
    per_row += (handed.seconds + decode.seconds * work.new_tokens) / decode.step.rows
    peak = decode.mesh.num_chips * decode.setting.chip.dense_flops
    price = decode.setting.chip.dollars_per_hour
    spent = decode.mesh.num_chips * per_row / work.new_tokens
    return {
        "total": {
            "seconds_of_a_row": seconds,
            "handover": {
                "moves": [str(own) for own in handed.moves],
                "bytes": handed.num_bytes,
                "seconds": handed.seconds,
            },
            "mfu": 2.0 * parameters_of_token(decode.config) * tokens / (peak * per_row),
            "chip_seconds_per_new_token": spent,
            "dollars_per_new_token": None if price is None else spent * price / 3600,
        }
    }


def _describe(model: str, plans: list[Cost], work: Work) -> Iterator[str]:
    first = plans[0]
    chip = first.setting.chip
    yield (
        f"model    {model}: {first.config.num_layers} layers, "
        f"{count_parameters(first.config) / 1e9:.4g} B parameters{_chosen(first)}, "
        f"{8 * first.setting.weight_bytes:.3g} bits each"
    )
    yield f"chips    {first.mesh.num_chips} {chip.name} as {first.mesh}: {chip.description}"
    for note in first.padding.notes:
        yield f"padding  {note}"
    added = first.padding.added_parameters(first.config)
    if added:
        share = added / count_parameters(first.config)
        yield f"         {added / 1e9:.3g} B parameters more, {share:.1%}"
    for own in plans:
        yield ""
        yield from _describe_step(own)
    if work.new_tokens:
        total = _total_record(plans, work)["total"]
        yield ""
        handed = total["handover"]
        yield (
            f"handover {', '.join(handed['moves']) or 'nothing moves'}: the cache of a batch, "
            f"{format_bytes(handed['bytes'])} a chip in {_time(handed['seconds'])}"
        )
        yield (
            f"total    a row waits {_time(total['seconds_of_a_row'])}, prompt and answer; "
            f"{total['mfu']:.1%} MFU, {total['chip_seconds_per_new_token']:.3g} chip-s per new "
            f"token{_price(total['dollars_per_new_token'])}"
        )


def _chosen(own: Cost) -> str:
    """How many parameters a token meets, where that is not all."""
    met = parameters_of_token(own.config)
    return "" if own.config.experts is None else f", {met / 1e9:.4g} B to a token"


def _describe_step(own: Cost) -> Iterator[str]:
    step, cut = own.step, own.cut
    before = f" after {step.past}" if step.past else ""
    yield f"{step.phase:8} {step.rows} rows, {step.new_tokens} new tokens each{before}"
    heads = f"by rows over {cut.batch}" if cut.batch else "by heads"
    if own.mesh.size(cut.used_axes) == 1:
        heads = "by rows, as the stream is"
    experts = f", experts over {cut.experts}" if cut.experts else ""
    yield f"layout   {_layout_name(own)}; attention {heads}{experts}; stream {cut.stream}"
    yield (
        f"time     {_time(own.seconds)}: compute {_time(own.compute_s / own.efficiency.compute)}, "
        f"memory {_time(own.memory_s / own.efficiency.memory)}, links {_time(own.waited_s)}, "
        f"fixed {_time(own.efficiency.layer_s * own.config.num_layers)}; {own.binds} binds"
    )
    yield (
        f"         {own.mfu:.1%} MFU, {own.chip_seconds_per_token:.3g} chip-s per token"
        f"{_price(own.dollars_per_token)}"
    )
    yield (
        f"memory   {format_bytes(own.memory_bytes)} of {format_bytes(own.room_bytes)} a chip: "
        f"weights {format_bytes(own.weight_bytes)}, keys and values {format_bytes(own.kv_bytes)}, "
        f"working {format_bytes(own.working_bytes)}; at most {own.max_context()} tokens of context"
    )
    rates = own.efficiency
    yield (
        f"rates    {rates.compute:.3g} of arithmetic, {rates.memory:.3g} of memory, "
        f"{rates.link:.3g} of links: {provenance(rates, own.setting.chip)}"
    )
    found = _shortest(own)
    if found is None:
        yield "path     not searched for: the shortest path is one through layers without experts"
    else:
        fits = "" if found["fits"] else f", in {format_bytes(found['memory_bytes'])} a chip"
        yield (
            f"path     {_time(found['seconds'])} with the shortest path through a layer over all "
            f"layouts{fits}"
        )
        if found["seconds"] < _BETTER * own.seconds:
            yield f"         stream {found['stream']}; {'; '.join(found['moves'])}"
    for name, count, lines in own.lines():
        yield ""
        title = name if count == 1 else f"{count} layers, of each"
        yield f"{title:44} {'bytes sent':>12} {'time':>9}"
        yield from map(_row, lines)


def _row(line: Line) -> str:
    sent = format_bytes(line.num_bytes) if line.num_bytes else ""
    taken = _time(line.seconds) if line.seconds else ""
    return f"  {line.what:42} {sent:>12} {taken:>9}  {line.layout}"


def _price(dollars: float | None) -> str:
    return "" if dollars is None else f", ${dollars * 1e6:.3g} per million"


def _time(seconds: float) -> str:
    if not seconds:
        return "no time"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
