"""The ``freight`` command: its sub-commands, and errors as people should see them.

Knows no model and no rows. What a sub-command needs is imported when it runs, so that ``--help``
answers at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Final, NoReturn, TextIO

from freight.entrypoints.bench.flags import BENCH_EXAMPLES, add_bench_flags
from freight.entrypoints.eval.flags import add_eval_parser
from freight.entrypoints.flags import (
    MAX_TOKENS,
    add_chips,
    add_compression,
    add_drafts,
    add_job,
    add_kept_compression,
    add_lora,
    add_machine,
    add_placement,
    add_policy,
    add_readings,
    add_sampling,
    add_task,
)
from freight.entrypoints.idle_threads import wait_briefly
from freight.entrypoints.partition.flags import add_partition_parser
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
"completion_tokens" and "finish_reason", or "id" and "error"; with several answers, "outputs". A row
with a "continuation" is scored instead. Lines of OpenAI's batch files are answered in their shape.

Exit status: 0 the output is complete; 3 it is, but no row was answered (with --fail-on-error: not
every row); 2 input or flags cannot be used; 1 anything else; 130 or 143 stopped by a signal.
"""

_LIBRARY_THREADS: Final = "OPENBLAS_NUM_THREADS"
"""What numpy's library reads when it is imported."""
_HARNESS: Final = "lm-eval"
"""A command whose arguments another programme reads."""

_PLAN_EXAMPLES = """\
examples:
  freight plan --model opt-30b --machine t4 --workload 512:32
  freight plan --model config.json --compare a10g l4 rtx-4090 --workload 1024:128 --objective rent
  freight plan --model opt-175b --machine flexgen-t4 --max-latency 5000 --explain
  freight plan --model opt-30b --machine t4 --workload 1024:32 --shared-prefix 896
  freight plan --model llama-3-8b --machine l4 --workload 900:256 --rows 500 --samples 16
  freight plan --model demo --machine laptop --workload rows.jsonl
  freight plan --model opt-175b --machine t4 --chips 4
  freight plan --model opt-30b --machine t4 --weights 20/80/0 --kv 0/100/0 --micro-batch-size 48

Policy flags fix what is given; what is left out is searched for.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    wait_briefly()
    if sys.stderr is None:  # closed by the caller, as some schedulers do
        sys.stderr = open(os.devnull, "w")
    parser = _build_parser()
    given = sys.argv[1:] if argv is None else argv
    arguments = _parse(parser, given[:1] if given[:1] == [_HARNESS] else given)
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
            with _light():
                from freight.entrypoints.plan import plan_policy

                return plan_policy(arguments)
        if arguments.command == "partition":
            from freight.entrypoints.partition.command import run_partition

            return run_partition(arguments)
        if arguments.command == "compress":
            from freight.entrypoints.compress import compress_model

            return compress_model(arguments)
        if arguments.command == _HARNESS:
            from freight.entrypoints.harness import run_harness

            return run_harness(given[1:])
        if arguments.command == "eval":
            from freight.entrypoints.eval.evaluate import evaluate_model

            return evaluate_model(arguments)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            # Started by torchrun, with others.
            from freight.entrypoints.run_stages import run_stages

            return run_stages(arguments)
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


@contextmanager
def _light() -> Iterator[None]:
    """Without looking for objects that name each other in a circle: planning makes many objects,
    next to none of them so, and a twentieth of its time went by looking. And without threads for
    products of matrices, of which it makes none: a process with one thread can be copied."""
    was_on, threads = gc.isenabled(), os.environ.get(_LIBRARY_THREADS)
    gc.disable()
    os.environ[_LIBRARY_THREADS] = "1"
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        if threads is None:
            del os.environ[_LIBRARY_THREADS]
        else:
            os.environ[_LIBRARY_THREADS] = threads


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


class _Parser(argparse.ArgumentParser):
    """Refuses as everything else here does, without a page of usage before the reason."""

    def error(self, message: str) -> NoReturn:
        self._refuse(message, f"{self.prog} --help names them all.")

    def refuse_left(self, left: Sequence[str]) -> NoReturn:
        """Arguments that are none of its own."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        flags = [own.split("=")[0] for own in left]
        meant = [get_close_matches(flag, known, n=1, cutoff=0.75) for flag in flags]
        likely = " ".join(own[0] for own in meant if own)
        advice = f"{self.prog} --help names them all."
        if likely:
            advice = f"Did you mean {likely}? {advice}"
        self._refuse(f"unrecognized arguments: {' '.join(left)}", advice)

    def _refuse(self, message: str, advice: str) -> NoReturn:
        refused = InputError(
            f"{self.prog} was given arguments that it cannot read.",
            f"{message[:1].upper()}{message[1:]}.",
            advice,
        )
        _print_error(refused, sys.stderr)
        self.exit(2)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """As ``parse_args``; what is left over is told by the command that it was given to."""
    found, left = parser.parse_known_args(argv)
    own: argparse.ArgumentParser | None = parser
    while left and own is not None:
        commands = [act for act in own._actions if isinstance(act, argparse._SubParsersAction)]
        chosen = [act.choices.get(getattr(found, act.dest)) for act in commands]
        if not any(chosen) and isinstance(own, _Parser):
            own.refuse_left(left)
        own = chosen[0]
    return found


