"""The machine's rates and the ceiling for the work, measured in a process of their own.

Also refuses, before anything is measured, what the planner would refuse.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, Final

import torch

from freight.entrypoints.bench.ceiling import ModelCost, Path, find_ceiling, model_cost
from freight.entrypoints.bench.machine import (
    Rate,
    measure_disk,
    measure_link,
    measure_products,
    product_rows,
)
from freight.entrypoints.bench.own_run import own_options
from freight.entrypoints.bench.work import Work
from freight.entrypoints.own_machine import nominal_s
from freight.memory.process import process_bytes, system_memory_bytes
from freight.model.checkpoint import imagined_sources, resolve
from freight.model.config import DTYPE_BYTES, read_config
from freight.model.number_format import (
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
    RowFormat,
    ShortExponents,
    find_compressed,
    row_bytes,
)
from freight.model.sources import TensorSource
from freight.quantities import MIB
from freight.runtime.compressed_files import kept_sources, settle_compute
from freight.runtime.device import ComputeDevice, choose_dtype, find_device
from freight.runtime.loaders import torch_dtype
from freight.runtime.options import EngineOptions
from freight.runtime.planning import plan_run

__all__ = ["probe"]

_SCRATCH_PIECES: Final = 128
_PIECE_BYTES: Final = 4 * MIB


def probe(job: Mapping[str, Any]) -> dict[str, Any]:
    """Number format, rates, memory and ceiling. ``budget_bytes`` is that of the process, or None
    for what the machine has."""
    notes: list[str] = []
    work = Work(**job["work"])
    config = read_config(FilePath(job["model"])).for_rows(work.total_tokens)
    # A profile is made here, if one is wanted: it would count in a measured process.
    options = own_options(job, work_s=nominal_s(config, work.workload()), say=notes.append)
    device = find_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    is_written = options.dummy_seed is None
    sources: Mapping[str, TensorSource] = (
        resolve(config, FilePath(job["model"])) if is_written else imagined_sources(config, dtype)
    )
    options = settle_compute(options, sources, device, dtype, notes.append)
    # What is to be compressed or converted is made here: it would count in a measured process.
    sources = kept_sources(config, sources, options, lambda _: None)
    plan_run(config, sources, dtype, device, options, work.workload())
    budget = job["budget_bytes"] or system_memory_bytes()
    paths, disk_depth = _paths(budget, options, device, sources)
    rows = product_rows(work)
    kinds = {find_compressed(source.dtype) for source in sources.values()}
    kept: list[RowFormat] = [own for own in kinds if isinstance(own, Grouped) and not own.wide]
    kept += [own for own in kinds if isinstance(own, MicroFloats | EightFloats | LevelFloats)]
    # Of normal numbers, which want as much room in every matrix.
    kept += [own for own in kinds if isinstance(own, ShortExponents)][:1]
    products = measure_products(config, device.torch_device, torch_dtype(dtype), rows, kept)
    if options.compute == "int8":
        in_integers = measure_products(config, device.torch_device, torch.int8, rows)
        products = {n: rate.or_better(in_integers[n]) for n, rate in products.items()}
    weight_size = _weight_size(dtype, sources)
    cost = model_cost(config, weight_size=weight_size, element_size=DTYPE_BYTES[dtype])
    best = {count: rate.best for count, rate in products.items()}
    usual = {count: rate.usual for count, rate in products.items()}
    ceiling = find_ceiling(cost, work, [own.at(rate.best) for own, rate in paths], best)
    slower = find_ceiling(cost, work, [own.at(rate.usual) for own, rate in paths], usual)
    return {
        "dtype": dtype,
        "compute": options.compute,
        "notes": notes,
        "device": _device_name(device),
        "budget_bytes": budget,
        "parameter_bytes": _parameter_bytes(dtype, sources),
        "weight_bytes": cost.weight_bytes,
        "kv_bytes": _kv_bytes(cost, work),
        "disk_requests_in_flight": disk_depth,
        "paths": [dataclasses.asdict(own.at(rate.best)) for own, rate in paths],
        "product_flops": {str(count): rate for count, rate in best.items()},
        "ceiling": {**dataclasses.asdict(ceiling), "limited_by": ceiling.limited_by},
        "usual": {
            "seconds": slower.seconds,
            "product_flops": {str(count): rate for count, rate in usual.items()},
            "bytes_per_s": {own.name: rate.usual for own, rate in paths},
        },
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """A path without its rate."""

    name: str
    room_bytes: float
    carries_kv: bool

    def at(self, bytes_per_s: float) -> Path:
        return Path(
            name=self.name,
            bytes_per_s=bytes_per_s,
            room_bytes=self.room_bytes,
            carries_kv=self.carries_kv,
        )


def _paths(
    budget: int,
    options: EngineOptions,
    device: ComputeDevice,
    sources: Mapping[str, TensorSource],
) -> tuple[list[tuple[_Way, Rate]], int]:
    """The ways of the weights to the arithmetic with their rates, and how many disk requests were
    best."""
    room = max(0, budget - process_bytes())
    with _file_to_read(options, sources) as path:
        rate, depth = measure_disk(path)
    if device.tier == "cpu":
        return [(_Way(name="disk", room_bytes=room, carries_kv=True), rate)], depth
    near = _device_room(device, options.gpu_memory_bytes)
    link = measure_link(device, options.sim_bytes_per_s)
    return [
        (_Way(name="link", room_bytes=near, carries_kv=False), link),
        (_Way(name="disk", room_bytes=near + room, carries_kv=True), rate),
    ], depth


@contextmanager
def _file_to_read(
    options: EngineOptions, sources: Mapping[str, TensorSource]
) -> Iterator[FilePath]:
    """The largest of the files that hold the weights; where none are written, one made for it."""
    if options.dummy_seed is None:
        yield max({source.path for source in sources.values()}, key=_file_size)
        return
    with tempfile.NamedTemporaryFile(dir=options.disk_dir) as file:
        for _ in range(_SCRATCH_PIECES):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        yield FilePath(file.name)


def _device_room(device: ComputeDevice, budget: int | None) -> int:
    """The device's memory beside the context, at most: a better policy may leave nothing free."""
    if device.kind == "sim":
        return device.room_bytes(budget)
    free, total = torch.cuda.mem_get_info(device.torch_device)
    if budget is None:
        return int(free)
    return budget - min(total - free, budget - device.room_bytes(budget))


def _weight_size(dtype: str, sources: Mapping[str, TensorSource]) -> float:
    """Bytes of a weight in the file or in the computation, whichever is less, of any matrix."""
    columns = ((source.dtype, source.shape[-1]) for source in sources.values())
    return min(DTYPE_BYTES[dtype], *(row_bytes(own, count) / count for own, count in columns))


def _parameter_bytes(dtype: str, sources: Mapping[str, TensorSource]) -> int:
    """Of all weights in memory; tied ones once."""
    places = {(source.path, source.offset): math.prod(source.shape) for source in sources.values()}
    return sum(places.values()) * DTYPE_BYTES[dtype]


def _kv_bytes(cost: ModelCost, work: Work) -> float:
    """Of all rows together when their last token is made."""
    return sum(cost.kv_bytes(prompt + new - 1) for prompt, new in work.lengths())


def _file_size(path: FilePath) -> int:
    return path.stat().st_size


def _device_name(device: ComputeDevice) -> str:
    if device.kind == "cuda":
        return torch.cuda.get_device_name(device.torch_device)
    return {"sim": "simulated device", "cpu": "CPU"}[device.kind]
