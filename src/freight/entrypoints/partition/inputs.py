"""What ``freight partition`` was given, as values: a model, chips, steps, rates."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.bundled import check_model, find_bundled
from freight.errors import InputError
from freight.hardware.chip import Chip, find_chip
from freight.model.config import ModelConfig, read_config
from freight.partition.cost import Cost, Setting, Step
from freight.partition.efficiency import DEFAULTS, Efficiency, Phase, Sample, calibrate
from freight.partition.layout import Mesh
from freight.partition.planner import best_plan

__all__ = [
    "WEIGHT_BYTES",
    "Work",
    "provenance",
    "read_mesh",
    "read_model",
    "read_setting",
    "read_work",
]

_WORKLOAD: Final = re.compile(r"(?:(\d+)\+)?(\d+):(\d+)")
_MESH: Final = re.compile(r"(\d+)x(\d+)x(\d+)")

WEIGHT_BYTES: Final = {16: 2.0, 8: 1.0, 4: 0.5 + 4 / 64}
"""Of an element by its bits; at 4 with a scale and a lowest value of 16 bits for each 64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Steps and how often each is made for one row's worth of its batch; ``new_tokens`` is 0 where
    one step was asked for."""

    steps: tuple[tuple[Step, float], ...]
    new_tokens: int = 0


def read_model(name: str | None) -> ModelConfig:
    """A bundled configuration by its name, or one in a file or directory."""
    if name is not None and (config := find_bundled(name)) is not None:
        return config
    return read_config(Path(check_model(name, "A layer of a model is cut.")))


def read_mesh(text: str | None, num_chips: int) -> Mesh | None:
    if text is None:
        return None
    found = _MESH.fullmatch(text)
    mesh = Mesh.of(x=int(found[1]), y=int(found[2]), z=int(found[3])) if found else None
    if mesh is None or mesh.num_chips != num_chips:
        raise InputError(
            f"--mesh {text} was given for {num_chips} chips.",
            f"It has {mesh.num_chips}." if mesh else "It is not a box of chips.",
            f"Write it like 4x4x4, with a product of {num_chips}.",
        )
    return mesh


def read_work(arguments: argparse.Namespace) -> Work:
    """One step, or both phases of a workload with batches of their own."""
    if arguments.workload is None:
        _refuse_batches_of_phases(arguments)
        is_prefill = arguments.phase == "prefill"
        step = Step(
            phase=arguments.phase,
            rows=arguments.batch,
            new_tokens=arguments.context if is_prefill else 1,
            past=0 if is_prefill else arguments.context,
        )
        return Work(steps=((step, 1.0),))
    found = _WORKLOAD.fullmatch(arguments.workload)
    if found is None or not int(found[2]) or not int(found[3]):
        raise InputError(
            f"--workload {arguments.workload} was given.",
            "It is not a number of prompt tokens and one of new tokens, both at least 1, with "
            "cached tokens before them if there are any.",
            "Write it like 512:32 or 1920+64:64.",
        )
    cached, prompt, new = int(found[1] or 0), int(found[2]), int(found[3])
    batches = arguments.prefill_batch, arguments.decode_batch
    rows = [arguments.batch if own is None else own for own in batches]
    prefill = Step(phase="prefill", rows=rows[0], new_tokens=prompt, past=cached)
    # Time grows evenly with the cache: the middle of decoding stands for all of it.
    middle = cached + prompt + (new - 1) // 2
    decode = Step(phase="decode", rows=rows[1], new_tokens=1, past=middle)
    return Work(steps=((prefill, rows[1] / rows[0]), (decode, float(new))), new_tokens=new)


def _refuse_batches_of_phases(arguments: argparse.Namespace) -> None:
    """What only a workload has is not silently left out."""
    for name in ("prefill_batch", "decode_batch"):
        if getattr(arguments, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')} was given without --workload.",
                "One step was asked for, of one phase.",
                "Give its rows as --batch, or both phases as --workload 512:32.",
            )


def read_setting(arguments: argparse.Namespace, config: ModelConfig) -> Setting:
    chip = find_chip(arguments.chip).at(arguments.dollars_per_hour)
    setting = Setting(
        chip=chip,
        weight_bytes=WEIGHT_BYTES[arguments.weight_bits],
        kv_bytes=arguments.kv_bits / 8,
        efficiencies={key: _given(own, arguments) for key, own in DEFAULTS.items()},
    )
    if arguments.measured is None:
        return setting
    return replace(setting, efficiencies=_fitted(config, arguments, setting))


def _given(default: Efficiency, arguments: argparse.Namespace) -> Efficiency:
    """The default or the peaks, with what flags say in its place."""
    flags = {
        "compute": arguments.compute_share,
        "memory": arguments.memory_share,
        "link": arguments.link_share,
        "layer_s": None if arguments.layer_us is None else arguments.layer_us * 1e-6,
        "overlap": arguments.overlap,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    start = Efficiency() if arguments.peaks else default
    if not given:
        return start
    if "compute" in given:
        start = replace(start, compute_by_tokens=None)
    named = ", ".join(name.removesuffix("_s") for name in given)
    return replace(start, **given, source=f"{named} as given; {start.source}")


def provenance(rates: Efficiency, chip: Chip) -> str:
    """Where shares come from, and whether they were measured on this chip."""
    if rates.chip == chip.name:
        return rates.source
    return f"{rates.source}; not calibrated for {chip.name}"


def _fitted(
    config: ModelConfig, arguments: argparse.Namespace, setting: Setting
) -> dict[tuple[bool, Phase], Efficiency]:
    """By phase and whether weights are gathered, what the measured steps say; where there are none,
    what it was."""
    path = Path(arguments.measured)
    samples: dict[tuple[bool, Phase], list[Sample]] = {}
    for record in _read_records(path):
        step = Step(**{name: record[name] for name in ("phase", "rows", "new_tokens", "past")})
        mesh = read_mesh(arguments.mesh, arguments.chips)
        (cost,) = best_plan(config, arguments.chips, [(step, 1.0)], setting, mesh)
        key = bool(cost.cut.gathered), step.phase
        samples.setdefault(key, []).append(_sample(cost, float(record["seconds"])))
    return {
        key: calibrate(
            samples[key],
            own,
            f"fitted to {len(samples[key])} steps in {path.name}",
            setting.chip.name,
        )
        if key in samples
        else own
        for key, own in setting.efficiencies.items()
    }


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(path.read_text("utf-8"))
        wanted = {"phase", "rows", "new_tokens", "past", "seconds"}
        if not isinstance(records, list) or any(set(own) != wanted for own in records):
            raise ValueError(f"it is no list of objects with {', '.join(sorted(wanted))}")
    except (OSError, ValueError) as error:
        raise InputError(
            f"--measured {path} was given.",
            f"It cannot be read: {error}.",
            "Give a file of measured steps as the help shows it.",
        ) from error
    return records


def _sample(cost: Cost, seconds: float) -> Sample:
    return Sample(
        seconds=seconds,
        compute_s=cost.compute_s,
        memory_s=cost.memory_s,
        link_s=cost.link_s,
        num_layers=cost.config.num_layers,
    )
