"""Peers: which there are, whether they can run here, and which batch size suits each best.

Knows how a run is asked for and nothing of what happens in it; imports none of them.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from freight.entrypoints.bench.children import Outcome, run_child
from freight.entrypoints.bench.flexgen_run import can_be_flexgens
from freight.entrypoints.bench.groups import GroupMaker
from freight.entrypoints.bench.work import Work
from freight.errors import FreightError, InputError
from freight.model.switches import ModelConfig
from freight.quantities import MIB, format_bytes

__all__ = ["PEERS", "Peer", "Setting", "Trial", "check_peers", "parse_batch_sizes", "sweep"]

PEERS: Final[Mapping[str, tuple[str, ...]]] = {
    "accelerate": ("accelerate", "transformers", "safetensors"),
    "transformers": ("transformers", "safetensors"),
    "flexgen": ("flexgen", "transformers"),
}
Setting = int | str
"""The rows of a batch; of FlexGen a policy, as its own flags."""
_LEAST_PROCESS_BYTES: Final = 256 * MIB
"""Python, torch and transformers before the first weight; they were never seen to take less."""
# Without this, weights that were let go stay in the heap, and a group's limit kills the process.
_ENVIRONMENT: Final = {"MALLOC_MMAP_THRESHOLD_": "1000000", "TOKENIZERS_PARALLELISM": "false"}


def check_peers(names: Sequence[str]) -> None:
    """Refuse names that are not known and peers that are not installed."""
    for name in names:
        if name not in PEERS:
            raise InputError(
                f"--peer {name} was given.",
                "It is not known.",
                f"Use one of {', '.join(PEERS)}.",
            )
    needed = dict.fromkeys(package for name in names for package in PEERS[name])
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        extras = ["bench"] * (missing != ["flexgen"]) + ["flexgen"] * ("flexgen" in missing)
        raise InputError(
            f"--peer {' --peer '.join(names)} was given.",
            f"Not installed here: {', '.join(missing)}.",
            f'Install them with: pip install "freight[{",".join(extras)}]"',
        )


def parse_batch_sizes(text: str | None) -> tuple[int, ...]:
    """Sizes of "8,16,32"; none where the flag was left out."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) for part in parts if part.isdecimal() and part.isascii()]
    if len(sizes) < len(parts) or min(sizes) < 1:
        raise InputError(
            f"--peer-batch-sizes {text} was given.",
            "Batch sizes are whole numbers of at least 1.",
            "Write them like 8,16,32,64.",
        )
    return tuple(dict.fromkeys(sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run with one batch size, or by one policy: its figures, or None and why there are none."""

    setting: Setting
    result: dict[str, Any] | None
    reason: str

    @property
    def generate_s(self) -> float:
        return float("inf") if self.result is None else float(self.result["generate_s"])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Peer:
    """A peer with the work it is given; ``job`` is what its runs have in common."""

    name: str
    job: Mapping[str, Any]
    config: ModelConfig
    work: Work
    weight_bytes: float
    budget_bytes: int
    groups: GroupMaker | None
    timeout_s: float

    def refusal(self) -> str | None:
        """Why it cannot run at all, if so: without offload, the weights must fit."""
        if self.name == "flexgen":
            return self._flexgen_refusal()
        needed = self.weight_bytes + _LEAST_PROCESS_BYTES
        if self.name == "accelerate" or self.job["on_cuda"] or needed <= self.budget_bytes:
            return None
        return (
            f"its weights take {format_bytes(self.weight_bytes)} in memory, and with the process "
            f"more than the budget of {format_bytes(self.budget_bytes)}"
        )

    def _flexgen_refusal(self) -> str | None:
        if not self.job["on_cuda"]:
            return "it computes on CUDA devices alone"
        if not can_be_flexgens(self.config):
            return "it computes OPT models alone, with norms before the blocks"
        if min(self.work.lengths()) != max(self.work.lengths()):
            return "its rows are of one length"
        return None

    def run(self, setting: Setting) -> Trial:
        """One run; what it cannot do is a trial without a result."""
        key = "policy" if isinstance(setting, str) else "batch_size"
        with tempfile.TemporaryDirectory(prefix="freight-bench-") as offload_dir:
            job = {
                **self.job,
                "task": "peer",
                "system": self.name,
                key: setting,
                "offload_dir": offload_dir,
            }
            try:
                outcome = run_child(
                    job, groups=self.groups, environment=_ENVIRONMENT, timeout_s=self.timeout_s
                )
            except FreightError as error:
                outcome = Outcome(result=None, reason=str(error))
        if outcome.result is not None and outcome.group_peak_bytes is not None:
            outcome.result["group_peak_bytes"] = outcome.group_peak_bytes
        return Trial(setting=setting, result=outcome.result, reason=outcome.reason)


def sweep(
    run: Callable[[Setting], Trial],
    settings: Sequence[Setting],
    num_rows: int,
    tell: Callable[[Trial], None],
) -> list[Trial]:
    """Try settings: those given, or all rows at once and then halves, for as long as a half is
    faster or nothing has finished."""
    trials: list[Trial] = []
    best_s = float("inf")
    for setting in settings or _halves(num_rows):
        trial = run(setting)
        tell(trial)
        trials.append(trial)
        if not settings and best_s < float("inf") and trial.generate_s >= best_s:
            break
        best_s = min(best_s, trial.generate_s)
    return trials


def _halves(num_rows: int) -> Iterator[int]:
    while num_rows:
        yield num_rows
        num_rows //= 2
