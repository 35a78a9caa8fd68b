"""Rows of random tokens by llama.cpp, all at once, as its ``llama-batched-bench`` has them.

    PYTHON -I benchmarks/batched_bench.py FILE ROWS PROMPT NEW THREADS

For a Python that has ``llama-cpp-python``, which brings the library without that program; ``-I``,
or a script beside this one is taken for it. The last line is JSON as the program's: seconds for
prompts, for new tokens, for both.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

BATCH, AT_ONCE = 2048, 512
Token = tuple[int, int, int, bool]
"""Of the vocabulary, its position, its row, and whether logits are wanted after it."""


def main() -> None:
    import llama_cpp

    file, (rows, prompt, new, threads) = sys.argv[1], map(int, sys.argv[2:])
    bench = Bench(llama_cpp, file, rows, prompt + new, threads)
    bench.take([(0, 0, 0, True)])  # the first one takes longer
    bench.clear()
    begin = perf_counter()
    tokens = [
        (bench.draw(), place, row, place == prompt - 1)
        for row in range(rows)
        for place in range(prompt)
    ]
    for first in range(0, len(tokens), BATCH):
        bench.take(tokens[first : first + BATCH])
    middle = perf_counter()
    for place in range(prompt, prompt + new):
        bench.take([(bench.draw(), place, row, True) for row in range(rows)])
    end = perf_counter()
    print(json.dumps({"t_pp": middle - begin, "t_tg": end - middle, "t": end - begin}))


class Bench:
    """A file, and room for so many rows of so many tokens, each with a cache of its own."""

    def __init__(self, library: Any, file: str, rows: int, tokens: int, threads: int) -> None:
        self._library = library
        library.llama_backend_init()
        self._model = library.llama_model_load_from_file(
            file.encode(), library.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"{file} was not taken.")
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = rows * tokens, rows
        settings.n_batch, settings.n_ubatch = BATCH, AT_ONCE
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = False
        self._context = library.llama_init_from_model(self._model, settings)
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        vocabulary = library.llama_model_get_vocab(self._model)
        self._num_tokens = library.llama_vocab_n_tokens(vocabulary)
        self._random = random.Random(1)

    def draw(self) -> int:
        return self._random.randrange(self._num_tokens)

    def take(self, tokens: Sequence[Token]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for number, (token, position, row, wanted) in enumerate(tokens):
            batch.token[number], batch.pos[number] = token, position
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, row
            batch.logits[number] = wanted
        if self._library.llama_decode(self._context, batch):
            sys.exit(f"{len(tokens)} tokens were not taken.")
        self._library.llama_synchronize(self._context)

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)


if __name__ == "__main__":
    main()
