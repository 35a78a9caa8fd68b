"""Which Triton kernels a CUDA device uses: each is tried there first, against its reference.

What is tried is what the run will call, with its formats and its heads, on a few numbers; a kernel
that does not compile, or finds something else, is left out, and the reference does its work. Trying
compiles the kernels, before a plan is made, for that takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Final

import numpy as np
import torch

from freight.kernels.cuda.choice import NO_KERNELS, Kernels, load_kernels, use_kernels
from freight.kernels.device_rows import DeviceRows
from freight.kernels.grouped import CompressedRows, dequantise, quantise, small_product
from freight.kernels.pages import Pages
from freight.kernels.sums import ADDS, PUTS
from freight.kernels.tokens import normalise, rotate
from freight.model.attention import append, attend
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import KVView, index_rows
from freight.model.number_format import (
    Compressed,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    ShortExponents,
)
from freight.model.programme import Attend, Programme
from freight.model.recurrent_steps import Convolve, DeltaRule, Scan
from freight.model.tiles import TOKENS_OF_A_LAUNCH
from freight.model.workspace import Workspace
from freight.quantities import MIB, align_up
from freight.runtime.plain_trials import float_rows, plain_trial
from freight.runtime.recurrence_trials import convolution_trial, recurrence_trial
from freight.runtime.trial_numbers import Trial, trial_numbers

__all__ = ["attend_steps", "choose_kernels", "recurrent_steps", "try_kernels"]

_NAMES: Final = {
    "make_plain": "dequantising",
    "make_exponents_plain": "making short exponents plain",
    "make_micro_plain": "making MXFP4 plain",
    "make_eights_plain": "making FP8 plain",
    "make_levels_plain": "making levels plain",
    "multiply": "products of few tokens",
    "multiply_sets": "products of several experts",
    "append": "compressing keys and values",
    "append_plain": "keys and values into their pages",
    "normalise": "norms",
    "rotate": "rotations",
    "convolve": "convolutions of rows",
    "recur": "states of rows",
    "attend": "attention of single queries",
}
_KEY_COUNTS: Final = (530, 17)
"""Of the rows that are tried: few and long enough to be attended in parts, and ragged."""
_SHORT_COUNTS: Final = (33, 17)
"""Of rows that are attended whole, as most are: code of its own."""
_NUM_ROWS: Final = (70, 128)
"""Of matrices: numbers that 16 divides have code of their own."""
_SHORT_COLUMNS: Final = 320
_MICRO_COLUMNS: Final = 96
"""Of a matrix with short exponents: no whole number of those before which it is noted how many
exponents have no code."""
_SET_COLUMNS: Final = (96, 256)
_SET_TOKENS: Final = (3, TOKENS_OF_A_LAUNCH)
_PAGE_TOKENS: Final = 16
_TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    weights: Iterable[Compressed | None],
    steps: Iterable[Attend],
    recurrences: Iterable[Convolve | DeltaRule | Scan] = (),
    has_experts: bool = False,
    say: Callable[[str], None],
) -> None:
    """From now on use on a CUDA device what works there, for weights kept so and attention, or
    ``recurrences``, of these steps; ``say`` is told of what does not. Nothing happens for a CPU,
    and triton is not loaded."""
    if device.type != "cuda":
        return
    use_kernels(device, NO_KERNELS)
    found = load_kernels()
    if found is None:
        say("triton is not installed: the GPU works with torch alone, which is slower")
        return
    chosen = try_kernels(
        device,
        dtype,
        found,
        weights=weights,
        steps=steps,
        recurrences=recurrences,
        has_experts=has_experts,
        say=say,
    )
    use_kernels(device, chosen)


def attend_steps(programme: Programme) -> list[Attend]:
    """One step of each form that attends."""
    return [step for unit in programme.kinds for step in unit.steps if isinstance(step, Attend)]


def recurrent_steps(programme: Programme) -> list[Convolve | DeltaRule | Scan]:
    """Likewise of those that keep a state."""
    steps = (step for unit in programme.kinds for step in unit.steps)
    return [step for step in steps if isinstance(step, Convolve | DeltaRule | Scan)]


def try_kernels(
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    weights: Iterable[Compressed | None],
    steps: Iterable[Attend],
    recurrences: Iterable[Convolve | DeltaRule | Scan] = (),
    has_experts: bool = False,
    say: Callable[[str], None],
) -> Kernels:
    """Those of ``kernels`` that find what their references find. None is in use afterwards."""
    kinds = set(weights)
    rows = [own for own in kinds if isinstance(own, Grouped)]
    # Products of groups across rows are always made of plain rows.
    products = [own for own in rows if not own.across]
    attends = set(steps)
    # Those that attend others' keys come first: their kind is tried with what puts keys there.
    ordered = sorted(attends, key=lambda own: own.k is not None)
    heads = {(own.kv_format, own.num_kv_heads, own.head_dim): own for own in ordered}
    kept = [step for step in heads.values() if step.kv_format is not None]
    states = set(recurrences)
    convolved = [own for own in states if isinstance(own, Convolve)]
    deltas = [own for own in states if isinstance(own, DeltaRule | Scan)]
    unpacked = [step for step in heads.values() if step.kv_format is None]
    formats = {*rows, *(step.kv_format for step in kept if step.kv_format is not None)}

    def grouped(own: Grouped) -> Trial:
        return plain_trial(lambda count: _rows(own, count, device), _NUM_ROWS, dtype)

    def plain(kind: type[Compressed]) -> list[Trial]:
        own = [partial(float_rows, each, device=device) for each in kinds if isinstance(each, kind)]
        return [plain_trial(rows_of, _NUM_ROWS, dtype) for rows_of in own]

    trials: dict[str, tuple[Sequence[Trial], float]] = {
        "make_plain": ([grouped(own) for own in formats], 0.0),
        "make_exponents_plain": (plain(ShortExponents), 0.0),
        "make_micro_plain": (plain(MicroFloats), 0.0),
        "make_eights_plain": (plain(EightFloats), 0.0),
        "make_levels_plain": (plain(LevelFloats), 0.0),
        "multiply": ([_product(own, device, dtype) for own in products], _TOLERANCES[dtype]),
        "multiply_sets": ([_sets(device, dtype)] if has_experts else [], _TOLERANCES[dtype]),
        "append": ([_append(step, device, dtype) for step in kept], 0.0),
        "append_plain": ([_append(step, device, dtype) for step in unpacked], 0.0),
        "normalise": ([_norms(device, dtype)], _TOLERANCES[dtype]),
        "rotate": ([_rotations(device, dtype)], _TOLERANCES[dtype]),
        "convolve": (
            [convolution_trial(own, device, dtype) for own in convolved],
            _TOLERANCES[dtype],
        ),
        "recur": (
            [recurrence_trial(own, device, dtype) for own in deltas],
            _TOLERANCES[dtype],
        ),
        "attend": ([_attend(step, device, dtype) for step in attends], _TOLERANCES[dtype]),
    }
    chosen = NO_KERNELS
    try:
        with torch.inference_mode():
            for field in fields(Kernels):
                only = replace(NO_KERNELS, **{field.name: getattr(kernels, field.name)})
                own, tolerance = trials[field.name]
                problem = next(filter(None, (_try(t, device, only, tolerance) for t in own)), None)
                if own and problem is None:
                    chosen = replace(chosen, **{field.name: getattr(kernels, field.name)})
                elif problem is not None:
                    say(f"{_NAMES[field.name]}: torch's way, for Triton's kernel {problem}")
    finally:
        use_kernels(device, NO_KERNELS)
    return chosen


def _try(trial: Trial, device: torch.device, kernels: Kernels, tolerance: float) -> str | None:
    """What is wrong with the kernels, if anything is."""
    use_kernels(device, NO_KERNELS)
    wanted = [own.clone() for own in trial()]
    use_kernels(device, kernels)
    try:
        found = list(trial())
    except Exception as error:  # a compiler may raise anything
        lines = str(error).splitlines()
        return f"fails: {type(error).__name__}{': ' + lines[0] if lines else ''}"
    for one, other in zip(found, wanted, strict=True):
        largest = float(other.float().abs().max())
        if not bool((one.float() - other.float()).abs().max() <= tolerance * largest):
            return "finds other numbers"
    return None


def _rows(own: Grouped, num_rows: int, device: torch.device) -> CompressedRows:
    narrow = replace(own, wide=False)
    columns = 3 * own.group_size
    count = align_up(num_rows, own.rows_together)
    raw = quantise(trial_numbers(count, columns, device=device, dtype=torch.float32), narrow)
    if own.wide:
        border = own.code_bytes(columns)
        factors = raw[:, border:].view(torch.float16).float().contiguous() / 3
        raw = torch.cat([raw[:, :border], factors.view(torch.uint8)], dim=1)
    return CompressedRows(raw=raw, columns=columns, number_format=own)


def _product(own: Grouped, device: torch.device, dtype: torch.dtype) -> Trial:
    def trial() -> Iterator[torch.Tensor]:
        for num_rows, tokens in product(_NUM_ROWS, (1, 5)):
            rows = _rows(own, num_rows, device)
            x = trial_numbers(tokens, rows.columns, device=device, dtype=dtype)
            found = small_product(x, rows)
            if found is None:
                plain = torch.empty(rows.shape, device=device)
                dequantise(rows, plain)
                found = x.float() @ plain.t()
            yield found

    return trial


def _sets(device: torch.device, dtype: torch.dtype) -> Trial:
    def trial() -> Iterator[torch.Tensor]:
        for num_rows, num_columns in product(_NUM_ROWS, _SET_COLUMNS):
            numbers = partial(trial_numbers, device=device, dtype=dtype)
            weight, bias = numbers(num_rows, num_columns), numbers(1, num_rows).view(-1)
            for most, has_bias, adds in product(_SET_TOKENS, (False, True), (False, True)):
                sets = [[(own, bias if has_bias else None)] for own in (weight, weight.flip(0))]
                x, out = numbers(1 + most, num_columns), numbers(1 + most, num_rows)
                if (rows := DeviceRows.of(sets)) is not None:
                    counts, places = np.array([1, most]), np.array([0, 1])
                    outcome = ADDS if adds else PUTS
                    rows.multiply(x, places, places, counts, [out], [outcome])
                else:
                    own = zip((x[:1], x[1:]), sets, strict=True)
                    found = torch.cat([some @ rows.t() for some, ((rows, _),) in own])
                    found += bias if has_bias else 0
                    out = found + out if adds else found
                yield out

    return trial


class _Case:
    """Rows with one query each, whose keys, so many of each, are in pages."""

    def __init__(
        self,
        step: Attend,
        device: torch.device,
        dtype: torch.dtype,
        key_counts: Sequence[int] = _KEY_COUNTS,
    ) -> None:
        self.spans = [
            RowSpan(row=RowKey(row), start=row, num_new=1, kv_len=count - 1, logit_positions=())
            for row, count in enumerate(key_counts)
        ]
        counts = [-(-span.total_len // _PAGE_TOKENS) for span in self.spans]
        # Not in order: the last row has the first page.
        borders = [sum(counts[row + 1 :]) for row in range(len(counts))]
        self.tables = [
            range(border, border + count) for border, count in zip(borders, counts, strict=True)
        ]
        kept, width = step.kv_format, step.head_dim
        size = width * dtype.itemsize if kept is None else kept.row_bytes(width)
        keys_alone = step.k is not None and step.k == step.v
        page_bytes = (2 - keys_alone) * step.num_kv_heads * _PAGE_TOKENS * size
        self.pages = Pages(
            raw=torch.zeros(sum(counts), page_bytes, dtype=torch.uint8, device=device),
            num_heads=step.num_kv_heads,
            page_tokens=_PAGE_TOKENS,
            width=width,
            dtype=dtype,
            number_format=kept,
            keys_alone=keys_alone,
        )
        self.step, self.device, self.dtype = step, device, dtype

    def fill(self) -> None:
        """All keys and values, as if they were new."""
        step = self.step
        spans, start = [], 0
        for span in self.spans:
            spans.append(span._replace(start=start, num_new=span.total_len, kv_len=0))
            start += span.total_len
        shape = (start, step.num_kv_heads, step.head_dim)
        k = trial_numbers(*shape, device=self.device, dtype=self.dtype)
        view = self._index(spans)
        append(self.pages, view, k, k.flip(0))

    def _index(self, spans: Sequence[RowSpan]) -> KVView:
        step = self.step
        return index_rows(
            spans,
            self.tables,
            start=0,
            page_tokens=_PAGE_TOKENS,
            num_heads=step.num_heads,
            num_kv_heads=step.num_kv_heads,
            head_dim=step.head_dim,
            element_bytes=self.dtype.itemsize,
            device=self.device,
        )

    def attend(self, *, with_sums: bool) -> Iterator[torch.Tensor]:
        step = self.step
        shape = (len(self.spans), step.num_heads, step.head_dim)
        q = trial_numbers(*shape, device=self.device, dtype=self.dtype)
        out = torch.empty_like(q)
        lse = torch.empty(shape[:2], device=self.device) if with_sums else None
        # Keys and values of the rows, plain and as they are kept, scores and their weights.
        keys = len(self.spans) * max(span.total_len for span in self.spans) + _PAGE_TOKENS
        numbers = keys * 4 * (step.num_kv_heads * step.head_dim + step.num_heads)
        room = numbers * self.dtype.itemsize + MIB
        workspace = Workspace(torch.empty(room, dtype=torch.uint8, device=self.device))
        attend(step, q, self.pages, self._index(self.spans), out, workspace, lse)
        yield out
        if lse is not None:
            yield lse


def _norms(device: torch.device, dtype: torch.dtype) -> Trial:
    """One of whole tokens and one of heads, with all there is beside: each is code of its own."""

    def trial() -> Iterator[torch.Tensor]:
        for num_heads, width in ((1, 2500), (3, 96)):
            x = trial_numbers(5, num_heads * width, device=device, dtype=dtype) + 1
            gain = trial_numbers(width, device=device, dtype=dtype)
            for centred, adds_one in product((False, True), (False, True)):
                out = torch.empty_like(x)
                workspace = Workspace(torch.empty(MIB, dtype=torch.uint8, device=device))
                normalise(
                    x,
                    out,
                    gain,
                    gain.flip(0) if centred else None,
                    num_heads=num_heads,
                    eps=1e-5,
                    centred=centred,
                    adds_one=adds_one,
                    workspace=workspace,
                )
                yield out

    return trial


def _rotations(device: torch.device, dtype: torch.dtype) -> Trial:
    def trial() -> Iterator[torch.Tensor]:
        angles = trial_numbers(5, 72, device=device, dtype=dtype)
        cos, sin = angles.cos(), angles.sin()
        for pairs in (False, True):
            x = trial_numbers(5, 17 * 160, device=device, dtype=dtype)
            workspace = Workspace(torch.empty(MIB, dtype=torch.uint8, device=device))
            rotate(x, 17, cos, sin, workspace, pairs=pairs)
            yield x

    return trial


def _append(step: Attend, device: torch.device, dtype: torch.dtype) -> Trial:
    def trial() -> Iterator[torch.Tensor]:
        case = _Case(step, device, dtype)
        case.fill()
        yield case.pages.raw

    return trial


def _attend(step: Attend, device: torch.device, dtype: torch.dtype) -> Trial:
    # Sparse attention has no kernel; what is tried is the attention of all keys.
    whole = replace(step, share=1.0)

    def trial() -> Iterator[torch.Tensor]:
        for key_counts, with_sums in ((_KEY_COUNTS, True), (_SHORT_COUNTS, False)):
            case = _Case(whole, device, dtype, key_counts)
            case.fill()
            yield from case.attend(with_sums=with_sums)

    return trial
