"""Products of plain rows against float64: every way of computing them, narrow rows, odd shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels import few_pairs, pairs, products
from freight.kernels.grouped import CompressedRows, dequantise, quantise
from freight.kernels.products import Product, multiply, scratch_values
from freight.model.number_format import Grouped

TYPES = [torch.float32, torch.bfloat16, torch.float16]
CHOICE = products.loops_are_faster
PAIRS = "pairs", "tiles", "blocks"


@pytest.fixture(params=["loops", "torch", "pairs", "tiles", "blocks"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By the loops, however small the product, by torch, and by pairs of bfloat16 or else torch,
    in vectors or in registers of sixteen by sixteen, where rows may be laid in blocks, on all
    threads."""
    loops = products.find_loops()
    assert loops is not None
    by_pairs = request.param in PAIRS
    module = {"blocks": loops.tile_blocks, "tiles": loops.tiles, "pairs": loops.pairs}
    if by_pairs and module[request.param] is None:
        pytest.skip("the processor has no instruction for it")
    with monkeypatch.context() as patch:
        if loops.tile_blocks is not None:
            fewest = 1 if request.param == "blocks" else 1 << 30
            patch.setattr(loops.tile_blocks, "FEWEST_TOKENS", fewest)
            patch.setattr(loops.tile_blocks, "FEWEST_TOKENS_OF_CODES", fewest)
        patch.setattr(products, "loops_are_faster", lambda kept, dtype: request.param == "loops")
        patch.setattr(pairs, "_are_faster", lambda tokens, has_plain: by_pairs)
        if request.param in ("pairs", "tiles"):
            patch.setattr(pairs, "_loops_of_many", lambda loops: module[request.param])
            patch.setattr(loops.pairs, "MOST_TOGETHER", 128)  # several times in turn with more
        patch.setattr(pairs, "_one_by_one", lambda tokens: request.param == "pairs")
        for own in (products, pairs):
            patch.setattr(own, "LEAST_PRODUCTS", 1)
        patch.setattr(pairs, "LEAST_SHARED", 1)
        patch.setattr(few_pairs, "LEAST_SHARED_OF_FEW", 1)
        if not by_pairs:
            patch.setattr(products, "few_codes_are_for_pairs", lambda x, products: False)
        yield request.param


