"""How many pages and states rows keep on each tier, and whether they keep any.

Upper bounds for the workload. Of rows that enter at any time pages, and beginnings with their pages
and states, are as many as they have on average: admission sees to it that they suffice. Knows no
sizes in bytes of what a page holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Final

from freight.plan.policy import Policy, Split, Tier
from freight.plan.workload import Workload

__all__ = [
    "disk_extent_pages",
    "held_beginnings",
    "held_pages",
    "keeps_kv",
    "kv_pages",
    "lie_in_extents",
    "may_forget_kv",
    "most_rows",
    "own_pages",
    "pages_together",
    "shared_page",
    "state_rows",
]

_EXTENT_BYTES: Final = 256 << 10
"""Requests of this size reach three fourths of a disk's rate, those of 16 KiB a fourth."""


@cache
def most_rows(split: Split, num_rows: int) -> Mapping[Tier, int]:
    """The most rows that each tier gets of a micro-batch of up to ``num_rows``."""
    most: dict[Tier, int] = {"gpu": 0, "cpu": 0, "disk": 0}
    for count in range(num_rows + 1):
        most = {tier: max(most[tier], own) for tier, own in split.cut(count).items()}
    return most


def may_forget_kv(workload: Workload) -> bool:
    """Whether rows need no key after the sweep that makes it: none makes more than one token."""
    return workload.max_new_tokens <= 1


def keeps_kv(policy: Policy, workload: Workload) -> bool:
    """Whether keys and values outlive the layer and the micro-batch that they are of.

    They do not where every row is in one sweep, with its whole prompt, and has its pages where the
    arithmetic is: then one computation of an attention unit writes all the keys that it reads. The
    computations of a run follow one another in the order of the one lane that they are on, so each
    may write over the pages of the one before: of another micro-batch, or of the layer below.
    Beginnings that prompts share are kept for others.
    """
    is_whole = not policy.is_continuous and workload.max_prompt_tokens <= policy.max_batch_tokens
    is_near = policy.kv.share(policy.compute_tier) == 1
    is_alone = not shared_page(policy, workload)
    may_forget = policy.forgets_keys and may_forget_kv(workload)
    return not (may_forget and is_whole and is_near and is_alone)


def shared_page(policy: Policy, workload: Workload) -> int:
    """Tokens of the pages in which rows share what they begin with, on the compute tier; 0 where
    they do not. Of rows that the CPU attends a device would have one part of the keys and the CPU
    another: where there are such rows nothing is reckoned to be shared."""
    is_near = policy.kv.share(policy.compute_tier) == 1
    shares = policy.shares_prefixes and (is_near or not policy.cpu_attention)
    return policy.page_tokens if shares and workload.beginnings is not None else 0


def disk_extent_pages(policy: Policy, workload: Workload, page_bytes: int) -> int:
    """How many pages a row on disk has in one piece; 0 where each may be anywhere. Of rows that
    enter at any time those that lie together are those of one row: small pages would be read one by
    one, at a fraction of the disk's rate, so a row has room for the longest there may be."""
    if not policy.kv.disk or not lie_in_extents(policy, page_bytes):
        return 0
    return own_pages(policy, workload)


def own_pages(policy: Policy, workload: Workload) -> int:
    """Pages per layer that the longest row may have, but for a beginning that it shares."""
    tokens = workload.own_total_tokens(shared_page(policy, workload))
    return -(-tokens // policy.page_tokens)


def lie_in_extents(policy: Policy, page_bytes: int) -> bool:
    """Whether what a row has on disk lies together, whatever other rows do."""
    return policy.is_continuous and page_bytes < _EXTENT_BYTES


def held_pages(policy: Policy, workload: Workload) -> int:
    """Pages per layer of the beginnings that a block's prompts share, on the compute tier."""
    if not shared_page(policy, workload):
        return 0
    held = workload.most_held(policy.block_rows, may_stay=policy.is_continuous)
    return -(-held.tokens // policy.page_tokens)


def kv_pages(policy: Policy, tier: Tier, workload: Workload, extent_pages: int) -> int:
    """Pages per layer for the rows of that tier: for their whole lives, or where they enter at any
    time for what they have on average; where all is computed also for beginnings that they share.
    Each block in flight has its own."""
    rows = most_rows(policy.kv, policy.micro_batch_size)[tier]
    if not keeps_kv(policy, workload):
        return rows * -(-workload.max_total_tokens // policy.page_tokens)
    rows *= policy.num_micro_batches
    pages = rows * own_pages(policy, workload)
    if tier != "disk" or not extent_pages:
        pages = min(pages, pages_together(policy, workload, rows))
    held = held_pages(policy, workload) if tier == policy.compute_tier else 0
    return (pages + held) * policy.blocks_in_flight


def pages_together(policy: Policy, workload: Workload, rows: int) -> int:
    """Pages that so many rows may have at one time: for their whole lives, or where they enter at
    any time, and admission sees to it, for what they have on average, but one row's longest. The
    average leaves out what prompts share, also where nothing is shared."""
    whole = own_pages(policy, workload)
    if not policy.is_continuous or not policy.row_tokens:
        return rows * whole
    not_shared = 0.0
    if policy.shares_prefixes and not shared_page(policy, workload):
        page = policy.page_tokens
        not_shared = max(
            workload.mean_shared_tokens(page),
            workload.held_tokens(page) - workload.held_tokens(page, page),
        )
    average = math.ceil(rows * (policy.row_tokens + not_shared) / policy.page_tokens)
    return min(rows * whole, max(whole, average))


def state_rows(policy: Policy, workload: Workload) -> dict[Tier, int]:
    """The most rows of all blocks in flight on each tier, and beginnings that prompts share."""
    rows = most_rows(policy.kv, policy.micro_batch_size)
    held = held_beginnings(policy, workload)
    lanes, times = policy.blocks_in_flight, policy.num_micro_batches
    if not keeps_kv(policy, workload):
        lanes = times = 1
    return {
        tier: lanes * (count * times + held * (tier == policy.compute_tier))
        for tier, count in rows.items()
    }


def held_beginnings(policy: Policy, workload: Workload) -> int:
    """The most beginnings that prompts share at one time. Where no keys are kept each row of a
    micro-batch may have one."""
    if not keeps_kv(policy, workload):
        return policy.micro_batch_size * (policy.shares_prefixes and workload.is_brought)
    if not shared_page(policy, workload):
        return 0
    return workload.most_held(policy.block_rows, may_stay=policy.is_continuous).beginnings
