"""How much scratch memory the arithmetic needs: each unit's steps walked through, the peak taken.

Mirrors what ``model.layers`` takes from its workspace. Knows no tensors and no devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from freight.model.batch import GROUP_BYTES, PROMPT_BYTES, QUERY_BLOCK, STEM_BYTES
from freight.model.kept_steps import AttendChosen, AttendKept, ProjectGroups
from freight.model.latent_steps import AbsorbKeys, ExpandValues, JoinLatent, SplitLatent
from freight.model.number_format import DTYPE_BYTES, TILE_ROWS, PerRow, integer_scratch
from freight.model.programme import (
    AddPositions,
    Attend,
    Dispatch,
    Embed,
    Gate,
    Level,
    Norm,
    Project,
    Rotate,
    Split,
    Unit,
    Weigh,
    Xielu,
    changed_values,
)
from freight.model.recurrent_steps import Deal, DeltaRule, Scan
from freight.model.slope_steps import Narrow, Widen
from freight.model.stream_steps import Average, Collapse, Expand, Spread
from freight.model.switches import ModelConfig
from freight.model.tiles import STREAM_TOKENS, laid_tokens, tile_rows
from freight.plan.layout import WeightLayout
from freight.plan.policy import Policy
from freight.plan.workload import Workload
from freight.quantities import align_up

__all__ = ["host_attention_bytes", "scored_chunk", "workspace_bytes"]

_SCORED_VALUES: Final = 8 << 20
"""Logits of scored positions at once: 32 MiB in float32."""

_SLACK: Final = 64 * 64  # every value begins on a cache line


def workspace_bytes(
    config: ModelConfig, layout: WeightLayout, policy: Policy, workload: Workload
) -> int:
    """Scratch for the arithmetic, the largest of what its units take."""
    size = layout.element_bytes
    # What is read itself is computed in float32, of a copy that is as wide.
    head_size = size if config.readout is None else DTYPE_BYTES["float32"]
    rows_of_one = max(policy.chunk_tokens, _longest_span(policy, workload))
    tokens = {
        "attention": rows_of_one,
        "recurrence": rows_of_one,
        "head": policy.most_made * (workload.max_new_tokens > 0),
    }
    carried = dict(layout.programme.carried)
    integers = {name for name, how in layout.compressed.items() if isinstance(how, PerRow)}

    def attended(step: Attend) -> int:
        times = 2 if step.k is None else 1  # a row's tokens that are sampled after, and scored
        return _attention_bytes(step, policy, workload, size, times * policy.most_spans)

    def peak(unit: Unit) -> int:
        count = tokens.get(unit.kind, policy.chunk_tokens)
        own_size = size if unit.kind != "head" else head_size
        sampled = _unit_bytes(unit, count, carried, own_size, attended, integers)
        is_scored = unit.kind == "head" and unit.steps and workload.max_scored_tokens
        if not is_scored:
            return sampled
        columns = len(unit.columns)
        count = min(scored_chunk(policy, columns), policy.max_batch_tokens)
        widened = 4 * columns if size < 4 else 0
        return max(
            sampled, _unit_bytes(unit, count, carried, size, attended, integers) + count * widened
        )

    def recomputing(unit: Unit) -> int:
        own, count = unit.keys(), max(policy.chunk_tokens, policy.page_tokens)
        made = config.kv_bytes_per_token_per_layer(size)
        return (
            0
            if own is None
            else _unit_bytes(own, count, carried, size, attended, integers) + (count * made)
        )

    most = max(peak(unit) for unit in layout.kinds)
    if policy.recomputed:
        units = (unit for unit in layout.kinds if unit.kind == "attention")
        most = max(most, *(recomputing(unit) for unit in units))
    on_device = policy.compute_tier == "gpu"
    return most + _tile_bytes(layout, head_size, on_device=on_device) + _SLACK


def _longest_span(policy: Policy, workload: Workload) -> int:
    """The most tokens that one row brings to a sweep. What a row has made is part of its prompt
    when it is computed again, and structured answers go on with several tokens."""
    is_mixed = policy.is_continuous or workload.is_structured
    longest = workload.max_total_tokens if is_mixed else workload.max_prompt_tokens
    longest = max(longest, 1 + policy.draft_tokens)
    return min(longest, policy.max_batch_tokens)


def _tile_bytes(layout: WeightLayout, head_size: int, *, on_device: bool) -> int:
    """Compressed rows that are plain at once, or narrower ones that are wide, or as many tokens as
    loops widen at once where they multiply. Those of the head have numbers of ``head_size``."""
    matrices = [w for unit in layout.kinds for w in unit.weights if w.is_matrix]
    wide = TILE_ROWS * max(w.num_columns for w in matrices) * DTYPE_BYTES["float32"]
    if layout.element_bytes == 2:  # a simulated device lays them, too
        laid = (laid_tokens(w.num_columns) * w.num_columns for w in matrices)
        wide = max(wide, layout.element_bytes * max(laid))
    plain = (
        tile_rows(w.num_rows, w.num_columns, on_device=on_device)
        * w.num_columns
        * (head_size if unit.kind == "head" else layout.element_bytes)
        for unit in layout.kinds
        for w in unit.weights
        if w.is_matrix and w.name in layout.compressed
    )
    return max(wide, max(plain, default=0))


def host_attention_bytes(layout: WeightLayout, policy: Policy, workload: Workload) -> int:
    """Scratch for attending single queries of a micro-batch's rows on the CPU."""
    steps = [step for unit in layout.kinds for step in unit.steps if isinstance(step, Attend)]
    size, rows = layout.element_bytes, policy.micro_batch_size
    keys = align_up(workload.max_total_tokens, policy.page_tokens)
    most = 0
    for step in steps:
        own = _gathered_bytes(step, keys, size, rows)
        if step.softcap is not None or step.share < 1:
            own += 2 * _group_bytes(keys * step.num_heads * size, rows)
            own += rows * step.num_heads * step.head_dim * size
        own += rows * step.num_heads * 4 * (step.sinks is not None)
        most = max(most, own)
    return most + _SLACK


