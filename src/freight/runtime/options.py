"""What a caller may ask of the engine besides the rows: memory, placement, device, number format.

A plain value: no torch, no probing of the machine. It refuses what can be refused without knowing
the machine or the model; whether a policy fits is the planner's question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freight.errors import InputError
from freight.hardware.machine import Machine
from freight.model.approximation import check_share
from freight.model.number_format import (
    GROUP_SIZE,
    Compression,
    ExactCompression,
    check_groups,
    find_compression,
    fit_head,
)
from freight.model.task import TASKS
from freight.plan.policy import ROUNDING, Admission, find_rule

__all__ = ["DEVICES", "DTYPES", "EngineOptions", "Shares"]

Shares = tuple[float, float, float]
"""Percent on gpu, cpu and disk; they sum to 100."""

MOST_DRAFT_TOKENS: Final = 32
DEVICES: Final = ("auto", "cuda", "cpu", "sim")
DTYPES: Final = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How the engine is to run; ``None`` leaves the choice to the engine.

    ``cpu_memory_bytes`` bounds the whole process, ``gpu_memory_bytes`` all that is taken of the
    device. ``*_percent`` are :data:`Shares`. ``cpu_attention_percent`` is of the rows off the
    device, and the CPU attends them. ``admission`` says when rows enter a block, ``batch_tokens``
    the most that a micro-batch brings to a sweep: longer prompts come in chunks. A row may bring up
    to ``draft_tokens`` guesses at what it says next, which change no answer. Beginnings of
    prompts that rows have alike are computed once where they may ``share_prefixes``; layers with an
    attention window keep the pages alone that it reaches where the engine may ``roll_windows``, and
    rows under way change tiers where it may ``move_rows``. ``lossless`` keeps bfloat16 weights with
    short exponents, ``weight_bits`` compresses the matrices to integers in groups of ``group_size``
    along their ``group_dim``, both kept in ``compressed_dir`` for later runs; ``kv_bits`` keys and
    values in groups of a head; ``compute`` "int8" makes products of 8-bit integers, on CPUs that
    are fast at it, of weights that are kept likewise. Of the keys of a single query the share
    ``sparse_attention`` counts. ``disk_dir`` holds offloaded KV cache and activations, or a rank's
    parts of layers.
    ``sim_bytes_per_s`` caps the links of the simulated device.
    ``dummy_seed`` asks for random weights, made from config.json alone with this seed. ``verify``
    proves every operation legal before it runs. ``task`` is what the model is run for, by its files
    if "auto". ``trace_path`` is where the times of all operations
    are written. ``machine`` has this machine's rates: with them a run is predicted."""

    task: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    cpu_memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    disk_dir: Path | None = None
    weights_percent: Shares | None = None
    kv_percent: Shares | None = None
    activations_percent: Shares | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    cpu_attention_percent: float | None = None
    recompute_percent: float | None = None
    admission: str = "auto"
    batch_tokens: int | None = None
    draft_tokens: int = 0
    share_prefixes: bool = True
    roll_windows: bool = True
    move_rows: bool = True
    lossless: bool = False
    weight_bits: int | None = None
    kv_bits: int | None = None
    group_size: int = GROUP_SIZE
    group_dim: str = "input"
    sparse_attention: float | None = None
    compute: str = "plain"
    compressed_dir: Path | None = None
    overlap: bool = True
    sim_bytes_per_s: int | None = None
    dummy_seed: int | None = None
    verify: bool = False
    trace_path: Path | None = None
    machine: Machine | None = None

    def __post_init__(self) -> None:
        self._check_names()
        _ = self.compression, self.rule  # refuse what is not known, or does not go together
        self._check_amounts()
        self._check_shares()

    @property
    def compression(self) -> Compression | ExactCompression | None:
        """How the matrices are to be compressed."""
        return find_compression(
            weight_bits=self.weight_bits,
            group_size=self.group_size,
            group_dim=self.group_dim,
            compute=self.compute,
            lossless=self.lossless,
        )

    @property
    def rule(self) -> Admission | None:
        """The rule that was asked for; None leaves it open."""
        return find_rule(self.admission)

    def _check_names(self) -> None:
        for flag, value, known in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, DTYPES),
            ("--task", self.task, TASKS),
        ):
            if value not in known:
                raise InputError(
                    f"{flag} {value} was given.",
                    "It is not known.",
                    f"Use one of {', '.join(known)}.",
                )
        if self.device == "cpu" and self.gpu_memory_bytes is not None:
            raise InputError(
                "--gpu-memory was given with --device cpu.",
                "Nothing is placed on a GPU when the CPU computes.",
                "Leave one of the two out.",
            )
        if self.device != "sim" and self.sim_bytes_per_s is not None:
            raise InputError(
                f"--sim-bandwidth was given with --device {self.device}.",
                "It caps the links of the simulated device only.",
                "Add --device sim, or leave it out.",
            )

    def _check_amounts(self) -> None:
        for flag, value in (
            ("--cpu-memory", self.cpu_memory_bytes),
            ("--gpu-memory", self.gpu_memory_bytes),
            ("--sim-bandwidth", self.sim_bytes_per_s),
            ("--micro-batch-size", self.micro_batch_size),
            ("--num-micro-batches", self.num_micro_batches),
            ("--batch-tokens", self.batch_tokens),
        ):
            if value is not None and value < 1:
                raise InputError(
                    f"{flag} {value} was given.",
                    "It must be more than zero.",
                    "Raise it, or leave it out and Freight chooses.",
                )
        check_groups(group_size=self.group_size, weight_bits=self.weight_bits, kv_bits=self.kv_bits)
        if self.kv_bits is not None:
            fit_head(self.kv_bits, self.group_size, self.group_size)
        if not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise InputError(
                f"--draft-tokens {self.draft_tokens} was given.",
                f"A row guesses from 0 (it does not) to {MOST_DRAFT_TOKENS} tokens at once.",
                "Give a few, like 4.",
            )
        if self.sparse_attention is not None:
            check_share(self.sparse_attention)
            self._check_sparse_drafts()
        if self.admission == "row" and (self.num_micro_batches or 1) > 1:
            raise InputError(
                f"--num-micro-batches {self.num_micro_batches} was given with --admission row.",
                "Row by row there is one micro-batch at a time.",
                "Leave one of the two out, or give --admission zigzag.",
            )
        share = self.cpu_attention_percent
        if share is not None and not 0 <= share <= 100:
            raise InputError(
                f"--cpu-attention {share:g} was given.",
                "It is the percentage of rows that the CPU attends, from 0 to 100.",
                "Give one, or leave it out and Freight chooses.",
            )
        share = self.recompute_percent
        if share is not None and not 0 <= share <= 100:
            raise InputError(
                f"--recompute-kv {share:g} was given.",
                "It is the percentage of the layers whose keys are computed again, from 0 to 100.",
                "Give one, or leave it out and Freight chooses.",
            )
        if self.dummy_seed is not None and not 0 <= self.dummy_seed < 2**63:
            raise InputError(
                f"Seed {self.dummy_seed} was given for random weights.",
                "A seed is in [0, 2**63).",
                "Use a small whole number.",
            )

    def _check_sparse_drafts(self) -> None:
        if self.draft_tokens:
            raise InputError(
                f"--draft-tokens {self.draft_tokens} was given with --sparse-attention.",
                "Sparse attention is of one new token a row; with guesses beside it all keys would "
                "count, and answers would depend on the guesses.",
                "Leave one of the two out.",
            )

    def _check_shares(self) -> None:
        for flag, shares in (
            ("--weights", self.weights_percent),
            ("--kv", self.kv_percent),
            ("--activations", self.activations_percent),
        ):
            if shares is None:
                continue
            _check_sum(flag, shares)
            gpu, _, disk = shares
            if gpu > 0 and self.device == "cpu":
                raise InputError(
                    f"{flag} {_written(shares)} was given with --device cpu.",
                    "There is no GPU to hold the first share.",
                    "Give cpu and disk alone, for instance 40/60.",
                )
            if disk > 0 and self.disk_dir is None and flag != "--weights":
                raise InputError(
                    f"{flag} {_written(shares)} puts {disk:g} percent on disk.",
                    "No directory was given for it.",
                    "Name one on a fast disk with --disk-dir.",
                )


def _check_sum(flag: str, shares: Shares) -> None:
    usable = len(shares) == 3 and all(math.isfinite(share) and share >= 0 for share in shares)
    if not usable or abs(sum(shares) - 100) > ROUNDING:
        raise InputError(
            f"{flag} {_written(shares)} was given.",
            "The shares of gpu, cpu and disk are percentages that add up to 100.",
            "Write them like 20/80/0, or leave the flag out and Freight chooses.",
        )


def _written(shares: Shares) -> str:
    return "/".join(f"{share:g}" for share in shares)
