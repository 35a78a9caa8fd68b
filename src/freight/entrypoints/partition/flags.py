"""The flags of ``freight partition`` and its two commands.

Knows no values: what is wrong with one is found where it is used.
"""

from __future__ import annotations

import argparse

__all__ = ["add_partition_parser"]

_ABOUT = "cut a model over many chips: layouts, their cost, and schemes found by search"
_EXAMPLES = """\
examples:
  freight partition plan --model palm-540b --chip tpu-v4 --chips 64 --batch 64 --context 2048
  freight partition plan --model palm-540b --chip tpu-v4 --chips 64 --workload 1920+64:64 \\
      --prefill-batch 1 --decode-batch 64 --weight-bits 8
  freight partition plan --model llama-2-70b --chip h100 --chips 8 --sweep charts
  freight partition search --model llama-2-7b --chips 4 --chip a100
"""


def add_partition_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "partition",
        help=_ABOUT,
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="partition", title="commands", required=True)
    _add_plan(kinds)
    _add_search(kinds)


def _add_plan(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "the fastest mesh and layouts for a model, chips and a batch"
    plan = kinds.add_parser("plan", help=about, description=about, allow_abbrev=False)
    _add_model(plan)
    plan.add_argument("--chips", type=int, default=8, metavar="N", help="how many (8)")
    plan.add_argument("--mesh", metavar="XxYxZ", help="this box of chips instead of the best")
    work = plan.add_argument_group("work")
    work.add_argument(
        "--phase", choices=("prefill", "decode"), default="decode", help="(default: decode)"
    )
    work.add_argument("--batch", type=int, default=64, metavar="N", help="rows at once (64)")
    work.add_argument(
        "--context",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a prompt, or tokens before the one that is decoded (2048)",
    )
    work.add_argument(
        "--workload",
        metavar="C+P:N",
        help="both phases instead: cached tokens, those of the prompt, and new ones, like "
        "1920+64:64; or P:N",
    )
    work.add_argument(
        "--prefill-batch", type=int, metavar="N", help="rows of a prefill, with --workload"
    )
    work.add_argument(
        "--decode-batch", type=int, metavar="N", help="rows that decode, with --workload"
    )
    numbers = plan.add_argument_group("numbers")
    numbers.add_argument(
        "--weight-bits", type=int, choices=(4, 8, 16), default=16, help="of weights (16)"
    )
    numbers.add_argument(
        "--kv-bits", type=int, choices=(8, 16), default=16, help="of keys and values (16)"
    )
    _add_rates(plan)
    plan.add_argument("--dollars-per-hour", type=float, metavar="DOLLARS", help="rent of one chip")
    plan.add_argument(
        "--sweep",
        metavar="DIR",
        help="also go over chips, batches and lengths, and write charts (needs matplotlib)",
    )
    plan.add_argument("--json", action="store_true", help="a JSON object instead of a table")


def _add_rates(plan: argparse.ArgumentParser) -> None:
    rates = plan.add_argument_group(
        "rates",
        "shares of the data sheet's peaks; the defaults say in the plan where they are from",
    )
    rates.add_argument("--peaks", action="store_true", help="the data sheet's peaks, reached")
    rates.add_argument("--compute-share", type=float, metavar="SHARE", help="of arithmetic")
    rates.add_argument("--memory-share", type=float, metavar="SHARE", help="of memory")
    rates.add_argument("--link-share", type=float, metavar="SHARE", help="of links")
    rates.add_argument("--layer-us", type=float, metavar="US", help="fixed time of a layer")
    rates.add_argument(
        "--overlap",
        type=float,
        metavar="SHARE",
        help="of a move that runs while its product is computed (0)",
    )
    rates.add_argument(
        "--measured",
        metavar="FILE",
        help='JSON list of measured steps to fit these to, each like {"phase": "decode", "rows": '
        '64, "new_tokens": 1, "past": 2016, "seconds": 0.0284}',
    )


def _add_search(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "all schemes of cutting a layer over one axis, and which are best at which length"
    search = kinds.add_parser("search", help=about, description=about, allow_abbrev=False)
    _add_model(search)
    search.add_argument("--chips", type=int, default=4, metavar="N", help="how many (4)")
    search.add_argument(
        "--literal", action="store_true", help="the eight rules alone, without restrictions"
    )
    search.add_argument(
        "--lift",
        action="append",
        default=[],
        choices=("core-by-heads", "only-projection-whole", "gathered-for-rows"),
        help="one of the restrictions under which the three published schemes come out; repeatable",
    )
    search.add_argument(
        "--most-tokens", type=int, default=65536, metavar="N", help="longest length (65536)"
    )
    search.add_argument(
        "--weight-bits", type=int, choices=(4, 8, 16), default=16, help="of weights (16)"
    )
    search.add_argument("--json", action="store_true", help="a JSON object instead of a table")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", metavar="MODEL", help="config.json, a directory, or a bundled name"
    )
    parser.add_argument("--chip", default="h100", metavar="CHIP", help="preset of a chip (h100)")
