"""What several chips send each other for one micro-batch: between ranks, and from stage to stage.

Priced at the peak of the links, none of it hidden. Knows no tiers and no policies.
"""

from __future__ import annotations

from freight.hardware.chip import Chip
from freight.model.config import ModelConfig
from freight.model.passing import handed_columns
from freight.partition.cost import Cost, Setting, Step
from freight.partition.layout import Mesh
from freight.partition.named import FEED_FORWARD
from freight.plan.shares import Shares

__all__ = ["sending_s"]


def sending_s(
    config: ModelConfig, chip: Chip, activation_bytes: float, shares: Shares, step: Step
) -> float:
    """Seconds for a stage of these layers: the moves of the 1D weight-stationary layout, ends
    included, and the residual stream on to the next stage, of which each rank sends its part."""
    setting = Setting(chip=chip, activation_bytes=activation_bytes)
    seconds = 0.0
    if shares.ranks > 1:
        cut = FEED_FORWARD["1D weight-stationary"].cut
        seconds += Cost(config, Mesh.of(x=shares.ranks, y=1, z=1), cut, step, setting).link_s
    if shares.stages > 1:
        is_inside = not chip.host_chips or shares.stages * shares.ranks <= chip.host_chips
        rate = chip.link_bytes_per_s if is_inside else chip.outer_bytes_per_s
        num_bytes = step.num_tokens * handed_columns(config) * activation_bytes
        seconds += num_bytes / shares.ranks / rate
        seconds += chip.link_latency_s if is_inside else chip.outer_latency_s
    return seconds
