"""Products of pairs of bfloat16, or of fours of 8-bit integers, in registers of sixteen rows of
sixteen, where the processor has them (Intel's AMX), and the leave to use them that Linux gives a
process which asks.

Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 tokens. What loads and multiplies is Intel's
TILELOADD, TDPBF16PS and TDPBSSD (Intel 64 and IA-32 Architectures Software Developer's Manual,
volume 2). A pair, or four, is what lies in four bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.compiled import uncounted
from freight.kernels.features import may_use_tiles
from freight.kernels.llvm import BYTE, FLOATS, WIDTH, address_of, fetch
from freight.kernels.vectors import transpose

__all__ = [
    "FEW",
    "INTEGERS",
    "IS_PACED",
    "PAIRS",
    "ROWS",
    "TILES",
    "add_products",
    "add_sums",
    "add_tile_products",
    "begin_sums",
    "block_products",
    "configure",
    "end_sums",
    "has_integers",
    "lay_weights",
    "put_products",
    "put_scores",
    "release",
]

ROWS: Final = 2 * WIDTH
TILES: Final = 2
"""Times sixteen tokens. Two by two blocks of sums use what is loaded twice; no other shape that
eight registers hold does better."""

PAIRS: Final = "tdpbf16ps"
INTEGERS: Final = "tdpbssd"
"""What multiplies: pairs, whose sums are float32, or fours of signed bytes, whose sums are whole
numbers of 32 bits."""

FEW: Final = 0
"""Queries or fewer are attended four tokens at a time: registers have a token a row."""
IS_PACED: Final = False
"""What will be wanted is fetched before the products, all of it."""

_INDEX = types.uintp
_INT: Final = np.uintp
_LONG: Final = ir.IntType(64)
_LINE_BYTES: Final = 64
_PAIR_BYTES: Final = 4
_ROW_REGISTERS: Final = (4, 5)
_TOKEN_REGISTERS: Final = (6, 7)
_MOST_SUMS: Final = 4


def has_integers() -> bool:
    """Whether they multiply integers, too."""
    return may_use_tiles() and bool(get_host_cpu_features().get("amx-int8"))


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


def _load_or_store(builder: Any, name: str, register: int, place: Any, pitch: Any) -> None:
    """Sixteen times 64 bytes, which are ``pitch`` bytes apart."""
    _call(builder, name, register, builder.bitcast(place, BYTE.as_pointer()), pitch)


class _Products:
    """The steps of a block's product: two by one or two registers of sums."""

    def __init__(
        self,
        context: Any,
        builder: Any,
        signature: Any,
        arguments: Any,
        instruction: str = PAIRS,
        load_rows: str = "tileloadd64",
    ) -> None:
        self.builder = builder
        self._instruction, self._load_rows = instruction, load_rows
        self._context, self._kinds, self._arguments = context, signature.args, arguments
        self._sums: dict[tuple[int, int], tuple[int, Any]] = {}

    def whole(self, value: int) -> Any:
        return ir.Constant(self._context.get_value_type(_INDEX), value)

    def address(self, number: int, index: Any) -> Any:
        """Of an element of the array that is argument ``number``."""
        array, kind = self._arguments[number], self._kinds[number]
        return address_of(self._context, self.builder, kind, array, index)

    def begin(self, number: int, num_tiles: int, place: Any, apart: Any, *, adds: bool) -> None:
        """Sums of ROWS rows and a tile begin at ``place``, those of the next tile ``apart``."""
        builder, line = self.builder, ir.Constant(_LONG, _LINE_BYTES)
        for tile in range(num_tiles):
            first = builder.add(place, builder.mul(apart, self.whole(tile)))
            for half in range(2):
                index = builder.add(first, self.whole(half * WIDTH * WIDTH))
                register, own = 2 * half + tile, self.address(number, index)
                self._sums[half, tile] = register, own
                if adds:
                    _load_or_store(builder, "tileloadd64", register, own, line)
                else:
                    _call(builder, "tilezero", register)

    def multiply(self, rows: Sequence[Any], pitch: Any, tiles: Sequence[Any]) -> None:
        """Sixteen pairs of twice sixteen rows, which begin at ``rows`` and are ``pitch`` bytes
        apart, and of one or two ``tiles``."""
        builder, line = self.builder, ir.Constant(_LONG, _LINE_BYTES)
        for register, own in zip(_ROW_REGISTERS, rows, strict=True):
            _load_or_store(builder, self._load_rows, register, own, pitch)
        for register, own in zip(_TOKEN_REGISTERS, tiles, strict=False):
            _load_or_store(builder, "tileloadd64", register, own, line)
        for half, register in enumerate(_ROW_REGISTERS):
            for tile in range(len(tiles)):
                sums = self._sums[half, tile][0]
                _call(builder, self._instruction, sums, register, _TOKEN_REGISTERS[tile])

    def end(self) -> None:
        for register, own in self._sums.values():
            line = ir.Constant(_LONG, _LINE_BYTES)
            _load_or_store(self.builder, "tilestored64", register, own, line)


