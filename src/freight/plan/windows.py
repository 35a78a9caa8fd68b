"""What layers with an attention window keep of a row: the pages that the window reaches, in turn.

A row's tokens are far more than such a layer looks back. It has as many pages there as the window
can reach at once, on the tier of its row; a page that it has left behind takes new tokens. Where a
row brings more at once than these hold, as a prompt does, they go through scratch, or through the
slot that rows elsewhere pass through, and the last ones stay. Knows counts, no bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from freight.model.programme import Programme
from freight.model.switches import ModelConfig
from freight.plan.kept_pages import keeps_kv, kv_pages, most_rows, state_rows
from freight.plan.policy import TIERS, Policy, Tier
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload

__all__ = ["NO_WINDOWS", "Windows", "counted_tokens", "find_windows", "pages_seen", "pays"]


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


def pays(saved_pages: int, scratch_pages: int) -> bool:
    """Whether pages that are not kept are more than those that this takes."""
    return saved_pages > scratch_pages


def find_windows(config: ModelConfig, policy: Policy, workload: Workload) -> Windows:
    """What a block's rows have in layers with a window. They keep all keys where that takes no more
    memory, as where rows are short or begin alike, and where keys are not kept as they are in
    order: recomputed, or chosen among all by their scores."""
    tokens = config.widest_window
    is_plain = not policy.recomputed and config.attended_share == 1
    if tokens is None or not (policy.rolls_windows and is_plain and keeps_kv(policy, workload)):
        return NO_WINDOWS
    page = policy.page_tokens
    pages = pages_seen(tokens + policy.draft_tokens, page)
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

    rows, layers = state_rows(policy, workload), config.num_window_layers
    scratch = max(of_row, pages_seen(policy.chunk_tokens, page))
    saved = sum(kv_pages(policy, tier, workload, 0) - rows[tier] * pages for tier in TIERS)
    if not pays(layers * saved, scratch):
        return NO_WINDOWS
    return Windows(
        tokens=tokens,
        pages=pages,
        layers=layers,
        rows=rows,
        slot_pages=slot_pages(far),
        most_slot_pages=slot_pages(policy.micro_batch_size),
        scratch_pages=scratch,
    )


def counted_tokens(
    config: ModelConfig, programme: Programme, wishes: Wishes, page_tokens: int, held: float
) -> int:
    """Of a row that is expected to have ``held`` tokens of keys, those to count pages for where
    rows enter at any time; 0, all that it may have, where no layer has more than a window of it:
    but for a stage of a pipeline, whose others may have layers that do."""
    tokens = config.widest_window
    rolls = wishes.rolls_windows and not wishes.recomputed and config.attended_share == 1
    rolls &= config.num_window_layers == config.num_attention_layers
    rolls &= not (programme.receives or programme.sends)
    pages = pages_seen((tokens or 0) + wishes.draft_tokens, page_tokens)
    if rolls and tokens and pages * page_tokens < held:
        return 0
    return max(1, math.ceil(held))
