"""Threads of OpenMP for compiled loops: they are woken and done without the interpreter.

A thread of Python has to have the interpreter's lock before it helps and after, and waits for it
behind all others: with more than a few threads that takes as long as a product of few tokens. Here
a loop, compiled, has one of the library's functions call another one on all threads, torch's own,
which are awake from the operation before.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch  # noqa: F401  its threads are meant
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import BYTE, WORD

__all__ = ["IS_THERE", "call_together", "share_ranges"]

_NAME: Final = "freight_team"
"""What compiled code, which is kept in files, calls the library's function."""
_FUNCTION: Final = "GOMP_parallel"
"""GNU's own; LLVM's and Intel's libraries have it, too, for what was compiled for GNU's."""


def _find() -> int:
    """Its address in the library that torch has loaded, 0 where there is none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = (re.search(r"/\S*/lib[gi]?omp[\d-]*[^/]*\.so[^/]*$", line) for line in lines)
    for path in dict.fromkeys(own.group() for own in found if own):
        try:
            function = getattr(ctypes.CDLL(path), _FUNCTION)
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


_ADDRESS: Final = _find()
IS_THERE: Final = _ADDRESS != 0
if IS_THERE:
    binding.add_symbol(_NAME, _ADDRESS)


def _on_threads(
    builder: Any, values: Sequence[Any], threads: Any, work: Callable[[Any, Sequence[Any]], None]
) -> None:
    """Have ``work`` written into a function that so many threads call with these values."""
    address = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [address])
    share = ir.Function(builder.module, kind, builder.module.get_unique_name("share"))
    share.linkage = "internal"
    packed = ir.LiteralStructType([value.type for value in values])
    place = cgutils.alloca_once(builder, packed)
    for number, value in enumerate(values):
        builder.store(value, cgutils.gep_inbounds(builder, place, 0, number))
    within = ir.IRBuilder(share.append_basic_block("entry"))
    whole = within.load(within.bitcast(share.args[0], packed.as_pointer()))
    work(within, [within.extract_value(whole, number) for number in range(len(values))])
    within.ret_void()
    team = ir.FunctionType(ir.VoidType(), [kind.as_pointer(), address, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, team, _NAME)
    count = builder.trunc(threads, WORD)
    builder.call(function, [share, builder.bitcast(place, address), count, ir.Constant(WORD, 0)])


def _unpacked(builder: Any, value: Any, kind: Any) -> list[Any]:
    return [builder.extract_value(value, number) for number in range(len(kind))]


@intrinsic
def call_together(typing_context, function, arguments, threads):  # type: ignore[no-untyped-def]
    """Have so many threads, this one among them, call a compiled function with a tuple of
    arguments; all have returned when this does. What it returns, or raises, nobody learns."""
    own = function.get_call_type(typing_context, tuple(arguments), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled = function.dispatcher.get_compile_result(own)
        context.active_code_library.add_linking_library(compiled.library)

        def work(within: Any, given: Sequence[Any]) -> None:
            own_values = _unpacked(within, given[0], arguments)
            context.call_internal_no_propagate(
                within, compiled.fndesc, compiled.signature, own_values
            )

        _on_threads(builder, [values[1]], values[2], work)
        return context.get_dummy_value()

    return types.void(function, arguments, threads), generate


@intrinsic
def share_ranges(typing_context, function, turns, before, after, threads):  # type: ignore[no-untyped-def]
    """The same of a function that works on a range: it is called with what comes ``before``, each
    border and the next, and what comes ``after``. ``turns`` are a counter and the borders, arrays
    of int64; the first come is the first served."""
    own = function.get_call_type(typing_context, (*before, types.int64, types.int64, *after), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled = function.dispatcher.get_compile_result(own)
        context.active_code_library.add_linking_library(compiled.library)

        def work(within: Any, given: Sequence[Any]) -> None:
            counter, borders = (
                context.make_array(kind)(context, within, value)
                for kind, value in zip(turns, _unpacked(within, given[0], turns), strict=True)
            )
            first_values = _unpacked(within, given[1], before)
            last_values = _unpacked(within, given[2], after)
            count = within.sub(borders.nitems, ir.Constant(borders.nitems.type, 1))
            one = ir.Constant(count.type, 1)
            head = within.append_basic_block("next")
            body, end = within.append_basic_block("range"), within.append_basic_block("end")
            within.branch(head)
            within.position_at_end(head)
            turn = within.atomic_rmw("add", counter.data, one, "acq_rel")
            within.cbranch(within.icmp_signed("<", turn, count), body, end)
            within.position_at_end(body)
            border = within.gep(borders.data, [turn])
            ends = [within.load(border), within.load(within.gep(border, [one]))]
            context.call_internal_no_propagate(
                within,
                compiled.fndesc,
                compiled.signature,
                [*first_values, *ends, *last_values],
            )
            within.branch(head)
            within.position_at_end(end)

        _on_threads(builder, values[1:4], values[4], work)
        return context.get_dummy_value()

    return types.void(function, turns, before, after, threads), generate
