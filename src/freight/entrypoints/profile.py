"""``freight profile``: measures this machine and keeps what it found for later plans.

Knows where profiles are kept; measuring is done elsewhere.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from freight.errors import InputError
from freight.hardware.host import LOOPS, processor_name
from freight.hardware.machine import Machine
from freight.hardware.storage import read_machine, write_machine
from freight.quantities import format_bytes

__all__ = [
    "default_path",
    "describe_machine",
    "profile_machine",
    "read_kept_profile",
    "read_own_profile",
]


def default_path() -> Path:
    """Where the profile of this machine is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "freight" / "machine.json"


def read_own_profile(host: Mapping[str, str], path: Path | None = None) -> Machine | None:
    """The profile kept for this machine, or None. InputError if it is another machine's, or was
    measured with loops of another version."""
    path = path or default_path()
    if not path.exists():
        return None
    machine = read_machine(path)
    others = [
        f"{key} {machine.host.get(key, 'unknown')}"
        for key in host
        if machine.host.get(key) != host[key]
    ]
    if others:
        raise InputError(
            f"The profile in {path} was to be used.",
            f"It is of another machine, or of other loops: {', '.join(others)}; "
            f"here {_listed(host)}.",
            "Measure this one with freight profile.",
        )
    return machine


def read_kept_profile(say: Callable[[str], None], path: Path | None = None) -> Machine:
    """The profile that is kept here, for plans of what is to run here; says so if it is of another
    machine, or was measured with loops of another version."""
    path = path or default_path()
    machine = read_machine(path)
    here = {"cpu": processor_name(), "loops": LOOPS}
    others = {key: value for key, value in machine.host.items() if here.get(key, value) != value}
    if others:
        found, own = _listed(others), _listed({key: here[key] for key in others})
        say(
            f"the profile in {path} is of {found}, not of {own}, and the plan with it; "
            "freight profile measures this machine"
        )
    return machine


def profile_machine(arguments: argparse.Namespace) -> int:
    """Measure, write, and tell; returns the exit status."""
    from freight.runtime.device import find_device
    from freight.runtime.profiler import profile

    path = default_path() if arguments.output is None else Path(arguments.output)
    directory = Path(arguments.disk_dir or tempfile.gettempdir())
    if not directory.is_dir():
        raise InputError(
            f"--disk-dir {directory} was given.",
            "It is a file." if directory.exists() else "There is no such directory.",
            "Name one on the disk that models are read from.",
        )

    def report(text: str) -> None:
        if not arguments.quiet:
            print(f"freight: measuring {text}", file=sys.stderr, flush=True)

    device = find_device(arguments.device)
    with _refusals(path):  # before a minute of measuring, which would be lost
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    machine = profile(device, directory, report)
    with _refusals(path):
        write_machine(machine, path)
    print("\n".join(describe_machine(machine)))
    print(f"written to {path}")
    return 0


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"The profile was to be written to {path}.",
            f"The system refused: {error.strerror}.",
            "Name another file with --output.",
        ) from error


def describe_machine(machine: Machine) -> Iterator[str]:
    """The rates that matter, one line per unit and link."""
    yield f"{machine.name}: {machine.description}"
    for unit in machine.units.values():
        yield (
            f"{unit.name}: {format_bytes(unit.memory_bytes)} of memory, "
            f"passes over it at {unit.memory_bytes_per_s / 1e9:.1f} GB/s"
        )
        for dtype, rates in unit.products.items():
            rows = ", ".join(f"{rate / 1e12:.3g} at {size:.0f}" for size, rate in rates.points)
            yield f"  {dtype} products: TFLOP/s {rows} rows"
            if dtype in unit.attention_flops:
                attention = unit.attention_flops[dtype] / 1e12
                yield f"  {dtype} attention of prompts: {attention:.3g} TFLOP/s"
        attended = unit.attended_bytes_per_s.at(4) / 1e9
        yield f"  keys and values read by new tokens: {attended:.1f} GB/s"
    for name, link in machine.links.items():
        rates_text = ", ".join(
            f"{rate / 1e9:.2f} at {format_bytes(size)}" for size, rate in link.bytes_per_s.points
        )
        yield f"{name}: GB/s {rates_text}"
    for entry in machine.beside:
        shares = ", ".join(f"{value:.2f} at {size:.0f}" for size, value in entry.share.points)
        yield f"{entry.part} beside {entry.other} keeps {shares} of its speed"


def _listed(host: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in host.items())
