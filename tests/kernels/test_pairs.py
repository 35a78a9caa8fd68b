"""Which products the loops over pairs of bfloat16 take, with whatever registers there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freight.kernels import few_pairs, pairs
from freight.kernels.eights import join_eight_rows
from freight.kernels.few_pairs import gate_neighbours, multiply_few
from freight.kernels.grouped import CompressedRows, dequantise, quantise
from freight.kernels.micro import join_micro_rows
from freight.kernels.product import Product
from freight.kernels.sums import ADDS, GATES, PUTS
from freight.kernels.threads import find_loops
from freight.model.number_format import EightFloats, Grouped, MicroFloats


def test_any_number_of_tokens_is_for_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes code for each number of tokens that it meets and keeps the last few: where rows
    are of many lengths it would be making some all the time."""
    loops = find_loops()
    if loops is None or loops.pairs is None:
        pytest.skip("the processor has no instruction for pairs")
    monkeypatch.setattr(pairs, "_are_faster", lambda tokens, has_plain: True)
    rows = torch.zeros(2048, 5632, dtype=torch.bfloat16)
    for count in (1, 16, 17, 256, 257, 300, 447, 448, 2049):
        x = torch.zeros(count, 5632, dtype=torch.bfloat16)
        one = [Product(rows=rows, out=torch.zeros(count, 2048, dtype=torch.bfloat16))]
        assert pairs.plain_pairs_are_better(x, one) or pairs.pairs_are_better(x, one), count
    assert pairs.pairs_are_always_better({2048, 5632, 14336})


def test_loops_for_any_number_of_tokens_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial that came out badly decides nothing where loops take all numbers of tokens; where
    they do not, each number of tokens is for the faster way."""
    loops = find_loops()
    if loops is None or loops.pairs is None:
        pytest.skip("the processor has no instruction for pairs")
    slower = {2: 0.8, 8: 1.3, 64: 1.4, 512: 1.0}
    monkeypatch.setattr(pairs, "_times", lambda tokens: (1.0, 5.0, slower[tokens]))
    chosen = [pairs._are_faster(tokens, has_plain=True) for tokens in (2, 12, 100, 600)]
    if loops.tile_blocks is None:
        assert chosen == [True, False, False, True]
    else:
        assert all(chosen)
        slower[512] = 1.6
        assert not pairs._are_faster(2, has_plain=True)
    assert pairs._are_faster(100, has_plain=False)


def _need_pairs() -> None:
    loops = find_loops()
    if loops is None or loops.pairs is None:
        pytest.skip("the processor has no instruction for pairs")


def _kept(
    plain: torch.Tensor, name: str, generator: torch.Generator
) -> torch.Tensor | CompressedRows:
    """Such rows in groups of so many, or others as large in floats of 4 or 8 bits."""
    if name == "plain":
        return plain
    count, columns = plain.shape
    form: Grouped | MicroFloats | EightFloats
    if name == "mxfp4":
        blocks = torch.randint(0, 256, (count, columns // 2), generator=generator)
        exponents = torch.randint(120, 127, (count, columns // 32), generator=generator)
        raw, form = join_micro_rows(blocks.byte(), exponents.byte()), MicroFloats()
    elif name == "fp8":
        codes = torch.randint(0, 127, (2, count, columns), generator=generator)
        codes = codes[0] | (codes[1] & 1) << 7
        scales = torch.rand(count, columns // 128, generator=generator) / 64
        raw, form = join_eight_rows(codes.byte(), scales), EightFloats()
    else:
        bits, size = map(int, name.split("/"))
        form = Grouped(bits=bits, group_size=size)
        raw = quantise(plain, form)
    return CompressedRows(raw=raw, columns=columns, number_format=form)


def _made_plain(rows: CompressedRows) -> torch.Tensor:
    found = torch.empty(rows.shape)
    dequantise(rows, found)
    return found


def _halves(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.mark.parametrize(
    "kept", ["plain", "mxfp4", "fp8", "4/32", "4/64", "4/256", "8/32", "8/128"]
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", range(1, 13))
def test_few_tokens_meet_rows_of_many_products(
    tokens: int, threads: int, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of rows that are no whole panels or turns, tokens and results with something between
    them, and each thing that can become of sums; nothing beside the results is touched. Rows are
    plain, in groups, or of floats of 4 or 8 bits."""
    _need_pairs()
    monkeypatch.setattr(few_pairs, "LEAST_SHARED_OF_FEW", 1)
    if tokens > find_loops().few_pairs.FEW_TOKENS:  # type: ignore[union-attr]
        pytest.skip("more than a few here")
    generator = torch.Generator().manual_seed(tokens)
    columns, counts = 96 if kept == "plain" else 768, (1, 3, 33, 70, 70, 128)
    x = _halves(generator, tokens, columns + 32)[:, :columns]
    plain = [_halves(generator, count, columns) for count in counts]
    rows = [_kept(own, kept, generator) for own in plain]
    plain = [own if isinstance(own, torch.Tensor) else _made_plain(own) for own in rows]
    biases = [torch.randn(count, generator=generator).bfloat16() for count in counts]
    room = _halves(generator, tokens, sum(counts) + 10)
    expected, before = room.clone(), 0
    products = []
    for number, (own, bias) in enumerate(zip(plain, biases, strict=True)):
        gates = number == 4
        if not gates:
            before += counts[number - 1] if number else 0
        part = slice(before, before + counts[number])
        added = bias if number % 2 else None
        adds = number == 5
        out = room[:, part]
        products.append(Product(rows=rows[number], out=out, bias=added, adds=adds, gates=gates))
        found = x.double() @ own.double().t()
        if added is not None:
            found += added.double()
        earlier = expected[:, part].double()
        if gates:
            found *= torch.nn.functional.silu(earlier)
        if adds:
            found += earlier
        expected[:, part] = found.bfloat16()
    earlier_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        multiply_few(x, products)
    finally:
        torch.set_num_threads(earlier_threads)
    atol = 2e-2 if kept == "plain" else 0.25
    torch.testing.assert_close(room, expected, rtol=2e-2, atol=atol)
    assert torch.equal(room[:, before + 128 :], expected[:, before + 128 :])


