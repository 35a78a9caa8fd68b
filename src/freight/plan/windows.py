"""What layers with an attention window keep of a row: the pages that the window reaches, in turn.

A row's tokens are far more than such a layer looks back. It has as many pages there as the window
can reach at once, on the tier of its row; a page that it has left behind takes new tokens. Where a
row brings more at once than these hold, as a prompt does, they go through scratch, or through the
slot that rows elsewhere pass through, and the last ones stay. Knows counts, no bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from freight.model.switches import ModelConfig
from freight.plan.kept_pages import keeps_kv, most_rows, own_pages, state_rows
from freight.plan.policy import Policy, Tier
from freight.plan.workload import Workload

__all__ = ["NO_WINDOWS", "Windows", "find_windows", "pages_seen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """``tokens`` are those that a layer attends, the most where they differ; a row has ``pages`` in
    each of ``layers``, and so many ``rows`` of all blocks in flight do on each tier. Those of a
    micro-batch that are elsewhere pass through ``slot_pages`` together, which if all were would be
    ``most_slot_pages``; ``scratch_pages`` are on the compute tier, and used within one computation.
    Without pages layers keep all keys."""

    tokens: int
    pages: int
    layers: int
    rows: dict[Tier, int]
    slot_pages: int
    most_slot_pages: int
    scratch_pages: int

    def reached(self, num_tokens: float) -> float:
        """Of a row with so many tokens, those that the next one sees."""
        return min(num_tokens, self.tokens - 1)


NO_WINDOWS = Windows(
    tokens=0,
    pages=0,
    layers=0,
    rows={"gpu": 0, "cpu": 0, "disk": 0},
    slot_pages=0,
    most_slot_pages=0,
    scratch_pages=0,
)


def pages_seen(num_tokens: int, page_tokens: int) -> int:
    """The most pages in which so many successive tokens may lie."""
    return (num_tokens + page_tokens - 2) // page_tokens + 1


def find_windows(config: ModelConfig, policy: Policy, workload: Workload) -> Windows:
    """What a block's rows have in layers with a window; nothing of its own where all that a row
    has takes no more, as where rows are short or begin alike, and where keys are not kept as they
    are in order: recomputed, chosen among all by their scores, or on disk for the CPU."""
    tokens = config.widest_window
    is_plain = not policy.recomputed and config.attended_share == 1
    is_plain &= not (policy.cpu_attention and policy.kv.disk)
    if tokens is None or not (policy.rolls_windows and is_plain and keeps_kv(policy, workload)):
        return NO_WINDOWS
    page = policy.page_tokens
    pages = pages_seen(tokens + policy.draft_tokens, page)
    whole = own_pages(policy, workload)
    if policy.is_continuous and policy.row_tokens:
        whole = min(whole, math.ceil(policy.row_tokens / page))
    if pages >= whole:
        return NO_WINDOWS
    brought = min(policy.max_batch_tokens, workload.max_total_tokens)
    of_row = min(
        -(-workload.max_total_tokens // page), pages_seen(tokens - 1 + max(1, brought), page)
    )
    shares = most_rows(policy.kv, policy.micro_batch_size)
    far = sum(count for tier, count in shares.items() if tier != policy.compute_tier)
    if far and policy.is_continuous and policy.moves_rows:
        far = policy.micro_batch_size

    def slot_pages(rows: int) -> int:
        """Of what the window reaches of each, and what they bring; of samples each brings it."""
        if workload.max_samples > 1:
            return rows * of_row
        apart = rows * (pages + 1) + -(-policy.max_batch_tokens // page)
        return min(rows * of_row, apart) if rows else 0

    return Windows(
        tokens=tokens,
        pages=pages,
        layers=config.num_window_layers,
        rows=state_rows(policy, workload),
        slot_pages=slot_pages(far),
        most_slot_pages=slot_pages(policy.micro_batch_size),
        scratch_pages=max(of_row, pages_seen(policy.chunk_tokens, page)),
    )