def add_tile_products(num_tiles: int, instruction: str) -> Any:
    """What adds to sums[place + 16 r + i] the products of row r of a panel and x[at + 16 k + i],
    over ``count`` pairs k, whole sixteens, for sixteen tokens i and ROWS rows r. Of a second tile,
    x lies ``apart``, and sums ``sums_apart``. Sums are float32, or as wide, as the ``instruction``
    has it.

    A panel holds sixteen pairs of one row after the other, then the next sixteen. Meanwhile the
    rows from number ``low`` to ``high`` of the next panel are laid, as many of their pairs as are
    multiplied but no more than ``width``: they begin at source[start] and are ``pitch`` apart. What
    lies ``ahead`` of them is fetched where there are two tiles: with one, rows are waited for
    whatever is fetched.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, at, apart, count, _, place, sums_apart, *coming = arguments
        _, _, start, pitch, low, high, width, ahead = coming
        own = _Products(context, builder, signature, arguments, instruction)
        own.begin(5, num_tiles, place, sums_apart, adds=True)
        with cgutils.for_range(builder, builder.udiv(count, own.whole(WIDTH))) as step:
            begun = builder.mul(step.index, own.whole(WIDTH))
            line = builder.mul(begun, own.whole(ROWS))
            halves = [own.address(0, line)]
            halves.append(builder.gep(halves[0], [own.whole(WIDTH * WIDTH)]))
            tokens = builder.add(at, builder.mul(begun, own.whole(WIDTH)))
            tiles = [
                own.address(1, builder.add(tokens, builder.mul(apart, own.whole(tile))))
                for tile in range(num_tiles)
            ]
            own.multiply(halves, ir.Constant(_LONG, _LINE_BYTES), tiles)
            is_there = builder.icmp_unsigned("<", begun, width)
            last = builder.select(is_there, high, low)
            with cgutils.for_range(builder, last, start=low) as row:
                source = builder.add(start, builder.mul(row.index, pitch))
                source = builder.add(source, begun)
                if num_tiles == TILES:
                    # It waits for nothing, where all that follows a load may wait for that.
                    fetch(builder, own.address(9, builder.add(source, ahead)), near=False)
                source = own.address(9, source)
                target = builder.add(line, builder.mul(row.index, own.whole(WIDTH)))
                kind = FLOATS.as_pointer()
                found = builder.load(builder.bitcast(source, kind), align=4)
                place_there = builder.bitcast(own.address(8, target), kind)
                builder.store(found, place_there, align=_LINE_BYTES)
        own.end()
        return context.get_dummy_value()

    @intrinsic
    def add(  # type: ignore[no-untyped-def]
        context,
        panel,
        x,
        at,
        apart,
        count,
        sums,
        place,
        sums_apart,
        next_panel,
        source,
        start,
        pitch,
        low,
        high,
        width,
        ahead,
    ):
        first = panel, x, _INDEX, _INDEX, _INDEX, sums, _INDEX, _INDEX
        return types.none(*first, next_panel, source, *[_INDEX] * 6), generate

    return add


def _tile_products(num_tiles: int, *, adds: bool) -> Any:
    """What ``put_products`` does with so many tiles, or ``add_products`` does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, pitch, _, at, apart, count, _, place, sums_apart = arguments
        own = _Products(context, builder, signature, arguments)
        own.begin(7, num_tiles, place, sums_apart, adds=adds)
        second = builder.add(start, builder.mul(pitch, own.whole(WIDTH)))
        line = builder.mul(pitch, own.whole(_PAIR_BYTES))
        with cgutils.for_range(builder, builder.udiv(count, own.whole(WIDTH))) as step:
            begun = builder.mul(step.index, own.whole(WIDTH))
            rows = [own.address(0, builder.add(half, begun)) for half in (start, second)]
            tokens = builder.add(at, builder.mul(begun, own.whole(WIDTH)))
            tiles = [
                own.address(3, builder.add(tokens, builder.mul(apart, own.whole(tile))))
                for tile in range(num_tiles)
            ]
            own.multiply(rows, line, tiles)
        own.end()
        return context.get_dummy_value()

    @intrinsic
    def put(context, rows, start, pitch, x, at, apart, count, sums, place, sums_apart):  # type: ignore[no-untyped-def]
        kinds = rows, _INDEX, _INDEX, x, _INDEX, _INDEX, _INDEX, sums, _INDEX, _INDEX
        return types.none(*kinds), generate

    return put


