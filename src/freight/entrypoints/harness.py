"""``freight lm-eval``: EleutherAI's lm-evaluation-harness, with Freight as the model.

Its arguments are those of ``lm_eval``, all of them; what Freight takes goes into ``--model_args``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from freight.errors import FreightError, InputError

__all__ = ["run_harness"]


def run_harness(arguments: Sequence[str]) -> int:
    """Run the harness with these arguments; returns the exit status. InputError where it is not
    installed, and for what Freight cannot do of what was asked."""
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        import freight.entrypoints.harness_model  # noqa: F401  it registers itself
    except ImportError as error:
        raise InputError(
            "freight lm-eval was called.",
            f"lm-evaluation-harness cannot be imported: {error}.",
            'Install it: pip install "freight[lm-eval]".',
        ) from error
    setup_logging()
    logging.getLogger("freight").setLevel(logging.INFO)
    given = [*arguments]
    is_run = bool(given) and (given[0] == "run" or given[0].startswith("-"))
    is_named = any(own.split("=")[0] in ("--model", "-M", "--config") for own in given)
    if is_run and not is_named and not {"-h", "--help"} & {*given}:
        given += ["--model", "freight"]
    sys.argv = ["freight lm-eval", *given]  # the harness looks there
    harness = HarnessCLI()
    try:
        harness.execute(harness.parse_args())
    except ValueError as error:  # as for tasks that it does not know
        raise InputError(
            "lm-evaluation-harness was given these arguments.",
            f"It cannot use them: {error}",
            "Mend them; freight lm-eval --help and freight lm-eval ls tasks name what there is.",
        ) from error
    except OSError as error:
        raise FreightError(
            "lm-evaluation-harness was under way.",
            f"The system refused something: {error}",
            "Mend the cause and give the same command again.",
        ) from error
    return 0
