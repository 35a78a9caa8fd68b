"""Threads of OpenMP for compiled loops: they are woken and done without the interpreter.

A thread of Python has to have the interpreter's lock before it helps and after, and waits for it
behind all others: with more than a few threads that takes as long as a product of few tokens. Here
a loop, compiled, has one of the library's functions call another one on all threads, torch's own,
which are awake from the operation before.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Final

import torch  # noqa: F401  its threads are meant
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freight.kernels.llvm import BYTE, WORD

__all__ = ["IS_THERE", "call_together"]

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


@intrinsic
def call_together(typing_context, function, arguments, threads):  # type: ignore[no-untyped-def]
    """Have so many threads, this one among them, call a compiled function with a tuple of
    arguments; all have returned when this does. What it returns, or raises, nobody learns."""
    own = function.get_call_type(typing_context, tuple(arguments), {})
    signature = types.void(function, arguments, threads)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled = function.dispatcher.get_compile_result(own)
        context.active_code_library.add_linking_library(compiled.library)
        place = cgutils.alloca_once_value(builder, values[1])
        address = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [address])
        share = ir.Function(builder.module, kind, builder.module.get_unique_name("share"))
        share.linkage = "internal"
        within = ir.IRBuilder(share.append_basic_block("entry"))
        whole = within.load(within.bitcast(share.args[0], place.type))
        given = [within.extract_value(whole, number) for number in range(len(arguments))]
        context.call_internal_no_propagate(within, compiled.fndesc, compiled.signature, given)
        within.ret_void()
        team = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [kind.as_pointer(), address, WORD, WORD]),
            _NAME,
        )
        count = builder.trunc(values[2], WORD)
        builder.call(team, [share, builder.bitcast(place, address), count, ir.Constant(WORD, 0)])
        return context.get_dummy_value()

    return signature, generate