def _build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="freight", description=_DESCRIPTION, allow_abbrev=False
    )
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
    add_lora(run)
    add_sampling(run)
    add_readings(run)
    add_job(run)
    add_machine(run)
    run.add_argument(
        "--split",
        default="layers",
        choices=("layers", "rows", "tensor"),
        help="what ranks share under torchrun: layers (default), rows, each with all layers, or "
        "the tensors of every layer",
    )
    run.add_argument(
        "--pin-layout",
        metavar="NAME",
        help="with --split tensor, compute everything in one layout, for last bits that are "
        "reproducible of as many rows together (--micro-batch-size)",
    )
    run.add_argument(
        "--torch-compile",
        action="store_true",
        help="with --split tensor, compile what stands between messages with torch.compile: "
        "starting takes a minute longer",
    )
    run.add_argument(
        "--stages",
        type=int,
        metavar="N",
        help="with --split tensor, stages that each have some of the layers, cut over their ranks "
        "(default 1)",
    )
    add_drafts(run)
    add_policy(run)
    add_kept_compression(run)
    _add_plan(commands)
    add_partition_parser(commands)
    _add_profile(commands)
    _add_compress(commands)
    _add_eval(commands)
    commands.add_parser(
        _HARNESS,
        help="lm-evaluation-harness with Freight as the model; its arguments are the harness's own",
        add_help=False,
    )
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
    add_lora(parser)
    parser.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="MACHINE",
        help="preset or profile, repeatable to compare (default: this one's profile)",
    )
    parser.add_argument(
        "--workload",
        metavar="P:N",
        help="prompt and new tokens (512:32, or what the model takes), like 16-256:4-128 with "
        "lengths between two numbers and answers that end early, or a JSONL file whose rows are "
        "counted",
    )
    parser.add_argument("--rows", type=int, metavar="N", help="rows of such lengths (1000)")
    parser.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts of such lengths begin with (0)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="answers to each row of such lengths, which share its prompt (1)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most new tokens of a file's rows that do not say it ({MAX_TOKENS})",
    )
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
    add_task(parser)
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
    parser.add_argument(
        "--dtype", default="auto", help="auto, bfloat16, float16 (on a GPU) or float32"
    )
    add_chips(parser)
    add_placement(parser)
    add_compression(parser)


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
    add_lora(parser)
    add_task(parser)
    add_kept_compression(parser)


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_eval_parser(commands)
    add_machine(parser)
    add_placement(parser)


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
    add_machine(offload)
    add_policy(offload)
    add_compression(offload)


if __name__ == "__main__":
    sys.exit(main())
