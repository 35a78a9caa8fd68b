"""Products of pairs of bfloat16 in registers of sixteen rows of sixteen, where the processor has
them (Intel's AMX), and the leave to use them that Linux gives a process which asks.

Register 0 to 3 hold sums, 4 and 5 rows, 6 and 7 tokens. What loads and multiplies is Intel's
TILELOADD and TDPBF16PS (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import BYTE, FLOATS, HAS_PAIR_PRODUCTS, WIDTH, address_of

__all__ = ["ROWS", "TILES", "add_tile_products", "configure", "may_use_tiles", "release"]

ROWS: Final = 2 * WIDTH
TILES: Final = 2
"""Times sixteen tokens. Two by two blocks of sums use what is loaded twice; no other shape that
eight registers hold does better."""

_INDEX = types.uintp
_LONG: Final = ir.IntType(64)
_LINE_BYTES: Final = 64
_ROW_REGISTERS: Final = (4, 5)
_TOKEN_REGISTERS: Final = (6, 7)

_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18


@cache
def may_use_tiles() -> bool:
    """Whether there are such registers, and this process may use them: its threads all may, once it
    has asked."""
    features = get_host_cpu_features()
    if not (HAS_PAIR_PRODUCTS and features.get("amx-tile") and features.get("amx-bf16")):
        return False
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    system_call = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _configuration() -> np.ndarray:
    """Palette 1, eight registers of sixteen rows of 64 bytes, as LDTILECFG takes it."""
    found = np.zeros(_LINE_BYTES, np.uint8)
    found[0] = 1
    found[16:32].view(np.uint16)[:] = _LINE_BYTES
    found[48:56] = WIDTH
    return found


_CONFIGURATION: Final = _configuration()


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """One of LLVM's functions that make an instruction each; plain numbers name registers."""
    given = [ir.Constant(BYTE, own) if isinstance(own, int) else own for own in arguments]
    kind = ir.FunctionType(ir.VoidType(), [own.type for own in given])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), given)


@intrinsic
def configure(context):  # type: ignore[no-untyped-def]
    """Have the calling thread's registers be as the others here want them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = [int(word) for word in _CONFIGURATION.view(np.uint64)]
        kind = ir.ArrayType(_LONG, len(words))
        place = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, words), place)
        _call(builder, "ldtilecfg", builder.bitcast(place, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def release(context):  # type: ignore[no-untyped-def]
    """Have them be empty again, which spares switches between threads their contents."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), generate


def add_tile_products(num_tiles: int) -> Any:
    """What adds to sums[place + 16 r + i] the products of row r of a panel and x[at + 16 k + i],
    over ``count`` pairs k, whole sixteens, for sixteen tokens i and ROWS rows r. Of a second tile,
    x lies ``apart``, and sums ``sums_apart``. Sums are float32.

    A panel holds sixteen pairs of one row after the other, then the next sixteen. Meanwhile the
    rows from number ``low`` to ``high`` of the next panel are laid, as many of their pairs as are
    multiplied but no more than ``width``: they begin at source[start] and are ``pitch`` apart.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, at, apart, count, _, place, sums_apart, *coming = arguments
        _, _, start, pitch, low, high, width = coming

        def address(number: int, index: Any) -> Any:
            return address_of(context, builder, signature.args[number], arguments[number], index)

        def whole(value: int) -> Any:
            return ir.Constant(at.type, value)

        def move(name: str, register: int, place: Any) -> None:
            raw = builder.bitcast(place, BYTE.as_pointer())
            _call(builder, name, register, raw, ir.Constant(_LONG, _LINE_BYTES))

        own_sums = {}
        for tile in range(num_tiles):
            begin = builder.add(place, builder.mul(sums_apart, whole(tile)))
            for half in range(2):
                index = builder.add(begin, whole(half * WIDTH * WIDTH))
                own_sums[half, tile] = 2 * half + tile, address(5, index)
        for register, own in own_sums.values():
            move("tileloadd64", register, own)
        with cgutils.for_range(builder, builder.udiv(count, whole(WIDTH))) as step:
            begun = builder.mul(step.index, whole(WIDTH))
            line = builder.mul(begun, whole(ROWS))
            for half in range(2):
                rows = address(0, builder.add(line, whole(half * WIDTH * WIDTH)))
                move("tileloadd64", _ROW_REGISTERS[half], rows)
                for tile, register in enumerate(_TOKEN_REGISTERS[:num_tiles]):
                    if half == 0:
                        index = builder.add(at, builder.mul(apart, whole(tile)))
                        index = builder.add(index, builder.mul(begun, whole(WIDTH)))
                        move("tileloadd64", register, address(1, index))
                    sums = own_sums[half, tile][0]
                    _call(builder, "tdpbf16ps", sums, _ROW_REGISTERS[half], register)
            is_there = builder.icmp_unsigned("<", begun, width)
            last = builder.select(is_there, high, low)
            with cgutils.for_range(builder, last, start=low) as row:
                source = builder.add(start, builder.mul(row.index, pitch))
                source = address(9, builder.add(source, begun))
                target = builder.add(line, builder.mul(row.index, whole(WIDTH)))
                kind = FLOATS.as_pointer()
                found = builder.load(builder.bitcast(source, kind), align=4)
                builder.store(found, builder.bitcast(address(8, target), kind), align=_LINE_BYTES)
        for register, own in own_sums.values():
            move("tilestored64", register, own)
        return context.get_dummy_value()

    @intrinsic
    def add(
        context,
        panel,
        x,
        at,
        apart,
        count,
        sums,
        place,
        sums_apart,
        following,
        source,
        start,
        pitch,
        low,
        high,
        width,
    ):  # type: ignore[no-untyped-def]
        whole = _INDEX
        first = panel, x, whole, whole, whole, sums, whole, whole
        return types.none(*first, following, source, *[whole] * 5), generate

    return add
