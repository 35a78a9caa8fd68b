"""Products of a few tokens of bfloat16 and rows of bfloat16, of codes or of floats in 4 or 8
bits, by loops that take all of them by one call, where the processor multiplies pairs at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.grouped import CompressedRows
from freight.kernels.levels import levels_of
from freight.kernels.plain_rows import EIGHTS
from freight.kernels.product import LEAST_SHARED_OF_FEW, TOKENS_WORTH_ROWS, Product
from freight.kernels.row_kinds import (
    EXPONENT,
    KeptBytes,
    KeptCodes,
    KeptEights,
    KeptLevels,
    KeptPairs,
    KeptSixteens,
)
from freight.kernels.sharing import take_turns
from freight.kernels.sums import PUTS
from freight.kernels.threads import find_loops, has_words
from freight.model.number_format import (
    MICRO_COLUMNS,
    EightFloats,
    Grouped,
    LevelFloats,
    MicroFloats,
)

__all__ = [
    "SeveralRows",
    "are_plain_pairs",
    "few_codes_are_for_pairs",
    "gate_neighbours",
    "lies_in_pairs",
    "most_few_codes",
    "multiply_few",
    "product_table",
    "wide_biases",
    "worth_shares",
]

_OF_TOKENS: Final = -1
"""In a line of a table that is of tokens, where one of a product has the number of theirs."""
_COUNTERS: Final = 2
"""Of turns that are taken, and rows that are done."""
_TABLE_COLUMNS: Final = 6
"""Of what is said of tokens or a product, before it is said which of them it is."""
_BYTES_OF_SCALE: Final = 4
_SIXTEEN: Final = 16
_LEAST_GROUP: Final = 32
_CHUNK_COLUMNS: Final = 64
"""Whose codes a loop looks up together."""

_PAIR_COLUMNS: Final = 32
"""That are a whole vector of pairs."""

_Form = Grouped | MicroFloats | EightFloats | LevelFloats
"""Of compressed rows."""
_Rows = torch.Tensor | CompressedRows
_Kept = KeptPairs | KeptCodes | KeptBytes | KeptEights | KeptLevels | KeptSixteens
_Matrix = tuple[_Rows, torch.Tensor | None]


def few_codes_are_for_pairs(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether these are so few tokens, and compressed rows of one kind, that loops multiply as they
    are."""
    if x.dtype is not torch.bfloat16 or x.device.type != "cpu" or not products:
        return False
    if x.shape[0] > most_few_codes() or not lies_in_pairs(x):
        return False
    return (
        _are_for_codes([own.rows for own in products])
        and gate_neighbours(products)
        and all(has_words(own.out) for own in products)
    )


def most_few_codes() -> int:
    """How many tokens meet such rows as they are; 0 where there is no loop."""
    loops = find_loops()
    if loops is None or loops.few_pairs is None:
        return 0
    own = loops.few_pairs.FEW_TOKENS if loops.tiles is None else loops.tiles.FEW_TOKENS_OF_CODES
    return int(own)


def _are_for_codes(rows: Sequence[_Rows]) -> bool:
    """Whether rows are compressed in one way that loops take, and lie as they want."""
    form = _form(rows[0])
    return (
        form is not None
        and _takes(form)
        and rows[0].shape[1] % _CHUNK_COLUMNS == 0
        and all(_form(own) == form and _lies_together(own, form) for own in rows)
    )


def are_plain_pairs(rows: torch.Tensor) -> bool:
    """Whether rows are pairs of bfloat16 one behind the other."""
    return rows.dtype is torch.bfloat16 and rows.is_contiguous() and lies_in_pairs(rows)


def _are_plain(rows: Sequence[_Rows]) -> bool:
    """Whether all are, in whole vectors."""
    return rows[0].shape[1] % _PAIR_COLUMNS == 0 and all(
        isinstance(own, torch.Tensor) and are_plain_pairs(own) for own in rows
    )


def _form(rows: _Rows) -> _Form | None:
    own = None if isinstance(rows, torch.Tensor) else rows.number_format
    return own if isinstance(own, _Form) else None


def _takes(form: _Form) -> bool:
    if isinstance(form, LevelFloats):
        if form.in_bytes:
            return form.levels == "e2m1" and form.group_size == _SIXTEEN
        return form.group_size >= _LEAST_GROUP and form.group_size.bit_count() == 1
    if not isinstance(form, Grouped):
        return True
    if form.across:
        return False
    return form.group_size >= _LEAST_GROUP and form.group_size.bit_count() == 1


