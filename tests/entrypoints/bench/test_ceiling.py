"""The ceiling: hand-computed numbers, no more time for more memory, and no policy beneath it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from freight.demo import MODEL_DIR
from freight.entrypoints.bench.ceiling import ModelCost, Path, find_ceiling, model_cost
from freight.entrypoints.bench.work import Work
from freight.model.config import read_config
from freight.model.decoder import tensor_shapes

COST = ModelCost(
    weight_bytes=1000,
    first_unit_bytes=100,
    layer_flops=100,
    head_flops=20,
    attention=((None, 2, 4),),
)
WORK = Work(num_rows=2, prompt_tokens=3, new_tokens=3)
RATES = {1: 250.0, 2: 500.0, 6: 1000.0}
DISK = Path(name="disk", bytes_per_s=100, room_bytes=400, carries_kv=True)


def test_by_hand() -> None:
    ceiling = find_ceiling(COST, WORK, [DISK], RATES)
    # Each row: 3 x 100 + 20, and 2 x (1 + 2 + 3) for attention, at 1000 FLOP/s.
    assert ceiling.prefill_s == pytest.approx(2 * 332 / 1000)
    # Each row: two tokens of 120 at 500 FLOP/s, attention to 4 and 5 keys.
    assert ceiling.decode_s == pytest.approx(2 * (240 / 500 + 2 * (4 + 5) / 1000))
    # Three sweeps miss 600 bytes each; before the second and third each row has 3 and 4 tokens.
    assert ceiling.bounds["disk"] == pytest.approx((3 * 600 + 2 * 4 * (3 + 4)) / 100)
    # Two more sweeps after the prompts; a token costs 0.12 s of arithmetic, its keys no less.
    assert ceiling.bounds["prompts, then disk"] == pytest.approx(0.664 + 12 + 2 * 2 * 0.12)
    assert ceiling.seconds == pytest.approx(18.56) and ceiling.limited_by == "disk"
    assert ceiling.with_loading_s == pytest.approx(18.56 + 4)
    assert ceiling.block_rows == 2 and ceiling.warm_up_s == 0


def test_states_are_read_in_each_pass_but_the_first() -> None:
    with_states = find_ceiling(replace(COST, state_bytes=50), WORK, [DISK], RATES)
    without = find_ceiling(COST, WORK, [DISK], RATES)
    assert with_states.bounds["disk"] == pytest.approx(without.bounds["disk"] + 2 * 2 * 50 / 100)
    assert with_states.bounds["arithmetic"] == without.bounds["arithmetic"]


def test_one_block_is_the_sum_over_its_sweeps() -> None:
    """Prompts that take long hide their sweep's reads; decoding waits for the disk."""
    rates = {rows: rate / 50 for rows, rate in RATES.items()}
    ceiling = find_ceiling(
        COST, replace(WORK, new_tokens=2), [replace(DISK, bytes_per_s=300)], rates
    )
    assert ceiling.limited_by == "arithmetic"
    fast = {1: 500.0, 2: 500.0, 6: 500.0}
    ceiling = find_ceiling(
        replace(COST, attention=((None, 0, 4),)),
        WORK,
        [replace(DISK, bytes_per_s=1000)],
        fast,
    )
    # max(0.6, 1.28) + max(0.624, 0.48) + max(0.632, 0.48)
    assert ceiling.seconds == pytest.approx(1.28 + 0.624 + 0.632)


def test_small_blocks_where_only_their_keys_do_not_fit() -> None:
    fits = replace(DISK, room_bytes=1030)
    ceiling = find_ceiling(COST, replace(WORK, num_rows=8), [fits], {1: 1e6, 8: 1e6})
    assert ceiling.block_rows < 8 and ceiling.bounds["disk"] == 0


def test_first_unit_that_does_not_fit() -> None:
    ceiling = find_ceiling(COST, WORK, [replace(DISK, room_bytes=30)], RATES)
    assert ceiling.warm_up_s == pytest.approx(0.7)


def test_attention_windows() -> None:
    cost = replace(COST, attention=((3, 1, 1),))
    assert cost.attention_flops(1, 5) == 1 + 2 + 3 + 3 + 3
    assert cost.attention_flops(7, 2) == 6
    assert cost.kv_bytes(10) == 2, "the token's own keys are not there yet"


def test_cost_of_a_model() -> None:
    config = read_config(FilePath(MODEL_DIR))
    cost = model_cost(config, weight_size=2, element_size=4)
    matrices = sum(r[0] * r[1] for r in tensor_shapes(config).values() if len(r) == 2)
    elements = matrices - config.vocab_size * config.hidden_size
    assert cost.weight_bytes == 2 * elements
    assert cost.layer_flops + cost.head_flops == 2 * elements
    assert cost.kv_bytes(1) == config.kv_bytes_per_token(4)