def product(
    x: torch.Tensor,
    rows: torch.Tensor | CompressedRows,
    bias: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result lies within a wider value whose other columns stay."""
    wide = torch.full((x.shape[0], rows.shape[0] + 5), 7.0, dtype=x.dtype)
    out = wide[:, 2:-3]
    if before is not None:
        out.copy_(before)
    count = scratch_values(rows.shape[1], x.dtype)
    room = [torch.full((count,), torch.nan, dtype=x.dtype)]
    own = Product(rows=rows, out=out, bias=bias, adds=before is not None)
    multiply(x, [own], lambda count: room.pop()[:count])
    assert torch.equal(wide[:, :2], torch.full_like(wide[:, :2], 7.0))
    assert torch.equal(wide[:, -3:], torch.full_like(wide[:, -3:], 7.0))
    return out


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 300),
    num_rows=st.integers(1, 70),
    sixteens=st.integers(1, 40),
    kept=st.sampled_from(TYPES),
    has_bias=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(
    tokens: int,
    num_rows: int,
    sixteens: int,
    kept: torch.dtype,
    has_bias: bool,
    adds: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16 * sixteens, generator=generator)
    rows = torch.randn(num_rows, 16 * sixteens, generator=generator).to(kept)
    bias = torch.randn(num_rows, generator=generator) if has_bias else None
    before = torch.randn(tokens, num_rows, generator=generator) if adds else None
    expected = x.double() @ rows.double().t()
    for other in (bias, before):
        if other is not None:
            expected += other.double()
    found = product(x, rows, bias, before)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [2, 21, 400])
def test_products_of_the_same_tokens(tokens: int, way: str) -> None:
    """What is computed together is what each comes to alone, whatever else there is."""
    x = torch.randn(tokens, 96)
    sizes, kinds = (50, 7, 130, 1), (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
    several = [torch.randn(n, 96).to(kind) for n, kind in zip(sizes, kinds, strict=True)]
    bias, before = torch.randn(130), torch.randn(tokens, 130)
    outs = [torch.full((tokens, n), 7.0) for n in sizes]
    outs[2].copy_(before)
    room = [torch.full((scratch_values(96, x.dtype),), torch.nan)]
    multiply(
        x,
        [
            Product(rows=rows, out=out, bias=bias if n == 130 else None, adds=n == 130)
            for n, rows, out in zip(sizes, several, outs, strict=True)
        ],
        lambda count: room.pop()[:count],
    )
    for n, rows, out in zip(sizes, several, outs, strict=True):
        alone = product(x, rows, bias if n == 130 else None, before if n == 130 else None)
        if way == "loops":
            assert torch.equal(out, alone)
        torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 40])
def test_tokens_that_are_part_of_a_wider_value(tokens: int) -> None:
    x = torch.randn(tokens, 96)[:, 16:80]
    rows = torch.randn(37, 64)
    torch.testing.assert_close(product(x, rows), x @ rows.t(), rtol=1e-5, atol=1e-4)


def test_columns_that_are_no_whole_vectors() -> None:
    x, rows = torch.randn(9, 50), torch.randn(30, 50).bfloat16()
    torch.testing.assert_close(product(x, rows), x @ rows.float().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kept", TYPES)
def test_numbers_at_the_ends_of_a_type(kept: torch.dtype) -> None:
    """The largest, the least that are there, zeros of both signs, infinities and no numbers."""
    info = torch.finfo(kept)
    edges = [info.max, info.min, info.tiny, info.smallest_normal / 4, 0.0, -0.0]
    for edge in [*edges, float("inf"), float("nan")]:
        rows = torch.zeros(20, 32, dtype=kept)
        rows[:, 5] = edge
        x = torch.zeros(10, 32)
        x[:, 5] = 0.5
        expected = x @ rows.float().t()
        torch.testing.assert_close(product(x, rows), expected, rtol=0, atol=0, equal_nan=True)


def test_a_token_does_not_depend_on_its_neighbours(way: str) -> None:
    """Nor on how rows are cut, where the loops multiply many tokens."""
    if way == "torch":
        pytest.skip("a library chooses its loops by shape")
    x, rows = torch.randn(200, 512), torch.randn(90, 512)
    if way in PAIRS:
        x, rows = x[:120].bfloat16(), rows.bfloat16()
    whole = product(x, rows)
    assert torch.equal(product(x[64:100], rows), whole[64:100])
    assert torch.equal(product(x, rows[13:51]), whole[:, 13:51])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 300),
    num_rows=st.integers(1, 230),
    size=st.sampled_from([32, 64, 128, 48]),
    groups=st.integers(1, 9),
    bits=st.sampled_from([4, 8]),
    wide=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_integers_in_groups(
    tokens: int,
    num_rows: int,
    size: int,
    groups: int,
    bits: int,
    wide: bool,
    dtype: torch.dtype,
    has_bias: bool,
    adds: bool,
    seed: int,
) -> None:
    """The products of what they are as plain numbers; by the loops, to the last bit."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    narrow = Grouped(bits=bits, group_size=size)
    raw = quantise(drawn(num_rows, groups * size), narrow)
    if wide:
        border = narrow.code_bytes(groups * size)
        factors = raw[:, border:].view(torch.float16).float().contiguous() / 3
        raw = torch.cat([raw[:, :border], factors.view(torch.uint8)], dim=1)
    kind = replace(narrow, wide=wide)
    rows = CompressedRows(raw=raw, columns=groups * size, number_format=kind)
    plain = torch.empty(num_rows, groups * size)
    dequantise(rows, plain)
    x = drawn(tokens, groups * size).to(dtype)
    bias = drawn(num_rows).to(dtype) if has_bias else None
    before = drawn(tokens, num_rows).to(dtype) if adds else None
    found, expected = product(x, rows, bias, before), product(x, plain.to(dtype), bias, before)
    # Fewer tokens may meet plain rows one by one, and more go to torch with them.
    own, is_many = Product(rows=rows, out=found), 16 < tokens <= 256
    if dtype is torch.bfloat16 and is_many and pairs.pairs_are_better(x, [own]):
        assert size != 48
        assert torch.equal(found, expected)
    is_by_loops = products.loops_are_faster(dtype, dtype)
    if is_by_loops and dtype is torch.float32 and tokens > 12 and size != 48:
        assert torch.equal(found, expected)
    atol = {torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype]
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=atol)
    if dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 300),
    num_rows=st.integers(1, 170),
    sixteens=st.integers(1, 40) | st.sampled_from([130, 222]),
    has_bias=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_all_in_bfloat16(
    tokens: int, num_rows: int, sixteens: int, has_bias: bool, adds: bool, seed: int
) -> None:
    """Summed in float32 and rounded once, but where torch adds to what is there."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, rows = drawn(tokens, 16 * sixteens), drawn(num_rows, 16 * sixteens)
    bias = drawn(num_rows) if has_bias else None
    before = drawn(tokens, num_rows) if adds else None
    expected = x.double() @ rows.double().t()
    largest = float(expected.abs().max())
    for other in (bias, before):
        if other is not None:
            expected += other.double()
    found = product(x, rows, bias, before).double()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8 * largest)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("tokens", "num_rows"), [(64, 320), (75, 64), (33, 100)])
def test_results_in_whole_lines(tokens: int, num_rows: int, adds: bool) -> None:
    """As they are elsewhere, bit for bit, and columns beside them stay."""
    x, rows = torch.randn(tokens, 640).bfloat16(), torch.randn(num_rows, 640).bfloat16()
    bias, before = torch.randn(num_rows).bfloat16(), torch.randn(tokens, num_rows).bfloat16()
    wide = torch.full((tokens, 384), 7.0).bfloat16()
    out = wide[:, 32 : 32 + num_rows]
    out.copy_(before)
    assert out.data_ptr() % 64 == 0
    scratch = torch.empty(scratch_values(640, x.dtype), dtype=x.dtype)
    own = Product(rows=rows, out=out, bias=bias, adds=adds)
    multiply(x, [own], lambda count: scratch[:count])
    assert torch.equal(out, product(x, rows, bias, before if adds else None))
    assert (wide[:, :32] == 7.0).all() and (wide[:, 32 + num_rows :] == 7.0).all()


def test_bfloat16_is_rounded_to_the_nearest(way: str) -> None:
    if way != "loops":
        pytest.skip("a library, or an instruction, rounds as it likes")
    x, rows = torch.randn(100, 512).bfloat16(), torch.randn(90, 512).bfloat16()
    narrow, wide = product(x, rows), product(x.float(), rows)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("tokens", [5, 70])
def test_pairs_that_are_part_of_a_wider_value(tokens: int) -> None:
    """Also where they begin within a pair, which loops do not take."""
    wide, rows = torch.randn(tokens, 131).bfloat16(), torch.randn(37, 96).bfloat16()
    for whole in (wide, wide[:, :130].contiguous()):
        for begin in (16, 17):
            x = whole[:, begin : begin + 96]
            expected = (x.double() @ rows.double().t()).bfloat16()
            torch.testing.assert_close(product(x, rows), expected, rtol=2**-7, atol=0.02)


def test_infinite_pairs_and_none(way: str) -> None:
    """An infinity, and no number, stay what they are and touch no other result."""
    x, rows = torch.ones(40, 64).bfloat16(), torch.ones(20, 64).bfloat16()
    rows[3, 5], rows[7, 63], x[9, 0] = torch.inf, torch.nan, -torch.inf
    expected = x.float() @ rows.float().t()
    torch.testing.assert_close(product(x, rows).float(), expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(17, 300),
    cuts=st.lists(st.integers(1, 119), max_size=2, unique=True),
    num_columns=st.sampled_from([32, 96, 640]),
    has_bias=st.booleans(),
    is_behind=st.booleans(),
    in_lines=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_that_gate_others(
    tokens: int,
    cuts: list[int],
    num_columns: int,
    has_bias: bool,
    is_behind: bool,
    in_lines: bool,
    seed: int,
) -> None:
    """In one call with what they gate, which other threads may make; rows lie in several places,
    those that are gated right behind their gates or behind all of them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x = drawn(tokens, num_columns)
    matrices, biases = drawn(2, 120, num_columns), drawn(2, 120) * 3
    matrices[0, 7] = 40.0 if seed % 2 else -40.0
    out = torch.full((tokens, 128 if in_lines else 120), torch.nan).bfloat16()[:, :120]
    borders = [0, *sorted({cut // 32 * 32 for cut in cuts} - {0} if in_lines else cuts), 120]
    parts = [slice(*pair) for pair in itertools.pairwise(borders)]
    orders = [(0, parts), (1, parts[::-1])]
    if is_behind:
        orders = [(own, [part]) for part in parts for own in range(2)]
    asked = [
        Product(
            rows=matrices[own][part].clone(),
            out=out[:, part],
            bias=biases[own][part] if has_bias else None,
            gates=own == 1,
        )
        for own, order in orders
        for part in order
    ]
    if not products.can_gate(x, asked):
        assert tokens > 128 or not pairs.pairs_are_better(x, asked)
        return
    count = scratch_values(num_columns, x.dtype)
    multiply(x, asked, lambda size: torch.full((count,), torch.nan).bfloat16()[:size])
    gated, shares = (
        x.double() @ own.double().t() + (bias.double() if has_bias else 0.0)
        for own, bias in zip(matrices, biases, strict=True)
    )
    expected = torch.nn.functional.silu(gated.bfloat16().double()) * shares
    torch.testing.assert_close(
        out.double(), expected, rtol=2**-6, atol=2**-6 * float(shares.abs().max())
    )


@pytest.mark.parametrize("width", [96, 100, 192, 320, 448])
def test_gates_are_the_same_made_before(way: str, width: int) -> None:
    """Bit for bit, whether a gate is kept or its silu taken at once; rows may be compressed."""
    if way not in PAIRS:
        pytest.skip("only loops over pairs gate")
    x, plain = torch.randn(50, 640).bfloat16(), torch.randn(width, 640)
    kind = Grouped(bits=4, group_size=64)
    short = CompressedRows(raw=quantise(plain, kind), columns=640, number_format=kind)
    gate, bias = torch.randn(width, 640).bfloat16(), torch.randn(width).bfloat16()
    scratch = torch.empty(scratch_values(640, x.dtype), dtype=x.dtype)
    found = torch.full((2, 50, width), torch.nan).bfloat16()
    for rows in (plain.bfloat16(), short):
        for out, at_once in zip(found, (True, False), strict=True):
            asked = [
                Product(rows=gate, out=out, bias=bias),
                Product(rows=rows, out=out, gates=True),
            ]
            for some in [asked] if at_once else [asked[:1], asked[1:]]:
                multiply(x, some, lambda count: scratch[:count])
        assert torch.equal(found[0], found[1])


def test_results_do_not_depend_on_the_turn_they_are_made_in() -> None:
    """Rows in their order, and the same rows in parts: none is rounded otherwise for being near the
    end of those that threads take turns at."""
    dice = torch.Generator().manual_seed(0)
    x, gate, plain = (torch.randn(n, 640, generator=dice).bfloat16() for n in (700, 672, 672))
    gate /= 16
    scratch = torch.empty(scratch_values(640, x.dtype), dtype=x.dtype)
    found = []
    for size in (672, 48, 112):
        parts = []
        for rows, factors in zip(plain.split(size), gate.split(size), strict=True):
            out = torch.empty(700, size, dtype=x.dtype)
            own = [Product(rows=rows, out=out), Product(rows=factors, out=out, gates=True)]
            if not products.can_gate(x, own):
                pytest.skip("nothing is gated so")
            multiply(x, own, lambda count: scratch[:count])
            parts.append(out)
        found.append(torch.cat(parts, dim=1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_float16_is_left_to_torch() -> None:
    x, rows = torch.randn(20, 64).half(), torch.randn(40, 64).half()
    assert torch.equal(product(x, rows), torch.mm(x, rows.t()))


def test_the_choice_is_made_once_and_leaves_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    kinds = torch.bfloat16, torch.float32
    assert CHOICE(*kinds) is CHOICE(*kinds)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 8])
def test_rows_do_not_depend_on_those_beside_them(tokens: int, bits: int | None, way: str) -> None:
    """Cores take as many rows as are left when they come: which ones meet together is chance."""
    if way != "loops":
        pytest.skip("the others are told of all rows")
    torch.manual_seed(0)
    plain, x = torch.randn(11, 192), torch.randn(tokens, 192)
    number_format = None if bits is None else Grouped(bits=bits, group_size=64)

    def own(first: int, last: int) -> torch.Tensor | CompressedRows:
        if number_format is None:
            return plain[first:last].bfloat16()
        raw = quantise(plain[first:last], number_format)
        return CompressedRows(raw=raw, columns=192, number_format=number_format)

    whole = product(x, own(0, 11))
    for first, last in ((0, 1), (0, 2), (1, 2), (1, 4), (2, 7), (3, 11)):
        assert torch.equal(product(x, own(first, last)), whole[:, first:last])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_of_few_does_not_depend_on_how_many_meet_codes(bits: int, way: str) -> None:
    if way != "loops":
        pytest.skip("others make rows plain")
    torch.manual_seed(0)
    raw = quantise(torch.randn(11, 192), Grouped(bits=bits, group_size=64))
    rows = CompressedRows(raw=raw, columns=192, number_format=Grouped(bits=bits, group_size=64))
    x = torch.randn(12, 192)
    whole = product(x, rows)
    for first, last in ((0, 1), (3, 5), (3, 6), (4, 11), (7, 12)):
        assert torch.equal(product(x[first:last], rows), whole[first:last])
