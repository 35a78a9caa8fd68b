"""Triton's kernels compiled for devices that need not be there, as far as machine code.

The interpreter takes what a device's compiler may refuse. Launches are intercepted: of each, the
types of its inputs and its constants go to the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = """
import sys
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from freight.kernels.cuda.attention import attend
from freight.kernels.cuda.append import append, append_plain
from freight.kernels.cuda.recurrence import recur, convolve
from freight.kernels.cuda.tokens import normalise, rotate
from freight.kernels.cuda.eights import make_eights_plain
from freight.kernels.cuda.exponents import make_exponents_plain
from freight.kernels.cuda.levels import make_levels_plain
from freight.kernels.cuda.micro import make_micro_plain
from freight.kernels.cuda.groups import make_plain, multiply
from freight.kernels.cuda.sets import multiply_sets
from freight.kernels.pages import Pages
from freight.kernels.state_heads import StateHeads
from freight.model.number_format import (
    EightFloats, Grouped, LevelFloats, MicroFloats, ShortExponents,
)
from freight.model.workspace import Workspace

target = GPUTarget("cuda", int(sys.argv[1]), 32)
dtype = getattr(torch, sys.argv[2])
TYPES = {
    torch.uint8: "*u8", torch.int64: "*i64", torch.float32: "*fp32", torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
OPTIONS = {"num_stages", "num_warps", "enable_fp_fusion"}


def compile_launch(self, *inputs, grid, warmup, **more):
    options = {name: more.pop(name) for name in OPTIONS & set(more)}
    values = dict(zip(self.arg_names, inputs)) | more
    values = {name: values.pop(name) for name in self.arg_names} | values
    assert list(values) == self.arg_names
    fixed = {param.name for param in self.params if param.is_constexpr}
    fixed |= {name for name, value in values.items() if value is None}
    types = {
        name: "constexpr" if name in fixed
        else TYPES[value.dtype] if isinstance(value, torch.Tensor)
        else "fp32" if isinstance(value, float) else "i32"
        for name, value in values.items()
    }
    constants = {(self.arg_names.index(name),): values[name] for name in fixed}
    made = triton.compile(ASTSource(self, types, constants), target=target, options=options)
    assert made.asm["cubin"]
    print(self.__name__)


JITFunction.run = compile_launch


def on_meta(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype, device="meta")


for own in (Grouped(bits=4, group_size=64), Grouped(bits=8, group_size=32, wide=True)):
    raw = on_meta(70, own.row_bytes(256))
    make_plain(raw, own, on_meta(70, 256, dtype=dtype))
    assert multiply(on_meta(5, 256, dtype=dtype), raw, own) is not None
across = Grouped(bits=4, group_size=64, across=True)
make_plain(on_meta(128, across.row_bytes(256)), across, on_meta(128, 256, dtype=dtype))
short = ShortExponents(spare=40)
make_exponents_plain(on_meta(70, short.row_bytes(320)), short, on_meta(70, 320, dtype=dtype))
eights = EightFloats()
make_eights_plain(on_meta(70, eights.row_bytes(320)), eights, on_meta(70, 320, dtype=dtype))
micro = MicroFloats()
make_micro_plain(on_meta(70, micro.row_bytes(96)), micro, on_meta(70, 96, dtype=dtype))
for size, in_bytes in ((16, True), (64, False)):
    levels = LevelFloats(levels="e2m1", group_size=size, in_bytes=in_bytes)
    make_levels_plain(on_meta(70, levels.row_bytes(320)), levels, on_meta(70, 320, dtype=dtype))
sets = on_meta(3, 4, dtype=torch.int64)
for most, some in ((5, {"has_bias": True, "adds": False}), (64, {"has_bias": False, "adds": True})):
    x, out = on_meta(70, 256, dtype=dtype), on_meta(70, 96, dtype=dtype)
    multiply_sets(x, sets, out, most_tokens=most, **some)
x, gain = on_meta(5, 300, dtype=dtype), on_meta(300, dtype=dtype)
for centred in (False, True):
    assert normalise(x, x, gain, gain if centred else None, num_heads=1, eps=1e-5, centred=centred,
                     adds_one=not centred)
    assert normalise(x, x, gain[:100], None, num_heads=3, eps=1e-5, centred=centred, adds_one=False)
assert rotate(x, 3, x[:, :40], x[:, :40], pairs=False)
class Rows:
    def table(self, device):
        return on_meta(4, 3, dtype=torch.int64)


for bias in (None, gain):
    columns = on_meta(5, 3, 300, dtype=dtype)
    assert convolve(x, on_meta(300, 4, dtype=dtype), bias, columns, Rows())
for width in (128, 96):
    x = on_meta(5, 2 * 2 * width + 4 * width, dtype=dtype)
    rate, own = on_meta(5, 4, dtype=dtype), on_meta(4, dtype=torch.float32)
    memory = on_meta(5, 4, width, width, dtype=torch.float32)
    out = on_meta(5, 4 * width, dtype=dtype)
    heads = StateHeads(num_key_heads=2, num_heads=4, key_width=width, value_width=width)
    assert recur(x, rate, rate, own, own, None, memory, out, heads=heads, rows=Rows())
    assert recur(x, rate, None, own, own, own, memory, out, heads=heads, rows=Rows())
    by_row = replace(heads, by_row=True)
    rates = [on_meta(5, 4 * width, dtype=dtype), rate, own, on_meta(4 * width, dtype=torch.float32)]
    for each in (by_row, replace(by_row, bound=5.0)):
        assert recur(x, *rates, None, memory, out, heads=each, rows=Rows())
ids = on_meta(2, dtype=torch.int64)
nibbles, bytes_ = Grouped(bits=4, group_size=64), Grouped(bits=8, group_size=40)
for kept, width in ((None, 128), (None, 80), (nibbles, 128), (bytes_, 80)):
    size = width * dtype.itemsize if kept is None else kept.row_bytes(width)
    pages = Pages(
        raw=on_meta(100, 2 * 2 * 16 * size), num_heads=2, page_tokens=16, width=width, dtype=dtype,
        number_format=kept,
    )
    put = append_plain if kept is None else append
    assert put(pages, ids, ids, *[on_meta(2, 2, width, dtype=dtype)] * 2) is not False
    q, lse = on_meta(2, 8, width, dtype=dtype), on_meta(2, 8, dtype=torch.float32)
    rows = on_meta(2 * 2 * 40, dtype=torch.int64)
    attend(q, pages, rows, ids, q, scale=0.1, softcap=30.0, window=None, lse=lse,
           workspace=Workspace(on_meta(1 << 20)))
    attend(q, pages, rows, ids, q, scale=0.1, softcap=None, window=100)
"""


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("80", "bfloat16"),
        pytest.param("75", "float16", marks=pytest.mark.slow),
        pytest.param("90", "float32", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles(architecture: str, dtype: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, architecture, dtype],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    kernels = {"_make_plain", "_make_plain_across", "_make_exponents_plain", "_multiply"}
    kernels |= {"_make_micro_plain", "_make_eights_plain", "_make_levels_plain", "_multiply_sets"}
    kernels |= {"_append", "_append_plain", "_merge", "_attend_plain", "_attend_codes"}
    kernels |= {"_normalise", "_rotate", "_convolve", "_recur"}
    assert set(done.stdout.split()) == kernels
