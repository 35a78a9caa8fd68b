"""Stands for ``freight.entrypoints.bench.child``, whose imports take longer than its work here: a
copy of a process that has imported what it needs does the work.

With ``serve`` this is that process. It forks for each that connects one that forks the copy, and
ends it when the one that asked is gone. It must stay without threads, so it computes nothing. Else
it is what asks: it hands on its descriptors and environment, and ends as the copy has.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys

WHERE = "FREIGHT_TESTS_CHILDREN"
_MANY = 64
_MOST_BYTES = 1 << 20
_HIGH = 200
"""Descriptors from here on are nobody's."""


def ask() -> None:
    numbers = [0, 1, 2]
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
            numbers += [number] if os.get_inheritable(number) else []
    told = {"environment": dict(os.environ), "numbers": numbers}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[WHERE])
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        socket.send_fds(server, [json.dumps(told).encode()], numbers)
        status = json.loads(server.recv(_MANY))
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path: str) -> None:
    import torch  # noqa: F401

    import freight.entrypoints.bench.child
    import freight.entrypoints.bench.probe
    import freight.entrypoints.eval.own_run
    import freight.entrypoints.eval.prepare
    import freight.kernels.append_loops
    import freight.kernels.attention_loops
    import freight.kernels.group_loops
    import freight.runtime.engine  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        os.write(1, b"ready\n")
        while listener in select.select([listener, 0], [], [])[0]:
            asking, _ = listener.accept()
            if not os.fork():
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(asking)
            asking.close()


def _answer(asking: socket.socket) -> None:
    text, descriptors, _, _ = socket.recv_fds(asking, _MOST_BYTES, _MANY)
    child = os.fork()
    if not child:
        asking.close()
        _work(descriptors=descriptors, **json.loads(text))
    watched = os.pidfd_open(child)
    if watched not in select.select([watched, asking], [], [])[0]:
        os.kill(child, signal.SIGKILL)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    asking.send(json.dumps(status).encode())
    os._exit(0)


def _work(descriptors: list[int], numbers: list[int], environment: dict[str, str]) -> None:
    status = 1
    try:
        above = [fcntl.fcntl(own, fcntl.F_DUPFD, _HIGH) for own in descriptors]
        os.closerange(3, _HIGH)
        for own, number in zip(above, numbers, strict=True):
            os.dup2(own, number)
        os.closerange(_HIGH, _HIGH + _MANY)
        os.environ.clear()
        os.environ.update(environment)
        import torch

        from freight.entrypoints.bench.child import main

        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        ask()