def test_few_tokens_have_the_same_results_beside_others() -> None:
    """Whichever rows are multiplied with them, and in whatever place."""
    _need_pairs()
    generator = torch.Generator().manual_seed(3)
    x, rows = _halves(generator, 6, 2048), _halves(generator, 71, 2048)
    whole = torch.empty(6, 71, dtype=torch.bfloat16)
    multiply_few(x, [Product(rows=rows, out=whole)])
    for first, last in ((0, 1), (1, 71), (35, 54)):
        some = torch.empty(6, last - first, dtype=torch.bfloat16)
        multiply_few(x, [Product(rows=rows[first:last], out=some)])
        assert torch.equal(some, whole[:, first:last])


def test_gates_of_few_tokens_follow_what_they_gate() -> None:
    """In any other order they wait for rows that another product makes."""
    rows, out = torch.zeros(4, 32), torch.zeros(2, 4)
    plain, gating = Product(rows=rows, out=out), Product(rows=rows, out=out, gates=True)
    elsewhere = Product(rows=rows, out=torch.zeros(2, 4))
    assert gate_neighbours([plain, gating, elsewhere])
    assert not gate_neighbours([gating, plain])
    assert not gate_neighbours([plain, elsewhere, gating])
    assert not gate_neighbours([Product(rows=rows[:3], out=out), gating])
    assert not gate_neighbours([Product(rows=rows, out=out, adds=True), gating])


