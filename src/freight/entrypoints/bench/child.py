"""What runs in a process of its own: reads a job from standard input, prints one line of JSON.

Knows which job is whose. An error that has a cause is told in its three parts; any other is a
traceback and an exit status.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from freight.errors import FreightError

__all__ = ["main"]


def main() -> None:
    job = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"result": _work(job)}
    except FreightError as error:
        answer = {
            "error": {
                "kind": type(error).__name__,
                "asked": error.asked,
                "limit": error.limit,
                "advice": error.advice,
            }
        }
    print(json.dumps(answer), flush=True)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    task = job["task"]
    if task == "write weights":
        from freight.entrypoints.bench.weights import write_weights

        return write_weights(job)
    if task == "probe":
        from freight.entrypoints.bench.probe import probe

        return probe(job)
    if task == "freight":
        from freight.entrypoints.bench.own_run import run_freight

        return run_freight(job)
    if task == "evaluation rows":
        from freight.entrypoints.eval.prepare import prepare_rows

        return prepare_rows(job)
    if task == "evaluation":
        from freight.entrypoints.eval.own_run import run_measure

        return run_measure(job)
    if job["system"] == "flexgen":
        from freight.entrypoints.bench.flexgen_run import run_flexgen

        return run_flexgen(job)
    from freight.entrypoints.bench.peer_run import run_peer

    return run_peer(job)


if __name__ == "__main__":
    main()
