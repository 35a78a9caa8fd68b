"""The policy: what lives where, how many rows are computed together, and what overlaps.

A plain value. Whether it fits is judged by ``footprint``, what it does by ``schedule``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from freight.errors import InputError

__all__ = [
    "ADMISSIONS",
    "LEAST_STAGED",
    "ROUNDING",
    "RULES",
    "TIERS",
    "Admission",
    "Policy",
    "Split",
    "Tier",
    "find_rule",
]

Admission = Literal["zigzag", "diagonal", "refill"]
ADMISSIONS: Final[tuple[Admission, ...]] = ("zigzag", "diagonal", "refill")
Tier = Literal["gpu", "cpu", "disk"]
TIERS: Final[tuple[Tier, ...]] = ("gpu", "cpu", "disk")


ROUNDING: Final = 0.02
"""How far from 100 percentages may sum up."""
LEAST_STAGED: Final = 3
"""One piece is read, one is passed on, one is ready."""
RULES: Final = ("auto", "row", *ADMISSIONS)
"""What may be asked for: "row" is zig-zag with one micro-batch."""


def find_rule(name: str) -> Admission | None:
    """The rule of that name among :data:`RULES`; None for "auto". Raises InputError."""
    if name not in RULES:
        raise InputError(
            f"--admission {name} was given.", "It is not known.", f"Use one of {', '.join(RULES)}."
        )
    asked = "zigzag" if name == "row" else name
    return next((rule for rule in ADMISSIONS if rule == asked), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Shares of one kind of tensor on each tier, in [0, 1], one in all."""

    gpu: float = 0.0
    cpu: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.gpu, self.cpu, self.disk)
        if any(not 0 <= share <= 1 for share in shares) or not math.isclose(sum(shares), 1):
            raise InputError(
                f"Shares of {'/'.join(f'{100 * own:g}' for own in shares)} % on gpu/cpu/disk "
                "were given.",
                "Shares are at least 0 and sum to 100 %.",
                "Write them like 20/80/0.",
            )

    @classmethod
    def of_percent(cls, gpu: float, cpu: float, disk: float) -> Split:
        """Of percentages, which may have been rounded where they were written down."""
        total = gpu + cpu + disk
        near = total if abs(total - 100) <= ROUNDING else 100.0
        return cls(gpu=gpu / near, cpu=cpu / near, disk=disk / near)

    @classmethod
    def rest_on_disk(cls, shares: Mapping[Tier, float]) -> Split:
        """With these shares on the other tiers."""
        gpu, cpu = shares["gpu"], shares["cpu"]
        return cls(gpu=gpu, cpu=cpu, disk=max(0.0, 1 - gpu - cpu))

    def share(self, tier: Tier) -> float:
        return {"gpu": self.gpu, "cpu": self.cpu, "disk": self.disk}[tier]

    def cut(self, num_items: int) -> dict[Tier, int]:
        """Whole items per tier: fastest tier first, each border rounded to the nearest item."""
        first = min(num_items, round(num_items * self.gpu))
        second = min(num_items, round(num_items * (self.gpu + self.cpu)))
        return {"gpu": first, "cpu": second - first, "disk": num_items - second}

    def __str__(self) -> str:
        """Percentages that sum to 100 as they are written; the last tier that has any takes what
        rounding leaves."""
        shares = (self.gpu, self.cpu, self.disk)
        hundredths = [math.floor(10000 * share + 1e-6) for share in shares]
        last = max(place for place, share in enumerate(shares) if share)
        hundredths[last] += 10000 - sum(hundredths)
        return "/".join(f"{own / 100:g}" for own in hundredths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a block of rows is run.

    ``compute_tier`` is where arithmetic finds its operands: "gpu" for CUDA and the simulated
    device, "cpu" where the CPU computes (then nothing may be put on gpu). ``embedding`` is the
    split of the table that rows are looked up in, None for that of the weights. A block is
    ``num_micro_batches`` micro-batches of ``micro_batch_size`` rows. ``max_batch_tokens`` bounds
    the tokens that a micro-batch brings to one sweep; ``chunk_tokens`` bounds how many of them are
    in the arithmetic at once. ``page_tokens`` tokens of one row and layer make a page of KV cache,
    ``piece_bytes`` is the largest read or copy of one unit's weights, and a block of their ring has
    no more; ``staging_pieces`` of them, read from the disk, may wait in RAM for a device's link.
    ``cpu_attention`` is the share of the rows off the device, on RAM and on disk alike, whose keys
    the CPU attends where they are; the others' cross the link. In the share ``recomputed`` of the
    layers rows off the compute tier keep what comes into attention, which is narrower than many
    heads of keys and values: these are computed of it again for every sweep.

    ``admission`` says when rows enter the block. "zigzag": all together, when the last of those
    before has ended. "diagonal": a row in every so many sweeps, so that ages are spread evenly over
    the longest answer. "refill": as rows end, ``entry_pace`` times as fast as they do at most.
    The block has pages for ``row_tokens`` tokens per row then, which is less than the longest row;
    0: each row has pages for all its life. ``moves_rows``: rows that are under way then move to
    faster tiers when nobody enters any more and others have left room there, and to slower ones
    where they grow beyond what their tier has. ``shares_prefixes``: what prompts begin with alike
    is computed once. ``rolls_windows``: layers with an attention window keep the pages alone that
    it reaches, where that is less than all. ``forgets_keys``: rows that make one token alone keep
    no keys beyond the layer and the micro-batch. Beside the token that it has a row brings up to
    ``draft_tokens`` guesses at those that follow. ``blocks_in_flight`` are the blocks whose keys
    and values are held at once: a stage of a pipeline sweeps over one while others are at other
    stages.
    """

    compute_tier: Tier
    weights: Split
    kv: Split
    activations: Split
    micro_batch_size: int
    num_micro_batches: int
    max_batch_tokens: int
    chunk_tokens: int = 512
    page_tokens: int = 16
    piece_bytes: int = 4 << 20
    staging_pieces: int = LEAST_STAGED
    overlap: bool = True
    embedding: Split | None = None
    cpu_attention: float = 0.0
    recomputed: float = 0.0
    admission: Admission = "zigzag"
    entry_pace: float = 1.0
    row_tokens: int = 0
    moves_rows: bool = True
    shares_prefixes: bool = True
    rolls_windows: bool = True
    forgets_keys: bool = True
    draft_tokens: int = 0
    blocks_in_flight: int = 1

    def __post_init__(self) -> None:
        self._check_cpu_attention()
        self._check_recomputed()
        for name in ("micro_batch_size", "num_micro_batches", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"{name}={getattr(self, name)} was given.",
                    f"{name} is at least 1.",
                    "Raise it, or leave the flag out for the default.",
                )
        for split in (self.weights, self.kv, self.activations):
            if self.compute_tier == "cpu" and split.gpu:
                raise InputError(
                    f"{split.gpu:.0%} was to be placed on the gpu tier.",
                    "This run computes on the CPU: its tiers are cpu and disk.",
                    "Give shares as cpu/disk, or choose a device with --device.",
                )

    def _check_cpu_attention(self) -> None:
        if not 0 <= self.cpu_attention <= 1:
            raise InputError(
                f"{self.cpu_attention:.4g} of the rows were to be attended on the CPU.",
                "It is a share from 0 to 1.",
                "Write --cpu-attention as percent, from 0 to 100.",
            )
        if self.cpu_attention and self.compute_tier == "cpu":
            raise InputError(
                f"{self.cpu_attention:.0%} of the rows were to be attended on the CPU.",
                "This run computes on the CPU: all rows are attended there.",
                "Leave --cpu-attention out.",
            )

    def _check_recomputed(self) -> None:
        if not 0 <= self.recomputed <= 1:
            raise InputError(
                f"Keys and values of {self.recomputed:.4g} of the layers were to be recomputed.",
                "It is a share from 0 to 1.",
                "Write --recompute-kv as percent, from 0 to 100.",
            )
        if self.recomputed and self.cpu_attention:
            raise InputError(
                f"Keys and values of {self.recomputed:.0%} of the layers were to be recomputed, "
                f"and {self.cpu_attention:.0%} of the rows to be attended on the CPU.",
                "The CPU attends keys where they are: of recomputed ones there are none in RAM.",
                "Choose one of --recompute-kv and --cpu-attention.",
            )

    def recomputes(self, num_layers: int) -> tuple[bool, ...]:
        """For each layer, whether it is one of those; they are spread evenly."""
        count = round(self.recomputed * num_layers)
        if not count:
            return (False,) * num_layers
        return tuple(
            (layer + 1) * count // num_layers > layer * count // num_layers
            for layer in range(num_layers)
        )

    @property
    def is_continuous(self) -> bool:
        """Whether rows enter while others are under way."""
        return self.admission != "zigzag"

    @property
    def block_rows(self) -> int:
        return self.micro_batch_size * self.num_micro_batches

    @property
    def most_made(self) -> int:
        """The most tokens of a micro-batch after which one is drawn."""
        return self.micro_batch_size * (1 + self.draft_tokens)

    @property
    def most_spans(self) -> int:
        """The most rows of a micro-batch that bring tokens: with each the beginning of its prompt
        may come, and one that a row which gave way has left."""
        return 2 * self.micro_batch_size + 1 if self.shares_prefixes else self.micro_batch_size

    def homes(self, num_rows: int) -> tuple[tuple[Tier, bool, int], ...]:
        """Where a micro-batch's rows live, in order: tier, whether the CPU attends them, and how
        many rows. Those that it attends come last."""
        cut = self.kv.cut(num_rows)
        delegated = self._delegated(cut)
        own = ((tier, False, count - delegated.get(tier, 0)) for tier, count in cut.items())
        return (*own, *((tier, True, count) for tier, count in delegated.items()))

    def seats(self) -> list[tuple[Tier, bool]]:
        """Of one micro-batch, in the order of its rows: tier, and whether the CPU attends them."""
        homes = self.homes(self.micro_batch_size)
        return [(tier, is_delegated) for tier, is_delegated, count in homes for _ in range(count)]

    def most_delegated(self) -> dict[Tier, int]:
        """The most rows of a micro-batch, full or not, on each tier that the CPU attends."""
        if not self.cpu_attention or self.compute_tier == "cpu":
            return {"cpu": 0, "disk": 0}
        return {**_most_delegated(self.kv, self.micro_batch_size, self.cpu_attention)}

    def _delegated(self, cut: Mapping[Tier, int]) -> dict[Tier, int]:
        if self.compute_tier == "cpu":
            return {}
        return _attended_of(cut, self.cpu_attention)


def _attended_of(cut: Mapping[Tier, int], share: float) -> dict[Tier, int]:
    away: tuple[Tier, ...] = ("cpu", "disk")
    return {tier: round(share * cut[tier]) for tier in away}


@lru_cache(maxsize=4096)
def _most_delegated(kv: Split, num_rows: int, share: float) -> dict[Tier, int]:
    own = [_attended_of(kv.cut(count), share) for count in range(num_rows + 1)]
    return {tier: max(counts[tier] for counts in own) for tier in own[0]}
