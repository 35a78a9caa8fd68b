"""From what the user asked and what the machine has to a plan: budgets and wishes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from freight.model.checkpoint import TensorSource
from freight.model.config import DTYPE_BYTES, ModelConfig
from freight.model.decoder import build_programme, tensor_shapes
from freight.plan.default import Plan, Planner, Wishes
from freight.plan.policy import Split, Tier
from freight.plan.workload import Workload
from freight.runtime.device import ComputeDevice, room_on_cpu
from freight.runtime.loaders import bounce_bytes
from freight.runtime.options import EngineOptions, Shares

__all__ = ["imagined_sources", "plan_run"]


def imagined_sources(config: ModelConfig, dtype: str) -> dict[str, TensorSource]:
    """Where dummy weights would lie if they were in one file."""
    sources = {}
    offset = 0
    for name, shape in tensor_shapes(config).items():
        num_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        sources[name] = TensorSource(
            path=Path("dummy"), offset=offset, num_bytes=num_bytes, dtype=dtype, shape=shape
        )
        offset += num_bytes
    if config.tied_embeddings:
        sources["head.weight"] = sources["embedding"]
    return sources


def plan_run(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    dtype: str,
    device: ComputeDevice,
    options: EngineOptions,
    workload: Workload,
) -> Plan:
    room: dict[Tier, int] = {}
    if device.tier == "gpu":
        # Before the host is measured: asking a CUDA device makes its context, which takes RAM.
        room["gpu"] = device.room_bytes(options.gpu_memory_bytes)
    room_bytes, own_bytes = room_on_cpu(options.cpu_memory_bytes)
    room["cpu"] = room_bytes - bounce_bytes(sources)
    planner = Planner(
        config=config,
        programme=build_programme(config),
        sources=sources,
        dtype=dtype,
        workload=workload,
        compute_tier=device.tier,
        room=room,
        taken_bytes=own_bytes + bounce_bytes(sources),
        has_disk_dir=options.disk_dir is not None,
        wishes=Wishes(
            weights=_split(options.weights_percent),
            kv=_split(options.kv_percent),
            activations=_split(options.activations_percent),
            micro_batch_size=options.micro_batch_size,
            num_micro_batches=options.num_micro_batches,
            overlap=options.overlap,
        ),
    )
    return planner.plan()


def _split(shares: Shares | None) -> Split | None:
    if shares is None:
        return None
    gpu, cpu, disk = (share / 100 for share in shares)
    return Split(gpu=gpu, cpu=cpu, disk=disk)
