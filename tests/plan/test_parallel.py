"""Several chips: the FlexGen paper's four T4s, parts that make up the whole, bounds and refusals.

``python -m pytest -s tests/plan/test_parallel.py`` prints predictions beside published figures.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import BudgetError, InputError
from freight.hardware.chip import find_chip
from freight.hardware.storage import find_machine
from freight.model.checkpoint import imagined_sources
from freight.model.config import Experts, parse_config
from freight.model.decoder import count_parameters, tensor_shapes
from freight.plan.beginnings import Beginnings, Shared
from freight.plan.parallel import Answer, Parallel, Refused
from freight.plan.policy import Split
from freight.plan.shares import Shares, cut_over, layer_ranges, part_of, sources_of, with_layers
from freight.plan.wishes import Wishes
from freight.plan.workload import Workload
from freight.quantities import GIB

from .test_published import CASES, config_of, price, search_for, tell

PROMPT, NEW = 512, 32
ONE, PIPELINE = Shares(1, 1, 1), Shares(1, 4, 1)
ZIGZAG = Wishes(admission="zigzag")


def chips(
    model: str,
    count: int,
    *,
    rows: int = 256,
    wishes: Wishes = ZIGZAG,
    host_chips: int = 1,
    max_block_s: float = math.inf,
    gpu_bytes: int = int(14.2 * GIB),
) -> Parallel:
    """Machines like the paper's, as ``search_for`` has one; the disk with room for a checkpoint."""
    config = config_of(model)
    model_bytes = 2 * count_parameters(config)
    return Parallel(
        config=config,
        workload=Workload.of_alike(rows, PROMPT, NEW),
        machine=find_machine("flexgen-t4"),
        budgets={"gpu": gpu_bytes, "cpu": 204 * GIB, "disk": 1000 * GIB + model_bytes},
        taken={},
        wishes=wishes,
        dtype="float16",
        sources=lambda own: imagined_sources(own, "float16"),
        chip=find_chip("t4"),
        model_bytes=model_bytes,
        num_chips=count,
        host_chips=host_chips,
        max_block_s=max_block_s,
    )


def decoded_per_s(seconds: float, rows: int) -> float:
    return rows * (NEW - 1) / seconds


# -- what was published: FlexGen (arXiv 2303.06865), table 3; four machines with one T4 each -------

# With four GPUs the paper prints no policies. These of OPT-175B say what its text does, "CPU-only
# offloading"; the rows of a block are fitted to the rate of decoding, and tested by the other rate.
IN_RAM = Wishes(
    admission="zigzag",
    weights=Split(cpu=1.0),
    kv=Split(cpu=1.0),
    activations=Split(cpu=1.0),
    cpu_attention=1.0,
    micro_batch_size=24,
    num_micro_batches=1,
)
# Model: wishes, rows in all, token/s of all work and of decoding, tolerance.
FOUR = {
    "opt-6.7b": (ZIGZAG, 256, 201.12, 764.65, 0.35),
    "opt-30b": (ZIGZAG, 256, 23.61, 48.94, 0.25),
    "opt-175b": (IN_RAM, 4 * 24, 2.33, 3.86, 0.2),
}
SINGLE = {"OPT-30B, 512": (7.32, 11.52), "OPT-175B, 512": (0.69, 0.83)}


@pytest.mark.parametrize("name", SINGLE)
def test_one_gpu_as_published(name: str) -> None:
    told = price(CASES[name]).forecast
    rows = CASES[name].size * CASES[name].count
    found = told.tokens_per_s, decoded_per_s(told.decode_s, rows)
    for what, own, printed in zip(("all", "decoding"), found, SINGLE[name], strict=True):
        tell(f"{name}, 1 GPU, {what}", own, printed)
        assert own == pytest.approx(printed, rel=0.25)


