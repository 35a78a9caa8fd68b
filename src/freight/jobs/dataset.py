"""What a dataset comes to as work, without a job: its rows counted as a run would count them.

Knows row formats and lengths, no model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from freight.errors import InputError
from freight.jobs.formats import RowLimits
from freight.jobs.lines import open_input
from freight.jobs.spool_writer import write_spool
from freight.plan.workload import Workload
from freight.runtime.params import SamplingParams
from freight.runtime.tokenizer import Tokenizer

__all__ = ["dataset_workload"]


def dataset_workload(
    source: Path,
    *,
    tokenizer: Tokenizer | None,
    limits: RowLimits,
    defaults: SamplingParams,
    say: Callable[[str], None],
) -> Workload:
    """The work that the rows of a JSONL file are, in the order in which they would run, with
    ``defaults`` for those that set nothing. Without a tokenizer rows are token ids. ``say`` is told
    of rows that cannot be used; InputError where none can."""
    with tempfile.TemporaryDirectory(prefix="freight-") as directory, open_input(source) as file:
        spool = write_spool(
            file,
            Path(directory),
            name=source.name,
            key=lambda digest: digest,
            tokenizer=tokenizer,
            limits=limits,
            defaults=defaults,
            on_rows=lambda _: None,
            on_remark=say,
        )
        with closing(spool):
            order, failed = spool.order(), spool.failed()
            if not len(order):
                error = spool.row_error(int(failed[0])) if len(failed) else "It has no rows."
                raise InputError(
                    f"The work of {source} was asked for.",
                    f"No row can be used. {error}",
                    'Give one JSON object per line, like {"prompt": "..."}.',
                )
            if len(failed):
                say(
                    f"{len(failed)} of {spool.num_rows} rows cannot be used, and are left out. "
                    f"{spool.row_error(int(failed[0]))}"
                )
            return spool.workload(order)
