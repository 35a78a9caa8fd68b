"""Bytes over each link: what was counted at the calls that move them equals the closed form.

The closed form is written here a second time, from row lengths, page size and shares; of the
weights it takes the layout's bytes per sweep. The counts are held against the kernel's own, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from freight.memory.disk import Traffic, create_scratch
from freight.model.batch import MicroBatch
from freight.model.decoder import count_parameters, tensor_shapes
from freight.plan.policy import Policy
from freight.runtime.engine import Engine
from freight.runtime.request import SamplingParams

from . import tiny
from .test_engine_memory import check_memory
from .test_engine_policies import POLICIES

STEPS = 5
PROMPTS = tiny.prompts(11, 70)
BLOCK, JOIN = 4096, 32 * 1024
ELEMENT, WIDTH, LAYERS, HEADS = 4, 64, 2, 2 * 2 * 16  # bytes, D, L, elements of a token's KV
QUERIES = 4 * 16  # elements of a token's queries


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.make_model(directory)
    return directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A micro-batch in a sweep: (keys so far, tokens with their ids) of each row, in order, and
    where they are: tier, and whether the CPU is to attend them; ``moves_to`` where those are left
    that move."""

    rows: list[tuple[int, list[int]]]
    homes: list[tuple[str, bool]]
    moves_to: list[str | None] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for _, ids in self.rows for token in ids]


def sweeps(engine: Engine, answers: list[list[int]]) -> Iterator[list[Batch]]:
    """Blocks in the order of the dataset; every row is in each of its block's sweeps."""
    policy = engine.plan.policy
    size, count = policy.micro_batch_size, policy.num_micro_batches
    rows = [*range(len(PROMPTS))]
    micro_batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    for first in range(0, len(micro_batches), count):
        for turn in range(STEPS):
            yield [
                Batch(
                    rows=[row_state(row, turn, answers) for row in members],
                    homes=homes(policy, len(members)),
                )
                for members in micro_batches[first : first + count]
            ]


def recorded_sweeps(engine: Engine, steps: int = STEPS, **params: Any) -> list[list[Batch]]:
    """The micro-batches of a run as they come: rows enter at any time, prompts in chunks."""
    found: dict[int, list[Batch]] = {}
    near = engine.plan.policy.compute_tier

    def record(sweep: int, batch: MicroBatch) -> None:
        pages = [engine.placement.kv_cache.rows[span.row] for span in batch.rows]
        states = [
            (span.kv_len, list(batch.token_ids[span.start : span.end])) for span in batch.rows
        ]
        named = {"compute": near, "cpu": "cpu", "disk": "disk"}
        sources = [own.origin or own for own in pages]
        found.setdefault(sweep, []).append(
            Batch(
                rows=states,
                homes=[(named[own.home], own.is_delegated) for own in sources],
                moves_to=[None if own.origin is None else named[own.home] for own in pages],
            )
        )

    tiny.run(engine, PROMPTS, steps, on_batch=record, **params)
    return [found[sweep] for sweep in sorted(found)]


def homes(policy: Policy, num_rows: int) -> list[tuple[str, bool]]:
    """Tier of each row, and whether the CPU attends it: of those in RAM and on disk a share,
    which come last."""
    on_gpu, on_cpu = cut(num_rows, policy.kv)
    on_disk, share = num_rows - on_gpu - on_cpu, policy.cpu_attention
    delegated = {"cpu": round(share * on_cpu), "disk": round(share * on_disk)}
    shipped = {"gpu": on_gpu, "cpu": on_cpu, "disk": on_disk}
    own = [
        (tier, False)
        for tier, count in shipped.items()
        for _ in range(count - delegated.get(tier, 0))
    ]
    return own + [(tier, True) for tier, count in delegated.items() for _ in range(count)]


def row_state(row: int, turn: int, answers: list[list[int]]) -> tuple[int, list[int]]:
    prompt = PROMPTS[row]
    return (len(prompt) + turn - 1, answers[row][turn - 1 : turn]) if turn else (0, prompt)


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def cut(count: int, shares: Any) -> tuple[int, int]:
    """How many of ``count`` come first (gpu), and second (cpu); the rest is on disk."""
    first = round(count * shares.gpu)
    return first, round(count * (shares.gpu + shares.cpu)) - first