def _lies_together(rows: _Rows, form: _Form) -> bool:
    """Whether rows follow each other, and scales begin where loops can load them."""
    size = 1
    assert isinstance(rows, CompressedRows)
    if not isinstance(form, MicroFloats):
        size = form.factor_bytes if isinstance(form, Grouped) else _BYTES_OF_SCALE
    is_whole = rows.raw.data_ptr() % size == 0 and rows.raw.shape[1] % size == 0
    return is_whole and rows.raw.is_contiguous()


def _kept(rows: _Rows) -> _Kept:
    """How rows are kept, as loops are told."""
    form = _form(rows)
    if isinstance(rows, torch.Tensor):
        return KeptPairs(rows.shape[1] * rows.itemsize)
    row_bytes = rows.raw.shape[1]
    if isinstance(form, Grouped):
        kind = KeptCodes if form.code_bits == 4 else KeptBytes
        return kind(row_bytes, form.group_size, form.factor_bytes)
    if isinstance(form, MicroFloats):
        return KeptCodes(row_bytes, MICRO_COLUMNS, EXPONENT)
    if isinstance(form, LevelFloats):
        return _kept_levels(row_bytes, form)
    return KeptEights(row_bytes)


def _kept_levels(row_bytes: int, form: LevelFloats) -> KeptLevels | KeptSixteens:
    levels = levels_of(form.levels)
    first = levels.bfloat16()
    parts = [first, (levels - first.float()).bfloat16()]
    both = [own.repeat(2).view(torch.uint16).numpy() for own in parts]
    if form.in_bytes:
        return KeptSixteens(row_bytes, form.group_size, both[0], EIGHTS)
    return KeptLevels(row_bytes, form.group_size, *both)


def lies_in_pairs(x: torch.Tensor) -> bool:
    """Whether neighbours are pairs that a loop can load."""
    return has_words(x) and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0


def gate_neighbours(products: Sequence[Product]) -> bool:
    """Whether those that gate follow just what they gate, as loops for few tokens want it."""
    return not products[0].gates and all(
        before.outcome == PUTS
        and before.out.data_ptr() == own.out.data_ptr()
        and before.rows.shape[0] == own.rows.shape[0]
        for before, own in itertools.pairwise(products)
        if own.gates
    )


def multiply_few(x: torch.Tensor, products: Sequence[Product]) -> None:
    """Rows one by one, as fast as they can be read: all plain, or such codes."""
    kept, biases = _kept(products[0].rows), wide_biases(products)
    shares = worth_shares(x, products, LEAST_SHARED_OF_FEW)
    loops, counters = find_loops(), np.zeros(_COUNTERS, np.int64)
    assert loops is not None
    few, table = loops.few_pairs, product_table(x, products, biases)
    take_turns(few.few_in_turns, few.few_together, shares, counters, table, kept)


def wide_biases(products: Sequence[Product]) -> list[torch.Tensor | None]:
    """As loops add them; to be kept while they do."""
    return [None if own.bias is None else own.bias.float() for own in products]


