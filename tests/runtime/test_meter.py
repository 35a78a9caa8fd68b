"""What a run counts of the operations that it is told of."""

from __future__ import annotations

import pytest

from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.plan.operation import Kind, Lane, Operation
from freight.runtime.meter import Meter


def test_waiting_for_tokens_is_no_work() -> None:
    """A stage of a pipeline takes them from the last one: time passes, and nothing is computed."""
    meter = Meter(has_phases=True)
    span = RowSpan(row=RowKey(0), start=0, num_new=1, kv_len=0, logit_positions=(0,))
    batch = MicroBatch(index=0, rows=(span,), token_ids=[1])
    compute = Operation(0, Kind.COMPUTE, Lane.COMPUTE, 0, 1, batch, (), ())
    take = Operation(1, Kind.TAKE_TOKENS, Lane.COMPUTE, 0, 2, batch, (), (), is_last=True)
    meter.record(compute, 10.0, 12.0)
    meter.record(take, 12.0, 17.0)
    assert meter.busy_s == {Lane.COMPUTE: pytest.approx(2.0)}
    assert meter.prefill_s == pytest.approx(7.0)
    assert meter.idle_shares() == {"prefill": pytest.approx(5 / 7)}
