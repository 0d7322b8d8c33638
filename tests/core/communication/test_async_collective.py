"""Exchanges with separate start and finish: order of events, with routes that stay on this rank."""

import torch
from torch import Tensor

from megatron.core.communication.async_collective import AsyncCollective, Route, sum_addends
from megatron.core.communication.collectives import Pending
from megatron.core.micro_batch import CooperativeTurn


class Turn(CooperativeTurn):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def yield_turn(self) -> None:
        self.events.append("yield")


def route(events: list[str]) -> Route:
    def go(rows: Tensor) -> Pending:
        events.append("go")
        return Pending(rows * 2.0, None)

    def come_back(rows: Tensor) -> Pending:
        events.append("come back")
        return Pending(rows * 3.0, None)

    return Route(go, come_back)


def test_work_between_start_and_finish_stands_there_in_backward_too() -> None:
    events: list[str] = []
    x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    exchange = AsyncCollective(route(events), Turn(events), x)
    work = y * 1.0
    work.register_hook(lambda gradient: events.append("work"))
    (received,) = exchange.finish()
    (received + work).sum().backward()
    assert torch.equal(received, torch.full((2,), 2.0, dtype=torch.float64))
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    assert events == ["go", "come back", "work", "yield"]


def test_the_way_back_is_the_route_reversed_and_needs_no_turn() -> None:
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    (received,) = AsyncCollective(route(events).reversed(), None, x).finish()
    received.sum().backward()
    assert events == ["come back", "go"] and received.tolist() == [3.0, 3.0] and x.grad.tolist() == [2.0, 2.0]


def test_tensors_without_gradients_are_not_sent_back() -> None:
    events: list[str] = []
    x, numbers = torch.ones(2, requires_grad=True), torch.ones(2)
    rows, _ = AsyncCollective(route(events), None, x, numbers).finish()
    rows.sum().backward()
    assert events == ["go", "go", "come back"]


def test_addends_are_added_in_float32_and_rounded_once() -> None:
    addends = torch.tensor([256.0, 1.0, 1.0]).bfloat16()  # in bfloat16 256 + 1 stays 256
    assert sum_addends(addends, 3).tolist() == [258.0]