def scored_chunk(policy: Policy, columns: int) -> int:
    """Positions scored at once by a chunk of the head with so many columns."""
    return max(1, min(policy.chunk_tokens, _SCORED_VALUES // columns))


def _unit_bytes(
    unit: Unit,
    num_tokens: int,
    carried: Mapping[str, int],
    size: int,
    attended: Callable[[Attend], int],
    integers: Collection[str],
) -> int:
    """The most that a unit's values and a step's own scratch take together, for so many tokens;
    the weights that ``integers`` names are multiplied as such."""
    # Rows that lie in several places are copied together first.
    columns = {"aside": carried["x"], **carried}
    held = sum(columns.values()) * size
    peak = 0
    as_integers: set[str] = set()
    for step in unit.steps:
        scratch = sums = 0
        before = set(columns)
        if isinstance(step, Norm):
            columns.setdefault(step.out, columns[step.x])
            scratch = columns[step.x] * 4
            sums = columns[step.x] * size * (step.kind == "layer_bare")
        elif isinstance(step, Project):
            columns.setdefault(step.out, step.weight.num_rows)
            if step.weight.name in integers:
                held += (step.weight.num_columns + 4) * (step.x not in as_integers)
                as_integers.add(step.x)
                own = step.weight
                sums = 4 * integer_scratch(num_tokens, own.num_rows, own.num_columns)
        elif isinstance(step, Embed):
            columns.setdefault(step.out, step.weight.num_columns)
            scratch = step.weight.num_columns * size
        elif isinstance(step, Dispatch):
            columns[step.out] = columns[step.x]
        elif isinstance(step, Split):
            columns[step.q] = step.num_heads * step.head_dim
            columns[step.k] = columns[step.v] = step.num_kv_heads * step.head_dim
        elif isinstance(step, Rotate):
            scratch = columns[step.x] * size // 2
        elif isinstance(step, Level):
            scratch = (columns[step.x] + step.num_heads) * 4
        elif isinstance(step, Xielu):
            scratch = columns[step.x] * (3 * 4 + 1)
        elif isinstance(step, AddPositions | Gate):
            scratch = columns[step.x] * size
        elif isinstance(step, SplitLatent):
            columns |= {step.latent: step.latent_width, step.turned: step.turned_width}
        elif isinstance(step, JoinLatent):
            width = step.latent_width + step.turned_width
            columns[step.out] = width
        elif isinstance(step, AbsorbKeys | ExpandValues):
            rank = step.weight.num_columns
            own_width = step.key_width if isinstance(step, AbsorbKeys) else step.value_width
            wide = step.turned_width + rank
            columns[step.out] = step.num_heads * (
                wide if isinstance(step, AbsorbKeys) else own_width
            )
            scratch = step.num_heads * (own_width + rank) * size
            sums = step.weight.num_elements * size
        elif isinstance(step, Attend):
            columns[step.out] = columns[step.q]
        elif isinstance(step, Widen | Narrow):
            more = step.columns * step.num_heads
            columns[step.out] = columns[step.x] + (more if isinstance(step, Widen) else -more)
            scratch = 4 * step.num_heads
        elif isinstance(step, Deal):
            columns |= {part.out: part.num_columns for part in step.parts}
        elif isinstance(step, AttendKept | AttendChosen):
            columns[step.out] = step.num_heads * step.width
        elif isinstance(step, ProjectGroups):
            columns[step.out] = step.weight.num_rows
            if step.weight.name in integers:
                scratch = step.weight.num_columns + 4
                own = step.weight
                sums = 4 * integer_scratch(num_tokens, own.num_rows, own.num_columns)
        elif isinstance(step, DeltaRule | Scan):
            columns[step.out] = step.num_heads * step.value_width
        elif isinstance(step, Spread):
            columns[step.out] = columns[step.x] * step.num_streams
        elif isinstance(step, Average | Collapse | Expand):
            scratch, sums = _stream_bytes(step, columns, num_tokens)
        elif isinstance(step, Weigh):
            # What softplus takes and makes is in float32.
            scratch = columns[step.y] * (size + 8 * (step.function == "softplus"))
        held += sum(columns[name] for name in set(columns) - before) * size
        fixed = attended(step) if isinstance(step, Attend) else sums
        peak = max(peak, num_tokens * (held + scratch) + fixed)
        as_integers.difference_update(changed_values(step))
    return peak


def _stream_bytes(
    step: Average | Collapse | Expand, columns: dict[str, int], num_tokens: int
) -> tuple[int, int]:
    """What a token of a stream that is several takes, and what those do that are wide at once;
    notes what the step makes."""
    wide = columns[step.x]
    narrow, mapped = wide // step.num_streams, 0
    if isinstance(step, Collapse):
        columns.setdefault(step.out, narrow)
        mapped = step.num_mappings
        if step.shares is not None:
            columns.setdefault(step.shares, step.share_columns)
    elif isinstance(step, Average):
        columns.setdefault(step.out, narrow)
    else:
        wide, mapped = 2 * wide, columns[step.shares]
    together = min(num_tokens, STREAM_TOKENS)
    return 4 * mapped, together * 4 * (wide + narrow + mapped) + 4 * 64


def _attention_bytes(
    step: Attend, policy: Policy, workload: Workload, size: int, most_spans: int
) -> int:
    """What attending a group of rows takes: gathered keys and values, queries, scores, weights.

    On the CPU torch's own attention needs no scores, unless they are capped.
    """
    keys = align_up(workload.max_total_tokens, policy.page_tokens)
    queries = min(QUERY_BLOCK, _longest_span(policy, workload))
    gathered = _gathered_bytes(step, keys, size, most_spans)
    tokens = max(policy.chunk_tokens, _longest_span(policy, workload))
    stems = _stem_bytes(step, policy, tokens, size)
    gathered += tokens * step.num_heads * (4 + size) * (step.sinks is not None)
    scores = _group_bytes(keys * step.num_heads * queries * size, most_spans)
    if policy.compute_tier == "cpu" and step.softcap is None and step.share == 1:
        is_cut = step.window is not None and step.window < keys
        return gathered + stems + (scores if stems and is_cut else 0)
    by_scores = gathered + stems + 2 * scores + tokens * step.num_heads * step.head_dim * size
    # Whole prompts, of which a device holds no scores.
    return max(by_scores, _gathered_bytes(step, keys, size, most_spans, PROMPT_BYTES))


def _stem_bytes(step: Attend, policy: Policy, tokens: int, size: int) -> int:
    """What attending shared beginnings takes beside keys and scores: queries, twice, and what was
    attended, twice and once more in float32, of some tokens, and the log-sum-exps of all."""
    if not policy.shares_prefixes or step.share < 1:
        return 0
    numbers = step.num_heads * step.head_dim
    together = min(tokens, max(1, STEM_BYTES // (numbers * size)))
    return together * (numbers * (3 * size + 4) + step.num_heads * 4) + tokens * step.num_heads * 4


def _gathered_bytes(
    step: Attend, keys: int, size: int, num_rows: int, limit: int = GROUP_BYTES
) -> int:
    """Keys and values of a group put together; compressed ones lie beside them as they are kept,
    first keys, then values."""
    plain = step.head_dim * size
    kept = 0 if step.kv_format is None else step.kv_format.row_bytes(step.head_dim)
    group = _group_bytes(2 * keys * step.num_kv_heads * plain, num_rows, limit)
    return group + group * kept // (2 * plain)


def _group_bytes(row_bytes: int, num_rows: int, limit: int = GROUP_BYTES) -> int:
    """What a group of rows takes: up to a limit, or one row that is larger."""
    return max(row_bytes, min(limit, num_rows * row_bytes))