costs = st.builds(
    ModelCost,
    weight_bytes=st.integers(1, 10**4),
    first_unit_bytes=st.integers(0, 100),
    layer_flops=st.integers(1000, 10**4),
    spared_flops=st.integers(0, 1000),
    head_flops=st.integers(0, 10**3),
    attention=st.tuples(
        st.tuples(st.none() | st.integers(1, 9), st.integers(0, 50), st.integers(0, 50))
    ),
)
works = st.builds(
    Work,
    num_rows=st.integers(1, 12),
    prompt_tokens=st.integers(1, 12),
    new_tokens=st.integers(1, 6),
)
speeds = st.floats(10, 10**5)
rooms = st.integers(0, 2 * 10**4)


@st.composite
def rising_rates(draw: st.DrawFn) -> dict[int, float]:
    """Rates by rows; larger products are no slower per row, and no faster altogether."""
    base, rate = draw(speeds), draw(st.floats(0, 1))
    return {rows: base * rows / (rows * rate + 12 * (1 - rate) + 1e-3) for rows in range(1, 145)}


@given(costs, works, rising_rates(), speeds, rooms, rooms)
def test_more_memory_never_raises_the_time(
    cost: ModelCost, work: Work, rates: Mapping[int, float], speed: float, a: int, b: int
) -> None:
    times = [
        find_ceiling(cost, work, [replace(DISK, bytes_per_s=speed, room_bytes=room)], rates)
        for room in sorted((a, b))
    ]
    assert times[1].seconds <= times[0].seconds * (1 + 1e-9)
    assert times[1].seconds <= times[1].with_loading_s


def zig_zag_s(
    cost: ModelCost,
    work: Work,
    rates: Mapping[int, float],
    path: Path,
    block: int,
    resident: float,
    chunk: int,
    keep_kv: bool,
) -> float:
    """Blocks one after the other, each sweep the longer of moving and computing; weights that stay,
    stay; keys and values in memory, or read in each sweep."""
    seconds = 0.0
    for begin in range(0, work.num_rows, block):
        rows = min(block, work.num_rows - begin)
        for step in range(work.new_tokens):
            had = work.prompt_tokens + step - 1 if step else 0
            moved = cost.weight_bytes - resident
            moved += 0 if keep_kv else rows * cost.kv_bytes(had)
            tokens = 1 if step else work.prompt_tokens
            flops = rows * (tokens * cost.layer_flops + cost.head_flops)
            flops -= rows * (tokens - 1) * cost.spared_flops
            attention = rows * cost.attention_flops(had + 1, tokens)
            compute = flops / rates[rows if step else chunk] + attention / max(rates.values())
            seconds += max(moved / path.bytes_per_s, compute)
    return seconds


@given(st.data(), costs, works, rising_rates(), speeds, rooms, st.booleans())
def test_no_simple_policy_is_faster(
    data: st.DataObject,
    cost: ModelCost,
    work: Work,
    rates: Mapping[int, float],
    speed: float,
    room: int,
    keep_kv: bool,
) -> None:
    block = data.draw(st.integers(1, work.num_rows))
    chunk = data.draw(st.integers(1, work.num_rows * work.prompt_tokens))
    kept = block * cost.kv_bytes(work.total_tokens) if keep_kv else 0.0
    assume(kept <= room)
    resident = min(room - kept, cost.weight_bytes) * data.draw(st.floats(0, 1))
    path = replace(DISK, bytes_per_s=speed, room_bytes=room)
    policy_s = zig_zag_s(cost, work, rates, path, block, resident, chunk, keep_kv)
    # At the start memory may hold the first unit, which no simple policy says.
    ceiling = find_ceiling(replace(cost, first_unit_bytes=0), work, [path], rates)
    assert ceiling.seconds <= policy_s * (1 + 1e-9)


def test_cost_of_experts(tmp_path: FilePath) -> None:
    """A token takes two of eight: so much arithmetic and so many bytes are sure."""
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 320,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    cost = model_cost(read_config(tmp_path), weight_size=2, element_size=2)
    attention, router, expert, head = 32 * (32 + 16 + 16 + 32), 8 * 32, 3 * 32 * 48, 320 * 32
    assert cost.weight_bytes == 2 * (attention + router + 2 * expert + head)
    assert cost.layer_flops == 2 * (attention + router + 2 * expert)
    keys = 32 * (16 + 16)
    assert cost.spared_flops == cost.layer_flops - 2 * keys, "all but keys and values, of one layer"
