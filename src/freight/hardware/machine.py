"""A machine as plain values: what computes, what remembers, what connects them, and how fast.

All that a planner must know of hardware, measured (a profile) or looked up (a preset). Knows no
model and no policy. Sizes are in bytes, rates per second of what the machine reaches in practice:
a preset holds achievable figures, not those of a data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from freight.errors import InputError
from freight.hardware.curve import Curve

__all__ = ["LINKS", "UNITS", "Beside", "ComputeUnit", "Link", "Machine", "TensorKind"]

TensorKind = Literal["weights", "kv", "activations"]

LINKS: Final = ("disk read", "disk write", "host to device", "device to host")
UNITS: Final = ("cpu", "gpu")
_SLEEP_S: Final = 1e-4
"""How much later than asked for a copy over a simulated link ends."""
_SHARED_SLEEP_S: Final = 5e-4
"""The same where arithmetic has threads on all cores, one of which must first be had back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeUnit:
    """A processor with a memory of its own.

    ``products`` are FLOP/s of a matrix product by number of rows, per dtype, the matrix coming from
    memory; of "int8" with making tokens integers, and their results plain; of "codes" by a matrix
    of integers in groups, of "exponents" by one with short exponents. ``attention_flops`` is what
    attention over prompts reaches, per dtype; ``attended_bytes_per_s`` how fast keys and values are
    read by rows with one query each, by the number of query heads that share a key head;
    ``attended_head_s`` comes to that for each row and key head, however few its keys.
    ``attended_codes_per_s`` are numbers of compressed keys and values read likewise, None where
    that is not known.
    ``memory_bytes_per_s`` is what a simple pass over values moves, reads and writes together.
    ``dequantised_per_s`` is how many compressed weights become plain in a second, which they do on
    a GPU for each chunk where products by "codes" are not known; 0 where that is not known.
    ``call_s`` is the fixed time of one unit of the model for one chunk of rows, ``sweep_s`` that of
    a micro-batch in a sweep: choosing tokens, book-keeping. ``passes`` is how often a "norm", a
    "rotation" and "silu" with what it gates pass over their value, where it was measured, and how
    often the last does as a "gate" that products may take in: then not at all. ``is_inline``: a
    device that is only simulated computes in the thread that asks it to.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    products: Mapping[str, Curve]
    attention_flops: Mapping[str, float]
    attended_bytes_per_s: Curve
    attended_head_s: float = 0.0
    attended_codes_per_s: Curve | None = None
    dequantised_per_s: float = 0.0
    call_s: float = 0.0
    sweep_s: float = 0.0
    passes: Mapping[str, float] = field(default_factory=dict)
    is_inline: bool = False

    def __post_init__(self) -> None:
        what = f"The unit {self.name!r}"
        for name in ("products", "attention_flops"):
            if not getattr(self, name):
                raise InputError(
                    f"{what} was described.",
                    f"It has no {name}.",
                    'Write a rate for a type, like {"bfloat16": 1e12}.',
                )
        _require_from_0(what, **{f"passes.{name}": often for name, often in self.passes.items()})
        rates = {f"attention_flops.{dtype}": rate for dtype, rate in self.attention_flops.items()}
        rates["memory_bytes_per_s"] = self.memory_bytes_per_s
        _require_above_0(what, rates)
        _require_from_0(what, memory_bytes=self.memory_bytes)
        _require_from_0(what, call_s=self.call_s, sweep_s=self.sweep_s)
        _require_from_0(what, attended_head_s=self.attended_head_s)
        _require_from_0(what, dequantised_per_s=self.dequantised_per_s)

    @property
    def plain_per_s(self) -> float:
        """Compressed weights that are made plain in a second; where it is not known, by the bytes
        that are read and written for each."""
        return self.dequantised_per_s or self.memory_bytes_per_s / 3.0

    def attended_s(self, num_bytes: float, num_codes: float, sharing: float) -> float:
        """Reading so many bytes of plain keys and values, or, where they are compressed, so many
        numbers, for single queries of which ``sharing`` have the same. Where it is not known they
        are made plain, of two bytes each, and read then."""
        plain_s = num_bytes / self.attended_bytes_per_s.at(sharing)
        if not num_codes:
            return plain_s
        if self.attended_codes_per_s is not None:
            return plain_s + num_codes / self.attended_codes_per_s.at(sharing)
        made_plain_s = num_codes / self.plain_per_s
        return plain_s + made_plain_s + 2.0 * num_codes / self.attended_bytes_per_s.at(sharing)

    def product_flops(self, dtype: str, num_rows: float, kind: str = "") -> float:
        """The rate of products of so many rows; of a ``kind``, "int8", "codes" or "exponents", that
        of ``dtype`` where that is all that is known."""
        known = kind in self.products
        return self.products[kind if known else self.nearest_dtype(dtype)].at(num_rows)

    def nearest_dtype(self, dtype: str) -> str:
        """The number format whose rates say most of ``dtype``: itself, another of 16 bits, or
        float32."""
        names = [dtype, *({"bfloat16", "float16"} if "16" in dtype else ()), "float32"]
        return next((name for name in names if name in self.products), next(iter(self.products)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way between two memories, one direction.

    ``bytes_per_s`` by the size of a request; ``kinds`` where tensors of one kind go at another
    rate, as keys and values in small pieces do. ``latency_s`` is added once per transfer.
    ``single_share`` of its rate is left where requests of which two are usually under way, those
    for weights on a disk, are made one by one; None where it is not known, and all is.
    """

    bytes_per_s: Curve
    kinds: Mapping[TensorKind, Curve] = field(default_factory=dict)
    latency_s: float = 0.0
    single_share: float | None = None

    def __post_init__(self) -> None:
        _require_from_0("A link", latency_s=self.latency_s)
        if self.single_share is not None:
            _require_above_0("A link", {"single_share": self.single_share})
        unknown = sorted(set(self.kinds) - set(get_args(TensorKind)))
        if unknown:
            raise InputError(
                f"A link with rates of its own for {unknown} was described.",
                f"Tensors are of the kinds {list(get_args(TensorKind))}.",
                "Name one of these, or leave the rate out.",
            )

    def seconds(
        self, num_bytes: float, kind: TensorKind, request_bytes: float, *, one_by_one: bool = False
    ) -> float:
        """For ``num_bytes`` in requests of ``request_bytes``, two at a time where that is usual."""
        if not num_bytes:
            return 0.0
        rate = self.kinds.get(kind, self.bytes_per_s).at(request_bytes)
        if one_by_one and self.single_share is not None:
            rate *= self.single_share
        return self.latency_s + num_bytes / rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """How much slower one part of the machine is while another works: the share of its speed that
    is left, by its own size (rows of a product, bytes of a request). Beside a "wait" it is what
    "compute" has left right after one."""

    part: str
    other: str
    share: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """``units`` by name ("cpu" always, "gpu" where there is one) and ``links`` by name.

    ``disk_bytes`` is the room for scratch, ``num_gpus`` like units. ``dollars_per_hour`` is the
    rent of the whole, ``watts`` its draw under load. ``host`` identifies the machine that a profile
    was measured on, ``sources`` says where each value of a preset comes from, by its path in JSON.
    """

    name: str
    description: str
    units: Mapping[str, ComputeUnit]
    links: Mapping[str, Link]
    beside: tuple[Beside, ...] = ()
    disk_bytes: int = 0
    num_gpus: int = 1
    dollars_per_hour: float | None = None
    watts: float | None = None
    host: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = {"disk read", "disk write"} if "gpu" not in self.units else set(LINKS)
        missing = sorted(({"cpu"} - set(self.units)) | (wanted - set(self.links)))
        unknown = sorted((set(self.units) - set(UNITS)) | (set(self.links) - set(LINKS)))
        if missing or unknown:
            raise InputError(
                f"The machine {self.name!r} was described.",
                f"It lacks {missing} and has {unknown}, which are not known."
                if unknown
                else f"It lacks {missing}.",
                f"A machine has units of {list(UNITS)}, links of {list(LINKS)}.",
            )
        what = f"The machine {self.name!r}"
        _require_from_0(what, disk_bytes=self.disk_bytes, num_gpus=self.num_gpus)
        _require_from_0(what, dollars_per_hour=self.dollars_per_hour or 0, watts=self.watts or 0)

    @property
    def compute_unit(self) -> ComputeUnit:
        """Where the arithmetic is done: the GPU where there is one."""
        return self.units.get("gpu", self.units["cpu"])

    def scaled(self, factors: Mapping[str, float], *, unit: str = "cpu") -> Machine:
        """The same with some parts faster or slower: links by name, "compute" for a unit."""
        own, factor = self.units[unit], factors.get("compute", 1.0)
        codes = own.attended_codes_per_s
        own = replace(
            own,
            memory_bytes_per_s=own.memory_bytes_per_s * factor,
            products={dtype: rate.scaled(factor) for dtype, rate in own.products.items()},
            attention_flops={d: rate * factor for d, rate in own.attention_flops.items()},
            attended_bytes_per_s=own.attended_bytes_per_s.scaled(factor),
            attended_codes_per_s=codes and codes.scaled(factor),
            attended_head_s=own.attended_head_s / factor,
        )
        links = {
            name: replace(
                link,
                bytes_per_s=link.bytes_per_s.scaled(factors.get(name, 1.0)),
                kinds={k: r.scaled(factors.get(name, 1.0)) for k, r in link.kinds.items()},
            )
            for name, link in self.links.items()
        }
        return replace(self, units={**self.units, unit: own}, links=links)

    def with_pageable_links(self) -> Machine:
        """The same for a program whose memory on the host is not pinned: the driver then copies
        every byte once more, through a buffer of its own, and reaches about half the rate."""
        links = {
            name: replace(
                link,
                bytes_per_s=link.bytes_per_s.scaled(0.5),
                kinds={kind: rate.scaled(0.5) for kind, rate in link.kinds.items()},
            )
            for name, link in self.links.items()
            if name in ("host to device", "device to host")
        }
        return replace(self, links={**self.links, **links})

    def with_simulated_device(
        self, memory_bytes: int, bytes_per_s: float | None, *, shares_cores: bool = True
    ) -> Machine:
        """The same with a simulated device: the CPU once more, behind links of that rate. It
        ``shares_cores`` with the CPU's own attention unless threads are few enough for both."""
        cpu = self.units["cpu"]
        # Without a limit it copies as memory does: every byte is read and written.
        most = cpu.memory_bytes_per_s / 2
        rate = min(bytes_per_s or most, most)
        late_s = _SHARED_SLEEP_S if shares_cores else _SLEEP_S
        link = Link(bytes_per_s=Curve.constant(rate), latency_s=late_s)
        device = replace(cpu, name="gpu", memory_bytes=memory_bytes, is_inline=True)
        half = Curve.constant(0.5)
        # A copy takes one of the cores for as long as it would take without a limit.
        left = Curve.constant(1.0 - 0.5 * rate / most)
        copied = (("compute", "host to device", left), ("compute", "device to host", left))
        attended = (("compute", "cpu attention", half), ("cpu attention", "compute", half))
        shared = (*attended, *copied) if shares_cores else ()
        return replace(
            self,
            beside=(
                *self.beside,
                *(Beside(part=part, other=other, share=share) for part, other, share in shared),
            ),
            units={"cpu": cpu, "gpu": device},
            links={**self.links, "host to device": link, "device to host": link},
        )

    def is_inline(self, unit: str) -> bool:
        """Whether the thread that issues operations also computes, and so holds later ones up."""
        return unit == "cpu" or self.units[unit].is_inline

    def share_beside(self, part: str, others: frozenset[str], size: float) -> float:
        """The share of its speed that a part keeps while ``others`` work."""
        return math.prod(curve.at(size) for curve in self.shares_beside(part, others))

    def shares_beside(self, part: str, others: frozenset[str]) -> tuple[Curve, ...]:
        """What each of ``others`` leaves of a part's speed, where that is known, by its size."""
        return tuple(own.share for own in self.beside if own.part == part and own.other in others)


def _require_above_0(what: str, numbers: Mapping[str, float]) -> None:
    wrong = {name: own for name, own in numbers.items() if not (_is_finite(own) and own > 0)}
    _refuse(what, wrong, "Write a number above 0 for each.")


def _require_from_0(what: str, **numbers: float) -> None:
    wrong = {name: own for name, own in numbers.items() if not (_is_finite(own) and own >= 0)}
    _refuse(what, wrong, "Write a number from 0 for each.")


def _is_finite(value: object) -> bool:
    """Files may hold anything in the place of a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -math.inf < value < math.inf  # type: ignore[operator]


def _refuse(what: str, wrong: Mapping[str, float], advice: str) -> None:
    """InputError if there are any; it names them all."""
    if wrong:
        found = ", ".join(f"{name} of {number!r}" for name, number in wrong.items())
        raise InputError(f"{what} was described.", f"It has {found}.", advice)
