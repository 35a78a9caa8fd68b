"""``freight partition search``: schemes over one axis, the Pareto set, and switch-over lengths."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from freight.entrypoints.partition.inputs import WEIGHT_BYTES, provenance, read_model
from freight.errors import InputError
from freight.hardware.chip import Chip, find_chip
from freight.partition.efficiency import DEFAULTS
from freight.partition.scheme_search import find_schemes
from freight.partition.schemes import LITERAL, PAPER, Rules, Scheme
from freight.partition.switching import Rates, Span, fastest

__all__ = ["search_schemes"]

_REACHED: Final = DEFAULTS[False, "prefill"]
_ADMITTED: Final = {"core_by_heads": False, "all_to_all": True, "gathered_keys": True}


def search_schemes(arguments: argparse.Namespace) -> int:
    """Print schemes; returns the exit status."""
    if not 1 <= arguments.most_tokens <= 10**6:
        raise InputError(
            f"--most-tokens {arguments.most_tokens} was given.",
            "Every length up to it is looked at, from 1 to 1,000,000.",
            "Give a number between these.",
        )
    config, chip = read_model(arguments.model), find_chip(arguments.chip)
    lifted = {name.replace("-", "_"): False for name in arguments.lift}
    rules = LITERAL if arguments.literal else replace(PAPER, **lifted)
    schemes = find_schemes(config, arguments.chips, rules)
    wider = find_schemes(config, arguments.chips, replace(rules, **_ADMITTED))
    rates = _rates(chip, arguments)
    groups = {"schemes": schemes, "with all-to-all and gathered keys": wider}
    spans = {
        name: {
            overlap: fastest(own, rates, arguments.most_tokens, overlap=overlap)
            for overlap in (False, True)
        }
        for name, own in groups.items()
    }
    if arguments.json:
        record = _as_record(arguments.model, chip, rules, groups, spans)
        print(json.dumps(record, indent=1))
    else:
        print("\n".join(_describe(arguments, chip, groups, spans)))
    return 0


def _rates(chip: Chip, arguments: argparse.Namespace) -> Rates:
    """What is reached when prompts are taken in."""
    between = arguments.chips > chip.host_chips > 0
    return Rates(
        flops=chip.dense_flops * _REACHED.compute,
        memory_bytes_per_s=chip.memory_bytes_per_s * _REACHED.memory,
        link_bytes_per_s=chip.outer_bytes_per_s if between else chip.link_bytes_per_s,
        collective_s=chip.outer_latency_s if between else chip.link_latency_s,
        weight_bytes=WEIGHT_BYTES[arguments.weight_bits],
    )


_Spans = Mapping[str, Mapping[bool, Sequence[Span]]]


def _describe(
    arguments: argparse.Namespace,
    chip: Chip,
    groups: Mapping[str, Sequence[Scheme]],
    spans: _Spans,
) -> Iterator[str]:
    schemes, wider = groups.values()
    yield f"model    {arguments.model} on {arguments.chips} chips, s tokens; {_widths(schemes)}"
    yield f"found    {len(schemes)} schemes of which none beats another, per layer and chip"
    for number, own in enumerate(schemes, 1):
        yield ""
        yield from _scheme(str(number), own)
    new = [own for own in wider if not any(_same(own, old) for old in schemes)]
    yield ""
    yield f"beyond   {len(new)} more with all-to-all and gathered keys admitted"
    for number, own in enumerate(new, len(schemes) + 1):
        yield ""
        yield from _scheme(str(number), own)
        yield f"     saves   {_saved(own, schemes)}"
    yield ""
    yield (
        f"rates    {_REACHED.compute:.3g} of arithmetic, {_REACHED.memory:.3g} of memory: "
        f"{provenance(_REACHED, chip)}"
    )
    for name, own_spans in spans.items():
        for overlap, found in own_spans.items():
            how = "gathering overlapped" if overlap else "without overlap"
            yield ""
            yield f"fastest on {chip.name}, {name}, {how}:"
            for span in found:
                number = _number(span.scheme, [*schemes, *new])
                yield f"  from {span.first:6} to {span.last:6} tokens  scheme {number}"


def _scheme(number: str, own: Scheme) -> Iterator[str]:
    yield f"{number:>3}  moves   {', '.join(own.moves) or 'none'}"
    yield f"     FLOPs   {_terms(own.terms('flops'))}"
    yield f"     sent    {_terms({**own.terms('moved'), **own.terms('gathered')})} elements"
    yield f"     weights {_terms(own.terms('kept'))}"


def _saved(own: Scheme, known: Sequence[Scheme]) -> str:
    """Against the known scheme that is nearest: the one with the fewest terms to differ in."""
    sent = {**own.terms("moved"), **own.terms("gathered")}
    compared = []
    for number, other in enumerate(known, 1):
        before = {**other.terms("moved"), **other.terms("gathered")}
        keys = {*sent, *before}
        differ = {key: before.get(key, 0.0) - sent.get(key, 0.0) for key in keys}
        weights = own.weights / other.weights - 1
        flops = own.flops.linear / other.flops.linear - 1
        differ = {key: value for key, value in differ.items() if abs(value) > 1e-9}
        if any(value > 0 for key, value in differ.items() if "s" in key):
            compared.append(
                (len(differ), abs(flops) + abs(weights), number, differ, flops, weights)
            )
    if not compared:
        return "no communication against any of them, but weights or FLOPs"
    _, _, number, differ, flops, weights = min(compared, key=lambda one: one[:3])
    less = _terms({key: value for key, value in differ.items() if value > 0})
    more = _terms({key: -value for key, value in differ.items() if value < 0})
    text = f"{less} elements against scheme {number}"
    text += f", for {more} more" if more != "none" else ""
    text += f", weights {weights:+.1%}" if abs(weights) > 1e-9 else ""
    return text + (f", FLOPs {flops:+.1%}" if abs(flops) > 1e-9 else "")


def _same(one: Scheme, other: Scheme) -> bool:
    pairs = zip(one.costs, other.costs, strict=True)
    return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in pairs)


def _number(scheme: Scheme, schemes: Sequence[Scheme]) -> int:
    return next(n for n, own in enumerate(schemes, 1) if _same(own, scheme))


def _terms(terms: Mapping[str, float]) -> str:
    shown = [f"{count:.4g} {' '.join(letters)}" for letters, count in terms.items() if count]
    return " + ".join(shown) or "none"


def _widths(schemes: Sequence[Scheme]) -> str:
    names = {"h": "stream", "q": "queries", "k": "keys", "f": "MLP"}
    return ", ".join(f"{own} {schemes[0].widths[own]} ({what})" for own, what in names.items())


def _as_record(
    model: str, chip: Chip, rules: Rules, groups: Mapping[str, Sequence[Scheme]], spans: _Spans
) -> dict[str, Any]:
    return {
        "model": model,
        "chip": chip.name,
        "rates": {
            "compute": _REACHED.compute,
            "memory": _REACHED.memory,
            "source": _REACHED.source,
            "is_calibrated": _REACHED.chip == chip.name,
        },
        "rules": {name: getattr(rules, name) for name in Rules.__dataclass_fields__},
        **{
            name.replace(" ", "_"): {
                "schemes": [
                    {
                        "moves": own.moves,
                        "steps": [choice.text for choice in own.choices],
                        "flops": own.flops.coefficients,
                        "sent_activations": own.moved.coefficients,
                        "sent_weights": own.gathered.constant,
                        "weights": own.weights,
                        "num_collectives": own.num_collectives,
                    }
                    for own in schemes
                ],
                "fastest": {
                    "overlapped" if overlap else "plain": [
                        {
                            "first": span.first,
                            "last": span.last,
                            "scheme": _number(span.scheme, schemes),
                        }
                        for span in found
                    ]
                    for overlap, found in spans[name].items()
                },
            }
            for name, schemes in groups.items()
        },
    }
