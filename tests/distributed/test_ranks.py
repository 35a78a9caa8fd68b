"""What ranks say to each other: however slow one is, it is waited for."""

from __future__ import annotations

import time

import pytest
import torch

import freight.distributed.ranks
from freight.distributed.messages import Inbox, Outbox, receive_all
from freight.distributed.ranks import Ranks
from freight.errors import BudgetError

from .pipeline.stages import on_ranks

CONNECT_S = 2.0
SLOW_S = 3.0


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """That for connecting, which messages once had too."""
    monkeypatch.setattr(freight.distributed.ranks, "_CONNECT_S", CONNECT_S)


def test_a_message_may_take_longer_than_connecting() -> None:
    def work(ranks: Ranks) -> float:
        group = ranks.group("slow")
        value = torch.zeros(1)
        if ranks.rank == 0:
            group.receive(value, 1).wait()
        else:
            time.sleep(SLOW_S)
            group.send(torch.ones(1), 0).wait()
        return float(value)

    assert on_ranks(2, work) == [1.0, 0.0]


def test_what_is_large_may_wait_as_long_for_who_takes_it() -> None:
    size = 1 << 24

    def work(ranks: Ranks) -> float:
        group = ranks.group("large")
        value = torch.zeros(size)
        if ranks.rank == 0:
            time.sleep(SLOW_S)
            group.receive(value, 1).wait()
        else:
            group.send(torch.ones(size), 0).wait()
        return float(value.sum())

    assert on_ranks(2, work) == [float(size), 0.0]


def test_so_may_values_of_which_none_come_for_long() -> None:
    def work(ranks: Ranks) -> list[object]:
        group = ranks.group("values")
        if ranks.rank == 0:
            inbox = Inbox()
            receive_all(group, 1, inbox)
            return [inbox.get(), inbox.get(), inbox.get()]
        outbox = Outbox(group, [0])
        outbox.send("first")
        outbox.flush()
        time.sleep(SLOW_S)
        outbox.send("second")
        outbox.send(None)
        outbox.flush()
        return []

    assert on_ranks(2, work) == [["first", "second", None], []]


def test_who_waits_for_a_rank_that_is_refused_is_refused_too() -> None:
    """It had just begun to take part in what all were making."""

    def work(ranks: Ranks) -> None:
        group = ranks.group("made together")

        def make() -> None:
            if ranks.rank == 2:
                raise BudgetError("a", "b", "c")
            group.receive(torch.zeros(1), 2).wait()

        ranks.share("made", make, together=True)

    errors = on_ranks(3, work)
    asked = [own.asked for own in errors if isinstance(own, BudgetError)]
    assert len(asked) == 3 and all(own.startswith("On rank 2 of 3 (") for own in asked)


def test_what_was_refused_to_one_may_be_made_otherwise() -> None:
    """As a block is that a stage has no memory for: the next one is tried, over the same wires."""

    def work(ranks: Ranks) -> float:
        group = ranks.group("wires")

        def make() -> None:
            if ranks.rank == 1:
                raise BudgetError("a", "b", "c")

        with pytest.raises(BudgetError):
            ranks.share("tried", make)
        value = torch.zeros(1)
        if ranks.rank == 0:
            group.receive(value, 1).wait()
        else:
            group.send(torch.ones(1), 0).wait()
        return float(value)

    assert on_ranks(2, work) == [1.0, 0.0]


def test_the_word_of_a_rank_is_heard_before_it_is_lost() -> None:
    def work(ranks: Ranks) -> tuple[int | None, str]:
        if ranks.rank == 2:
            ranks.note_failure("it fell over")
        ranks.exchange("noted", None)
        rank = ranks.wait_for_failure(1.0) if ranks.rank == 0 else 2
        return rank, ranks.loss(rank).limit if ranks.rank == 0 else ""

    (rank, told), *_ = on_ranks(3, work)
    assert rank == 2 and told.endswith("has ended: it fell over.")


def test_nobody_has_failed() -> None:
    def work(ranks: Ranks) -> int | None:
        return ranks.wait_for_failure(0.3)

    assert on_ranks(2, work) == [None, None]
