"""The programme's steps as functions of tensors.

``run_unit`` interprets a unit for some rows of a micro-batch. Weights come as parts (rows of the
matrix) on the compute device; which tier brought them, and when, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F

from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.tokens import activate, normalise, rotate
from freight.model.attention import append, attend, sink
from freight.model.expert_rows import combine, dispatch
from freight.model.frame import Frame, PageCopies
from freight.model.kept_attention import attend_kept
from freight.model.kept_latents import attend_chosen
from freight.model.kept_steps import AttendChosen, AttendKept, ProjectGroups
from freight.model.latent_steps import AbsorbKeys, ExpandValues, JoinLatent, SplitLatent
from freight.model.latents import absorb_keys, expand_values, join_latent, split_latent
from freight.model.number_format import TILE_ROWS
from freight.model.products import project, project_gated, project_groups
from freight.model.programme import (
    Activate,
    Attend,
    Combine,
    Dispatch,
    Embed,
    Multiply,
    Norm,
    Project,
    Rotate,
    Route,
    Split,
    Step,
    Unit,
    Weigh,
    changed_values,
)
from freight.model.recurrences import convolve, deal, recur_by_state
from freight.model.recurrent_steps import Convolve, Deal, DeltaRule, Scan
from freight.model.routes import choose_experts
from freight.model.slope_steps import Narrow, Widen
from freight.model.slopes import narrow, widen
from freight.model.stems import attend_stems
from freight.model.streams import STREAM_STEPS
from freight.model.value_layers import VALUE_STEPS
from freight.model.workspace import Workspace

__all__ = ["run_unit", "select_rows"]


def run_unit(unit: Unit, frame: Frame) -> None:
    """Run all steps of a unit; embedding rows are gathered by the caller, who knows the tiers."""
    with frame.workspace.frame():
        if not unit.runs:
            unit.runs.extend(map(_Run.of, _runs(unit.steps)))
        for run in unit.runs:
            products, rest = run.products, run.rest
            if products and project_gated(products, rest, frame):
                rest = []
            elif products:
                project(products, frame)
            if len(rest) > 1:
                _activate_and_gate(rest[0], rest[1], frame)
            elif rest:
                _STEPS[type(rest[0])](rest[0], frame)
            if frame.integers:
                for name in run.changed:
                    frame.integers.pop(name, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Steps that are computed together: products, what follows them, and what all change."""

    products: list[Project]
    rest: list[Any]
    changed: tuple[str, ...]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> _Run:
        products = [step for step in steps if isinstance(step, Project)]
        changed = tuple(name for step in steps for name in changed_values(step))
        return cls(products=products, rest=list(steps[len(products) :]), changed=changed)


def _runs(steps: Sequence[Step]) -> Iterator[list[Any]]:
    """Steps one by one, but products of one value that follow each other together, and so an
    activation and what it is multiplied by, with the products that make both."""
    run: list[Any] = []
    for step in steps:
        if run and not _is_alongside(step, run):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def _is_alongside(step: Step, run: Sequence[Step]) -> bool:
    """Whether a step can be computed with those of a run: what gates an activation, an activation
    of what products make, and products, whose results it does not touch."""
    last = run[-1]
    if isinstance(last, Activate):
        return isinstance(step, Multiply) and step.x == last.x != step.y
    if not isinstance(last, Project):
        return False
    if isinstance(step, Activate):
        made = [other.out for other in run if isinstance(other, Project)]
        return len(made) == 2 and step.x == made[0] != made[1]
    if not isinstance(step, Project):
        return False
    made_so_far = {name for other in run for name in changed_values(other)}
    return step.x == last.x and not made_so_far & {step.x, step.out}


def _norm(step: Norm, frame: Frame) -> None:
    x = frame.values[step.x]
    out = frame.new(step.out, x, x.shape[1])
    with frame.workspace.frame():
        if step.kind == "layer_bare":
            gain = frame.workspace.take(step.weight.num_columns, dtype=x.dtype).fill_(1.0)
        else:
            gain = frame.vector(step.weight)
        normalise(
            x,
            out,
            gain,
            None if step.bias is None else frame.vector(step.bias),
            num_heads=step.num_heads,
            eps=step.eps,
            centred=step.kind.startswith("layer"),
            adds_one=step.kind.endswith("plus_one"),
            workspace=frame.workspace,
        )


def select_rows(
    rows: torch.Tensor | CompressedRows, ids: torch.Tensor, out: torch.Tensor, workspace: Workspace
) -> None:
    """out [n, columns] = the rows of these numbers; compressed ones are made plain, narrower ones
    widened, a tile at a time."""
    raw = rows if isinstance(rows, torch.Tensor) else rows.raw
    if raw.dtype == out.dtype:
        torch.index_select(raw, 0, ids, out=out)
        return
    for begin in range(0, len(ids), TILE_ROWS):
        some, target = ids[begin : begin + TILE_ROWS], out[begin : begin + TILE_ROWS]
        with workspace.frame():
            found = workspace.take(len(some), raw.shape[1], dtype=raw.dtype)
            torch.index_select(raw, 0, some, out=found)
            if isinstance(rows, torch.Tensor):
                target.copy_(found)
            else:
                dequantise(replace(rows, raw=found), target)


