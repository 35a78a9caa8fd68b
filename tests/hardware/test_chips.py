"""The chips that come with Freight: every figure has a source and a size that can be."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from freight.errors import InputError
from freight.hardware.chip import Chip, chip_names, find_chip

WITHOUT_SOURCE = {"name", "description", "sources"}


@pytest.mark.parametrize("name", chip_names())
def test_every_figure_has_a_source(name: str) -> None:
    chip = find_chip(name)
    assert chip.name == name
    for own in fields(Chip):
        value = getattr(chip, own.name)
        if own.name in WITHOUT_SOURCE or not value:
            continue
        found = [source for path, source in chip.sources.items() if path.split(".")[0] == own.name]
        assert found and all(found), f"{own.name} of {value} has no source"
    assert chip.dense_flops == max(chip.flops.get(k, 0) for k in ("bfloat16", "float16"))


@pytest.mark.parametrize("name", chip_names())
def test_chips_are_nearer_to_themselves_than_to_others(name: str) -> None:
    chip = find_chip(name)
    assert chip.memory_bytes_per_s > chip.link_bytes_per_s
    if chip.host_chips:
        assert chip.link_bytes_per_s > chip.outer_bytes_per_s > 0
        assert chip.outer_latency_s > chip.link_latency_s


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InputError, match="Did you mean tpu-v4"):
        find_chip("tpu-v44")
    with pytest.raises(InputError, match="Presets are a100"):
        find_chip("!")
    with pytest.raises(InputError, match="memory_bytes of 0"):
        replace(find_chip("t4"), memory_bytes=0)
    with pytest.raises(InputError, match="outer_bytes_per_s"):
        replace(find_chip("t4"), outer_bytes_per_s=0.0)
    assert find_chip("t4").at(2.0).dollars_per_hour == 2.0
    assert find_chip("t4").at(None) == find_chip("t4")
