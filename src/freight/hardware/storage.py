"""Machines as JSON: presets that come with Freight, profiles in files, and what is wrong with them.

The format is that of the values in ``machine``, field by field; a rate is a number or pairs of size
and number. Knows neither how a machine is measured nor how it is used.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from freight.errors import FreightError, InputError, reason_of
from freight.hardware.curve import as_curve
from freight.hardware.machine import Beside, ComputeUnit, Link, Machine

__all__ = ["find_machine", "preset_names", "read_machine", "write_machine"]

Made = TypeVar("Made")


def preset_names() -> list[str]:
    """Names of the machines that come with Freight."""
    folder = resources.files("freight.hardware") / "presets"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def find_machine(name: str) -> Machine:
    """A preset by its name, or a machine from a JSON file.

    InputError if there is neither; it lists names that are close.
    """
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read_machine(Path(name))
    names = preset_names()
    if name not in names:
        close = [preset for preset in names if name and name.lower() in preset]
        close = close or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
        raise InputError(
            f"The machine {name!r} was asked for.",
            "There is no preset of that name, and no such file.",
            f"Did you mean {' or '.join(close)}?" if close else f"Presets are {', '.join(names)}.",
        )
    text = (resources.files("freight.hardware") / "presets" / f"{name}.json").read_text("utf-8")
    return _parse(text, f"the preset {name}")


def read_machine(path: Path) -> Machine:
    """A machine from a file; InputError if it cannot be read as one."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The machine in {path} was asked for.",
            f"The file cannot be read: {reason_of(error)}.",
            "Name a preset, or a file that freight profile has written.",
        ) from error
    return _parse(text, str(path))


def write_machine(machine: Machine, path: Path) -> None:
    """Write all fields as JSON, a point of a rate per line, over what was there, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    text = json.dumps(_as_json(machine), indent=1) + "\n"
    draft.write_text(re.sub(r"\[\n *([^\n\[]+),\n *([^\n\[]+)\n *\]", r"[\1, \2]", text), "utf-8")
    draft.replace(path)


def _parse(text: str, where: str) -> Machine:
    try:
        return _machine(json.loads(text))
    except FreightError as error:
        limit = f"{error.asked} {error.limit}"
        raise InputError(f"The machine in {where} was read.", limit, error.advice) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"The machine in {where} was read.",
            f"It is not what freight profile writes: {type(error).__name__}: {error}.",
            "Write it anew with freight profile, or mend the file.",
        ) from error


def _machine(record: Mapping[str, Any]) -> Machine:
    values = dict(record)
    values["units"] = {name: _unit(name, own) for name, own in record["units"].items()}
    values["links"] = {name: _link(own) for name, own in record["links"].items()}
    values["beside"] = tuple(
        Beside(part=own["part"], other=own["other"], share=as_curve(own["share"]))
        for own in record.get("beside", ())
    )
    return _make(Machine, values)


def _unit(name: str, record: Mapping[str, Any]) -> ComputeUnit:
    rates = {
        "products": {dtype: as_curve(rate) for dtype, rate in record["products"].items()},
        "attended_bytes_per_s": as_curve(record["attended_bytes_per_s"]),
    }
    if record.get("attended_codes_per_s") is not None:
        rates["attended_codes_per_s"] = as_curve(record["attended_codes_per_s"])
    return _make(ComputeUnit, {"name": name, **record, **rates})


def _link(record: Mapping[str, Any]) -> Link:
    rates = {kind: as_curve(rate) for kind, rate in record.get("kinds", {}).items()}
    return _make(Link, {**record, "bytes_per_s": as_curve(record["bytes_per_s"]), "kinds": rates})


def _make(kind: Callable[..., Made], values: Mapping[str, Any]) -> Made:
    """A value of the dataclass ``kind``; TypeError names fields that it does not have."""
    return kind(**values)


def _as_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if hasattr(value, "__dataclass_fields__"):
        return {own.name: _as_json(getattr(value, own.name)) for own in fields(value)}
    if isinstance(value, Mapping):
        return {key: _as_json(own) for key, own in value.items()}
    if isinstance(value, tuple):
        return [_as_json(own) for own in value]
    return value
