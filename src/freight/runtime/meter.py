"""What a run took: time by phase, and how long each lane worked."""

from __future__ import annotations

import threading

from freight.plan.operation import Kind, Lane, Operation

__all__ = ["Meter"]


class Meter:
    """Told of every operation, from all lanes. ``has_phases``: prompts have sweeps of their own."""

    def __init__(self, *, has_phases: bool) -> None:
        self._has_phases = has_phases
        self._lock = threading.Lock()
        self._last_s: float | None = None
        self.busy_s: dict[Lane, float] = {}
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self._computed_s = {True: 0.0, False: 0.0}

    @property
    def seconds(self) -> float:
        """From the first operation to the last tokens."""
        return self.prefill_s + self.decode_s

    def idle_shares(self) -> dict[str, float]:
        """Of each phase that there was, the share in which nothing was computed."""
        phases = {"prefill": (True, self.prefill_s), "decode": (False, self.decode_s)}
        return {
            name: max(0.0, 1.0 - self._computed_s[is_prefill] / seconds)
            for name, (is_prefill, seconds) in phases.items()
            if seconds
        }

    def record(self, operation: Operation, started_s: float, ended_s: float) -> None:
        """One operation, done between these times (``time.perf_counter``)."""
        with self._lock:
            if self._last_s is None:
                self._last_s = started_s
            lane = operation.lane
            # Tokens of other stages are waited for: no work.
            if operation.kind is not Kind.TAKE_TOKENS:
                self.busy_s[lane] = self.busy_s.get(lane, 0.0) + ended_s - started_s
                if lane is Lane.COMPUTE and operation.batch is not None:
                    self._computed_s[self._is_prefill(operation)] += ended_s - started_s
            if operation.is_last:
                self._add(operation, ended_s - self._last_s)
                self._last_s = ended_s

    def _add(self, operation: Operation, passed_s: float) -> None:
        """Since the last tokens."""
        if self._is_prefill(operation):
            self.prefill_s += passed_s
        else:
            self.decode_s += passed_s

    def _is_prefill(self, operation: Operation) -> bool:
        """Whether it is of a block's first sweep: its rows had no keys."""
        assert operation.batch is not None
        return self._has_phases and not operation.batch.rows[0].kv_len
