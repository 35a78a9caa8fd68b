"""The sizes of everything a run holds, from its policy: what the engine takes is what was planned.

All are upper bounds for the workload, fixed before anything is loaded. Knows no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from freight.model.batch import STATE_BLOCK, STATE_BYTES, STATE_PAIRS
from freight.model.layer_kinds import CompressedKeys, KeptLatents
from freight.model.passing import handed_columns
from freight.model.switches import ModelConfig
from freight.model.tiles import KEPT_BYTES
from freight.plan.forms import BLOCK
from freight.plan.kept_pages import (
    disk_extent_pages,
    keeps_kv,
    kv_pages,
    most_rows,
    pages_together,
    shared_page,
    state_rows,
)
from freight.plan.layout import WeightLayout
from freight.plan.page_sizes import far_page_sizes, near_page_sizes, page_size, state_size
from freight.plan.policy import Policy, Split, Tier
from freight.plan.ring import embeds_in_place, size_ring
from freight.plan.scoreboard import RING_SLOTS
from freight.plan.scratch import host_attention_bytes, workspace_bytes
from freight.plan.windows import Windows, find_windows
from freight.plan.workload import Workload
from freight.quantities import align_up

__all__ = ["SHAPES_BYTES", "TIMES_OF_KEYS", "Geometry", "measure"]

SHAPES_BYTES: Final = 128 << 20
"""What libraries keep on the CPU for sweeps of many different numbers of tokens, as measured: code
for bfloat16 products of each, and memory in pieces of many sizes."""

_TIMES_OF_STATES: Final = 10
TIMES_OF_KEYS: Final = 3
"""Where keys are a state at most 1.6 times was measured."""

_LOGPROB_BYTES: Final = 256
"""A log-probability as it is handed out, with its token's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Counts and sizes in bytes.

    ``usage`` is what each tier holds, by purpose. ``page_bytes`` are the largest page's where all
    is computed, ``far_page_bytes`` by layer those of a page elsewhere. Rows share what they begin
    with in pages of ``shared_page`` tokens, 0: not at all. ``kv_pages`` are the pages per layer on
    each tier, ``disk_extent_pages`` those that a row on disk has in one piece, or 0,
    ``kv_page_bytes`` those of a page there in each layer that keeps all keys, of one where none are
    kept (see :func:`keeps_kv`); ``windows`` is what those have that do not keep all,
    ``window_page_bytes`` of a page of each of these. ``state_rows`` are the rows on each tier that
    keep ``state_bytes`` in each of ``state_layers`` without pages of keys, in memory
    of its own. ``kv_slot_pages`` are the pages that one micro-batch's offloaded rows may have
    together, ``kv_slot_bytes`` what these or their states take, ``num_tails`` the rows on disk of
    all micro-batches. ``logit_rows`` are the tokens of a micro-batch after which one may be drawn.
    ``index_bytes`` is what the micro-batches' positions and page tables take outside the tiers'
    buffers, and libraries, ``shapes_bytes`` of it if sweeps vary.
    ``activation_rows`` are the tokens of one micro-batch on each tier. Of a micro-batch's
    rows that the CPU attends ``query_bytes`` of queries, keys and values go there;
    ``delegated_pages`` are the pages of those on disk, ``attention_bytes`` its scratch;
    ``attended_bytes`` is what is attended of all rows. ``scored_tokens`` are the most tokens of one
    micro-batch's prompts that are scored, each with ``score_bytes`` of running state. Of a stage
    of a pipeline ``departing_bytes`` go on with each micro-batch, and ``embedding_bytes`` come,
    into one of ``embedding_slots``: as many as there are micro-batches. Where the model
    ``embeds_in_place`` rows of the table need none, they are read to the activations.
    """

    page_bytes: int
    far_page_bytes: tuple[int, ...]
    shared_page: int
    kv_page_bytes: tuple[int, ...]
    window_page_bytes: tuple[int, ...]
    windows: Windows
    state_layers: int
    state_bytes: int
    state_rows: dict[Tier, int]
    kv_pages: dict[Tier, int]
    disk_extent_pages: int
    kv_slot_pages: int
    kv_slot_bytes: int
    num_tails: int
    activation_rows: dict[Tier, int]
    activation_slot_bytes: int
    activation_disk_stride: int
    embedding_bytes: int
    embedding_slots: int
    embeds_in_place: bool
    departing_bytes: int
    logit_rows: int
    logits_bytes: int
    picked_bytes: int
    scored_tokens: int
    score_bytes: int
    workspace_bytes: int
    index_bytes: int
    shapes_bytes: int
    query_bytes: int
    attended_bytes: int
    delegated_pages: int
    attention_bytes: int
    usage: dict[Tier, dict[str, int]]

    @property
    def input_page_bytes(self) -> int:
        """Of a page of what comes into attention, where some layers keep that."""
        return min((size for size in self.far_page_bytes if size), default=self.page_bytes)

    @property
    def rolls(self) -> bool:
        """Whether layers with a window keep the pages alone that it reaches."""
        return self.windows.pages > 0

    def far_bytes(self, config: ModelConfig, rows: int, pages: float) -> float:
        """What rows off the compute tier have that keep so many pages per layer together."""
        rolled = self.windows.layers * self.page_bytes
        whole = sum(self.far_page_bytes) - rolled
        of_row = self.windows.pages * rolled + config.num_recurrent_layers * self.state_bytes
        return pages * whole + rows * of_row

    def total(self, tier: Tier) -> int:
        """Bytes to take of a tier; every purpose may be cut in a few aligned stretches."""
        return sum(align_up(size, BLOCK) + 2 * BLOCK for size in self.usage[tier].values() if size)


def most_tokens(split: Split, num_tokens: int) -> dict[Tier, int]:
    """Likewise of tokens, with one more for rounding where a tier has only a share."""
    tiers: tuple[Tier, ...] = ("gpu", "cpu", "disk")
    return {tier: _bounded(split.share(tier), num_tokens) for tier in tiers}


def _most_attended(policy: Policy, workload: Workload) -> int:
    """The most tokens of a micro-batch of which the CPU attends some: single ones, and where they
    do not come whole prompts beside them, or what structured answers must go on with."""
    prompts = workload.max_prompts(policy.micro_batch_size) * workload.max_prompt_tokens
    is_mixed = policy.is_continuous or policy.max_batch_tokens < prompts or workload.is_structured
    is_mixed |= policy.draft_tokens > 0
    return policy.max_batch_tokens if is_mixed else policy.micro_batch_size


def _bounded(share: float, count: int) -> int:
    return min(count, int(share * count) + 1) if share else 0


def measure(
    config: ModelConfig,
    layout: WeightLayout,
    policy: Policy,
    workload: Workload,
    shapes_bytes: int,
    like: Geometry | None = None,
) -> Geometry:
    """Size everything for ``policy`` on ``workload``; ``like`` is that of a policy which differs
    from this one by where weights are alone."""
    if like is None:
        like = _measure_rows(config, layout, policy, workload, shapes_bytes)
        _count_block(like, config, layout, policy)
    geometry = replace(
        like,
        embedding_bytes=_embedding_bytes(config, layout, policy),
        embeds_in_place=embeds_in_place(layout, policy),
        usage={tier: {**usage} for tier, usage in like.usage.items()},
    )
    _count_weights(geometry, layout, policy)
    _count_embedding(geometry, policy)
    return geometry


def _embedding_bytes(config: ModelConfig, layout: WeightLayout, policy: Policy) -> int:
    """Rows of tables that must be fetched, or what comes from another stage."""
    far = [table.weight for table in layout.tables if table.is_far(policy.compute_tier)]
    columns = sum(weight.num_columns for weight in far)
    columns += handed_columns(config) * layout.programme.receives
    return policy.max_batch_tokens * columns * layout.element_bytes


def _measure_rows(
    config: ModelConfig, layout: WeightLayout, policy: Policy, workload: Workload, shapes_bytes: int
) -> Geometry:
    """All that does not depend on where weights are."""
    size = layout.element_bytes
    token_bytes = config.kv_bytes_per_token_per_layer(size)
    page_bytes = page_size(config, policy.page_tokens, size)
    far_page_bytes = far_page_sizes(config, policy, size)
    near_page_bytes = near_page_sizes(config, policy.page_tokens, size)
    kv_rows = most_rows(policy.kv, policy.micro_batch_size)
    row_pages = -(-workload.max_total_tokens // policy.page_tokens)
    is_kept = keeps_kv(policy, workload)
    windows = find_windows(config, policy, workload)
    extent_pages = disk_extent_pages(policy, workload, page_bytes)
    home = policy.compute_tier
    slot_pages = pages_together(
        policy, workload, sum(kv_rows[tier] for tier in kv_rows if tier != home)
    )
    state_bytes = state_size(config, size)
    far_states = sum(kv_rows[tier] for tier in kv_rows if tier != home) * state_bytes
    row_bytes = layout.stream_columns * size
    tokens = most_tokens(policy.activations, policy.max_batch_tokens)
    disk_stride = align_up(tokens["disk"] * row_bytes, BLOCK)
    host_tokens = tokens["cpu"] if home == "gpu" else 0
    slot_bytes = align_up(host_tokens * row_bytes, BLOCK) + disk_stride
    block = policy.num_micro_batches
    receives, sends = layout.programme.receives, layout.programme.sends
    logit_rows = policy.most_made if workload.max_new_tokens and not sends else 0
    scored = min(policy.max_batch_tokens, policy.micro_batch_size * workload.max_scored_tokens)
    scored = 0 if sends else scored
    delegated = policy.most_delegated()
    num_delegated = sum(delegated.values())
    attended = config.attended_bytes_per_token(size)
    return Geometry(
        page_bytes=page_bytes,
        far_page_bytes=far_page_bytes,
        shared_page=shared_page(policy, workload),
        kv_page_bytes=tuple(_of_whole(config, windows, near_page_bytes))
        if is_kept
        else (page_bytes,),
        window_page_bytes=tuple(_of_windows(config, windows, near_page_bytes)),
        windows=windows,
        state_layers=config.num_recurrent_layers
        if is_kept
        else min(1, config.num_recurrent_layers),
        state_bytes=state_bytes,
        state_rows=state_rows(policy, workload),
        kv_pages={tier: kv_pages(policy, tier, workload, extent_pages) for tier in kv_rows},
        disk_extent_pages=extent_pages,
        kv_slot_pages=slot_pages,
        kv_slot_bytes=max(
            slot_pages * max(_of_whole(config, windows, far_page_bytes), default=0),
            far_states,
            windows.slot_pages * page_bytes,
        ),
        num_tails=policy.blocks_in_flight * block * kv_rows["disk"],
        activation_rows=tokens,
        activation_slot_bytes=slot_bytes,
        activation_disk_stride=disk_stride,
        embedding_bytes=0,
        embeds_in_place=False,
        embedding_slots=block if receives else RING_SLOTS["embedding rows"],
        departing_bytes=policy.max_batch_tokens * handed_columns(config) * size if sends else 0,
        logit_rows=logit_rows,
        logits_bytes=block * logit_rows * config.head_size * 4,
        picked_bytes=block * (logit_rows + scored) * row_bytes,
        scored_tokens=scored,
        score_bytes=4 * (3 + 2 * min(max(1, workload.max_logprobs), config.vocab_size)),
        workspace_bytes=workspace_bytes(config, layout, policy, workload),
        index_bytes=_index_bytes(
            config, size, policy, row_pages + windows.pages * (1 + (windows.layers > 0))
        )
        + _turns_bytes(config, size, policy, workload)
        + _is_varied(policy, workload, size) * shapes_bytes
        + _record_bytes(policy, workload, scored)
        + _recurrence_bytes(config),
        shapes_bytes=shapes_bytes,
        query_bytes=num_delegated * (attended + token_bytes),
        attended_bytes=_most_attended(policy, workload) * attended if num_delegated else 0,
        delegated_pages=max(
            min(slot_pages, delegated["disk"] * row_pages), delegated["disk"] * windows.pages
        ),
        attention_bytes=host_attention_bytes(layout, policy, workload) if num_delegated else 0,
        usage={"gpu": {}, "cpu": {}, "disk": {}},
    )


def _of_whole(config: ModelConfig, windows: Windows, sizes: Sequence[int]) -> list[int]:
    """Those, by layer, of layers that keep all keys."""
    rolls = windows.pages > 0
    return [size for i, size in enumerate(sizes) if size and not (rolls and config.has_window(i))]


def _of_windows(config: ModelConfig, windows: Windows, sizes: Sequence[int]) -> list[int]:
    """Those of layers that keep no more than a window of them."""
    rolls = windows.pages > 0
    return [size for i, size in enumerate(sizes) if rolls and config.has_window(i)]


def _recurrence_bytes(config: ModelConfig) -> int:
    """What torch's own steps take beside the workspace where a layer's states are changed by them:
    eight times what they do at once was measured (torch's profiler), and is rounded up."""
    own = config.recurrence
    if own is None:
        return 0
    if isinstance(own, CompressedKeys | KeptLatents):
        heads = config.most_query_heads
        return TIMES_OF_KEYS * max(KEPT_BYTES, 4 * own.most_numbers(heads))
    tokens = STATE_BLOCK * own.mixed_columns * 4
    pairs = STATE_PAIRS**2 * own.num_heads * own.key_width * 4 if own.by_row else 0
    return _TIMES_OF_STATES * max(STATE_BYTES, tokens, own.matrix_bytes, pairs)


def _record_bytes(policy: Policy, workload: Workload, scored: int) -> int:
    """What is noted of the block's rows on the host: siblings' pages, targets of scores, and the
    log-probabilities that were asked for, one row's as they are handed out."""
    rows = policy.num_micro_batches * policy.micro_batch_size * policy.blocks_in_flight
    # Pages and places, of two sweeps.
    copies = 2 * 2 * 8 * workload.max_prompt_tokens if workload.max_samples > 1 else 0
    per_token = 8 + 8 * workload.max_logprobs
    notes = rows * (copies + workload.max_listed_tokens * per_token)
    notes += policy.num_micro_batches * scored * (8 + per_token)
    handed_out = workload.max_scored_tokens + workload.max_samples * workload.max_listed_tokens
    return notes + handed_out * (1 + workload.max_logprobs) * _LOGPROB_BYTES


def _index_bytes(config: ModelConfig, size: int, policy: Policy, row_pages: int) -> int:
    """What a block's descriptions take, those of two sweeps: sines and cosines and places of all
    tokens, those that attend a beginning, keys and values by page and head, experts chosen; also
    what making one takes, and the largest results that the libraries hand out in memory of their
    own."""
    tokens = policy.max_batch_tokens
    batches = 2 * policy.num_micro_batches * policy.blocks_in_flight
    routes = config.experts.per_token * 2 * 8 if config.experts else 0
    places = 5 + 2 * policy.shares_prefixes
    per_token = config.rotary_columns * size + places * 8 + routes
    # Keys and values, and keys once more where prompts are attended as one.
    per_row = row_pages * (3 * sum(own.num_kv for own in config.all_heads) + 2) * 8
    making = (
        tokens * (4 * config.rotary_columns * 4 + 8 * 8) + 2 * policy.micro_batch_size * per_row
    )
    attended = policy.chunk_tokens * config.attended_bytes_per_token(size)
    # What is picked has places and tables of its own where layers attend others' keys.
    views = 3 if config.sharing is not None else 1
    described = tokens * per_token + views * policy.micro_batch_size * per_row
    return batches * described + making + attended


def _turns_bytes(config: ModelConfig, size: int, policy: Policy, workload: Workload) -> int:
    """Sines and cosines of all positions, and what making them takes, where keys of earlier tokens
    are made again."""
    positions = workload.max_total_tokens + policy.page_tokens + policy.chunk_tokens
    return bool(policy.recomputed) * positions * config.rotary_columns * (size + 3 * 4)


def _is_varied(policy: Policy, workload: Workload, size: int) -> bool:
    """Whether the CPU computes sweeps of many numbers of tokens in 16 bits: rows come, or leave, at
    any time, or bring several."""
    is_varied = policy.is_continuous or workload.has_many_lengths or workload.is_structured
    is_varied |= policy.draft_tokens > 0
    return is_varied and policy.compute_tier == "cpu" and size == 2


def _count_weights(geometry: Geometry, layout: WeightLayout, policy: Policy) -> None:
    usage = geometry.usage
    home = policy.compute_tier
    held = layout.held_bytes
    usage[home]["weights"] = held[home]
    ring = size_ring(layout, policy.piece_bytes)
    usage[home]["weight slots"] = ring.num_bytes + layout.seam_bytes
    usage[home]["decoded weights"] = layout.decoded_bytes
    if home == "gpu":
        usage["cpu"]["weights"] = held["cpu"]
        staged = any(s.tier == "disk" for form in layout.forms for s in form.stretches)
        size = align_up(policy.piece_bytes, BLOCK) if staged else 0
        usage["cpu"]["weight staging"] = policy.staging_pieces * size


def _count_block(
    geometry: Geometry, config: ModelConfig, layout: WeightLayout, policy: Policy
) -> None:
    """What the block's rows take: KV cache, activations, logits and scratch."""
    g, home, block = geometry, policy.compute_tier, policy.num_micro_batches
    row_bytes = layout.stream_columns * layout.element_bytes
    far_bytes = sum(_of_whole(config, g.windows, g.far_page_bytes))
    layer_pages = {
        t: pages * (sum(g.kv_page_bytes) if t == home else far_bytes)
        for t, pages in g.kv_pages.items()
    }
    windows = {
        t: rows
        * g.windows.pages
        * (sum(g.window_page_bytes) if t == home else g.windows.layers * g.page_bytes)
        for t, rows in g.windows.rows.items()
    }
    states = {t: g.state_layers * rows * g.state_bytes for t, rows in g.state_rows.items()}
    slot = g.kv_slot_bytes
    near, host = g.usage[home], g.usage["cpu"]
    recomputes = policy.recomputes(config.num_layers)
    near["KV cache"] = layer_pages[home]
    near["KV windows"] = windows[home]
    near["window scratch"] = g.windows.scratch_pages * g.page_bytes
    near["row states"] = states[home]
    near["KV slots"] = RING_SLOTS["kv slot"] * slot
    near["recomputed KV"] = g.kv_slot_pages * g.page_bytes * any(recomputes)
    near["activations"] = block * align_up(g.activation_rows[home] * row_bytes, BLOCK)
    near["activation slots"] = RING_SLOTS["activation slot"] * g.activation_slot_bytes
    near["logits"] = g.logits_bytes + g.picked_bytes
    near["scores"] = block * g.scored_tokens * g.score_bytes
    near["workspace"] = g.workspace_bytes
    host["KV tails"] = sum(g.far_page_bytes) * g.num_tails
    host["departing rows"] = block * g.departing_bytes
    if home == "gpu":
        near["departing rows"] = RING_SLOTS["departing slot"] * g.departing_bytes
        near["delegated rows"] = block * align_up(g.query_bytes, BLOCK)
        near["attended rows"] = block * g.attended_bytes
        host["delegated rows"] = block * align_up(g.query_bytes, BLOCK)
        host["delegated KV"] = RING_SLOTS["delegated kv"] * g.delegated_pages * g.page_bytes
        host["attention"] = g.attention_bytes
        host["KV cache"] = layer_pages["cpu"]
        host["KV windows"] = windows["cpu"]
        host["row states"] = states["cpu"]
        if g.num_tails:
            host["KV staging"] = (RING_SLOTS["kv in"] + RING_SLOTS["kv out"]) * slot
        host["activations"] = block * align_up(g.activation_rows["cpu"] * row_bytes, BLOCK)
        if g.activation_rows["disk"]:
            slots = RING_SLOTS["activations in"] + RING_SLOTS["activations out"]
            host["activation staging"] = slots * g.activation_slot_bytes
    g.usage["disk"]["KV cache"] = layer_pages["disk"]
    g.usage["disk"]["KV windows"] = windows["disk"]
    g.usage["disk"]["row states"] = states["disk"]
    g.usage["disk"]["activations"] = block * g.activation_disk_stride


def _count_embedding(geometry: Geometry, policy: Policy) -> None:
    """Rows of the table on their way."""
    g = geometry
    slots = 0 if g.embeds_in_place else g.embedding_slots
    g.usage["cpu"]["embedding rows"] = slots * g.embedding_bytes
    if policy.compute_tier == "gpu":
        g.usage["gpu"]["embedding rows"] = RING_SLOTS["embedding slot"] * g.embedding_bytes