def worth_shares(x: torch.Tensor, products: Sequence[Product], least: int) -> int:
    """Rows are read, or laid, for few tokens as for more: that is worth another core, too."""
    tokens, columns = x.shape
    numbers = columns * sum(own.rows.shape[0] for own in products)
    return max(1, numbers * max(tokens, TOKENS_WORTH_ROWS) // least)


def product_table(
    x: torch.Tensor,
    products: Sequence[Product],
    biases: Sequence[torch.Tensor | None],
    *places: int,
) -> npt.NDArray[np.int64]:
    """What loops are told by addresses: a line of the tokens, and what else they want to know, and
    one of each product."""
    first = x.data_ptr(), x.stride(0) // 2, x.shape[1] // 2, x.shape[0], *places
    lines = [first + (0,) * (_TABLE_COLUMNS - len(first)) + (_OF_TOKENS,)]
    for own, bias in zip(products, biases, strict=True):
        where, place = 0 if bias is None else bias.data_ptr(), own.out.data_ptr()
        rows = _raw(own.rows).data_ptr(), own.rows.shape[0]
        lines.append((*rows, where, own.outcome, place, own.out.stride(0), 0))
    return np.array(lines, np.int64)


def _raw(rows: _Rows) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else rows.raw


class SeveralRows:
    """Matrices of several sets, which are alike: of each set its tokens are multiplied by all of
    its matrices, and all sets by one call. A matrix is rows, and a bias if there is any."""

    def __init__(self, sets: Sequence[Sequence[_Matrix]]) -> None:
        self._kept, self._columns = _kept(sets[0][0][0]), sets[0][0][0].shape[1]
        self._sets = sets
        self._rows = np.array(
            [[(_raw(rows).data_ptr(), rows.shape[0]) for rows, _ in own] for own in sets], np.int64
        )

    @classmethod
    def of(cls, sets: Sequence[Sequence[_Matrix]]) -> SeveralRows | None:
        """None where loops do not take them."""
        loops, rows = find_loops(), [rows for own in sets for rows, _ in own]
        if loops is None or loops.few_pairs is None or _raw(rows[0]).device.type != "cpu":
            return None
        shapes = [[(rows.shape, bias is None) for rows, bias in own] for own in sets]
        columns = {shape[1] for own in shapes for shape, _ in own}
        are_alike = len(columns) == 1 and all(own == shapes[0] for own in shapes)
        return cls(sets) if are_alike and (_are_plain(rows) or _are_for_codes(rows)) else None

    @property
    def are_plain(self) -> bool:
        return isinstance(self._kept, KeptPairs)

    def takes(self, x: torch.Tensor, outs: Sequence[torch.Tensor]) -> bool:
        """Whether tokens lie as loops want, and results are to."""
        are_pairs = all(own.dtype is torch.bfloat16 and has_words(own) for own in (x, *outs))
        return are_pairs and lies_in_pairs(x) and x.shape[1] == self._columns

    def multiply(
        self,
        x: torch.Tensor,
        numbers: npt.NDArray[np.int64],
        firsts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        outs: Sequence[torch.Tensor],
        outcomes: Sequence[int],
        *,
        are_few: bool,
    ) -> None:
        """Of the sets ``numbers`` each by as many tokens of x [T, columns], from the ``firsts`` on,
        as ``counts`` say; to the same rows of each matrix's ``outs`` [T, rows] goes what is made,
        as its outcome says. Unless they ``are_few`` all rows are plain."""
        loops, num_sets, num_matrices = find_loops(), len(numbers), len(outs)
        assert loops is not None
        most = loops.few_pairs.FEW_TOKENS if are_few else loops.pairs.MOST_OF_EACH
        assert counts.max() <= most and num_matrices == self._rows.shape[1]
        lines = np.zeros((num_sets, 1 + num_matrices, _TABLE_COLUMNS + 1), np.int64)
        of_tokens, products = lines[:, 0], lines[:, 1:]
        pitch = x.stride(0)
        of_tokens[:, 0] = x.data_ptr() + x.itemsize * pitch * firsts
        of_tokens[:, 1], of_tokens[:, 2], of_tokens[:, 3] = pitch // 2, x.shape[1] // 2, counts
        of_tokens[:, -1] = _OF_TOKENS
        products[..., :2] = self._rows[numbers]
        biases = [self._biases(numbers, matrix) for matrix in range(num_matrices)]
        for own, out, outcome, wide in zip(
            products.swapaxes(0, 1), outs, outcomes, biases, strict=True
        ):
            if wide is not None:
                own[:, 2] = wide.data_ptr() + wide.itemsize * wide.shape[1] * np.arange(num_sets)
            own[:, 3], own[:, 5] = outcome, out.stride(0)
            own[:, 4] = out.data_ptr() + out.itemsize * out.stride(0) * firsts
        products[..., -1] = np.arange(num_sets)[:, None] * (1 + num_matrices)
        read = int(products[..., 1].sum()) * x.shape[1]
        shares = max(1, read * TOKENS_WORTH_ROWS // LEAST_SHARED_OF_FEW)
        table = lines.reshape(-1, lines.shape[-1])
        counters, few, many = np.zeros(_COUNTERS, np.int64), loops.few_pairs, loops.pairs
        if are_few:
            own = few.few_in_turns, few.few_together
            take_turns(*own, shares, counters, table, self._kept)
        else:
            of_tokens[:, 4] = many.columns_together(x.shape[1] // 2, most)
            own = many.several_in_turns, many.several_together
            take_turns(*own, shares, counters, table)

    def _biases(self, numbers: npt.NDArray[np.int64], matrix: int) -> torch.Tensor | None:
        """Of some sets [n, rows], as loops add them, if a matrix has any."""
        own = [self._sets[number][matrix][1] for number in numbers.tolist()]
        found = [bias for bias in own if bias is not None]
        return torch.stack(found).float() if found else None
