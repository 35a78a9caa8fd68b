"""The flags of ``freight bench offload`` that are not those of ``freight run``.

Knows no meaning of them: ``--help`` must answer at once.
"""

from __future__ import annotations

import argparse

__all__ = ["BENCH_EXAMPLES", "add_bench_flags"]

BENCH_EXAMPLES = """\
examples:
  freight bench offload --model config.json --shape 128:16 --rows 64 --cpu-memory 1450MiB
  freight bench offload --model ./model --shape 128:16 --rows 64 --cpu-memory 1450MiB \\
      --group 1536MiB --peer accelerate --peer transformers

Prints the rates of the machine, the ceiling they allow, each run, and last one line of JSON. Every
run is a process of its own. A config.json without weights gets random ones, written once.
"""


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """The work, how often, and against whom."""
    _add_work(parser)
    _add_comparison(parser)


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("work")
    group.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="directory of a model, a config.json, a bundled configuration like opt-30b, a Hugging "
        "Face Hub id, or demo",
    )
    group.add_argument(
        "--shape",
        default="128:16",
        metavar="P:N",
        help="prompt and new tokens (default 128:16); like 16-256:4-128 with lengths drawn between "
        "two numbers, and answers that end where nothing told them before",
    )
    group.add_argument("--rows", type=int, default=64, metavar="N", help="rows (default 64)")
    group.add_argument(
        "--work-dir",
        default="freight-bench",
        metavar="DIR",
        help="where random weights are kept for the next time (default freight-bench)",
    )

    group.add_argument(
        "--unwritten-weights",
        action="store_true",
        help="random weights that each run makes anew in memory; none are written unless a policy "
        "keeps some on disk",
    )


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each system, in turn (3)"
    )
    group.add_argument(
        "--group",
        metavar="SIZE",
        help="run each system in a fresh memory control group of this size, page cache counted, "
        "with cold caches (needs root)",
    )
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="also run accelerate (weights on disk), transformers (in memory) or flexgen (OPT on "
        "CUDA); repeatable",
    )
    group.add_argument(
        "--peer-batch-sizes",
        metavar="N,N",
        help="batch sizes to try with each peer (default: all rows, halved while that helps)",
    )
    group.add_argument(
        "--peer-rows",
        type=int,
        metavar="N",
        help="peers answer the first N rows only, and are compared by tokens per second",
    )
    group.add_argument(
        "--flexgen",
        action="append",
        default=[],
        metavar="FLAGS",
        help="a policy to try with flexgen, as flags of its own, like '--percent 20 80 0 100 0 100 "
        "--gpu-batch-size 48 --num-gpu-batches 3'; repeatable (default: the published ones)",
    )
    group.add_argument(
        "--peer-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="end a peer's run after so many seconds (600)",
    )
    group.add_argument(
        "--peer-resident",
        metavar="SIZE",
        help="weights that accelerate keeps in memory (default: what the budget leaves)",
    )
