"""``freight bench offload``: the ceiling first, then what is reached, then one line of JSON.

Everything that can be refused is refused before anything runs. This process holds no model and
imports no torch; what is measured is measured in children, one at a time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from freight.entrypoints.bench.children import ended_by_sigterm, run_or_raise
from freight.entrypoints.bench.flexgen_run import flexgen_policies
from freight.entrypoints.bench.groups import GroupMaker, forget_files
from freight.entrypoints.bench.peers import (
    Peer,
    Setting,
    Trial,
    check_peers,
    parse_batch_sizes,
    sweep,
)
from freight.entrypoints.bench.report import (
    byte_ratios,
    describe_ceiling,
    describe_pace,
    describe_run,
    describe_setting,
    share_of_pace,
    summarise,
)
from freight.entrypoints.bench.weights import find_config, provide_weights
from freight.entrypoints.bench.work import Work, check_work, parse_shape
from freight.entrypoints.run import engine_options
from freight.entrypoints.version import freight_version
from freight.errors import InputError
from freight.model.config import read_config
from freight.model.task import refuse_other
from freight.quantities import format_bytes, parse_bytes
from freight.runtime.options import EngineOptions

__all__ = ["bench_offload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """The flags, read and checked."""

    work: Work
    options: EngineOptions
    model: Path
    """A directory, or the file of a configuration."""
    group: GroupMaker | None
    peers: tuple[str, ...]
    settings: Mapping[str, tuple[Setting, ...]]
    """Of each peer; none are searched for."""
    timeout_s: float
    resident_bytes: int | None
    repeats: int
    peer_rows: int
    """How many of the rows peers answer."""
    is_unwritten: bool
    """Whether each run makes its weights anew."""

    @property
    def peer_work(self) -> Work:
        return replace(self.work, num_rows=self.peer_rows)

    @property
    def budget_bytes(self) -> int | None:
        """What each system may take; None is what the machine has."""
        group = None if self.group is None else self.group.limit_bytes
        return self.options.cpu_memory_bytes or group


def bench_offload(arguments: argparse.Namespace) -> int:
    """Run the benchmark that the flags describe; returns the exit status."""
    with ended_by_sigterm():
        _carry_out(arguments)
    return 0


def _carry_out(arguments: argparse.Namespace) -> None:
    request = _read(arguments)
    model_dir = provide_weights(
        request.model,
        Path(arguments.work_dir),
        dtype=request.options.dtype,
        dummy=arguments.dummy_weights,
        unwritten=arguments.unwritten_weights,
    )
    job = {"model": str(model_dir), "work": asdict(request.work), "flags": vars(arguments)}
    asked = "Rates of this machine were to be measured."
    probe = {**job, "task": "probe", "budget_bytes": request.budget_bytes}
    probed = run_or_raise(probe, asked)
    _say(describe_ceiling(probed, request.work))
    if request.peers and request.group is None:
        _say(["note:     without --group, peers have the page cache beside their memory"])
    job["dtype"] = probed["dtype"]
    bench = _Bench(request=request, model_dir=model_dir, job=job, probe=probe, probed=probed)
    bench.run()
    _say(describe_pace(bench.runs["freight"], bench.usual_s))
    print(json.dumps(bench.record(arguments)))


def _read(arguments: argparse.Namespace) -> _Request:
    work = parse_shape(arguments.shape, arguments.rows)
    if arguments.repeats < 1:
        raise _refuse_number("--repeats", arguments.repeats, "At least one run is measured.")
    if arguments.peer_rows is not None and arguments.peer_rows < 1:
        raise _refuse_number("--peer-rows", arguments.peer_rows, "A peer answers at least one row.")
    if not (math.isfinite(arguments.peer_timeout) and arguments.peer_timeout > 0):
        raise _refuse_number("--peer-timeout", arguments.peer_timeout, "It is a time in seconds.")
    options = engine_options(arguments)
    peers = tuple(dict.fromkeys(arguments.peer))
    check_peers(peers)
    if arguments.flexgen and "flexgen" not in peers:
        raise InputError(
            f"--flexgen '{arguments.flexgen[0]}' was given without --peer flexgen.",
            "It is a policy for that peer.",
            "Add --peer flexgen, or leave it out.",
        )
    resident = arguments.peer_resident
    model = find_config(arguments.model)
    config = read_config(model)
    asked = "New tokens were to be made, and timed."
    refuse_other(config.readout, "generate", asked, takes_task=False)
    check_work(work, config)
    settings: dict[str, tuple[Setting, ...]] = {}
    sizes = parse_batch_sizes(arguments.peer_batch_sizes)
    for peer in peers:
        is_flexgen = peer == "flexgen"
        settings[peer] = (
            flexgen_policies(arguments.flexgen, config.hidden_size) if is_flexgen else sizes
        )
    return _Request(
        work=work,
        options=options,
        model=model,
        group=_read_group(arguments.group, options),
        peers=peers,
        settings=settings,
        timeout_s=arguments.peer_timeout,
        resident_bytes=None if resident is None else parse_bytes(resident, name="--peer-resident"),
        repeats=arguments.repeats,
        peer_rows=min(work.num_rows, arguments.peer_rows or work.num_rows),
        is_unwritten=arguments.unwritten_weights,
    )


def _read_group(text: str | None, options: EngineOptions) -> GroupMaker | None:
    if text is None:
        return None
    group = GroupMaker(limit_bytes=parse_bytes(text, name="--group"))
    if options.cpu_memory_bytes is not None and options.cpu_memory_bytes > group.limit_bytes:
        raise InputError(
            f"--cpu-memory {format_bytes(options.cpu_memory_bytes)} was given.",
            f"--group ends a process that takes more than {format_bytes(group.limit_bytes)}.",
            "Give --cpu-memory somewhat less than --group: code and page cache count there, too.",
        )
    group.check()
    return group


def _refuse_number(flag: str, value: float, limit: str) -> InputError:
    return InputError(f"{flag} {value:g} was given.", limit, "Give more than 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bench:
    """The measured part: peers find their batch size, then all run in turn. Where each runs once,
    ours is first, and what peers find is their run: whatever ends the call, ours is there."""

    request: _Request
    model_dir: Path
    job: Mapping[str, Any]
    probe: Mapping[str, Any]
    probed: Mapping[str, Any]
    later: list[dict[str, Any]] = field(default_factory=list)
    """As ``probed``, after each run of our own."""
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        if self.request.repeats == 1:
            self._run_own()
            for peer, setting in self._find_settings().items():
                self._keep_trial(peer.name, setting)
            return
        best = self._find_settings()
        for _ in range(self.request.repeats):
            self._run_own()
            for peer, setting in best.items():
                forget_files(self.model_dir)
                trial = peer.run(setting)
                self._tell(peer.name, trial)
                self.runs.setdefault(peer.name, [])
                if trial.result is not None:
                    self.runs[peer.name].append(trial.result)

    def _keep_trial(self, name: str, setting: Setting) -> None:
        """Where each is run once, that a peer's best was found is its run."""
        (trial,) = (own for own in self.trials[name] if own.setting == setting)
        assert trial.result is not None
        self.runs[name] = [trial.result]

    def _run_own(self) -> None:
        forget_files(self.model_dir)
        job = {**self.job, "task": "freight"}
        result = run_or_raise(job, "Freight was to be measured.", self.request.group)
        self.runs.setdefault("freight", []).append(result)
        _say(describe_run("freight", result, self.request.work, self._ceiling_s))
        if self.request.repeats > 1:
            again = run_or_raise(self.probe, "Rates of this machine were to be measured again.")
            self.later.append(again)

    def _find_settings(self) -> dict[Peer, Setting]:
        """The fastest batch size, or policy, of each peer that finishes with any."""
        best: dict[Peer, Setting] = {}
        for name in self.request.peers:
            peer = self._peer(name)
            refusal = peer.refusal()
            if refusal is not None:
                self.refusals[name] = refusal
                _say([f"{name}: refused, {refusal}"])
                continue
            self.trials[name] = self._sweep(peer)
            fastest = min(self.trials[name], key=lambda trial: trial.generate_s)
            if fastest.result is not None:
                best[peer] = fastest.setting
        return best

    def _sweep(self, peer: Peer) -> list[Trial]:
        def run(setting: Setting) -> Trial:
            forget_files(self.model_dir)
            return peer.run(setting)

        def tell(trial: Trial) -> None:
            self._tell(f"{peer.name}, looking for what suits it", trial)

        return sweep(run, self.request.settings[peer.name], self.request.peer_rows, tell)

    def _peer(self, name: str) -> Peer:
        on_cuda = any(path["name"] == "link" for path in self.probed["paths"])
        on_cuda = on_cuda and self.request.options.device != "sim"
        near = self.probed["paths"][0]["room_bytes"] if on_cuda else None
        budget = self.probed["budget_bytes"]
        return Peer(
            name=name,
            job={
                **{key: self.job[key] for key in ("model", "dtype")},
                "work": asdict(self.request.peer_work),
                "budget_bytes": budget,
                "resident_bytes": self.request.resident_bytes,
                "on_cuda": on_cuda,
                "unwritten": self.request.is_unwritten,
                "gpu_budget_bytes": near,
            },
            config=read_config(self.request.model),
            work=self.request.peer_work,
            weight_bytes=self.probed["parameter_bytes"],
            budget_bytes=budget,
            groups=self.request.group,
            timeout_s=self.request.timeout_s,
        )

    @property
    def _ceiling_s(self) -> float:
        return float(self.probed["ceiling"]["seconds"])

    @property
    def usual_s(self) -> list[float]:
        """The ceiling by what the machine did usually, before the first run and after each."""
        return [float(probed["usual"]["seconds"]) for probed in (self.probed, *self.later)]

    def _tell(self, name: str, trial: Trial) -> None:
        if trial.result is None:
            _say([f"{name} ({describe_setting(trial.setting)}): {trial.reason}"])
        else:
            _say(describe_run(name, trial.result, self.request.peer_work, None))

    def _measure_of(self, name: str) -> tuple[Work, float]:
        """What a system did, and the ceiling of as much."""
        if name == "freight":
            return self.request.work, self._ceiling_s
        work = self.request.peer_work
        return work, self._ceiling_s * work.total_new_tokens / self.request.work.total_new_tokens

    def record(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Everything, as one object."""
        request, own = self.request, self.runs["freight"]
        systems = {
            name: summarise(runs, *self._measure_of(name)) for name, runs in self.runs.items()
        }
        for name, trials in self.trials.items():
            systems.setdefault(name, summarise([], *self._measure_of(name)))
            systems[name]["trials"] = [_trial_record(trial) for trial in trials]
            # Weights that nobody wrote are not the same ones.
            runs = [] if request.is_unwritten else self.runs.get(name, [])
            systems[name]["same_first_tokens"] = _agreement(own, runs)
        systems |= {name: {"refused": reason} for name, reason in self.refusals.items()}
        return {
            "benchmark": "offload",
            "version": freight_version(),
            "model": arguments.model,
            **asdict(request.work),
            "group_bytes": None if request.group is None else request.group.limit_bytes,
            "machine": dict(self.probed),
            "systems": systems,
            "share_of_ceiling": systems["freight"]["median"]["share_of_ceiling"],
            "usual_ceilings_s": self.usual_s,
            "share_of_usual_ceiling": share_of_pace(own, self.usual_s),
            "byte_ratios": [byte_ratios(run) for run in own],
            "times_peer": _times_peer(systems),
        }


def _trial_record(trial: Trial) -> dict[str, Any]:
    done = trial.result is not None
    return {
        "policy" if isinstance(trial.setting, str) else "batch_size": trial.setting,
        "generate_s": trial.generate_s if done else None,
        "reason": trial.reason or None,
    }


def _times_peer(systems: Mapping[str, Any]) -> dict[str, float]:
    """How many times as long each peer took for a token, by medians."""
    own = systems["freight"]["median"]["new_tokens_per_s"]
    medians = {name: system.get("median") for name, system in systems.items()}
    return {
        name: own / median["new_tokens_per_s"]
        for name, median in medians.items()
        if median is not None and name != "freight"
    }


def _agreement(own: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of rows whose first new token is the same; number formats of few bits make ties."""
    if not peer or "first_tokens" not in peer[0]:
        return None
    pairs = list(zip(own[0]["first_tokens"], peer[0]["first_tokens"], strict=False))
    return sum(bool(a == b) for a, b in pairs) / len(pairs)


def _say(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)
