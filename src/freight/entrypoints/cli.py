"""The ``freight`` command: its flags, and errors as people should see them.

Knows no model and no rows. What a sub-command needs is imported when it runs, so that ``--help``
answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from freight.entrypoints.bench.flags import BENCH_EXAMPLES, add_bench_flags
from freight.errors import FreightError, InputError

__all__ = ["main"]

_DESCRIPTION = """\
Run an open-weight language model over a whole dataset, with weights, KV cache and activations
spread over GPU, RAM and disk. A run that was stopped goes on when the same command is given again.
"""

_EXAMPLES = """\
examples:
  freight run rows.jsonl --model demo --output answers.jsonl
  freight run rows.jsonl --model ./Llama-3.1-8B --output answers.jsonl --cpu-memory 16GiB
  freight run rows.jsonl -m ./model -o answers.jsonl --weights 20/80/0 --kv 0/100/0
  cat rows.jsonl | freight run - -m ./model -o - > answers.jsonl

Each input line is a JSON object with "prompt" (text or token ids) or "messages", and if wanted
"id" and sampling parameters by the names of the flags, like "max_tokens" or "logit_bias"; stop
tokens are "stop_token_ids". Each output line has "id", "text", "prompt_tokens",
"completion_tokens" and "finish_reason", or "id" and "error"; with several answers, "outputs".
"""

_PLAN_EXAMPLES = """\
examples:
  freight plan --model opt-30b --machine t4 --workload 512:32
  freight plan --model config.json --compare a10g l4 rtx-4090 --workload 1024:128 --objective rent
  freight plan --model opt-175b --machine flexgen-t4 --max-latency 5000 --explain
  freight plan --model opt-30b --machine t4 --weights 20/80/0 --kv 0/100/0 --micro-batch-size 48

Policy flags fix what is given; what is left out is searched for.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        from freight.entrypoints.version import freight_version

        print(f"freight {freight_version()}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        if arguments.command == "bench":
            from freight.entrypoints.bench.offload import bench_offload

            return bench_offload(arguments)
        if arguments.command == "profile":
            from freight.entrypoints.profile import profile_machine

            return profile_machine(arguments)
        if arguments.command == "plan":
            from freight.entrypoints.plan import plan_policy

            return plan_policy(arguments)
        if arguments.command == "compress":
            from freight.entrypoints.compress import compress_model

            return compress_model(arguments)
        from freight.entrypoints.run import run

        return run(arguments)
    except FreightError as error:
        _print_error(error, sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:  # before the job began; later ones are handled where rows are kept
        return 130
    except BrokenPipeError:
        # Whoever read our output has had enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError) as error:
        _print_error(_unforeseen(error), sys.stderr)
        return 1


def _unforeseen(error: OSError | MemoryError) -> FreightError:
    """What the system refused where nobody expected it to."""
    reason = "no memory is left" if isinstance(error, MemoryError) else str(error)
    return FreightError(
        "The command was under way.",
        f"The system refused something: {reason}.",
        "Rows that were finished are kept: mend the cause and give the same command again.",
    )


def _print_error(error: FreightError, file: TextIO) -> None:
    print(f"freight: error: {error.asked}\n  {error.limit}\n  {error.advice}", file=file)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="freight", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="answer every row of a JSONL dataset",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("input", metavar="INPUT", help="JSONL file, or - for standard input")
    run.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="directory of a model, a GGUF file, a Hugging Face Hub id, or demo: the tiny model in "
        "the package",
    )
    run.add_argument(
        "-o", "--output", metavar="OUTPUT", required=True, help="file, or - for standard output"
    )
    _add_sampling(run)
    _add_job(run)
    _add_machine(run)
    _add_policy(run)
    _add_kept_compression(run)
    _add_plan(commands)
    _add_profile(commands)
    _add_compress(commands)
    _add_bench(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="the best policy for a model on a machine, and what it will take",
        description="The best policy for a model, a machine and a workload, how long it will take "
        "and what it will cost. Needs neither weights nor the machine.",
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="config.json, a directory, a GGUF file, or a bundled name",
    )
    parser.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="MACHINE",
        help="preset or profile, repeatable to compare (default: this one's profile)",
    )
    parser.add_argument(
        "--workload", default="512:32", metavar="P:N", help="prompt and new tokens (512:32)"
    )
    parser.add_argument("--rows", type=int, default=1000, metavar="N", help="rows (1000)")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="MACHINE",
        help="several machines, the best for the objective first",
    )
    parser.add_argument(
        "--objective",
        choices=("throughput", "rent", "electricity"),
        default="throughput",
        help="what the best of several machines is judged by: new tokens per second (default), "
        "dollars per new token where it is rented, or for its electricity",
    )
    parser.add_argument(
        "--max-latency",
        type=float,
        metavar="SECONDS",
        help="the longest that a block may take, from its prompts to its last token",
    )
    parser.add_argument(
        "--electricity",
        type=float,
        default=0.15,
        metavar="DOLLARS",
        help="price of a kilowatt-hour (0.15)",
    )
    parser.add_argument("--explain", action="store_true", help="what each technique is worth, here")
    parser.add_argument(
        "--frontier",
        metavar="PNG",
        help="draw throughput against latency, also without each technique (needs matplotlib)",
    )
    parser.add_argument("--trace", metavar="FILE", help="when each lane is busy with what")
    parser.add_argument("--json", action="store_true", help="a JSON object instead of a table")
    parser.add_argument("--cpu-memory", metavar="SIZE", help="most memory of the process")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="most memory taken of the GPU")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    _add_placement(parser)
    _add_compression(parser)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "measure this machine, for plans"
    parser = commands.add_parser("profile", help=about, description=about, allow_abbrev=False)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="default: where freight run looks for it"
    )
    parser.add_argument(
        "--disk-dir", metavar="DIR", help="on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--quiet", action="store_true", help="the result only")


