"""What a router chose is read when it has run, not when it has been issued."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freight.runtime.routing import Routing

CUDA = torch.device("cuda", 0)


class Late:
    """An event of a device that writes what it was given to when it is waited for."""

    routes: Any = None

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "who waits sleeps"

    def record(self) -> None:
        assert Late.routes is not None

    def synchronize(self) -> None:
        Late.routes.experts.copy_(torch.tensor([[4, 1], [1, 3]]))


def test_on_a_device_the_router_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that is pretended: its tensors are the CPU's, its events are ``Late``."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **more: empty(*shape, **more))
    monkeypatch.setattr(torch.cuda, "Event", Late)
    routing = Routing(2, torch.float32, CUDA)
    Late.routes = routing.begin(0, 2)
    Late.routes.experts.fill_(7)
    routing.end(0)
    found = routing.choices(0)
    assert found.names.tolist() == [1, 3, 4]
    assert found.some(0, 1).tokens.tolist() == [0, 1]
    assert found.some(0, 1).places.tolist() == [1, 2]


def test_each_micro_batch_has_its_own() -> None:
    routing = Routing(1, torch.float32, torch.device("cpu"))
    for k in range(2):
        routing.begin(k, 3).experts.copy_(torch.tensor([[k], [5], [k]]))
        routing.end(k)
    for k in range(2):
        assert routing.choices(k).names.tolist() == [k, 5]
    assert routing.of(1).experts.tolist() == [[1], [5], [1]]


def test_choices_are_sorted_by_expert_and_token() -> None:
    routing = Routing(2, torch.float32, torch.device("cpu"))
    routing.begin(0, 5).experts.copy_(torch.tensor([[3, 1], [1, 6], [3, 1], [7, 3], [6, 9]]))
    routing.end(0)
    found = routing.choices(0)
    assert found.names.tolist() == [1, 3, 6, 7, 9] and found.counts.tolist() == [3, 3, 2, 1, 1]
    own = found.some(1, 4)
    assert own.names.tolist() == [3, 6, 7] and own.borders.tolist() == [0, 3, 5, 6]
    assert own.tokens.tolist() == [0, 2, 3, 1, 4, 3]
    assert own.places.tolist() == [0, 4, 7, 3, 8, 6]