class ClosedForm:
    """Bytes per link, added up sweep by sweep."""

    def __init__(self, engine: Engine, places: dict[str, tuple[int, int]]) -> None:
        self.engine = engine
        self.policy = engine.plan.policy
        self.on_device = self.policy.compute_tier == "gpu"
        self.moved: Counter[str] = Counter()
        self.embedding_file_offset, self.file_bytes = places["embedding"]

    def add(self, batches: Sequence[Batch]) -> None:
        self.add_weights()
        for batch in batches:
            self.add_kv(batch)
            begun = LAYERS * any(
                is_delegated and before and len(ids) == 1
                for (_, is_delegated), (before, ids) in zip(batch.homes, batch.rows, strict=True)
            )
            self.add_activations(len(batch.token_ids), begun)
            self.add_embedding(batch.token_ids)

    def add_weights(self) -> None:
        layout = self.engine.plan.layout
        self.moved["disk read"] += layout.streamed_bytes("disk")[1]
        self.moved["host to device"] += layout.streamed_bytes("disk")[1] * self.on_device
        self.moved["host to device"] += layout.streamed_bytes("cpu")[1]

    def add_kv(self, batch: Batch) -> None:
        page = self.policy.page_tokens
        size = LAYERS * page * HEADS * ELEMENT
        moves = batch.moves_to or [None] * len(batch.rows)
        for (home, is_delegated), (before, ids), target in zip(
            batch.homes, batch.rows, moves, strict=True
        ):
            after = before + len(ids)
            if target is not None:
                self.add_move(home, target, before, after)
                continue
            had, touched = -(-before // page), -(-after // page) - before // page
            if home == self.policy.compute_tier:
                continue
            if is_delegated and before and len(ids) == 1:
                attended = LAYERS * QUERIES * ELEMENT
                self.moved["host to device"] += attended
                self.moved["device to host"] += attended + LAYERS * HEADS * ELEMENT
            else:
                self.moved["host to device"] += had * size * self.on_device
                self.moved["device to host"] += touched * size * self.on_device
            if home == "disk":
                self.moved["disk read"] += before // page * size
                self.moved["disk write"] += (after // page - before // page) * size

    def add_move(self, home: str, target: str, before: int, after: int) -> None:
        """All that a row has comes from one tier, and goes to another."""
        page, near = self.policy.page_tokens, self.policy.compute_tier
        size = LAYERS * page * HEADS * ELEMENT
        if self.on_device:
            self.moved["host to device"] += -(-before // page) * size * (home != near)
            self.moved["device to host"] += -(-after // page) * size * (target != near)
        self.moved["disk read"] += before // page * size * (home == "disk")
        self.moved["disk write"] += after // page * size * (target == "disk")

    def add_activations(self, num_tokens: int, begun: int) -> None:
        """Out after every unit from the embedding to the last attention, and in before the next,
        where what the head needs is picked; in once more for those that are begun, and finished
        when the CPU has attended."""
        on_gpu, on_cpu = cut(num_tokens, self.policy.activations)
        crossings = 2 * LAYERS
        disk = up((num_tokens - on_gpu - on_cpu) * WIDTH * ELEMENT, BLOCK)
        cpu = on_cpu * WIDTH * ELEMENT
        self.moved["disk read"] += disk * (crossings + begun)
        self.moved["disk write"] += disk * crossings
        if self.on_device:
            self.moved["host to device"] += (cpu + disk) * (crossings + begun)
            self.moved["device to host"] += (cpu + disk) * crossings

    def add_embedding(self, token_ids: list[int]) -> None:
        """Rows that are not where the arithmetic is; from disk, near neighbours together."""
        on_gpu, on_cpu = cut(tiny.VOCAB, self.policy.weights)
        near = on_gpu if self.on_device else on_cpu
        row_bytes = WIDTH * ELEMENT
        far = [token for token in token_ids if token >= near]
        self.moved["host to device"] += len(far) * row_bytes * self.on_device
        stretches: list[list[int]] = []
        for token in sorted({token for token in far if token >= on_gpu + on_cpu}):
            if stretches and (token - stretches[-1][1]) * row_bytes <= JOIN:
                stretches[-1][1] = token
            else:
                stretches.append([token, token])
        for first, last in stretches:
            begin = self.embedding_file_offset + first * row_bytes
            end = self.embedding_file_offset + (last + 1) * row_bytes
            self.moved["disk read"] += up(end, BLOCK) - begin // BLOCK * BLOCK


def embedding_place(directory: Path) -> dict[str, tuple[int, int]]:
    """Where the table begins in its file, by the header of the format."""
    path = directory / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    begin = header["model.embed_tokens.weight"]["data_offsets"][0]
    return {"embedding": (8 + length + begin, path.stat().st_size)}


def past_the_end(engine: Engine, places: dict[str, tuple[int, int]]) -> int:
    """Bytes of the last block of the file, per sweep, which are not there to be read."""
    file_bytes = places["embedding"][1]
    pieces = [piece for unit in engine.plan.layout.units for piece in unit.pieces if piece.path]
    return sum(max(0, piece.offset + piece.num_bytes - file_bytes) for piece in pieces)


def check_counts(
    engine: Engine, told: Sequence[Sequence[Batch]], places: dict[str, tuple[int, int]]
) -> None:
    """The bytes that crossed each link since loading are those of the closed form."""
    moved = Counter(engine.traffic.moved)
    moved.subtract(engine.load_traffic)
    form = ClosedForm(engine, places)
    for batches in told:
        form.add(batches)
        moved["disk read"] += past_the_end(engine, places)
    assert {link: n for link, n in moved.items() if n} == {
        link: n for link, n in form.moved.items() if n
    }


@pytest.mark.parametrize("name", [name for name in POLICIES if "slow" not in name])
def test_counts_equal_the_closed_form(name: str, model_dir: Path) -> None:
    places = embedding_place(model_dir)
    with tiny.engine(model_dir, PROMPTS, STEPS, **POLICIES[name]) as engine:
        if engine.plan.policy.is_continuous or "batch_tokens" in POLICIES[name]:
            told = recorded_sweeps(engine)
        else:
            told = [*sweeps(engine, tiny.run(engine, PROMPTS, STEPS))]
        check_counts(engine, told, places)


@pytest.mark.parametrize("dim", ["input", "output"])
@pytest.mark.parametrize(
    "name", ["cpu: all on disk", "cpu: odd mix", "sim: weights on disk", "sim: odd mix, K=8"]
)
def test_counts_of_compressed_weights(name: str, dim: str, model_dir: Path) -> None:
    """All matrices but the table that is looked up, in groups of 16 or 32 here: 4 bits, and 16 for
    each scale and minimum. Group borders move no byte."""
    places = embedding_place(model_dir)
    options = {**POLICIES[name], "weight_bits": 4, "group_size": 32, "group_dim": dim}
    options["compressed_dir"] = model_dir / "kept"
    with tiny.engine(model_dir, PROMPTS, STEPS, **options) as engine:
        layout = engine.plan.layout
        parts = [part for unit in layout.units for part in unit.parts if part.compressed]
        elements = sum(part.num_elements for part in parts)
        assert elements == LAYERS * (WIDTH * 192 + 3 * WIDTH * 160) + tiny.VOCAB * WIDTH
        assert sum(part.num_bytes for part in parts) == elements // 2 + 4 * elements // 32
        on_disk = [part for part in parts if part.tier == "disk"]
        vectors_stay = layout.streamed_bytes("disk")[0]
        assert vectors_stay == sum(part.num_bytes for part in on_disk)
        check_counts(engine, [*sweeps(engine, tiny.run(engine, PROMPTS, STEPS))], places)


SCORING = [
    "cpu: all in memory",
    "cpu: weights on disk",
    "cpu: all on disk",
    "cpu: activations on disk",
    "cpu: odd mix",
    "cpu: zigzag in chunks",
    "cpu: refill, odd mix",
    "sim: weights on disk",
    "sim: all on disk",
    "sim: odd mix, K=7",
    "sim: attention on both",
    "sim: refill, odd mix",
]


@pytest.mark.parametrize("name", SCORING)
@pytest.mark.parametrize("steps", [0, 1])
def test_counts_of_prompts_alone(name: str, steps: int, model_dir: Path) -> None:
    """Rows that are in one sweep: of keys nothing moves that was not asked to be elsewhere."""
    places = embedding_place(model_dir)
    asked = SamplingParams(max_tokens=steps, prompt_logprobs=0)
    with tiny.engine(model_dir, PROMPTS, steps, asked, **POLICIES[name]) as engine:
        told = recorded_sweeps(engine, steps, prompt_logprobs=0)
        check_memory(engine)
        check_counts(engine, told, places)
        tokens = sum(len(batch.token_ids) for batches in told for batch in batches)
        most_once = sum(len(prompt) - (not steps and len(prompt) > 1) for prompt in PROMPTS)
        assert tokens >= most_once if engine.plan.policy.is_continuous else tokens == most_once
        check_kv(engine)


def check_kv(engine: Engine) -> None:
    """Pages of one micro-batch and layer where all rows are near and their prompts whole."""
    policy, g = engine.plan.policy, engine.plan.geometry
    longest = max(len(prompt) for prompt in PROMPTS)
    is_near = policy.kv.share(policy.compute_tier) == 1
    if is_near and not policy.is_continuous and policy.max_batch_tokens >= longest:
        most = engine.plan.workload.max_total_tokens
        pages = policy.micro_batch_size * -(-most // policy.page_tokens)
        held = pages * policy.page_tokens * HEADS * ELEMENT
        assert g.usage[policy.compute_tier]["KV cache"] == held
    else:
        assert g.kv_page_bytes == (g.page_bytes,) * LAYERS


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("steps", [0, 1])
def test_weights_are_read_once_where_the_planner_may_choose(
    device: str, steps: int, model_dir: Path
) -> None:
    """All rows are one block then, and of the weights each byte crosses each link once."""
    asked = SamplingParams(max_tokens=steps, prompt_logprobs=0)
    options = {"device": device, "weights_percent": (0.0, 0.0, 100.0), "micro_batch_size": 2}
    with tiny.engine(model_dir, PROMPTS, steps, asked, **options) as engine:
        told = recorded_sweeps(engine, steps, prompt_logprobs=0)
        moved = Counter(engine.traffic.moved)
        moved.subtract(engine.load_traffic)
        form = ClosedForm(engine, embedding_place(model_dir))
        form.add(told[0])
        moved["disk read"] += past_the_end(engine, embedding_place(model_dir))
    assert len(told) == 1 and len(told[0]) == 6
    assert dict(+moved) == dict(+form.moved)
    check_kv(engine)


def test_loading_reads_what_stays_in_memory_once(model_dir: Path) -> None:
    """All on the compute tier: the checkpoint's bytes, and blocks at both ends of tensors. The last
    norm comes with every chunk of the head."""
    with tiny.engine(model_dir, PROMPTS, STEPS, **POLICIES["cpu: all in memory"]) as engine:
        read = engine.load_traffic["disk read"]
        num_chunks = sum(unit.kind == "head" for unit in engine.programme.units)
        again = (num_chunks - 1) * engine.config.hidden_size
        num_bytes = (count_parameters(engine.config) + again) * ELEMENT
        num_tensors = len(tensor_shapes(engine.config)) + num_chunks
        assert engine.traffic.wanted["disk read"] == num_bytes
        assert num_bytes <= read <= num_bytes + 2 * BLOCK * num_tensors


# -- against the kernel ------------------------------------------------------------------------

PROGRAMME = """
import json, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from freight.plan.workload import Workload
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Request, SamplingParams

directory, prompts, steps, options = json.loads(sys.argv[1])

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
options = EngineOptions(dtype="float32", disk_dir=Path(directory), **options)
engine = build_engine(Path(directory), options=options, workload=workload)
list(engine.run(requests()))  # whatever is read once, such as code, is read now
before, counted = kernel(), dict(engine.traffic.moved)
list(engine.run(requests()))
after = kernel()
names = {"disk read": "read_bytes", "disk write": "write_bytes"}
print(json.dumps({
    link: [engine.traffic.moved[link] - counted[link], after[name] - before[name]]
    for link, name in names.items()
}))
"""


@pytest.mark.parametrize("name", ["cpu: all on disk", "sim: all on disk"])
def test_counts_equal_the_kernel_s(name: str, model_dir: Path) -> None:
    probe = create_scratch(model_dir, BLOCK, Traffic())
    is_direct = probe.is_direct
    probe.close()
    if not is_direct:
        pytest.skip(f"the file system of {tempfile.gettempdir()} takes no direct I/O")
    arguments = json.dumps([str(model_dir), PROMPTS, STEPS, POLICIES[name]])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAMME, arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(result.stdout)
    counted, measured = found["disk read"]
    # Of the file's last block, which a sweep may need, the kernel counts all, we what is there.
    file_bytes = (model_dir / "model.safetensors").stat().st_size
    tail = up(file_bytes, BLOCK) - file_bytes
    assert counted and measured - counted in (0, STEPS * tail)
    counted, measured = found["disk write"]
    # The kernel counts the file's inode, too, whenever its time of change is brought up to date.
    assert counted and measured - counted in range(0, 4 * BLOCK + 1, BLOCK)
