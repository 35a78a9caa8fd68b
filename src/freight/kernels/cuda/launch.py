"""What the kernels' callers share: sizes, and the type that a tensor core is given."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

__all__ = ["dot_type", "multiprocessors", "power_of_two"]

_TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def power_of_two(count: int) -> int:
    """The least one that is no smaller: what a block may measure."""
    return int(triton.next_power_of_2(count))


def dot_type(x: torch.Tensor) -> Any:
    """What a product's operands are: the tensor's own type, in which all codes are exact. Triton's
    interpreter has no arithmetic in bfloat16 and computes in float32."""
    if x.device.type == "cpu" and x.dtype is torch.bfloat16:
        return tl.float32
    return _TYPES[x.dtype]


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, at the least; of the interpreter, any number."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
