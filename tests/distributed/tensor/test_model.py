"""Whole models over virtual ranks: the greedy tokens of transformers, whatever way is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.virtual import VirtualRanks
from freight.errors import InputError
from freight.model.checkpoint import open_checkpoint
from freight.model.config import read_config
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC, EXCHANGED

from ...runtime import tiny
from ...runtime.classics import CLASSICS_REFUSED
from ...runtime.test_engine_parity import CONFIGS
from ...runtime.test_engine_recurrence import CONFIGS as RECURRENT
from ...runtime.test_engine_recurrence import nemotron
from .bed import CUTS, greedy

STEPS = 7


class OneRank(VirtualRanks):
    """One of a mesh's ranks, which can load but sends nothing."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh)
        self.own = (rank,)


EIGHT = Mesh.of(x=2, y=2, z=2)
ROTATED_BY_LENGTH = {"dynamic", "longrope"}
REFUSED = {
    **CLASSICS_REFUSED,
    "afmoe": "gates of what is attended",
    "gemma4, experts": "experts beside an MLP",
    "afmoe, mostly plain layers": "gates of what is attended",
    "opt, norms after": "32 columns",
    "deepseek-v2": "latents",
    "deepseek-v2-lite": "latents",
    "deepseek-v3": "latents",
    "deepseek-v3, biases": "latents",
    "deepseek-v3.2": "latents",
    "gemma4": "heads of several sizes",
    "gemma4, capped logits": "norms of values or scales of layers",
    "gemma4, unified": "heads of several sizes",
    "gemma4, inputs of layers": "keys of other layers, or inputs of each layer",
    "gemma4, keys of others": "keys of other layers, or inputs of each layer",
    "gemma4, wider behind": "keys of other layers, or inputs of each layer",
    "glm-4.7 flash": "latents",
    "glm-5": "latents",
    "hy 4": "several residual streams",
    "hy 4, biases": "several residual streams",
    "laguna": "heads of several sizes",
    "laguna, gates as wide as heads": "gates of what is attended",
    "mimo": "values that are narrower than keys",
    "mimo, other layers": "heads of several sizes",
    "mistral 4": "latents",
    "mistral 4, groups": "latents",
    "minicpm3": "latents",
    "minicpm3, queries at once": "latents",
    "youtu": "latents",
}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - REFUSED.keys() - ROTATED_BY_LENGTH))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Each step is computed in another way than the one before it."""
    reference = tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts = tiny.prompts(5, 17, vocab=300)
    mesh = EIGHT if CONFIGS[name].hidden_size % 8 == 0 else Mesh.of(x=2, y=2, z=1)
    model = load_model(tmp_path, VirtualRanks(mesh), CUTS, dtype=torch.float32)
    found = [*zip(*greedy(model, prompts, STEPS, CUTS), strict=True)]
    wanted = tiny.tokens(tiny.reference(reference, prompts, STEPS))
    assert [list(own) for own in found] == wanted


def test_queries_do_not_grow_in_rows_that_end_before(tmp_path: Path) -> None:
    reference = tiny.make_model(tmp_path, config=CONFIGS["ministral 3"])
    prompts, config = tiny.prompts(5, 6, vocab=300), read_config(tmp_path).for_rows(12)
    model = load_model(tmp_path, VirtualRanks(EIGHT), CUTS, dtype=torch.float32, config=config)
    found = [*zip(*greedy(model, prompts, 6, CUTS), strict=True)]
    assert [list(own) for own in found] == tiny.tokens(tiny.reference(reference, prompts, 6))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name: str, tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=CONFIGS[name])
    with pytest.raises(InputError, match=REFUSED[name]):
        load_model(tmp_path, VirtualRanks(EIGHT), CUTS, dtype=torch.float32)


KEPT = {"qwen3.5": "keep a state and gates", "olmo hybrid": "layers that keep a state"}
KEPT["kimi linear"] = "latents and layers that keep a state"
KEPT["ling 3"] = "latents and layers that keep a state and gates"


@pytest.mark.parametrize("name", KEPT)
def test_layers_that_keep_a_state_are_refused(name: str, tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=RECURRENT[name])
    with pytest.raises(InputError, match=KEPT[name]):
        load_model(tmp_path, VirtualRanks(EIGHT), CUTS, dtype=torch.float32)


def test_layers_of_one_part_are_refused(tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=nemotron("*-"))
    with pytest.raises(InputError, match="It has layers of one part,"):
        load_model(tmp_path, VirtualRanks(EIGHT), CUTS, dtype=torch.float32)


SERIAL = [
    "multi-head",
    "opt",
    "opt, no biases",
    "gpt-neox, serial",
    "qwen2",
    "qwen3",
    "phi3",
    "tied",
]


@pytest.mark.parametrize("name", SERIAL)
def test_schemes_take_turns(name: str, tmp_path: Path) -> None:
    """Of Ong & Kwon, and the better ones with an exchange: of every kind of norm and bias."""
    reference = tiny.make_model(tmp_path, config=CONFIGS[name])
    schemes = [*DYNAMIC.values(), *EXCHANGED.values()]
    ranks = VirtualRanks(Mesh.of(x=4 if name == "multi-head" else 2))
    model = load_model(tmp_path, ranks, schemes, dtype=torch.float32)
    prompts = tiny.prompts(3, 11)
    found = [*zip(*greedy(model, prompts, 5, schemes), strict=True)]
    assert [list(own) for own in found] == tiny.tokens(tiny.reference(reference, prompts, 5))


@pytest.mark.parametrize("name", ["falcon 7b", "falcon 40b", "mixtral", "odd sizes", "tied"])
def test_ranks_read_their_own_bytes(name: str, tmp_path: Path) -> None:
    """Of each matrix every byte is read by one rank, vectors and routers by all that use them."""
    tiny.make_model(tmp_path, config=CONFIGS[name])
    mesh = EIGHT if CONFIGS[name].hidden_size % 8 == 0 else Mesh.of(x=2, y=2, z=1)
    sizes = {own: tensor.num_bytes for own, tensor in open_checkpoint(tmp_path).items()}
    vectors = sum(sizes[own] for own in sizes if "norm" in own or "ln_" in own)
    routers = sum(size for own, size in sizes.items() if own.endswith("moe.gate.weight"))
    matrices = sum(sizes.values()) - vectors - routers
    read = [
        load_model(tmp_path, OneRank(mesh, rank), [Cut()], dtype=torch.float32).bytes_read
        for rank in range(mesh.num_chips)
    ]
    assert sum(read) == matrices + routers * mesh.size("yz") + vectors * mesh.num_chips
    assert max(read) - min(read) <= 0.1 * max(read)  # but for padding all read alike


def test_keys_are_handed_over_by_slicing(tmp_path: Path) -> None:
    """From head-sharded prefill to row-sharded decoding of a multi-query model nothing is sent, and
    each rank has an eighth of the keys then; weights stay where they are."""
    tiny.make_model(tmp_path, config=CONFIGS["falcon 7b"])
    model = load_model(tmp_path, VirtualRanks(EIGHT), CUTS, dtype=torch.float32)
    stored = [part.data_ptr() for own in model.stored for parts in own.values() for part in parts]
    batch = model.begin(8, 16)
    model.step(batch, tiny.prompts(8, 9), Cut())
    assert batch.cache.num_bytes == 8 * 2 * 2 * 8 * 16 * 16 * 4
    model.step(batch, [[1]] * 8, Cut(batch="zyx"))
    assert batch.cache.num_bytes == 2 * 2 * 8 * 16 * 16 * 4
    moved = {
        kind: size
        for (kind, what), size in model.executor.moved.items()
        if what == "keys and values"
    }
    assert moved == {"slice": 0}
    after = [part.data_ptr() for own in model.stored for parts in own.values() for part in parts]
    assert stored == after