_PUT: Final = _tile_products(TILES, adds=False)
_ADD: Final = _tile_products(TILES, adds=True)


@uncounted
def put_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles):  # type: ignore[no-untyped-def]
    """Make sums[place + 16 r + i] the products of rows[start + pitch r + k] and x[at + 16 k + i],
    over ``count`` pairs k, whole sixteens, for sixteen i and ROWS rows r. Of further tiles, an even
    number of them, x lies ``apart``, and sums ``sums_apart``."""
    for tile in range(0, num_tiles, TILES):
        own, to = at + _INT(tile) * apart, place + _INT(tile) * sums_apart
        _PUT(rows, start, pitch, x, own, apart, count, sums, to, sums_apart)


@uncounted
def add_products(rows, start, pitch, x, at, apart, count, sums, place, sums_apart, num_tiles):  # type: ignore[no-untyped-def]
    """Add the same to what is there."""
    for tile in range(0, num_tiles, TILES):
        own, to = at + _INT(tile) * apart, place + _INT(tile) * sums_apart
        _ADD(rows, start, pitch, x, own, apart, count, sums, to, sums_apart)


def block_products(num_tiles: int, instruction: str, *, adds: bool) -> Any:
    """What makes sums[place + 16 r + i] the products of row r of two strips, the first of which
    begins at block[start], and x[at + 16 k + i], over ``count`` pairs k, whole sixteens, for
    sixteen tokens i and ROWS rows r, or ``adds`` them to what is there. The other strip, and of a
    second tile x, lie ``apart``, and sums ``sums_apart``.

    A strip holds sixteen pairs of each of sixteen rows, then the next sixteen: two are read side by
    side faster than one of thirty-two rows. They pass the nearest cache without staying there.
    For each sixteen pairs ``lines`` cache lines of each tile are brought to the second cache, one
    after the other from x[ahead] on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, _, at, apart, count, _, place, sums_apart, ahead, lines = arguments
        own = _Products(context, builder, signature, arguments, instruction, "tileloaddt164")
        own.begin(6, num_tiles, place, sums_apart, adds=adds)
        with cgutils.for_range(builder, builder.udiv(count, own.whole(WIDTH))) as step:
            begun = builder.mul(step.index, own.whole(WIDTH))
            square = builder.mul(begun, own.whole(WIDTH))
            line = builder.add(start, square)
            halves = [own.address(0, builder.add(line, half)) for half in (own.whole(0), apart)]
            tokens = builder.add(at, square)
            further = [builder.mul(apart, own.whole(tile)) for tile in range(num_tiles)]
            tiles = [own.address(2, builder.add(tokens, tile)) for tile in further]
            own.multiply(halves, ir.Constant(_LONG, _LINE_BYTES), tiles)
            coming = builder.add(ahead, builder.mul(begun, lines))
            with cgutils.for_range(builder, lines) as ahead_line:
                next_line = builder.mul(ahead_line.index, own.whole(WIDTH))
                next_line = builder.add(coming, next_line)
                for tile in further:
                    fetch(builder, own.address(2, builder.add(next_line, tile)), near=False)
        own.end()
        return context.get_dummy_value()

    @intrinsic
    def put(context, block, start, x, at, apart, count, sums, place, sums_apart, ahead, lines):  # type: ignore[no-untyped-def]
        kinds = block, _INDEX, x, _INDEX, _INDEX, _INDEX, sums, _INDEX, _INDEX, _INDEX, _INDEX
        return types.none(*kinds), generate

    return put


@intrinsic
def put_scores(context, rows, at, stride, pairs, blocks, scores, place, ahead, fours):  # type: ignore[no-untyped-def]
    """scores[place + 16 r + i] = the products of sixteen rows of bfloat16, which begin at rows[at]
    and are ``stride`` apart, and sixteen columns i of pairs [16 blocks, 16]. As many rows are
    fetched that follow each other ``ahead``. There are no ``fours``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, apart, _, count, _, to, further, _ = arguments
        own = _Products(context, builder, signature, arguments)
        line = ir.Constant(_LONG, _LINE_BYTES)
        pitch = builder.mul(apart, own.whole(2))
        with cgutils.for_range(builder, builder.mul(count, own.whole(WIDTH))) as coming:
            numbers = builder.mul(coming.index, own.whole(2 * WIDTH))
            fetch(builder, own.address(0, builder.add(further, numbers)))
        _call(builder, "tilezero", 0)
        with cgutils.for_range(builder, count) as step:
            column = builder.add(start, builder.mul(step.index, own.whole(2 * WIDTH)))
            _load_or_store(builder, "tileloadd64", 4, own.address(0, column), pitch)
            square = builder.mul(step.index, own.whole(WIDTH * WIDTH))
            _load_or_store(builder, "tileloadd64", 6, own.address(3, square), line)
            _call(builder, PAIRS, 0, 4, 6)
        _load_or_store(builder, "tilestored64", 0, own.address(5, to), line)
        return context.get_dummy_value()

    kinds = rows, _INDEX, _INDEX, pairs, _INDEX, scores, _INDEX, _INDEX, _INDEX
    return types.none(*kinds), generate


