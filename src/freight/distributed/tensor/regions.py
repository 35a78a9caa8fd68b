"""What is computed between two moves as one function, compiled by ``torch.compile``.

A layout says where moves are; what stands between them, for one rank, is a function of tensors
alone: products, norms, activations and sums. Each such region of each way is compiled when it is
first met, once for one shape and then for all, and used for every layer that is like it. Attention,
which keeps keys, and experts, whose tokens are counted, stay outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Final

import torch

from freight.distributed.tensor.looped import GatherProducts, ProductScatter, Stage
from freight.distributed.tensor.plain import PLAIN, compute_plain
from freight.distributed.tensor.vectors import Beside
from freight.errors import InputError
from freight.model.switches import ModelConfig
from freight.partition.sharded import Compute, Transfer

__all__ = [
    "Piece",
    "Region",
    "Regions",
    "in_regions",
    "names_of",
    "warm_up_compiler",
]

_LEAST_STEPS: Final = 2
"""A product alone is torch's as it is."""


@dataclass(frozen=True, slots=True)
class Region:
    """Steps that follow each other without a move; ``inputs`` are what they take from before,
    ``outputs`` what is used after them."""

    steps: tuple[Compute, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Piece = Stage | Region


def names_of(step: Piece) -> tuple[str, ...]:
    """Values that a step takes, or makes."""
    match step:
        case Transfer():
            return (step.value,)
        case Compute():
            return (*step.operands, step.out)
        case GatherProducts():
            return (step.transfer.value, *(n for own in step.products for n in names_of(own)))
        case ProductScatter():
            return names_of(step.product)
        case Region():
            return (*step.inputs, *step.outputs)


def in_regions(steps: Sequence[Stage], outputs: Mapping[str, object]) -> list[Piece]:
    """The steps, with those joined that one function can compute."""
    found: list[Piece] = []
    for begin, end in _stretches(steps):
        joined = [step for step in steps[begin:end] if isinstance(step, Compute)]
        if len(joined) < _LEAST_STEPS or any(step.kind not in PLAIN for step in joined):
            found += steps[begin:end]
            continue
        made = {step.out for step in joined}
        after = {name for step in steps[end:] for name in names_of(step)} | outputs.keys()
        taken: dict[str, None] = {}
        known: set[str] = set()
        for step in joined:
            taken |= dict.fromkeys(name for name in step.operands if name not in known)
            known.add(step.out)
        found.append(
            Region(
                # Work that is counted says nothing of what is computed, and differs by shape.
                steps=tuple(replace(step, flops=0.0) for step in joined),
                inputs=tuple(taken),
                outputs=tuple(sorted(made & after)),
            )
        )
    return found


def _stretches(steps: Sequence[Stage]) -> Iterator[tuple[int, int]]:
    """Where steps begin and end that can be joined, and each other one by itself."""
    begin = 0
    for place, step in enumerate(steps):
        if isinstance(step, Compute) and step.kind in PLAIN:
            continue
        if begin < place:
            yield begin, place
        yield place, place + 1
        begin = place + 1
    if begin < len(steps):
        yield begin, len(steps)


_Values = Mapping[str, torch.Tensor]
_Given = tuple[Beside, Sequence[torch.Tensor]]
"""Of a step: its vectors, and biases that its result is to be given."""
_Function = Callable[[_Values, Sequence[_Given]], dict[str, torch.Tensor]]


class Regions:
    """Compiled functions of one model, by what they compute, made by a ``backend`` of
    ``torch.compile``."""

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._compiled: dict[Region, _Function] = {}

    def compute(
        self, own: Region, config: ModelConfig, values: _Values, given: Sequence[_Given]
    ) -> dict[str, torch.Tensor]:
        """The outputs of a region on one rank."""
        function = self._compiled.get(own)
        if function is None:
            made = _function(own, config)
            function = torch.compile(made, fullgraph=True, backend=self._backend)
            self._compiled[own] = function
        return function(values, given)


def _function(own: Region, config: ModelConfig) -> _Function:
    def compute(values: _Values, given: Sequence[_Given]) -> dict[str, torch.Tensor]:
        known = dict(values)
        for step, (beside, biases) in zip(own.steps, given, strict=True):
            made = compute_plain(config, step, [known[name] for name in step.operands], beside)
            for bias in biases:
                made = made + bias
            known[step.out] = made
        return {name: known[name] for name in own.outputs}

    # What torch compiles is kept with the code, of which there is to be one for each region.
    return FunctionType(
        compute.__code__.replace(), compute.__globals__, "region", None, compute.__closure__
    )


def warm_up_compiler() -> None:
    """Load the compiler and try it, so that what it takes is there before memory is counted.

    InputError where there is none."""
    # Each rank's workers would take memory that no budget counts.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    x = torch.ones(8)
    try:
        if shutil.which("c++") is None and shutil.which("g++") is None and x.device.type == "cpu":
            raise RuntimeError("there is no C++ compiler")
        torch.compile(lambda own: own * 2 + 1)(x)
    except Exception as error:
        raise InputError(
            "--torch-compile was given.",
            f"torch.compile does not work here: {str(error).splitlines()[0]}",
            "Install a C++ compiler (g++), or leave it out.",
        ) from error
