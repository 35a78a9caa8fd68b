"""What the user has fixed: no more of a block than there are rows."""

from __future__ import annotations

import pytest

from freight.plan.wishes import Wishes


@pytest.mark.parametrize(
    ("asked", "num_rows", "given"),
    [
        ((None, None), 5, (None, None)),
        ((4, 2), 100, (4, 2)),
        ((4, 2), 8, (4, 2)),
        ((4, 2), 5, (4, 2)),
        ((4, 9), 5, (4, 2)),
        ((100_000_000, None), 1, (1, None)),
        ((100_000_000, 7), 5, (5, 1)),
        ((None, 7), 5, (None, 5)),
    ],
)
def test_a_block_is_no_larger_than_the_job(
    asked: tuple[int | None, int | None], num_rows: int, given: tuple[int | None, int | None]
) -> None:
    found = Wishes(micro_batch_size=asked[0], num_micro_batches=asked[1]).within(num_rows)
    assert (found.micro_batch_size, found.num_micro_batches) == given
