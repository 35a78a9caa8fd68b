"""Commands of a job whose ranks are processes, and the loss of one."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .forks import LIMIT_S, Forks, Run

FLAGS = ["--model", "demo", "--dtype", "float32", "--device", "cpu"]
NUM_ROWS = 24
# Rows end all along.
SMALL = ["--micro-batch-size", "4", "--num-micro-batches", "1"]
# The command line of one rank alone is changed.
DIFFERING = """
import os, sys
from freight.entrypoints.cli import main
if os.environ["RANK"] == "1":
    {change}
sys.exit(main())
"""


def job(rows: Path, output: Path, *flags: str) -> list[str]:
    return ["-m", "freight", "run", str(rows), "--output", str(output), *FLAGS, *flags]


def refused(done: tuple[int, str]) -> str:
    """What was asked, limit and advice, said once."""
    status, told = done
    assert status != 0
    (error,) = re.findall(r"freight: error: (.*\n  .*\n  .*)\n", told)
    return str(error)


def wait_for_rows(output: Path, run: Run) -> None:
    """Until some rows of a run are in its journal."""
    journal = output.with_name(f"{output.name}.freight") / "journal.jsonl"
    ends_s = time.monotonic() + LIMIT_S
    while not journal.exists() or len(journal.read_bytes().splitlines()) < 6:
        assert run.poll() is None and time.monotonic() < ends_s, run.told()
        time.sleep(0.01)


def kill(run: Run, rank: int) -> str:
    """What the others say to the loss of one; they have ended soon, and are gone."""
    pids = run.ranks()
    os.kill(pids[rank], signal.SIGKILL)
    killed_s = time.monotonic()
    assert run.wait() != 0
    assert time.monotonic() - killed_s < 10, run.told()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    return run.told()


def lose_a_rank(
    forks: Forks,
    size: int,
    command: Sequence[str],
    output: Path,
    *,
    torchrun: bool = False,
    look: Callable[[Run], None] = lambda _: None,
) -> str:
    """What the first rank says to the loss of the second, some rows having been answered."""
    with forks.start(size, command, torchrun=torchrun) as run:
        wait_for_rows(output, run)
        look(run)
        told = kill(run, 1)
    error = re.search(r"freight: error: (.*\n  .*\n  .*)\n", told)
    assert error is not None, told
    assert re.search(r"Rank 1 .* has ended", error[1]) and "kept" in error[1]
    assert f"torchrun --nproc-per-node {size} -m freight run" in error[1]
    return error[1]


def few_wide_layers(directory: Path, num_layers: int) -> tuple[Path, Path, int]:
    """A config, rows for it, and the bytes of its weights in float32."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    model, rows = directory / "model", directory / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    rows.write_text("".join(json.dumps({"prompt": [i, i + 1, 7]}) + "\n" for i in range(4)))
    weights = 4 * (num_layers * (4 * 1024**2 + 3 * 1024 * 4096) + 2 * 1000 * 1024)
    return model, rows, weights
