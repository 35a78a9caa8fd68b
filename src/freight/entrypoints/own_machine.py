"""The rates of the machine that a job runs on: kept from an earlier measurement, or measured now.

Measuring takes half a minute and memory of its own. So it is done once, by another process, and
only before work that is long enough to be worth it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from freight.entrypoints.profile import default_path, read_own_profile
from freight.errors import FreightError, InputError
from freight.hardware.machine import Machine
from freight.hardware.storage import write_machine
from freight.model.config import ModelConfig
from freight.model.decoder import count_parameters
from freight.plan.workload import Workload
from freight.runtime.options import EngineOptions

__all__ = ["keep_recalibrated", "nominal_s", "own_machine", "recalibrate"]

_WORTH_MEASURING_S: Final = 300.0
_NOMINAL_FLOPS: Final = 5e11
_NOMINAL_BYTES_PER_S: Final = 2e9
_TIMEOUT_S: Final = 180.0
_LEAST_SHARE: Final = 0.05
_MOST_FACTOR: Final = 4.0
_OF_A_RANK: Final = ("OMP_NUM_THREADS",)
"""What torchrun leaves each rank of a host; whoever measures for all has all of it."""


def nominal_s(config: ModelConfig, workload: Workload) -> float:
    """About how long a job takes, on no machine in particular: arithmetic on some cores, or one
    reading of the model from a disk if that is longer."""
    parameters = count_parameters(config)
    tokens = workload.total_prompt_tokens + workload.total_new_tokens
    return max(2.0 * parameters * tokens / _NOMINAL_FLOPS, 2.0 * parameters / _NOMINAL_BYTES_PER_S)


def own_machine(
    options: EngineOptions,
    model_dir: Path,
    work_s: float,
    say: Callable[[str], None],
    *,
    is_part: bool = False,
) -> Machine | None:
    """This machine's profile: the one that is kept, or a new one where ``work_s`` of work lie
    ahead; None where there is none, and a plan has to do with nominal rates. ``is_part``: this
    process has not all threads of the machine, whose profile it is all the same."""
    if work_s < _WORTH_MEASURING_S and not default_path().exists():
        return None
    # torch takes seconds to import.
    from freight.runtime.device import find_device
    from freight.runtime.profiler import identify_host

    device = find_device(options.device)
    host = identify_host(device)
    if is_part:
        del host["threads"]
    try:
        machine = read_own_profile(host)
    except InputError as error:
        say(f"The machine's kept profile is not used. {error.limit} {error.advice}")
        machine = None
    if machine is not None or work_s < _WORTH_MEASURING_S:
        return machine
    say("measuring this machine, once, for the plan")
    try:
        left_out = _OF_A_RANK if is_part else ()
        _measure(device.kind, options.disk_dir or _writable(model_dir), left_out)
        return read_own_profile(host)
    except (FreightError, subprocess.SubprocessError, OSError) as error:
        say(f"it could not be measured ({error}): the plan is made from nominal rates")
        return None


def recalibrate(
    machine: Machine,
    predicted_s: Mapping[str, float],
    measured_s: Mapping[str, float],
    *,
    unit: str = "cpu",
) -> Machine:
    """The machine with each part's rates as a run has found them: scaled by how long the part was
    to work, over how long it did. Parts that hardly worked are left as they are. ``unit`` is what
    computed."""
    most = max(measured_s.values(), default=0.0)
    factors = {}
    for part, told_s in predicted_s.items():
        was_s = measured_s.get(part, 0.0)
        if told_s > 0 and was_s > _LEAST_SHARE * most:
            factors[part] = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, told_s / was_s))
    return machine.scaled(factors, unit=unit)


def keep_recalibrated(engine: Any, machine: Machine | None, say: Callable[[str], None]) -> None:
    """Write the profile anew from what a run measured, or say why not. Of the real machine's parts
    only: a simulated link is as fast as it was told to be."""
    told = getattr(engine, "forecast", None)
    if machine is None or told is None:
        say("not recalibrated: there is no profile")
        return
    parts, unit = {"compute", "disk read", "disk write"}, "cpu"
    if engine.device.kind == "cuda":
        parts, unit = parts | {"host to device", "device to host"}, "gpu"
    predicted = {lane.value: s for lane, s in told.busy_s.items() if lane.value in parts}
    measured = {lane.value: s for lane, s in engine.meter.busy_s.items()}
    write_machine(recalibrate(machine, predicted, measured, unit=unit), default_path())
    say(f"recalibrated {default_path()}")


def _measure(kind: str, directory: Path | None, left_out: Collection[str] = ()) -> None:
    """By another process, without these variables of this one's environment."""
    where = [] if directory is None else ["--disk-dir", str(directory)]
    device = "cuda" if kind == "cuda" else "cpu"
    command = [sys.executable, "-m", "freight", "profile", "--quiet", "--device", device, *where]
    subprocess.run(
        [*command, "--output", str(default_path())],
        env={name: value for name, value in os.environ.items() if name not in left_out},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
    )


def _writable(directory: Path) -> Path | None:
    """Weights are read from there: best measure that disk, if a file may be made on it."""
    return directory if os.access(directory, os.W_OK) else None
