"""Pages of codes made plain as bfloat16, for loops that numba compiles over pairs of such numbers.
Indices count elements; nothing is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.attention_steps import make_plain
from freight.kernels.cache_lines import prefetch_further
from freight.kernels.compiled import uncounted
from freight.kernels.llvm import BYTE, FLOATS, SHORT, WIDTH, WORD, address_of, narrowed, place_of

__all__ = ["make_sixteen_plain"]

U = np.uintp
_SHORTS = ir.VectorType(SHORT, 2 * WIDTH)
_BYTES = U(2 * WIDTH)


@intrinsic
def _put_by_table(context, raw, at, halves, scale, lowest, plain, place, further):  # type: ignore[no-untyped-def]
    """plain[place + i] = the number whose code is the lower half of byte i of 32 from raw[at] on,
    plain[place + further + i] that of the upper half, by a scale and a lowest number in float16 of
    ``halves``. All sixteen that there can be are computed, and looked up by an instruction that
    ignores all bits but the lowest five."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index, factors, scale, least, target, first, apart = arguments
        scale, least = (
            _widened(context, builder, signature.args[2], factors, place)
            for place in (scale, least)
        )
        codes = ir.Constant(FLOATS, [float(code) for code in range(WIDTH)])
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fused = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
        known = narrowed(builder, builder.call(fused, [codes, scale, least]))
        known = builder.bitcast(known, ir.VectorType(SHORT, WIDTH))
        twice = ir.Constant(ir.VectorType(WORD, 2 * WIDTH), [*range(WIDTH)] * 2)
        table = builder.shuffle_vector(known, known, twice)
        begin = place_of(context, builder, signature.args[0], data, index, BYTE)
        begin = builder.bitcast(begin, ir.VectorType(BYTE, 2 * WIDTH).as_pointer())
        low = builder.zext(builder.load(begin, align=1), _SHORTS)
        high = builder.lshr(low, ir.Constant(_SHORTS, [4] * 2 * WIDTH))
        kind = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
        name = "llvm.x86.avx512.permvar.hi.512"
        look_up = cgutils.get_or_insert_function(builder.module, kind, name)
        for half, number in ((low, first), (high, builder.add(first, apart))):
            to = place_of(context, builder, signature.args[5], target, number, SHORT)
            found = builder.call(look_up, [table, half])
            builder.store(found, builder.bitcast(to, _SHORTS.as_pointer()), align=2)
        return context.get_dummy_value()

    index = types.uintp
    return types.none(raw, index, halves, index, index, plain, index, index), generate


def _widened(context: Any, builder: Any, array: Any, data: Any, index: Any) -> Any:
    """A float16 sixteen times, by an instruction that those processors have."""
    place = address_of(context, builder, array, data, index)
    half = builder.bitcast(builder.load(place, align=2), ir.HalfType())
    sixteen = ir.Constant(ir.VectorType(half.type, WIDTH), ir.Undefined)
    sixteen = builder.insert_element(sixteen, half, ir.Constant(WORD, 0))
    mask = ir.Constant(ir.VectorType(WORD, WIDTH), [0] * WIDTH)
    return builder.fpext(builder.shuffle_vector(sixteen, sixteen, mask), FLOATS)


@uncounted
def make_sixteen_plain(raw, halves, at, ahead, shape, plain):  # type: ignore[no-untyped-def]
    """Sixteen tokens of a head, from ``at`` on, as bfloat16 [16, width]. Those ``ahead`` are
    fetched meanwhile."""
    half = shape.group_size // U(2)
    if shape.bits != U(4) or half % _BYTES != U(0):
        make_plain(raw, halves, at, U(WIDTH), shape, plain, ahead)
        return
    groups = shape.width // shape.group_size
    for token in range(WIDTH):
        source = at + U(token) * shape.token_stride
        coming = ahead + U(token) * shape.token_stride
        prefetch_further(raw, coming)
        prefetch_further(raw, coming + shape.token_stride - U(1))
        factors = (source + shape.width // U(2)) // U(2)
        for group in range(groups):
            scale, lowest = factors + U(group), factors + groups + U(group)
            own = U(token) * shape.width + U(group) * shape.group_size
            for byte in range(U(0), half, _BYTES):
                begin = source + U(group) * half + byte
                _put_by_table(raw, begin, halves, scale, lowest, plain, own + byte, half)
