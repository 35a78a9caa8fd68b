"""An engine without a model: it reverses prompts, in shuffled order, as slowly as wanted."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

from freight.plan.workload import Workload
from freight.runtime.request import Completion, CompletionOutput, Request


class FakeEngine:
    """Answers with the prompt's ids reversed, cut at max_tokens; blocks of rows, shuffled. Each of
    several samples is the same."""

    def __init__(
        self,
        workload: Workload | None = None,
        *,
        block_size: int = 4,
        delay_s: float = 0.0,
        fail_after: int | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self.workload = workload
        self.block_size = block_size
        self.delay_s = delay_s
        self.fail_after = fail_after
        self.failure = failure or RuntimeError("the engine broke")
        self.requests: list[Request] = []
        self.closed = False

    def run(self, requests: Iterator[Request]) -> Iterator[Completion]:
        while block := list(itertools.islice(requests, self.block_size)):
            self.requests += block
            random.Random(len(self.requests)).shuffle(block)
            for request in block:
                if self.fail_after == 0:
                    raise self.failure
                if self.fail_after is not None:
                    self.fail_after -= 1
                time.sleep(self.delay_s)
                yield answer(request)

    def status(self) -> str:
        assert not self.closed
        return "fake"

    def summary(self) -> str:
        return "fake engine\ntwo lines"

    def close(self) -> None:
        self.closed = True


def answer(request: Request) -> Completion:
    ids = tuple(request.prompt_ids)[::-1][: request.params.max_tokens]
    output = CompletionOutput(
        token_ids=ids,
        text=" ".join(map(str, ids)) + f" seed {request.params.seed}",
        finish_reason="length",
    )
    return Completion(
        index=request.index,
        num_prompt_tokens=len(request.prompt_ids),
        outputs=(output,) * request.params.n,
    )


class Watcher:
    """An observer that counts."""

    def __init__(self) -> None:
        self.num_read = 0
        self.remarks: list[str] = []
        self.started: tuple[int, int] | None = None
        self.num_rows = 0
        self.ended = False

    def on_reading(self, num_rows: int) -> None:
        self.num_read = num_rows

    def on_remark(self, text: str) -> None:
        self.remarks.append(text)

    def on_start(self, *, num_rows: int, num_done: int, status: Callable[[], str]) -> None:
        assert status() in ("fake", "")
        self.started = num_rows, num_done

    def on_row(self, *, num_new_tokens: int) -> None:
        self.num_rows += 1

    def on_end(self) -> None:
        self.ended = True
