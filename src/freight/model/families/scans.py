"""What the tensors of a scan (Mamba-2) are called in checkpoints of all families that have one."""

from __future__ import annotations

from collections.abc import Mapping

from freight.model.families.table import Fused, Place

__all__ = ["scan_tensors"]


def scan_tensors(prefix: str) -> Mapping[str, Place]:
    """Logical names with their places under ``prefix``. Gates, what is convolved, and rates are
    made by one matrix."""
    mixed = Fused(
        tensor=f"{prefix}.in_proj.weight",
        of=("recurrence.gate", "recurrence.mixed", "recurrence.a"),
    )
    return {
        "layers.{i}.recurrence.gate": mixed,
        "layers.{i}.recurrence.mixed": mixed,
        "layers.{i}.recurrence.a": mixed,
        "layers.{i}.recurrence.convolution": f"{prefix}.conv1d.weight",
        "layers.{i}.recurrence.convolution_bias": f"{prefix}.conv1d.bias",
        "layers.{i}.recurrence.decay": f"{prefix}.A_log",
        "layers.{i}.recurrence.decay_bias": f"{prefix}.dt_bias",
        "layers.{i}.recurrence.skip": f"{prefix}.D",
        "layers.{i}.recurrence.read_norm": f"{prefix}.norm.weight",
        "layers.{i}.recurrence.out": f"{prefix}.out_proj.weight",
    }
