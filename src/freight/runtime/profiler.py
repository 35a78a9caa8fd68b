"""Measures this machine: products, attention, passes over memory, disk and links, alone and beside
each other. The result is a ``Machine`` for the planner.

Typical rates, not the best: each is that of several tries together. Matrices come from memory, not
from a cache, and so do what is read and written. Knows no model and no policy.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from freight.hardware.curve import Curve
from freight.hardware.host import LOOPS, processor_name
from freight.hardware.machine import ComputeUnit, Link, Machine
from freight.kernels.grouped import CompressedRows
from freight.kernels.paged import loops_attend
from freight.kernels.pages import Pages
from freight.memory.process import system_memory_bytes
from freight.model.attention import attend, attends_without_scores
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import index_rows
from freight.model.number_format import Grouped, ShortExponents
from freight.model.programme import Attend
from freight.model.workspace import Workspace
from freight.quantities import MIB
from freight.runtime.beside_probe import (
    measure_both_ways,
    measure_pairs,
    of_both_ways,
    what_is_left,
)
from freight.runtime.call_probe import call_s
from freight.runtime.device import ComputeDevice, choose_dtype, computes_int8
from freight.runtime.disk_probe import DiskProbe, total
from freight.runtime.kernel_choice import choose_kernels
from freight.runtime.link_probe import measure_link_both_ways, measure_links
from freight.runtime.processor_probe import (
    CODES,
    COLUMNS,
    LEAST_TRIES,
    PRODUCT_S,
    ROWS,
    SMALL_ROWS,
    WIDTH,
    ColdMemory,
    code_matrices,
    compressed_s,
    exponent_matrices,
    integer_matrices,
    integer_s,
    matrix_shape,
    pass_bytes_per_s,
    plain_per_s,
    product_s,
    steps_s,
    sweep_s,
    typical_s,
)

__all__ = ["identify_host", "profile"]

_DEVICE_TIMES: Final = 16
_ROUNDS: Final = 3
_ENOUGH_S: Final = 30.0
"""No further round begins then."""
_SHARING: Final = (1, 4, 8)
_MOST_POOLS: Final = 16
_STEPS: Final = ("norm", "rotation", "silu", "gate")
_SECONDS: Final = ("head", "call", "sweep", *_STEPS)
"""Measurements that are times; others are rates."""
_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

_Report = Callable[[str], None]


def profile(device: ComputeDevice, directory: Path, report: _Report) -> Machine:
    """Measure the machine; the disk is the one that ``directory`` is on. Takes about a minute.

    All is measured in turn, three times, and counts together: a shared machine is faster now and
    slower a few seconds later. Where a round takes long there are fewer. ``report`` is told in a
    few words what is being measured.
    BudgetError where the disk has no room for a scratch file of 1 GiB.
    """
    host = ComputeDevice(kind="cpu", torch_device=torch.device("cpu"))
    reads, singly, writes, beside, units, links = [], [], [], [], [], []
    disk_ways, link_ways = [], []
    report("a scratch file")
    # Before the probes take any of it.
    gpu_bytes = device.room_bytes(None) if device.kind == "cuda" else 0
    with DiskProbe(directory) as disk:
        cpu = _UnitProbe(host)
        gpu = _UnitProbe(device) if device.kind == "cuda" else None
        started_s = time.perf_counter()
        for turn in range(1, _ROUNDS + 1):
            if turn > 1 and time.perf_counter() - started_s > _ENOUGH_S:
                break
            report(f"disk, products and attention, {turn} of {_ROUNDS}")
            reads.append(disk.measure_reads())
            singly.append(disk.read_singly())
            writes.append(disk.measure_writes())
            disk_ways.append(measure_both_ways(disk))
            units.append(cpu.measure())
            beside.append(measure_pairs(partial(cpu.product_s, cpu.fast), disk))
            if gpu is not None:
                report(f"the GPU and its links, {turn} of {_ROUNDS}")
                links.append((gpu.measure(), measure_links(device)))
                link_ways.append(measure_link_both_ways(device))
    alone = total([pair.read for own in beside for pair in own])
    single_share = min(1.0, total(singly).bytes_per_s / alone.bytes_per_s)
    found = {
        "disk read": _with_largest(_mean_link(reads), alone.bytes_per_s, single_share),
        "disk write": _mean_link(writes),
    }
    computing = {"cpu": cpu.unit(units, system_memory_bytes())}
    if gpu is not None:
        computing["gpu"] = gpu.unit([own for own, _ in links], gpu_bytes)
        found |= {
            name: _mean_link([own[name] for _, own in links])
            for name in ("host to device", "device to host")
        }
    stat = os.statvfs(directory)
    return Machine(
        name=platform.node() or "this machine",
        description=f"measured on {time.strftime('%Y-%m-%d')}",
        units=computing,
        links=found,
        beside=(
            *what_is_left(beside),
            *of_both_ways(disk_ways),
            *(of_both_ways(link_ways) if link_ways else ()),
        ),
        disk_bytes=stat.f_bavail * stat.f_frsize,
        host=identify_host(device),
    )


def _mean_link(rounds: Sequence[Link]) -> Link:
    """Of links that were measured at the same sizes: as long as all rounds together."""
    curves = [own.bytes_per_s for own in rounds]
    return Link(
        bytes_per_s=Curve(
            points=tuple(
                (size, statistics.harmonic_mean([curve.at(size) for curve in curves]))
                for size, _ in curves[0].points
            )
        )
    )


def _with_largest(link: Link, bytes_per_s: float, single_share: float) -> Link:
    """The same where the largest requests, which weights are read in, were measured for longer, and
    one by one as well."""
    *points, (largest, _) = link.bytes_per_s.points
    curve = Curve(points=(*points, (largest, bytes_per_s)))
    return replace(link, bytes_per_s=curve, single_share=single_share)


def identify_host(device: ComputeDevice) -> dict[str, str]:
    """What tells this machine, and the loops that it is measured with, from others."""
    gpu = torch.cuda.get_device_name(device.torch_device) if device.kind == "cuda" else "none"
    threads = str(torch.get_num_threads())
    return {"cpu": processor_name(), "threads": threads, "gpu": gpu, "loops": LOOPS}


# -- compute units -----------------------------------------------------------------------------


class _UnitProbe:
    """A processor and what is run on it. Of a round's measurements each has a name."""

    def __init__(self, device: ComputeDevice) -> None:
        self.where = device.torch_device
        self.fast = choose_dtype("auto", device)
        self.names = [*dict.fromkeys((self.fast, "float32"))]
        # Of the numbers that files have: where 16 bits are slow they are widened as they are used.
        kept = {name: _DTYPES[name] for name in self.names}
        kept[self.fast] = torch.bfloat16 if self.fast == "float32" else _DTYPES[self.fast]
        self._memory = ColdMemory(self.where)
        self.weights = {
            name: self._memory.tensors(matrix_shape(self.where), kept[name]) for name in self.names
        }
        self._name = "cpu" if device.kind == "cpu" else "gpu"
        choose_kernels(
            self.where,
            _DTYPES[self.fast],
            weights=[CODES, ShortExponents(spare=0)],
            steps=[_step(32, 32 // n, 64, kept) for n in _SHARING for kept in (None, CODES)],
            say=lambda _: None,
        )
        self.codes = code_matrices(self.where)
        self.exponents = exponent_matrices(self.where)
        # Products of integers, where they are faster.
        has_integers = device.kind == "cpu" and computes_int8(self.fast)
        self.integers = integer_matrices() if has_integers else []

    def measure(self) -> dict[str, float]:
        where, fast = self.where, _DTYPES[self.fast]
        pairs = 2.0 * math.prod(matrix_shape(where))
        found = {
            f"{name} {rows}": pairs * rows / self.product_s(name, rows)
            for name in self.names
            for rows in ROWS
        }
        found |= {
            f"{name} attention": _prompt_attention_flops(_DTYPES[name], self._memory, where)
            for name in self.names
        }
        found |= {f"codes {rows}": self._compressed_flops(self.codes, rows) for rows in ROWS}
        short = self.exponents
        found |= {f"exponents {rows}": self._compressed_flops(short, rows) for rows in ROWS}
        if self.integers:
            found |= {f"int8 {rows}": self._integer_flops(rows) for rows in ROWS}
        found["pass"] = pass_bytes_per_s(self._memory, fast, where)
        for sharing in _SHARING:
            keys_per_s, head_s = _attended(sharing, fast, None, self._memory, where)
            found[f"attended {sharing}"] = keys_per_s * fast.itemsize
            found["head"] = min(head_s, found.get("head", head_s))
            codes_per_s, _ = _attended(sharing, fast, CODES, self._memory, where)
            found[f"attended codes {sharing}"] = codes_per_s
        found["plain"] = plain_per_s(fast, where)
        found |= steps_s(self._memory, fast, where)
        rate = found[f"{self.fast} {SMALL_ROWS}"]
        found["call"] = call_s(fast, self.weights[self.fast][0].dtype, where, rate)
        found["sweep"] = sweep_s(where)
        return found

    def _integer_flops(self, rows: int) -> float:
        return 2.0 * rows * WIDTH * COLUMNS / integer_s(self.integers, rows, _DTYPES[self.fast])

    def _compressed_flops(self, weights: Sequence[CompressedRows], rows: int) -> float:
        seconds = compressed_s(weights, rows, _DTYPES[self.fast], self.where)
        return 2.0 * rows * math.prod(weights[0].shape) / seconds

    def product_s(
        self,
        name: str,
        rows: int,
        least_s: float = PRODUCT_S,
        pause_s: float = 0.0,
        *,
        least_tries: int = LEAST_TRIES,
    ) -> float:
        return product_s(
            self.weights[name],
            rows,
            _DTYPES[name],
            self.where,
            least_s=least_s,
            pause_s=pause_s,
            least_tries=least_tries,
        )

    def unit(self, rounds: Sequence[Mapping[str, float]], memory_bytes: int) -> ComputeUnit:
        found = {
            name: (statistics.mean if name in _SECONDS else statistics.harmonic_mean)(
                [own[name] for own in rounds]
            )
            for name in rounds[0]
        }
        return ComputeUnit(
            name=self._name,
            memory_bytes=memory_bytes,
            memory_bytes_per_s=found["pass"],
            products={
                name: Curve(points=tuple((float(n), found[f"{name} {n}"]) for n in rows))
                for name, rows in [
                    *((name, ROWS) for name in self.names),
                    ("codes", ROWS),
                    ("exponents", ROWS),
                    *([("int8", ROWS)] if self.integers else []),
                ]
            },
            attention_flops={name: found[f"{name} attention"] for name in self.names},
            attended_bytes_per_s=Curve(
                points=tuple((float(n), found[f"attended {n}"]) for n in _SHARING)
            ),
            attended_head_s=found["head"],
            attended_codes_per_s=Curve(
                points=tuple((float(n), found[f"attended codes {n}"]) for n in _SHARING)
            ),
            dequantised_per_s=found["plain"],
            call_s=found["call"],
            sweep_s=found["sweep"],
            passes={name: found[name] * found["pass"] for name in _STEPS},
        )


def _prompt_attention_flops(dtype: torch.dtype, memory: ColdMemory, where: torch.device) -> float:
    # Prompts are work enough for all cores.
    times = 1 if where.type == "cpu" else _DEVICE_TIMES
    rows, tokens, heads, width = 8 * times, 512, 32, 64
    spans = [_span(i, tokens, 0) for i in range(rows)]
    seconds = _attend_s(spans, heads, heads // 4, width, dtype, None, memory, where)
    return 4 * heads * width * rows * tokens * (tokens + 1) / 2 / seconds


def _attended(
    sharing: int,
    dtype: torch.dtype,
    kept: Grouped | None,
    memory: ColdMemory,
    where: torch.device,
) -> tuple[float, float]:
    """Rows with one query: numbers of keys and values per second, and seconds for each row and
    key/value head beside, from many keys and from few; ``sharing`` queries have one key head."""
    rows, heads, width = 8 * sharing * _times_as_much(where), 32, 64
    kv_heads = heads // sharing
    seconds = {}
    for tokens in (16, 256):
        spans = [_span(i, 1, tokens - 1) for i in range(rows)]
        seconds[tokens] = _attend_s(spans, heads, kv_heads, width, dtype, kept, memory, where)
    token = 2 * rows * kv_heads * width
    rate = token * (256 - 16) / max(1e-9, seconds[256] - seconds[16])
    return rate, max(0.0, seconds[16] - 16 * token / rate) / (rows * kv_heads)


def _times_as_much(where: torch.device) -> int:
    """What two threads have enough of, many cores or a device are done with before they are all at
    work."""
    return _DEVICE_TIMES if where.type != "cpu" else max(1, torch.get_num_threads() // 2)


def _span(number: int, num_new: int, kv_len: int) -> RowSpan:
    return RowSpan(
        row=RowKey(number),
        start=number * num_new,
        num_new=num_new,
        kv_len=kv_len,
        logit_positions=(),
    )


def _step(heads: int, kv_heads: int, width: int, kept: Grouped | None) -> Attend:
    return Attend(
        q="q",
        k="k",
        v="v",
        out="out",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        scale=width**-0.5,
        kv_format=kept,
    )


def _attend_s(
    spans: Sequence[RowSpan],
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    kept: Grouped | None,
    memory: ColdMemory,
    where: torch.device,
) -> float:
    """One layer's attention for rows whose pages lie one after the other."""
    page = 16
    pages = -(-spans[0].total_len // page)
    view = index_rows(
        spans,
        [range(i * pages, (i + 1) * pages) for i in range(len(spans))],
        start=0,
        page_tokens=page,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        element_bytes=dtype.itemsize,
        device=where,
        by_loop=loops_attend(where, width, dtype, kept),
        without_scores=attends_without_scores(where, dtype, width),
    )
    token_bytes = width * dtype.itemsize if kept is None else kept.row_bytes(width)
    shape = (len(spans) * pages, 2 * kv_heads * page * token_bytes)
    held = torch.uint8
    if kept is None:
        shape, held = (len(spans) * pages, 2 * kv_heads * page * width), dtype
    pools = [
        Pages(
            raw=raw.view(torch.uint8),
            num_heads=kv_heads,
            page_tokens=page,
            width=width,
            dtype=dtype,
            number_format=kept,
        )
        for raw in memory.tensors(shape, held)[:_MOST_POOLS]
    ]
    q = torch.rand(spans[-1].end, heads, width, dtype=dtype, device=where)
    out = torch.empty_like(q)
    workspace = Workspace(torch.empty(256 * MIB, dtype=torch.uint8, device=where))
    step = _step(heads, kv_heads, width, kept)
    return typical_s(
        lambda turn: attend(step, q, pools[turn % len(pools)], view, out, workspace), where
    )
