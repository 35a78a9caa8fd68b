"""Runs in processes of their own: started, bounded, ended, and their one line of JSON read.

Knows no models; the parent stays small, for it imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from freight import errors
from freight.entrypoints.bench.groups import GroupMaker, MemoryGroup, drop_caches
from freight.errors import DeviceError, FreightError

__all__ = ["ChildFailed", "Outcome", "ended_by_sigterm", "run_child", "run_or_raise"]

_MODULE: Final = "freight.entrypoints.bench.child"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended: its result, or None and why there is none."""

    result: dict[str, Any] | None
    reason: str = ""
    group_peak_bytes: int | None = None


class ChildFailed(FreightError):
    """A run that was to give a figure gave none."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Told to end, this process leaves by way of all ``finally``: a child is ended and its group
    removed."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run_child(
    job: Mapping[str, Any],
    *,
    groups: GroupMaker | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    descriptors: tuple[int, ...] = (),
) -> Outcome:
    """Run a job (see ``child``); in a fresh group with cold caches where ``groups`` is given.
    ``descriptors`` stay open in it.

    A job that refuses raises its FreightError here; one that is killed, fails or takes too long is
    an outcome without a result.
    """
    group = None if groups is None else groups.make()
    try:
        if group is not None:
            drop_caches()
        outcome = _run(job, group, environment or {}, timeout_s, descriptors)
        peak = None if group is None else group.peak_bytes()
        return Outcome(result=outcome.result, reason=outcome.reason, group_peak_bytes=peak)
    finally:
        if group is not None:
            group.remove()


def run_or_raise(
    job: Mapping[str, Any], asked: str, groups: GroupMaker | None = None
) -> dict[str, Any]:
    """The result of a job that must give one."""
    outcome = run_child(job, groups=groups)
    if outcome.result is None:
        raise ChildFailed(
            asked,
            f"Its process was {outcome.reason}.",
            "Free some memory or give less work."
            if groups is None
            else "Raise --group or lower --cpu-memory: code and page cache count in a group, too.",
        )
    if outcome.group_peak_bytes is not None:
        outcome.result["group_peak_bytes"] = outcome.group_peak_bytes
    return outcome.result


def _run(
    job: Mapping[str, Any],
    group: MemoryGroup | None,
    environment: Mapping[str, str],
    timeout_s: float | None,
    descriptors: tuple[int, ...],
) -> Outcome:
    with tempfile.TemporaryFile() as messages:
        try:
            done = subprocess.run(
                [sys.executable, "-m", _MODULE],
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                stderr=messages,
                env={**os.environ, **_paths(), **environment},
                preexec_fn=None if group is None else group.enter,
                timeout=timeout_s,
                pass_fds=descriptors,
            )
        except subprocess.TimeoutExpired:
            return Outcome(result=None, reason=f"not done in {timeout_s:g} s")
        except subprocess.SubprocessError as error:
            return Outcome(result=None, reason=f"not started ({error})")
        if done.returncode:
            return Outcome(result=None, reason=_reason(done.returncode, messages))
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise _rebuilt(answer["error"])
    return Outcome(result=answer["result"])


def _paths() -> dict[str, str]:
    """Let the child find the package that is running, installed or not."""
    source = str(Path(__file__).resolve().parents[3])
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": source if not others else os.pathsep.join((source, others))}


def _reason(returncode: int, messages: IO[bytes]) -> str:
    if returncode < 0:
        return "killed" if returncode == -9 else f"ended by signal {-returncode}"
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return f"ended with an error ({lines[-1] if lines else f'status {returncode}'})"


def _rebuilt(error: Mapping[str, str]) -> FreightError:
    """The child's error as it was raised there."""
    kind = getattr(errors, error["kind"], DeviceError)
    rebuilt: FreightError = kind(error["asked"], error["limit"], error["advice"])
    return rebuilt