@uncounted
def lay_weights(room, weights, place):  # type: ignore[no-untyped-def]
    """Sixteen pairs of tokens by sixteen queries, turned, from ``place`` on."""
    transpose(room, _INT(0), _INT(WIDTH), weights, place)


def _each(builder: Any, own: _Products, tiles: Any) -> Any:
    """The registers of sums that are counted by ``tiles``, and how far each one's begin."""
    for tile in range(_MOST_SUMS):
        with builder.if_then(builder.icmp_unsigned("<", own.whole(tile), tiles)):
            yield tile, own.whole(tile * WIDTH * WIDTH)


@intrinsic
def begin_sums(context, sums, place, tiles, goes_on):  # type: ignore[no-untyped-def]
    """Up to four registers of sums are 0, or sums [tiles, 16, 16] from ``place`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, first, count, is_more = arguments
        own = _Products(context, builder, signature, arguments)
        line = ir.Constant(_LONG, _LINE_BYTES)
        for tile, apart in _each(builder, own, count):
            with builder.if_else(builder.icmp_unsigned("!=", is_more, own.whole(0))) as (
                then,
                rest,
            ):
                with then:
                    place = own.address(0, builder.add(first, apart))
                    _load_or_store(builder, "tileloadd64", tile, place, line)
                with rest:
                    _call(builder, "tilezero", tile)
        return context.get_dummy_value()

    return types.none(sums, _INDEX, _INDEX, _INDEX), generate


@intrinsic
def add_sums(context, weights, at, values, tiles, sums, place, queries, fours):  # type: ignore[no-untyped-def]
    """Add the products of sixteen rows of pairs from weights[at] on and sixteen times as many
    columns of values [tiles, 16, 16]. Sums are in registers, of however many ``queries``; there
    are no ``fours``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, start, _, count, _, _, _, _ = arguments
        own = _Products(context, builder, signature, arguments)
        line = ir.Constant(_LONG, _LINE_BYTES)
        _load_or_store(builder, "tileloadd64", 4, own.address(0, start), line)
        for tile, apart in _each(builder, own, count):
            register = 5 + tile % 3
            _load_or_store(builder, "tileloadd64", register, own.address(2, apart), line)
            _call(builder, PAIRS, tile, 4, register)
        return context.get_dummy_value()

    kinds = weights, _INDEX, values, _INDEX, sums, _INDEX, _INDEX, _INDEX
    return types.none(*kinds), generate


@intrinsic
def end_sums(context, sums, place, tiles):  # type: ignore[no-untyped-def]
    """sums [tiles, 16, 16] from ``place`` on = what the registers hold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, first, count = arguments
        own = _Products(context, builder, signature, arguments)
        line = ir.Constant(_LONG, _LINE_BYTES)
        for tile, apart in _each(builder, own, count):
            place = own.address(0, builder.add(first, apart))
            _load_or_store(builder, "tilestored64", tile, place, line)
        return context.get_dummy_value()

    return types.none(sums, _INDEX, _INDEX), generate
