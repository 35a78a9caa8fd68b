"""The flags of ``freight eval`` that are not those of ``freight run``.

Knows no meaning of them: ``--help`` must answer at once.
"""

from __future__ import annotations

import argparse

from freight.entrypoints.eval.settings import DEFAULT_SETTINGS, KEYS
from freight.entrypoints.flags import add_lora

__all__ = ["add_eval_parser"]

_DESCRIPTION = """\
What approximations cost: a model's scores on your data with each setting, beside the bytes that it
saves. Every setting runs through the same engine, budgets and policy as freight run would, in
processes of its own.
"""

_EXAMPLES = """\
examples:
  freight eval --model ./model --perplexity wiki.txt --last-word lambada.jsonl
  freight eval --model ./model --exact-match rows.jsonl --setting exact --setting weights=4,group=32
  freight eval --model ./model --perplexity wiki.txt --cpu-memory 16GiB --json scores.json

Perplexity: the text is cut into windows of --context tokens, each with the special tokens that a
prompt begins with. A window begins --stride tokens after the one before it and scores the tokens
that were not scored yet, so each token is scored once.
Last words: rows like {"text": "... the last word"}. A row is right if each token of its last word
is the most likely one after what comes before it.
Exact match: rows like those of freight run, with an "answer". A row is right if the greedy answer
is that text, white space around them left out. A row may set max_tokens, stop, stop_token_ids.
"""


def add_eval_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """The command, with the flags for the model, the settings, the data and the results."""
    parser = commands.add_parser(
        "eval",
        help="what an approximation costs, on your data",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="directory of a model, a Hugging Face Hub id, or demo",
    )
    keys = ", ".join(f"{word}={key.values}" for word, key in KEYS.items())
    add_lora(parser)
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="SETTING",
        help=f"exact, or {keys} with commas between them; repeatable "
        f"(default: {', '.join(DEFAULT_SETTINGS)}; 3 bits are a negative control; of a model that "
        "is quantised already those without weights)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was found there")
    parser.add_argument("--quiet", action="store_true", help="the table only")
    _add_data(parser)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data", "at least one of the three")
    group.add_argument("--perplexity", metavar="FILE", help="a text file")
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a window (default: what the model takes, at most 2048)",
    )
    group.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens from a window's start to the next one's (default: all but one); less gives "
        "each token more before it and takes longer",
    )
    group.add_argument("--last-word", metavar="FILE", help="JSONL with texts")
    group.add_argument("--exact-match", metavar="FILE", help="JSONL with prompts and answers")
    group.add_argument(
        "--answer-key", default="answer", metavar="NAME", help="where answers are (answer)"
    )
    group.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most new tokens of a row (256)"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a row here; repeatable"
    )
    group.add_argument(
        "--compressed-dir",
        metavar="DIR",
        help="where compressed weights are kept (default: the user's cache)",
    )
