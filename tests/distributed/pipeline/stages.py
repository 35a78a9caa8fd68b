"""All stages of a pipeline in this process, each in a thread, really connected to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import HashStore, PrefixStore

from freight.distributed.pipeline.engine import StageEngine
from freight.distributed.pipeline.planning import build_stage_engine
from freight.distributed.ranks import Connection, ConnectionLost, Place, Ranks
from freight.errors import FreightError
from freight.plan.workload import Workload
from freight.runtime.options import EngineOptions
from freight.runtime.request import Completion, Request

Made = TypeVar("Made")

LIMIT_S = 120.0


def on_ranks(size: int, work: Callable[[Ranks], Made]) -> list[Made | BaseException]:
    """What ``work`` returns or raises on each of so many ranks."""
    store = HashStore()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            place = Place(rank=rank, size=size, local_rank=rank, local_size=size)
            connection = Connection(store=PrefixStore("test", store), address="127.0.0.1")
            ranks = Ranks(place, connection)
            try:
                results[rank] = work(ranks)
            finally:
                ranks.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    ends_s = time.monotonic() + LIMIT_S
    while True:
        is_over = not any(thread.is_alive() for thread in threads)
        # A process that fails is missed by the others; a thread is not.
        for own in results:
            if isinstance(own, BaseException) and not isinstance(
                own, FreightError | ConnectionLost
            ):
                raise own
        if is_over:
            return results
        assert time.monotonic() < ends_s, "a rank does not come to an end"
        time.sleep(0.005)


def answers(
    model_dir: Path,
    size: int,
    requests: Sequence[Request],
    workload: Workload,
    *,
    look: Callable[[StageEngine], None] = lambda _: None,
    own: Callable[[int], dict[str, Any]] = lambda _: {},
    **options: Any,
) -> list[list[Completion]]:
    """What each stage answers, in the order of the requests; ``own`` are a rank's own options."""

    def work(ranks: Ranks) -> list[Completion]:
        defaults = {"dtype": "float32", "device": "cpu", "verify": True, "disk_dir": model_dir}
        chosen = EngineOptions(**{**defaults, **options, **own(ranks.rank)})
        engine = build_stage_engine(model_dir, options=chosen, workload=workload, ranks=ranks)
        try:
            done = list(engine.run(iter(requests if ranks.rank == 0 else ())))
            look(engine)
            engine.summary()
        finally:
            engine.close()
        assert sorted(one.index for one in done) == list(range(len(requests)))
        return sorted(done, key=lambda one: one.index)

    results = on_ranks(size, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