@pytest.mark.parametrize("model", FOUR)
def test_four_gpus_as_published(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many blocks in flight as there are stages, as the paper has them."""
    monkeypatch.setattr("freight.plan.parallel._ROUNDS", (1,))
    wishes, rows, every, decoding, tolerance = FOUR[model]
    told = chips(model, 4, rows=rows, wishes=wishes).price(PIPELINE)
    found = told.tokens_per_s, decoded_per_s(told.decode_s, rows)
    for what, own, printed in zip(("all", "decoding"), found, (every, decoding), strict=True):
        tell(f"{model}, 4 GPUs, {what}", own, printed)
        assert own == pytest.approx(printed, rel=tolerance)


def test_decoding_speeds_up_by_about_four_and_prompts_by_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OPT-30B: 48.94 / 11.52 = 4.25 and, from what is left of the times for all work, 2.33. By
    S T / (T + S - 1) four blocks on four stages come to 2.29."""
    monkeypatch.setattr("freight.plan.parallel._ROUNDS", (1,))
    one = chips("opt-30b", 1).price(ONE)
    four = chips("opt-30b", 4).price(PIPELINE)
    decoding, prompts = one.decode_s / four.decode_s, one.prefill_s / four.prefill_s
    tell("OPT-30B, decoding, times", decoding, 48.94 / 11.52)
    tell("OPT-30B, prompts, times", prompts, 2.33)
    assert decoding == pytest.approx(48.94 / 11.52, rel=0.1)
    assert prompts == pytest.approx(2.33, rel=0.1)


def test_what_is_found_for_opt_175b_is_no_worse() -> None:
    published = chips("opt-175b", 4, rows=96, wishes=IN_RAM).price(PIPELINE)
    found = chips("opt-175b", 4, rows=256).price(PIPELINE)
    tell("OPT-175B, 4 GPUs, as searched", found.tokens_per_s, 2.33)
    assert found.tokens_per_s > published.tokens_per_s


# -- parts and the whole --------------------------------------------------------------------------


def test_one_chip_is_planned_as_ever() -> None:
    plain = search_for("opt-6.7b", 64, PROMPT, Wishes(), needs_all=False).best()
    own = chips("opt-6.7b", 1, rows=64)
    (answer,) = own.answers()
    assert isinstance(answer, Answer)
    assert answer.stages[0].choice.plan.policy == plain.plan.policy
    assert answer.seconds == pytest.approx(plain.forecast.seconds)
    assert answer.block_s == pytest.approx(plain.forecast.block_s)


def test_more_replicas_are_never_slower() -> None:
    seconds = [
        chips("opt-6.7b", count).price(Shares(count, 1, 1), is_rough=True).seconds
        for count in (1, 2, 4)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[-1] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("shares", [Shares(1, 3, 1), Shares(1, 1, 4), Shares(2, 2, 1)], ids=str)
def test_every_chip_keeps_to_its_memory(shares: Shares) -> None:
    count = shares.data * shares.stages * shares.ranks
    own = chips("opt-6.7b", count, rows=128, host_chips=count, gpu_bytes=4 * GIB)
    answer = own.price(shares, is_rough=True)
    layers = [layer for stage in answer.stages for layer in range(stage.first, stage.last + 1)]
    assert layers == [*range(32)]
    for stage in answer.stages:
        geometry = stage.choice.plan.geometry
        assert geometry.total("gpu") <= 4 * GIB
        assert geometry.total("cpu") <= 204 * GIB // count
        policy = stage.choice.plan.policy
        kept = sum(geometry.usage[tier]["KV cache"] for tier in geometry.usage)
        pages = math.ceil((PROMPT + NEW) / policy.page_tokens)
        row = pages * geometry.page_bytes * (stage.last + 1 - stage.first)
        assert kept >= answer.in_flight * policy.block_rows * row
    blocks = {stage.choice.plan.policy.block_rows for stage in answer.stages}
    assert len(blocks) == 1


def test_a_shared_host_is_no_faster_than_hosts_of_their_own() -> None:
    apart, together = (
        chips("opt-30b", 4, rows=64, host_chips=count).price(Shares(4, 1, 1), is_rough=True)
        for count in (1, 4)
    )
    assert together.seconds >= apart.seconds


@given(st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_layers_are_shared_out_evenly(case: tuple[int, int]) -> None:
    num_layers, stages = case
    ranges = layer_ranges(num_layers, stages)
    assert [layer for own in ranges for layer in own] == [*range(num_layers)]
    sizes = [len(own) for own in ranges]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_all_of_the_matrices(ranks: int) -> None:
    """What every rank has whole, norms and biases of the stream, is little."""
    config = config_of("llama-3-70b")
    part, whole = count_parameters(cut_over(config, ranks)), count_parameters(config)
    assert whole <= ranks * part <= 1.001 * whole


def test_stages_have_all_layers_and_their_own_tensors() -> None:
    windows = (None, 8, 16, 32)
    whole = config_of("opt-6.7b")
    config = replace(whole, num_layers=4, sliding_windows=windows, ropes=whole.ropes[:4])
    sources = imagined_sources(config, "float16")
    parts = [range(1), range(1, 4)]
    models = [with_layers(config, own, with_ends=own.stop == 4) for own in parts]
    assert [own.sliding_windows for own in models] == [(None,), (8, 16, 32)]
    for own, layers in zip(models, parts, strict=True):
        found = sources_of(sources, layers, with_ends=layers.stop == 4)
        for name, shape in tensor_shapes(own).items():
            assert found[name].shape == shape
    first = sources_of(sources, parts[1], with_ends=True)["layers.0.attention.q"]
    assert first == sources["layers.1.attention.q"]


def test_stages_have_their_own_layers_experts() -> None:
    experts = Experts(
        num_experts=4,
        per_token=2,
        intermediate_size=64,
        normalised=True,
        layers=(True, False, True, True),
    )
    llama, sliding_windows = config_of("llama-3-8b"), (None,) * 4
    config = replace(
        llama,
        num_layers=4,
        sliding_windows=sliding_windows,
        ropes=llama.ropes[:4],
        experts=experts,
    )
    whole = set(tensor_shapes(config))
    found = []
    for layers in (range(2), range(2, 4)):
        own = with_layers(config, layers, with_ends=True)
        for name in tensor_shapes(own):
            room, _, rest = name.partition(".")
            if room == "layers":
                number, _, rest = rest.partition(".")
                name = f"layers.{int(number) + layers.start}.{rest}"
            found.append(name)
    assert set(found) == whole
    ranked = cut_over(config, 2)
    assert ranked.experts is not None and ranked.experts.intermediate_size == 32


def test_stages_have_their_own_layers_parts() -> None:
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "n_routed_experts": 4}
    raw = {"model_type": "nemotron_h", **sizes, "hybrid_override_pattern": "M-*E"}
    config = parse_config(raw)
    sources = imagined_sources(config, "float16")
    for layers in (range(1, 2), range(2, 4)):
        own = with_layers(config, layers, with_ends=True)
        found = sources_of(sources, layers, with_ends=True)
        assert {name: found[name].shape for name in tensor_shapes(own)} == tensor_shapes(own)
        assert len(found) == len(tensor_shapes(own))


def test_rows_are_shared_out_and_rounded_up() -> None:
    part = part_of(Workload.of_alike(10, 5, 3), 4)
    assert (part.num_rows, part.total_prompt_tokens, part.total_new_tokens) == (3, 15, 9)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.integers(2, 20), st.integers(0, 9)),
        min_size=1,
        max_size=5,
        unique_by=lambda group: group[1:],
    ),
    parts=st.integers(1, 50),
    is_scored=st.booleans(),
)
def test_a_part_of_the_rows_is_like_all(
    groups: list[tuple[int, int, int]], parts: int, is_scored: bool
) -> None:
    """Work that can be, with some rows of each length, in proportion."""
    rows = sum(count for count, _, _ in groups)
    prompts = sum(count * prompt for count, prompt, _ in groups)
    longest = max(prompt for _, prompt, _ in groups)
    whole = Workload(
        num_rows=rows,
        max_prompt_tokens=longest,
        max_new_tokens=max(new for _, _, new in groups),
        max_total_tokens=max(prompt + new for _, prompt, new in groups),
        total_prompt_tokens=prompts,
        total_new_tokens=sum(count * new for count, _, new in groups),
        max_scored_tokens=is_scored * (longest - 1),
        total_scored_tokens=is_scored * (prompts - rows),
        lengths=tuple(groups),
    )
    keys = np.repeat(np.arange(len(groups)), [count for count, _, _ in groups])
    prompt_of = np.array([groups[key][1] for key in keys])
    whole = replace(
        whole,
        beginnings=Beginnings.of(
            tuple(Shared(prompt - 1, 1) for _, prompt, _ in groups),
            keys=keys,
            tokens=prompt_of - 1,
            prompts=prompt_of,
            totals=prompt_of + [groups[key][2] for key in keys],
            rows=np.ones(rows, dtype=np.int64),
        ),
    )
    part = part_of(whole, parts)
    begun = [row.computes for row in part.row_lengths(0, part.num_rows, 1) if row.shared]
    assert sum(begun) == sum(prompt > 1 for _, prompt, _ in part.lengths)
    assert part.begun(part.num_rows) == len(part.lengths)
    assert part.num_rows == -(-rows // parts) == sum(count for count, _, _ in part.lengths)
    for name in ("total_prompt_tokens", "total_new_tokens", "total_scored_tokens"):
        mean = getattr(whole, name) / rows
        assert mean <= getattr(part, name) / part.num_rows < mean + 1 + 1e-9
    left = list(part.lengths)
    for count, prompt, new in groups:
        own = left.pop(0)[0] if left and left[0][1:] == (prompt, new) else 0
        assert abs(own - count * part.num_rows / rows) <= 1 + 1e-9
    assert not left


def test_ranks_send_what_the_closed_form_says() -> None:
    """An all-reduce behind attention and behind the MLP of each layer (Pope et al., section 3.2.1);
    norms, the embedding and the head are little beside."""
    own = chips("opt-30b", 4, rows=64)
    answer = own.price(Shares(1, 1, 4), is_rough=True)
    tokens, width, layers = 64 * PROMPT, own.config.hidden_size, own.config.num_layers
    sent_bytes = layers * 2 * 2 * tokens * width * (1 - 1 / 4) * 2
    prefill_s, _ = answer.stages[0].sent_s
    assert prefill_s == pytest.approx(sent_bytes / own.chip.outer_bytes_per_s, rel=0.05)
    assert answer.prefill_s == answer.stages[0].choice.forecast.prefill_s + prefill_s


# -- bounds and refusals --------------------------------------------------------------------------


def test_a_bound_on_latency_is_kept() -> None:
    free = chips("opt-6.7b", 2, rows=512)
    best = free.best(free.answers())
    bound = 0.6 * best.block_s
    tight = replace(free, max_block_s=bound)
    kept = tight.best(tight.answers())
    assert kept.block_s <= bound
    assert kept.tokens_per_s <= best.tokens_per_s * 1.02  # few block shapes are priced


def test_a_bound_is_kept_by_stages() -> None:
    """It holds for the whole round of blocks, of which a stage's own sweeps are a part."""
    free = chips("opt-30b", 4).price(PIPELINE, is_rough=True)
    bound = free.block_s / 2
    kept = chips("opt-30b", 4, max_block_s=bound).price(PIPELINE, is_rough=True)
    assert bound / 4 <= kept.block_s <= bound


def test_a_bound_is_filled_where_ranks_send_on_top() -> None:
    """What is sent is no part of what a chip's own search knows. The bound is that of one block
    shape; what keeps to it is as good as that, not just the shortest block."""
    shares = Shares(1, 1, 4)
    shape = replace(ZIGZAG, micro_batch_size=8, num_micro_batches=1)
    alone = chips("opt-66b", 4, wishes=shape).price(shares, is_rough=True)
    assert sum(alone.stages[0].sent_s) > 0.1 * alone.seconds
    bound = 1.02 * alone.block_s
    kept = chips("opt-66b", 4, max_block_s=bound).price(shares, is_rough=True)
    assert kept.block_s <= bound
    assert kept.tokens_per_s > 0.9 * alone.tokens_per_s


def test_a_bound_that_none_keeps_says_what_is_nearest() -> None:
    own = chips("opt-6.7b", 2, rows=64, max_block_s=0.01)
    with pytest.raises(BudgetError, match=r"The least that was found is .* s, with ") as caught:
        own.best(own.answers())
    assert "Raise --max-latency to" in caught.value.advice


@pytest.mark.parametrize(
    ("model", "shares", "words"),
    [
        ("llama-3-70b", Shares(1, 1, 16), "8 key heads do not divide by 16"),
        ("palm-8b", Shares(1, 1, 2), "1 key heads do not divide by 2"),
        ("opt-6.7b", Shares(1, 33, 1), "has 32 layers"),
    ],
)
def test_what_cannot_be_cut(model: str, shares: Shares, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chips(model, shares.stages * shares.ranks).price(shares)


def test_rows_that_enter_at_any_time_have_no_stages() -> None:
    with pytest.raises(InputError, match="rows enter together"):
        chips("opt-6.7b", 4, wishes=Wishes(admission="refill")).price(PIPELINE)


def test_what_fits_on_no_chip_is_refused_with_all_reasons() -> None:
    own = chips("opt-6.7b", 2, gpu_bytes=GIB // 8)
    answers = own.answers()
    assert all(isinstance(answer, Refused) for answer in answers)
    with pytest.raises(BudgetError) as caught:
        own.best(answers)
    for way in ("data 2: ", "pipeline 2: ", "tensor 2: "):
        assert way in caught.value.limit
    assert "Raise --gpu-memory to" in caught.value.advice


@pytest.mark.parametrize("count", [(0, 1), (1, 0), (-2, 1)])
def test_there_is_a_chip(count: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="at least"):
        chips("opt-6.7b", count[0], host_chips=count[1])