def _split(step: Split, frame: Frame) -> None:
    x = frame.values[step.x]
    K, H = step.num_kv_heads, step.head_dim
    group = step.num_heads // K
    heads = x.view(x.shape[0], K, group + 2, H)
    shares = ((step.q, 0, group), (step.k, group, group + 1), (step.v, group + 1, group + 2))
    for name, first, last in shares:
        out = frame.new(name, x, K * (last - first) * H)
        out.view(x.shape[0], K, last - first, H).copy_(heads[:, :, first:last])


def _rotate(step: Rotate, frame: Frame) -> None:
    x = frame.values[step.x]
    own = frame.angles[step.rope]
    sin = -own.sin if step.backwards else own.sin
    pairs = step.rope.pairs if step.pairs is None else step.pairs
    rotate(x, step.num_heads, own.cos, sin, frame.workspace, pairs=pairs, first=step.first)


def _attend(step: Attend, frame: Frame) -> None:
    q = frame.values[step.q].view(-1, step.num_heads, step.head_dim)
    new = [
        frame.values[own].view(-1, step.num_kv_heads, step.head_dim)
        for own in (step.k, step.v)
        if own is not None
    ]
    out = frame.new(step.out, frame.values[step.q], step.num_heads * step.head_dim).view(q.shape)
    with frame.workspace.frame():
        lse = None
        if step.sinks is not None or any(view.stems for _, view in frame.kv):
            lse = frame.workspace.take(*q.shape[:2], dtype=torch.float32)
        for place, (pool, view) in enumerate(frame.kv):
            before, after = frame.around[place] if frame.around else ((), ())
            _copy(before)
            if new:
                append(pool, view, *new)
            attend(step, q, pool, view, out, frame.workspace, lse)
            _copy(after)
        for pool, view in frame.kv:
            if lse is not None:
                attend_stems(step, q, pool, view, out, lse, frame.workspace)
        if step.sinks is not None and lse is not None:
            own = slice(None if frame.delegated is None else frame.delegated.first)
            sink(out[own], lse[own], frame.vector(step.sinks))
    if frame.delegated is not None:
        tokens = slice(frame.delegated.first, None)
        for target, found in zip(frame.delegated.targets, (q, *new), strict=True):
            target.copy_(found[tokens])


def _copy(pages: PageCopies) -> None:
    for source, target in pages:
        target.copy_(source, non_blocking=True)


def _activate_and_gate(step: Activate, by: Multiply, frame: Frame) -> None:
    """Both at once: each number leaves the cache once."""
    activate(frame.values[step.x], step.function, frame.values[by.y])


def _embed(step: Embed, frame: Frame) -> None:
    assert step.out in frame.values, f"rows of {step.weight.name} are gathered by the caller"


def _route(step: Route, frame: Frame) -> None:
    assert frame.routes is not None
    corrections = None if step.corrections is None else frame.vector(step.corrections)
    gains = None if step.gains is None else frame.vector(step.gains)
    given = None
    if step.table is not None:
        assert frame.token_ids is not None
        table = frame.vector(step.table).view(-1, step.num_chosen)
        given = table[frame.token_ids].long().remainder_(frame.values[step.x].shape[1])
    choose_experts(step, frame.values[step.x], corrections, frame.routes, gains, given)


def _weigh(step: Weigh, frame: Frame) -> None:
    x, y = frame.values[step.x], frame.values[step.y]
    shape = len(x), y.shape[1], x.shape[1] // y.shape[1]
    gates = y.sigmoid() if step.function == "sigmoid" else F.softplus(y.float()).to(y.dtype)
    x.view(shape).mul_(gates[..., None])


_STEPS: Final[Mapping[type, Callable[[Any, Frame], None]]] = {
    **VALUE_STEPS,
    **STREAM_STEPS,
    Attend: _attend,
    AttendChosen: attend_chosen,
    AttendKept: attend_kept,
    Combine: combine,
    Dispatch: dispatch,
    Embed: _embed,
    Norm: _norm,
    ProjectGroups: project_groups,
    Rotate: _rotate,
    Route: _route,
    Split: _split,
    SplitLatent: split_latent,
    JoinLatent: join_latent,
    AbsorbKeys: absorb_keys,
    ExpandValues: expand_values,
    Deal: deal,
    Convolve: convolve,
    DeltaRule: recur_by_state,
    Scan: recur_by_state,
    Weigh: _weigh,
    Widen: widen,
    Narrow: narrow,
}
