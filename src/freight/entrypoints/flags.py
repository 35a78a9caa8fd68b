"""The groups of flags that commands are made of.

Knows no command and no values: what is wrong with one is found where it is used.
"""

from __future__ import annotations

import argparse
from typing import Final

__all__ = [
    "MAX_TOKENS",
    "add_chips",
    "add_compression",
    "add_drafts",
    "add_job",
    "add_kept_compression",
    "add_machine",
    "add_placement",
    "add_policy",
    "add_readings",
    "add_sampling",
    "add_task",
]

MAX_TOKENS: Final = 256
"""New tokens of a row that does not say how many it wants at most."""


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "for rows that do not set their own")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"most new tokens (default {MAX_TOKENS})",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off (default)")
    _add_penalties(group)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="each row's seed is derived of it"
    )
    group.add_argument("--n", type=int, default=1, metavar="N", help="answers drawn of each prompt")
    _add_stops(group)
    _add_structures(group)
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="of new tokens, with K alternatives to each"
    )
    group.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="of the prompt's tokens; --max-tokens 0 generates nothing beside them",
    )


def add_lora(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora",
        metavar="ADAPTER",
        help="directory or Hub id of a LoRA adapter of PEFT's, which is added to the model's "
        "weights once and kept (--model may also name one, for the model that it was trained on)",
    )


def add_task(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--task",
        default="auto",
        metavar="TASK",
        help="generate, embed (the last token, behind the last norm), classify (by the model's "
        "labels), or auto: what the model's files say (default)",
    )


def add_readings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "embeddings and labels", "models that are for these say so by their files"
    )
    add_task(group)
    group.add_argument(
        "--dimensions",
        type=int,
        metavar="N",
        help="of embeddings, the first N (default: all, or what the model's files say)",
    )
    group.add_argument(
        "--encoding-format",
        default="float",
        metavar="HOW",
        help="embeddings as lists of numbers (float, default), or as base64 of float32",
    )


def _add_penalties(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="on tokens of prompt and answer; 1 is off (default)",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="on tokens of the answer, once; 0 is off (default)",
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="on tokens of the answer, each time; 0 is off (default)",
    )
    group.add_argument(
        "--logit-bias", metavar="JSON", help="""added to tokens' logits, like '{"50256": -100}'"""
    )


def _add_stops(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a row here; repeatable"
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="end a row at this token; repeatable",
    )
    group.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="no row stops before so many"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end of the sequence"
    )


