"""Ranks as processes: ``python worker.py JOB NUM_RANKS DIRECTORY`` runs a job of this file on each.

Torch is imported once, before the processes fork. Each leaves what its job returns, or why it
failed, in the directory.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import bed

from freight.distributed.tensor.engine import TensorEngine, follow
from freight.distributed.tensor.fitting import TensorOptions
from freight.distributed.tensor.launch import launch
from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.processes import ProcessRanks
from freight.partition.layout import Mesh
from freight.plan.workload import Workload
from freight.runtime.params import SamplingParams
from freight.runtime.request import Request


def layouts(directory: Path) -> list[tuple[str, Counter]]:
    """Every layout, and what was sent beside what the algebra counts."""
    return [
        (case.name, bed.check(ProcessRanks(case.own.mesh), case, known))
        for case, known in all_layouts()
    ]


@cache
def all_layouts() -> list[tuple[bed.Case, tuple[bed.Tensors, torch.Tensor]]]:
    """And what they must come to: found before the processes fork, once for all of them."""
    mesh = Mesh.of(x=2, y=2, z=2)
    own = [*bed.cases(mesh, some=True), *bed.schemes(8), *bed.searched(mesh, literal=False)]
    return [(case, bed.whole(case)) for case in own]


def models(directory: Path) -> dict[str, list[list[int]]]:
    """Greedy tokens of every model that the directory has, each step in another way."""
    found = {}
    for path, prompts, steps in json.loads((directory / "models.json").read_text()):
        ranks = ProcessRanks(Mesh.of(x=2, y=2, z=2))
        model = load_model(Path(path), ranks, bed.CUTS, dtype=torch.float32)
        found[path] = [*zip(*bed.greedy(model, prompts, steps, bed.CUTS), strict=True)]
    return found


def answers(directory: Path) -> list[list[int]] | None:
    """Greedy tokens of the directory's prompts, on the first rank; the others follow it."""
    prompts, params = torch.load(directory / "prompts"), SamplingParams(max_tokens=5)
    longest = max(map(len, prompts))
    work = Workload(
        num_rows=len(prompts),
        max_prompt_tokens=longest,
        max_new_tokens=5,
        max_total_tokens=longest + 5,
        total_prompt_tokens=sum(map(len, prompts)),
        total_new_tokens=5 * len(prompts),
    )
    model, switch, planned = launch(
        directory,
        4,
        ProcessRanks,
        workload=work,
        dtype=torch.float32,
        options=TensorOptions(memory_bytes=1 << 30, cache_dir=directory / "cache"),
    )
    if dist.get_rank():
        follow(model)
        return None
    engine = TensorEngine(
        model, switch, workload=work, tokenizer=None, rows=planned.rows, call_tokens=64
    )
    asked = (
        Request(index=index, prompt_ids=prompt, params=params)
        for index, prompt in enumerate(prompts)
    )
    found = {own.index: list(own.token_ids) for own in engine.run(asked)}
    engine.close()
    return [found[index] for index in range(len(prompts))]


JOBS = {"layouts": layouts, "models": models, "answers": answers}


def main(job: str, num_ranks: int, directory: Path) -> int:
    torch.set_num_threads(1)
    if job == "layouts":
        all_layouts()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os._exit(_rank(job, rank, num_ranks, directory))
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children)


def _rank(job: str, rank: int, num_ranks: int, directory: Path) -> int:
    try:
        store = dist.FileStore(str(directory / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        found = JOBS[job](directory)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (directory / f"{rank}.error").write_text(traceback.format_exc())
        return 1
    (directory / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