def _add_compress(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "make a model's matrices small, ahead of the runs that use them"
    parser = commands.add_parser("compress", help=about, description=about, allow_abbrev=False)
    parser.add_argument(
        "-m", "--model", metavar="MODEL", help="a directory, a GGUF file, or a name on the hub"
    )
    _add_kept_compression(parser)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "measure the machine, its ceiling for some work, and what is reached of it"
    bench = commands.add_parser("bench", help=about, description=about, allow_abbrev=False)
    kinds = bench.add_subparsers(dest="benchmark", title="benchmarks", required=True)
    offload = kinds.add_parser(
        "offload",
        help="rows of one length, weights larger than memory",
        description="Rows of one length through a model that may be larger than memory: the "
        "ceiling of the machine first, then what Freight and others reach.",
        epilog=BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_bench_flags(offload)
    _add_machine(offload)
    _add_policy(offload)
    _add_compression(offload)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "for rows that do not set their own")
    group.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most new tokens (default 256)"
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
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="of new tokens, with K alternatives to each"
    )
    group.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="of the prompt's tokens; --max-tokens 0 generates nothing beside them",
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


def _add_job(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument("--quiet", action="store_true", help="errors only on standard error")
    group.add_argument(
        "--recalibrate",
        action="store_true",
        help="keep what this run took in the machine's profile, for later plans",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine", "sizes are written like 16GiB, 1450MiB or 2GB")
    group.add_argument(
        "--cpu-memory", metavar="SIZE", help="most memory of the whole process (default: what is)"
    )
    group.add_argument("--gpu-memory", metavar="SIZE", help="most memory taken of the GPU")
    group.add_argument(
        "--disk-dir", metavar="DIR", help="where KV cache and activations offload to"
    )
    group.add_argument("--device", default="auto", help="auto, cuda, cpu or sim (a simulated GPU)")
    group.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    group.add_argument(
        "--sim-bandwidth", metavar="SIZE", help="bytes per second of the simulated GPU's link"
    )
    group.add_argument(
        "--dummy-weights", action="store_true", help="random weights made from config.json alone"
    )


def _add_placement(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
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
    group.add_argument("--micro-batch-size", type=int, metavar="N", help="rows computed at once")
    group.add_argument("--num-micro-batches", type=int, metavar="N", help="micro-batches a block")
    group.add_argument(
        "--no-overlap", action="store_true", help="move and compute in turn, to compare"
    )
    return group


def _add_compression(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group(
        "approximations", "what changes the answers a little, and is done only when asked for"
    )
    group.add_argument(
        "--weight-bits", type=int, metavar="N", help="compress the matrices to 4 or 8 bits"
    )
    group.add_argument(
        "--group-size",
        type=int,
        default=64,
        metavar="N",
        help="weights that share a scale: 32, 64 (default) or 128",
    )
    return group


def _add_kept_compression(parser: argparse.ArgumentParser) -> None:
    _add_compression(parser).add_argument(
        "--compressed-dir",
        metavar="DIR",
        help="where compressed weights are kept (default: the user's cache)",
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    _add_placement(parser).add_argument(
        "--trace", metavar="FILE", help="write when each link was busy, for Perfetto"
    )


if __name__ == "__main__":
    sys.exit(main())
