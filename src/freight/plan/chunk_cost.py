"""What a chunk of tokens takes in a unit: its products by their rates, what is made plain for them,
and all that steps pass over, by the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freight.hardware.machine import ComputeUnit
from freight.model.number_format import Compressed, PerRow, RowFormat, ShortExponents
from freight.model.programme import Unit
from freight.plan.passes import bytes_passed

__all__ = ["chunk_s"]


def chunk_s(
    unit: Unit,
    num_tokens: int,
    on: ComputeUnit,
    dtype: str,
    size: int,
    compressed: Mapping[str, Compressed],
    *,
    on_cpu: bool,
) -> float:
    """Seconds but for the call, of numbers of ``size`` bytes; weights are ``compressed`` by
    name."""
    num_short = _num_elements(unit, compressed, ShortExponents)
    num_codes = _num_elements(unit, compressed, RowFormat) - num_short
    integers = 2.0 * num_tokens * _num_elements(unit, compressed, PerRow)
    codes, short = 2.0 * num_tokens * num_codes, 2.0 * num_tokens * num_short
    plain = unit.matmul_flops(num_tokens) - integers - codes - short
    products_s = plain / on.product_flops(dtype, num_tokens)
    products_s += integers / on.product_flops(dtype, num_tokens, "int8")
    products_s += codes / on.product_flops(dtype, num_tokens, "codes")
    products_s += short / on.product_flops(dtype, num_tokens, "exponents")
    passed = num_tokens * sum(bytes_passed(unit, size, on.passes, gates_apart=integers > 0))
    made_plain_s = _made_plain_s(num_codes, num_short, on, on_cpu=on_cpu)
    return products_s + passed / on.memory_bytes_per_s + made_plain_s


def _made_plain_s(num_codes: float, num_short: float, on: ComputeUnit, *, on_cpu: bool) -> float:
    """Of compressed numbers that become plain for a chunk: none where products by them are known as
    a whole, nor of codes for the CPU's loops, which take as long with them as with plain rows at
    most."""
    if "codes" in on.products or on_cpu:
        num_codes = 0.0
    if "exponents" in on.products:
        num_short = 0.0
    return (num_codes + num_short) / on.plain_per_s


def _num_elements(unit: Unit, compressed: Mapping[str, Compressed], kinds: Any) -> int:
    """Of a unit's weights that are compressed like this, and are made plain or multiplied as they
    are for each chunk: of the embedding's table a few rows are looked up."""
    if unit.kind == "embedding":
        return 0
    own = (w for w in unit.weights if isinstance(compressed.get(w.name), kinds))
    return sum(w.num_elements for w in own)
