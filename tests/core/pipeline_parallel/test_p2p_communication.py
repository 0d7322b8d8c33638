"""Messages between stages: their format, their order, and the bound on unfinished sends. Other ranks are pretended."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, Pending
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import (
    MessageFormat,
    PipelineP2P,
    max_sends_in_flight,
    message_format_of,
)
from megatron.core.pipeline_parallel.stages import Pipeline, StatesIn

CPU = torch.device("cpu")
FORMAT = MessageFormat((4, 1, 2), torch.float32, CPU)


class Work:
    """A send that ends when it is waited for, or when told."""

    def __init__(self) -> None:
        self.ended = self.waited = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = self.waited = True


class Wire:
    """Carries messages of one process to itself, first in, first out."""

    def __init__(self) -> None:
        self.messages: deque[Tensor] = deque()
        self.works: list[Work] = []
        self.ends: list[tuple[str, int]] = []

    def send(self, tensor: Tensor, peer: int, group: Group) -> Pending:
        self.messages.append(tensor.clone())
        self.works.append(Work())
        self.ends.append(("send", peer))
        return Pending(tensor, self.works[-1])  # type: ignore[arg-type]

    def receive(self, tensor: Tensor, peer: int, group: Group) -> Pending:
        self.ends.append(("receive", peer))
        return Pending(tensor.copy_(self.messages.popleft()), None)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(p2p_communication, "start_send", wire.send)
    monkeypatch.setattr(p2p_communication, "start_receive", wire.receive)
    monkeypatch.setattr(p2p_communication.dist, "get_backend_config", lambda group: "cpu:gloo")
    return wire


def p2p(message_format: MessageFormat = FORMAT) -> PipelineP2P:
    """The messages of pipeline rank 1; global ranks are twice the pipeline ranks, plus 1."""
    groups = ProcessGroupCollection.from_grid(RankGrid(6, tensor=2, pipeline=3), 3)
    return PipelineP2P(groups, Pipeline(3), message_format)


def test_hidden_states_and_gradients_reach_the_neighbours_global_rank(wire: Wire) -> None:
    messages = p2p()
    hidden = torch.randn(4, 1, 2, dtype=torch.float32, requires_grad=True)
    messages.send_hidden(hidden, 2)
    received = messages.receive_hidden(0).wait()
    assert torch.equal(received, hidden) and not received.requires_grad
    messages.send_gradient(torch.ones(4, 1, 2, dtype=torch.float64), 0)
    assert torch.equal(messages.receive_gradient((4, 1, 2), 2).wait(), torch.ones(4, 1, 2))
    assert wire.ends == [("send", 5), ("receive", 1), ("send", 1), ("receive", 5)]


def test_several_states_are_one_message(wire: Wire) -> None:
    messages, hidden = p2p(), torch.randn(8, 1, 2)
    messages.send_hidden(hidden, 2, states=StatesIn(2))
    assert torch.equal(messages.receive_hidden(0, states=StatesIn(2)).wait(), hidden)
    assert FORMAT.shape_of(StatesIn(3)) == (12, 1, 2)


def test_a_shape_that_varies_is_sent_first(wire: Wire) -> None:
    messages, hidden = p2p(MessageFormat((4, 1, 2), torch.float32, CPU, shape_is_sent=True)), torch.randn(7, 1, 2)
    messages.send_hidden(hidden, 2)
    assert wire.messages[0].tolist() == [7, 1, 2]
    assert torch.equal(messages.receive_hidden(0).wait(), hidden)


def test_what_does_not_fit_the_format_is_refused(wire: Wire) -> None:
    with pytest.raises(UserError, match=r"shape \(5, 1, 2\), while seq_length and micro_batch_size say \(4, 1, 2\)"):
        p2p().send_hidden(torch.zeros(5, 1, 2), 2)
    with pytest.raises(UserError, match=r"in torch.float64, and config.pipeline_dtype torch.float32 would round"):
        p2p().send_hidden(torch.zeros(4, 1, 2, dtype=torch.float64), 2)
    assert not wire.messages
    p2p().send_hidden(torch.zeros(4, 1, 2, dtype=torch.bfloat16), 2)
    assert wire.messages[0].dtype is torch.float32


def test_no_more_sends_than_the_bound_are_unfinished(wire: Wire) -> None:
    messages, bound = p2p(), max_sends_in_flight(Pipeline(3))
    for _ in range(bound):
        messages.send_hidden(torch.zeros(4, 1, 2), 2)
    assert not any(work.waited for work in wire.works)
    messages.send_hidden(torch.zeros(4, 1, 2), 2)
    assert [work.waited for work in wire.works] == [True] + [False] * bound
    messages.send_gradient(torch.zeros(4, 1, 2), 0)  # sends to another rank have a bound of their own
    assert sum(work.waited for work in wire.works) == 1
    messages.finish()
    assert all(work.waited for work in wire.works)


def config(**fields: Any) -> SimpleNamespace:
    defaults = {"hidden_size": 6, "sequence_parallel": False, "variable_seq_lengths": False}
    return SimpleNamespace(**defaults | {"pipeline_dtype": torch.bfloat16} | fields)


def test_the_format_follows_from_the_config() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(4, tensor=2, context=2), 0)
    plain = message_format_of(config(), groups, CPU, 8, 3)
    assert plain == MessageFormat((4, 3, 6), torch.bfloat16, CPU)
    split = message_format_of(config(sequence_parallel=True, variable_seq_lengths=True), groups, CPU, 8, 3)
    assert split == MessageFormat((2, 3, 6), torch.bfloat16, CPU, shape_is_sent=True)
    with pytest.raises(UserError, match=r"seq_length 6 is not divisible by 4, .*; use 4"):
        message_format_of(config(sequence_parallel=True), groups, CPU, 6, 3)
    with pytest.raises(UserError, match="needs seq_length and micro_batch_size"):
        message_format_of(config(), groups, CPU, None, 3)


def test_a_script_may_adjust_the_shape() -> None:
    assert FORMAT.adjusted(None) is FORMAT
    adjusted = FORMAT.adjusted(lambda receive, send: ([[9, *receive[0][1:]]], send))
    assert adjusted == MessageFormat((9, 1, 2), torch.float32, CPU)
