"""The work that ``freight plan`` plans for: two lengths, ranges of lengths, or a dataset's rows.

What reads a dataset is imported where there is one: a plan is wanted at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from freight.entrypoints.bench.work import parse_shape
from freight.entrypoints.flags import MAX_TOKENS
from freight.errors import InputError
from freight.model.config import ModelConfig
from freight.model.task import refuse_other
from freight.plan.workload import Workload

__all__ = ["read_workload"]

_NUM_ROWS = 1000
_PROMPT_TOKENS, _NEW_TOKENS = 512, 32
_MOST_SAMPLED = 10_000_000


def read_workload(arguments: argparse.Namespace, config: ModelConfig) -> Workload:
    """What ``--workload`` and the flags beside it say. InputError where rows are longer than the
    model takes."""
    given = {"--samples": arguments.samples != 1, "--max-tokens": arguments.max_tokens is not None}
    for flag in (flag for flag, is_given in given.items() if is_given):
        refuse_other(config.readout, "generate", f"{flag} was given.", spare="leave it out")
    if arguments.workload is None:
        return _of_lengths(_usual_shape(config), arguments)
    source = Path(arguments.workload)
    if source.is_file():
        return _of_dataset(source, arguments, config)
    workload = _of_lengths(arguments.workload, arguments)
    if config.readout is not None and workload.max_new_tokens > 1:
        raise InputError(
            f"--workload {arguments.workload} was given.",
            f"The model makes {config.readout.name}: of a row's last token one is read.",
            f"Write it like {arguments.workload.partition(':')[0]}:1.",
        )
    # What is read of a row's last token has no position of its own.
    if workload.max_total_tokens - (config.readout is not None) > config.max_positions:
        raise InputError(
            f"--workload {arguments.workload} was given: rows of up to "
            f"{workload.max_total_tokens} tokens.",
            f"The model takes {config.max_positions}.",
            "Give shorter rows, or another model.",
        )
    return workload


def _usual_shape(config: ModelConfig) -> str:
    """Of rows of which nothing is said."""
    if config.readout is not None:
        return f"{min(_PROMPT_TOKENS, config.max_positions)}:1"
    new = max(1, min(_NEW_TOKENS, config.max_positions // 2))
    return f"{max(1, min(_PROMPT_TOKENS, config.max_positions - new))}:{new}"


def _of_lengths(shape: str, arguments: argparse.Namespace) -> Workload:
    """Rows that are described, not there."""
    if arguments.max_tokens is not None:
        raise InputError(
            f"--max-tokens {arguments.max_tokens} was given for a workload of {shape}.",
            "It is of a dataset's rows; that is no file, and a shape has its own lengths.",
            "Leave it out, or name a file with rows.",
        )
    num_rows = _NUM_ROWS if arguments.rows is None else arguments.rows
    for flag, count in (("--rows", num_rows), ("--samples", arguments.samples)):
        if count < 1:
            raise InputError(
                f"{flag} {count} was given.", "A plan is for one row at least.", "Give 1 or more."
            )
    try:
        work = parse_shape(shape, num_rows)
    except InputError as error:
        raise InputError(
            f"--workload {shape or repr(shape)} was given.",
            "It is neither prompt and new tokens, both at least 1, nor a file with rows.",
            "Write it like 512:32, or like 16-256:4-128 for lengths between two numbers.",
        ) from error
    shared, longest = arguments.shared_prefix, work.least_prompt_tokens or work.prompt_tokens
    if not 0 <= shared < longest:
        raise InputError(
            f"--shared-prefix {shared} was given.",
            f"Prompts of {longest} tokens begin alike with 0 to {longest - 1} of them.",
            "Give so many, or longer prompts.",
        )
    if work.is_ragged or work.least_prompt_tokens != work.prompt_tokens:
        workload = work.workload()
    else:
        workload = Workload.of_alike(num_rows, work.prompt_tokens, work.new_tokens)
    if arguments.samples > 1 and num_rows > _MOST_SAMPLED:
        raise InputError(
            f"--samples {arguments.samples} was given for {num_rows} rows.",
            f"What samples share is counted row by row, of {_MOST_SAMPLED} at most.",
            "Give fewer rows: time and cost grow as these do.",
        )
    samples = workload.with_samples(arguments.samples)
    # A row has one beginning: that which spares more.
    spared = (workload.mean_prompt_tokens - 1) * (1 - 1 / arguments.samples)
    is_own = samples.beginnings is not None and spared > shared
    return samples if is_own else samples.with_beginning(shared)


def _of_dataset(source: Path, arguments: argparse.Namespace, config: ModelConfig) -> Workload:
    """A file's rows, as ``freight run`` would find them."""
    from freight.entrypoints.model_source import limits_of
    from freight.jobs.dataset import dataset_workload
    from freight.jobs.readings import READING
    from freight.runtime.params import SamplingParams
    from freight.runtime.tokenizer import Tokenizer

    given = {
        "--rows": arguments.rows,
        "--shared-prefix": arguments.shared_prefix or None,
        "--samples": arguments.samples if arguments.samples != 1 else None,
    }
    for flag, value in given.items():
        if value is not None:
            raise InputError(
                f"{flag} {value} was given with --workload {source}.",
                "The file's rows say it themselves.",
                f"Leave {flag} out.",
            )
    tokenizer_dir = _tokenizer_dir(arguments.model)
    most = MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens
    return dataset_workload(
        source,
        tokenizer=None if tokenizer_dir is None else Tokenizer(tokenizer_dir),
        limits=limits_of(config),
        defaults=SamplingParams(max_tokens=most) if config.readout is None else READING,
        say=lambda text: print(f"freight: {text}", file=sys.stderr),
    )


def _tokenizer_dir(model: str) -> Path | None:
    """Where the model's tokenizer is, if it is at hand: rows may be token ids."""
    from freight.entrypoints.model_source import find_model
    from freight.runtime.tokenizer import has_tokenizer

    path = Path(model)
    if path.name == "config.json":
        directory = path.parent
    elif model == "demo" or path.is_dir() or path.suffix == ".gguf":
        directory = find_model(model)
    else:
        return None
    return directory if has_tokenizer(directory) else None
