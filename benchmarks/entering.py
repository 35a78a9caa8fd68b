"""How well rows enter whose answers end by themselves, without a model: sweeps, rows that gave way,
and tokens that were computed, over the least there may be.

The run's own scheduler, with pages for what rows hold on average, all where the arithmetic is.
Prompts are 16 to 256 tokens long; answers are drawn as each line says. The last line is JSON.

    python benchmarks/entering.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch

from freight.memory.kv_cache import KVCache
from freight.plan.kept_pages import pages_together
from freight.plan.policy import Policy, Split
from freight.plan.sweep import BatchWork
from freight.plan.workload import Workload
from freight.runtime.answers import NewTokens
from freight.runtime.request import Request, SamplingParams
from freight.runtime.scheduler import Scheduler

PAGE_TOKENS, PROMPTS, END, OTHER = 16, (16, 256), 1, 2
BLOCKS = (
    # rows, rows of a micro-batch, micro-batches
    (200, 8, 1),
    (200, 16, 1),
    (600, 32, 2),
    (2000, 64, 2),
)
Draw = Callable[[random.Random], int]
ANSWERS: tuple[tuple[str, int, Draw], ...] = (
    ("4-128 of 128", 128, lambda dice: dice.randint(4, 128)),
    ("about 40 of 512", 512, lambda dice: min(512, 1 + int(dice.expovariate(1 / 40)))),
    (
        "1-30, a tenth 512",
        512,
        lambda dice: 512 if dice.random() < 0.1 else dice.randint(1, 30),
    ),
    ("400-512 of 512", 512, lambda dice: dice.randint(400, 512)),
)


def main() -> None:
    records = []
    for num_rows, size, count in BLOCKS:
        for name, longest, draw in ANSWERS:
            found = enter(num_rows, size, count, longest, draw)
            records.append({"rows": num_rows, "block": [count, size], "answers": name, **found})
            print(
                f"{num_rows:5} rows, {count} x {size:2}, {name:18} {found['sweeps']:6} sweeps, "
                f"{found['gave_way']:4} gave way, {found['tokens']:.3f} of the tokens",
                flush=True,
            )
    print(json.dumps({"benchmark": "entering", "runs": records}))


def enter(num_rows: int, size: int, count: int, longest: int, draw: Draw) -> dict[str, Any]:
    dice = random.Random(5)
    lengths = [(dice.randint(*PROMPTS), draw(dice)) for _ in range(num_rows)]
    prompts = sum(prompt for prompt, _ in lengths)
    workload = Workload(
        num_rows=num_rows,
        max_prompt_tokens=PROMPTS[1],
        max_new_tokens=longest,
        max_total_tokens=PROMPTS[1] + longest,
        total_prompt_tokens=prompts,
        total_new_tokens=num_rows * longest,
        lengths=tuple((1, prompt, longest) for prompt, _ in lengths),
        ends_early=True,
    )
    policy = Policy(
        compute_tier="cpu",
        weights=Split(disk=1.0),
        kv=Split(cpu=1.0),
        activations=Split(cpu=1.0),
        micro_batch_size=size,
        num_micro_batches=count,
        max_batch_tokens=2048,
        page_tokens=PAGE_TOKENS,
        admission="refill",
        entry_pace=2.0,
        row_tokens=int(workload.held_tokens(PAGE_TOKENS)) + 1,
    )
    pages = pages_together(policy, workload, size * count)
    scheduler = Scheduler(
        (
            Request(
                index=row,
                prompt_ids=[OTHER] * prompt,
                params=SamplingParams(max_tokens=longest, stop_token_ids=(END,)),
            )
            for row, (prompt, _) in enumerate(lengths)
        ),
        policy=policy,
        kv_cache=KVCache(
            pools={"compute": [torch.zeros(pages, 1, dtype=torch.uint8)]},
            tails=[torch.zeros(1, 1, dtype=torch.uint8)],
            file=None,
            num_disk_pages=0,
            page_tokens=PAGE_TOKENS,
            far_page_bytes=(1,),
        ),
        slot_pages=0,
        tokenizer=None,
        eos_ids=frozenset(),
        lengths=workload.answers(),
        describe=lambda sweep, batch, continues: BatchWork(batch=batch, continues=continues),
    )
    sweeps = tokens = begun = 0
    for sweep in scheduler.sweeps():
        sweeps += 1
        for work in sweep.works:
            tokens += work.batch.num_tokens
            begun += sum(span.kv_len == 0 for span in work.batch.rows)
            made = []
            for span in work.batch.rows:
                prompt, answer = lengths[span.row.request]
                if span.logit_positions:
                    made.append(END if span.total_len - prompt + 1 >= answer else OTHER)
            scheduler.update(work.batch, NewTokens(token_ids=made))
    least = sum(prompt + answer - 1 for prompt, answer in lengths)
    return {"sweeps": sweeps, "gave_way": begun - num_rows, "tokens": tokens / least}


if __name__ == "__main__":
    main()