@pytest.mark.parametrize("kept", ["plain", "mxfp4", "fp8", "4/64", "8/32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_tokens_of_several_sets_are_multiplied_as_those_of_one(
    kept: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets in any order, some left out, each number of tokens that loops take, as tokens and
    results lie among others; what nobody makes stays as it was."""
    _need_pairs()
    monkeypatch.setattr(few_pairs, "LEAST_SHARED_OF_FEW", 1)
    most = find_loops().few_pairs.FEW_TOKENS  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(threads)
    columns, heights = 768, (70, 70, 33)
    sets = [
        [
            (_kept(_halves(generator, count, columns), kept, generator), bias)
            for count, bias in zip(
                heights, (None, None, torch.randn(33, generator=generator)), strict=True
            )
        ]
        for _ in range(most + 2)
    ]
    numbers = torch.randperm(most + 2, generator=generator)[:most].numpy()
    counts = np.arange(1, most + 1)
    firsts = np.cumsum(counts + 1) - counts  # a token of nobody before each set's
    x = _halves(generator, int(firsts[-1] + counts[-1]) + 1, columns + 32)[:, :columns]
    found = [_halves(generator, len(x), width + 6)[:, :width] for width in (70, 33)]
    expected = [own.clone() for own in found]
    rows = few_pairs.SeveralRows.of(sets)
    assert rows is not None and rows.are_plain == (kept == "plain")
    outs = (found[0], found[0], found[1])
    assert rows.takes(x, outs) and not rows.takes(x.float(), outs)
    earlier_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows.multiply(x, numbers, firsts, counts, outs, (PUTS, GATES, ADDS), are_few=True)
        for number, first, count in zip(numbers, firsts, counts, strict=True):
            own = slice(first, first + count)
            one, two, three = sets[number]
            gated, added = (each[own] for each in expected)
            products = [
                Product(rows=one[0], out=gated),
                Product(rows=two[0], out=gated, gates=True),
                Product(rows=three[0], out=added, bias=three[1], adds=True),
            ]
            multiply_few(x[own], products)
    finally:
        torch.set_num_threads(earlier_threads)
    for own, wanted in zip(found, expected, strict=True):
        assert torch.equal(own, wanted)


def test_only_sets_that_are_alike_have_a_table() -> None:
    _need_pairs()
    plain = torch.zeros(4, 64, dtype=torch.bfloat16)
    of = few_pairs.SeveralRows.of
    assert of([[(plain, None)], [(plain, None)]]) is not None
    form = Grouped(bits=4, group_size=64)
    packed = CompressedRows(raw=quantise(plain.float(), form), columns=64, number_format=form)
    assert of([[(packed, None)], [(plain, None)]]) is None
    assert of([[(plain.float(), None)]]) is None
    assert of([[(torch.zeros(4, 48, dtype=torch.bfloat16), None)]]) is None
    assert of([[(torch.zeros(8, 64, dtype=torch.bfloat16)[::2], None)]]) is None


@pytest.mark.parametrize("columns", [96, 2304])
@pytest.mark.parametrize("threads", [1, 2])
def test_more_tokens_of_several_sets_are_multiplied_as_those_of_one(
    columns: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles and others, rows that are no whole panels, in one part and in several."""
    _need_pairs()
    monkeypatch.setattr(few_pairs, "LEAST_SHARED_OF_FEW", 1)
    loops = find_loops()
    assert loops is not None
    generator = torch.Generator().manual_seed(threads)
    heights = (100, 100, 37)
    sets = [[(_halves(generator, n, columns), None) for n in heights] for _ in range(6)]
    counts = np.array([1, 13, 16, 33, 48, loops.pairs.MOST_OF_EACH])
    firsts = np.cumsum(counts + 1) - counts
    numbers = torch.randperm(6, generator=generator).numpy()
    x = _halves(generator, int(firsts[-1] + counts[-1]) + 1, columns + 32)[:, :columns]
    found = [_halves(generator, len(x), width + 6)[:, :width] for width in (100, 37)]
    expected = [own.clone() for own in found]
    rows = few_pairs.SeveralRows.of(sets)
    assert rows is not None
    room = torch.empty((int(counts[-1]) + 16) * columns, dtype=torch.bfloat16)
    outs, outcomes = (found[0], found[0], found[1]), (PUTS, GATES, ADDS)
    earlier_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows.multiply(x, numbers, firsts, counts, outs, outcomes, are_few=False)
        for number, first, count in zip(numbers, firsts, counts, strict=True):
            own = slice(first, first + count)
            (one, _), (two, _), (three, _) = sets[number]
            gated, added = (each[own] for each in expected)
            products = [
                Product(rows=one, out=gated),
                Product(rows=two, out=gated, gates=True),
                Product(rows=three, out=added, adds=True),
            ]
            pairs.multiply_plain_pairs(x[own], products, lambda wanted: room[:wanted])
    finally:
        torch.set_num_threads(earlier_threads)
    for own, wanted in zip(found, expected, strict=True):
        assert torch.equal(own, wanted)
