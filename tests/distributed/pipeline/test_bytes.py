"""What each stage counts as read and written is what the kernel has seen of its process."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from freight.memory.disk import BLOCK, Traffic, create_scratch
from freight.quantities import align_up

from ...runtime import tiny
from ..forks import Forks

STEPS = 6
PROMPTS = tiny.prompts(6, 20)

RANK = """
import json, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from freight.distributed.pipeline.planning import build_stage_engine
from freight.distributed.ranks import Connection, Place, Ranks
from freight.plan.workload import Workload
from freight.runtime.options import EngineOptions
from freight.runtime.request import Request, SamplingParams

directory, prompts, steps = json.loads(sys.argv[1])

def requests():
    for index, ids in enumerate(prompts):
        yield Request(index=index, prompt_ids=ids, params=SamplingParams(max_tokens=steps))

def kernel():
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}

longest = max(map(len, prompts))
workload = Workload(
    num_rows=len(prompts), max_prompt_tokens=longest, max_new_tokens=steps,
    max_total_tokens=longest + steps, total_prompt_tokens=sum(map(len, prompts)),
    total_new_tokens=steps * len(prompts),
)
options = EngineOptions(
    dtype="float32", device="cpu", disk_dir=Path(directory), weights_percent=(0.0, 0.0, 100.0),
    kv_percent=(0.0, 0.0, 100.0), micro_batch_size=3, num_micro_batches=1, admission="zigzag",
)
place = Place.from_environment()
ranks = Ranks(place, Connection.from_environment(place))
engine = build_stage_engine(Path(directory), options=options, workload=workload, ranks=ranks)

def run():
    return list(engine.run(requests() if place.rank == 0 else iter(())))

names = {"disk read": "read_bytes", "disk write": "write_bytes"}

def measured():
    before, counted = kernel(), dict(engine.traffic.moved)
    found = run()
    assert place.rank or len(found) == len(prompts)
    after = kernel()
    return [
        [engine.traffic.moved[link] - counted[link], after[name] - before[name]]
        for link, name in names.items()
    ]

run()  # whatever is read once, such as code, is read now
# A machine that is short of memory reads code again: then the kernel counts more, and which run of
# some that was without is told by the least.
least = [min(own, key=lambda pair: pair[1] - pair[0]) for own in zip(*(measured() for _ in "123"))]
print("\\n" + json.dumps([place.rank, *least]), flush=True)
engine.close()
ranks.close()
"""


def test_counts_of_each_stage_equal_the_kernel_s(forks: Forks, tmp_path: Path) -> None:
    probe = create_scratch(tmp_path, BLOCK, Traffic())
    is_direct = probe.is_direct
    probe.close()
    if not is_direct:
        pytest.skip(f"the file system of {tempfile.gettempdir()} takes no direct I/O")
    tiny.make_model(tmp_path, num_hidden_layers=5)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    status, told = forks.finish(2, [str(script), json.dumps([str(tmp_path), PROMPTS, STEPS])])
    assert status == 0, told
    found = sorted(json.loads(line) for line in re.findall(r"^\[\d.*\]$", told, re.MULTILINE))
    assert [rank for rank, _, _ in found] == [0, 1], told
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    # Of the file's last block the kernel counts all, we what is there, as often as it is read.
    tail = align_up(file_bytes, BLOCK) - file_bytes
    for _, (read, kernel_read), (written, kernel_written) in found:
        assert read and (kernel_read - read) % max(1, tail) == 0 <= kernel_read - read
        # The kernel counts the file's inode, too, when its time of change is brought up to date.
        assert written and kernel_written - written in range(0, 8 * BLOCK + 1, BLOCK)