def _add_structures(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json-schema", metavar="FILE", help="answers are JSON of this schema, and end with it"
    )
    group.add_argument(
        "--regex", metavar="PATTERN", help="answers are matched by it as a whole (Rust's syntax)"
    )
    group.add_argument(
        "--choice",
        action="append",
        default=[],
        metavar="TEXT",
        help="answers are one of these texts; repeatable",
    )
    group.add_argument(
        "--grammar", metavar="FILE", help="answers are sentences of a Lark grammar (llguidance's)"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    group.add_argument(
        "--unordered", action="store_true", help="write rows as they finish, not as in the input"
    )
    group.add_argument(
        "--restart", action="store_true", help="throw away what an earlier run has done"
    )
    group.add_argument(
        "--job-dir",
        metavar="DIR",
        help="where finished rows are kept until the job is done (default OUTPUT.freight; "
        "for standard output a temporary directory, so such a run cannot be continued)",
    )
    group.add_argument(
        "--fail-on-error",
        action="store_true",
        help="end with status 3 if any row has an error (default: if all have)",
    )
    group.add_argument("--quiet", action="store_true", help="errors only on standard error")
    group.add_argument(
        "--recalibrate",
        action="store_true",
        help="keep what this run took in the machine's profile, for later plans",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine", "sizes are written like 16GiB, 1450MiB or 2GB")
    group.add_argument(
        "--cpu-memory", metavar="SIZE", help="most memory of the whole process (default: what is)"
    )
    group.add_argument("--gpu-memory", metavar="SIZE", help="most memory taken of the GPU")
    group.add_argument(
        "--disk-dir",
        metavar="DIR",
        help="where KV cache and activations offload to; with --split tensor, layers",
    )
    group.add_argument("--device", default="auto", help="auto, cuda, cpu or sim (a simulated GPU)")
    group.add_argument(
        "--dtype", default="auto", help="auto, bfloat16, float16 (on a GPU) or float32"
    )
    group.add_argument(
        "--sim-bandwidth", metavar="SIZE", help="bytes per second of the simulated GPU's link"
    )
    group.add_argument(
        "--dummy-weights", action="store_true", help="random weights made from config.json alone"
    )


def add_chips(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several chips", "by rows, layers or heads, each chip with tiers and a policy of its own"
    )
    group.add_argument("--chips", type=int, metavar="N", help="how many there are")
    group.add_argument(
        "--host-chips",
        type=int,
        metavar="K",
        help="how many of them share one machine (default: as many as it has)",
    )
    group.add_argument(
        "--chip",
        metavar="CHIP",
        help="preset of the links between them (default: the one that the machine is named after)",
    )


def add_placement(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group(
        "policy",
        "shares are percentages on GPU/CPU/disk like 20/80/0, or CPU/disk like 40/60 where the "
        "CPU computes; what is left out is chosen by Freight. No policy changes the answers.",
    )
    group.add_argument("--weights", metavar="G/C/D", help="where the weights are")
    group.add_argument("--kv", metavar="G/C/D", help="where the KV cache is")
    group.add_argument("--activations", metavar="G/C/D", help="where activations wait")
    group.add_argument(
        "--cpu-attention",
        type=float,
        metavar="PERCENT",
        help="of the rows whose KV is not on the GPU, those that the CPU attends where it is",
    )
    group.add_argument(
        "--recompute-kv",
        type=float,
        metavar="PERCENT",
        help="of the layers, those in which rows with their KV elsewhere keep the narrower input "
        "of attention, of which keys and values are computed again",
    )
    group.add_argument("--micro-batch-size", type=int, metavar="N", help="rows computed at once")
    group.add_argument("--num-micro-batches", type=int, metavar="N", help="micro-batches a block")
    group.add_argument(
        "--admission",
        default="auto",
        metavar="RULE",
        help="when rows enter the block: row, zigzag (all at once), diagonal (evenly spread), "
        "refill (as others end), or auto (default)",
    )
    group.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        help="most tokens that a micro-batch brings to a sweep: longer prompts come in chunks",
    )
    group.add_argument(
        "--no-shared-prefixes",
        action="store_true",
        help="compute what prompts begin with alike for every row, to compare",
    )
    group.add_argument(
        "--no-rolling-windows",
        action="store_true",
        help="keep all keys in layers that attend the last ones alone, to compare",
    )
    group.add_argument(
        "--no-row-moves",
        action="store_true",
        help="leave keys and values on the tier where their row entered, to compare",
    )
    group.add_argument(
        "--no-overlap", action="store_true", help="move and compute in turn, to compare"
    )
    return group


def add_compression(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    parser.add_argument(
        "--lossless",
        action="store_true",
        help="keep bfloat16 weights in 11 bits, exactly as they are: three tenths less to hold "
        "and to bring",
    )
    group = parser.add_argument_group(
        "approximations", "what changes the answers a little, and is done only when asked for"
    )
    group.add_argument(
        "--weight-bits",
        type=int,
        metavar="N",
        help="compress the matrices to 4 or 8 bits; 3 saves no more than 4 and shows what too few "
        "bits do",
    )
    group.add_argument(
        "--kv-bits", type=int, metavar="N", help="keep keys and values in 4 or 8 bits"
    )
    group.add_argument(
        "--group-size",
        type=int,
        default=64,
        metavar="N",
        help="numbers that share a scale: 32, 64 (default) or 128",
    )
    group.add_argument(
        "--group-dim",
        default="input",
        metavar="DIM",
        help="where a matrix's groups run: along input (default), or output, as FlexGen's do",
    )
    group.add_argument(
        "--sparse-attention",
        type=float,
        metavar="SHARE",
        help="of the keys that a new token sees, only this share, with the highest scores, counts",
    )
    group.add_argument(
        "--compute",
        default="plain",
        metavar="HOW",
        help="int8: products of 8-bit integers, on CPUs that are fast at it (default: plain)",
    )
    return group


def add_kept_compression(parser: argparse.ArgumentParser) -> None:
    add_compression(parser).add_argument(
        "--compressed-dir",
        metavar="DIR",
        help="where compressed weights are kept (default: the user's cache)",
    )


def add_drafts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="N",
        help="prompt lookup: let rows try up to N tokens at once that followed the same words "
        "before, in their prompts or other answers; the answers stay the same (default 0)",
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    add_placement(parser).add_argument(
        "--trace", metavar="FILE", help="write when each link was busy, for Perfetto"
    )
