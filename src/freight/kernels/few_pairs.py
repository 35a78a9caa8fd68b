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
from freight.kernels.product import LEAST_SHARED_OF_FEW, TOKENS_WORTH_ROWS, Product
from freight.kernels.row_kinds import EXPONENT, KeptBytes, KeptCodes, KeptEights, KeptPairs
from freight.kernels.sharing import team_threads, together
from freight.kernels.sums import PUTS
from freight.kernels.threads import find_loops, has_words
from freight.model.number_format import MICRO_COLUMNS, EightFloats, Grouped, MicroFloats

__all__ = [
    "few_codes_are_for_pairs",
    "gate_neighbours",
    "lies_in_pairs",
    "multiply_few",
    "product_table",
    "wide_biases",
    "worth_shares",
]

_COUNTERS: Final = 2
"""Of turns that are taken, and rows that are done."""
_TABLE_COLUMNS: Final = 6
_BYTES_OF_EIGHTS_SCALE: Final = 4
_LEAST_GROUP: Final = 32
_CHUNK_COLUMNS: Final = 64
"""Whose codes a loop looks up together."""

_Form = Grouped | MicroFloats | EightFloats
"""Of compressed rows."""


def few_codes_are_for_pairs(x: torch.Tensor, products: Sequence[Product]) -> bool:
    """Whether these are so few tokens, and compressed rows of one kind, that loops multiply as they
    are."""
    loops = find_loops() if x.dtype is torch.bfloat16 and x.device.type == "cpu" else None
    if loops is None or loops.few_pairs is None or not products:
        return False
    most = loops.few_pairs.FEW_TOKENS
    if loops.tiles is not None:
        most = loops.tiles.FEW_TOKENS_OF_CODES
    if x.shape[0] > most or x.shape[1] % _CHUNK_COLUMNS:
        return False
    form = _form(products[0])
    return (
        form is not None
        and _takes(form)
        and lies_in_pairs(x)
        and all(_form(own) == form for own in products[1:])
        and gate_neighbours(products)
        and all(has_words(own.out) and _lies_together(own, form) for own in products)
    )


def _form(product: Product) -> _Form | None:
    rows = product.rows
    own = None if isinstance(rows, torch.Tensor) else rows.number_format
    return own if isinstance(own, Grouped | MicroFloats | EightFloats) else None


def _takes(form: _Form) -> bool:
    if not isinstance(form, Grouped):
        return True
    if form.across:
        return False
    return form.group_size >= _LEAST_GROUP and form.group_size.bit_count() == 1


def _lies_together(product: Product, form: _Form) -> bool:
    """Whether rows follow each other, and scales begin where loops can load them."""
    rows, size = product.rows, 1
    assert isinstance(rows, CompressedRows)
    if not isinstance(form, MicroFloats):
        size = form.factor_bytes if isinstance(form, Grouped) else _BYTES_OF_EIGHTS_SCALE
    is_whole = rows.raw.data_ptr() % size == 0 and rows.raw.shape[1] % size == 0
    return is_whole and rows.raw.is_contiguous()


def _kept(product: Product) -> KeptPairs | KeptCodes | KeptBytes | KeptEights:
    """How rows are kept, as loops are told."""
    rows, form = product.rows, _form(product)
    if isinstance(rows, torch.Tensor):
        return KeptPairs(rows.shape[1] * rows.itemsize)
    row_bytes = rows.raw.shape[1]
    if isinstance(form, Grouped):
        kind = KeptCodes if form.code_bits == 4 else KeptBytes
        return kind(row_bytes, form.group_size, form.factor_bytes)
    if isinstance(form, MicroFloats):
        return KeptCodes(row_bytes, MICRO_COLUMNS, EXPONENT)
    return KeptEights(row_bytes)


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
    loops, kept, biases = find_loops(), _kept(products[0]), wide_biases(products)
    assert loops is not None
    table, counters = product_table(x, products, biases), np.zeros(_COUNTERS, np.int64)
    shares = worth_shares(x, products, LEAST_SHARED_OF_FEW)
    if threads := team_threads(shares):
        loops.few_pairs.few_together(threads, counters, table, kept)
        return
    together(lambda: loops.few_pairs.few_in_turns(counters, table, kept), shares, waits=False)


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
    lines = [first + (0,) * (_TABLE_COLUMNS - len(first))]
    for own, bias in zip(products, biases, strict=True):
        rows, where = own.rows, 0 if bias is None else bias.data_ptr()
        begin = rows.data_ptr() if isinstance(rows, torch.Tensor) else rows.raw.data_ptr()
        place = own.out.data_ptr(), own.out.stride(0)
        lines.append((begin, rows.shape[0], where, own.outcome, *place))
    return np.array(lines, np.int64)
