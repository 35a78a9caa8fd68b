"""Starts commands as torchrun would, without its seconds: ranks fork from a process that has
imported what they need.

That process, ``Forks``, is started once. It forks for each command one that stands for torchrun: it
forks the ranks, tells each its place, stops the others when one fails and ends with them. The store
is the first rank's. Or it becomes torchrun itself. Run as a program this file is that process; it
must stay without threads, so it imports and computes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


@dataclass(frozen=True)
class Run:
    """A command under way, in processes of its own session."""

    pid: int
    log: Path
    poll: Callable[[], int | None]

    def ranks(self) -> list[int]:
        """Their process ids, in order, of those that are there."""
        return [*map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit status."""
        ends_s = time.monotonic() + limit_s
        while (status := self.poll()) is None:
            assert time.monotonic() < ends_s, self.told()
            time.sleep(0.01)
        return status

    def told(self) -> str:
        """All that it has printed."""
        return self.log.read_text()


class Forks:
    """The process that all come from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._directory = tempfile.TemporaryDirectory()
        self._num_runs = 0

    @contextmanager
    def start(self, size: int, command: Sequence[str], *, torchrun: bool = False) -> Iterator[Run]:
        """``-m module ...`` or ``script ...`` on so many ranks; one is a process by itself."""
        self._num_runs += 1
        log = Path(self._directory.name) / str(self._num_runs)
        log.touch()
        pid = self._ask(size=size, command=[*command], log=str(log), torchrun=torchrun)
        run = Run(pid, log, lambda: self._ask(poll=pid))
        try:
            yield run
        finally:
            if run.poll() is None:
                os.killpg(pid, signal.SIGKILL)
                run.wait()

    def finish(
        self, size: int, command: Sequence[str], *, torchrun: bool = False
    ) -> tuple[int, str]:
        """Exit status, and what it printed."""
        with self.start(size, command, torchrun=torchrun) as run:
            return run.wait(), run.told()

    def close(self) -> None:
        self._process.communicate()
        self._directory.cleanup()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


# -- in that process -------------------------------------------------------------------------------


def _serve() -> None:
    import freight.entrypoints.cli
    import freight.entrypoints.run_stages
    import freight.kernels.append_loops
    import freight.kernels.attention_loops
    import freight.kernels.group_loops  # noqa: F401

    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: int | None = None
        if (pid := request.get("poll")) is not None:
            if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(found[1])
            answer = ended.get(pid)
        elif (answer := os.fork()) == 0:
            _begin(**request)
        print(json.dumps(answer), flush=True)


def _begin(size: int, command: list[str], log: str, torchrun: bool) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, own in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(own, number)
    if torchrun:
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        os.execv(sys.executable, [sys.executable, *start, *command])
    _stand_for_torchrun(size, command)


def _stand_for_torchrun(size: int, command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            _run(command)
    living, is_failed = {*ranks}, False
    while living:
        pid, status = os.wait()
        living.discard(pid)
        if status and not is_failed:
            is_failed = True
            for other in living:
                os.kill(other, signal.SIGTERM)
    os._exit(is_failed)


def _run(command: list[str]) -> None:
    status: Any = 1
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    _serve()
