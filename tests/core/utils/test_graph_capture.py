"""Static inputs of graphs, and the recorder that the tests on a CPU use."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from support.graph_recorder import OperationRecorder
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils import graph_capture
from megatron.core.utils.graph_capture import (
    StaticInputs,
    StepGraphs,
    capture_errors,
    leaves,
    map_tensors,
    signature,
    undoing_a_failed_capture,
)


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    mask: Tensor | None = None
    length: int = 3
    sample_ids: Tensor | None = None


def batch(value: int, **changes: object) -> Batch:
    return dataclasses.replace(Batch(torch.full((2, 3), value), sample_ids=torch.tensor([value])), **changes)


@pytest.mark.parametrize("ended", [False, True])
def test_a_capture_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """Stream, allocator and generator, in this order. tests/gpu/test_cuda_graphs_on_gpu.py fails real captures."""
    done: list[str] = []

    def end(device: torch.device, pool: int) -> None:
        done.append(f"pool {pool}")
        if ended:
            raise RuntimeError("not currently recording to this pool")

    before = SimpleNamespace(device_index=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: before)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: done.append(f"stream {stream is before}"))
    monkeypatch.setattr(graph_capture, "end_allocation_to_pool", end)
    monkeypatch.setattr(graph_capture, "_capture_one_kernel", lambda device: done.append("a capture"))
    with undoing_a_failed_capture(torch.device("cuda", 0), 7):
        pass
    assert done == []
    with pytest.raises(ValueError, match="of the capture"), undoing_a_failed_capture(torch.device("cuda", 0), 7):
        raise ValueError("of the capture")
    assert done == ["stream True", "pool 7", "a capture"]


def test_static_inputs_keep_their_addresses_and_leave_sample_ids_on_the_host() -> None:
    static = StaticInputs({"batch": batch(1), "pair": (torch.ones(2), "text")}, torch.device("cpu"))
    tokens = static.value["batch"].tokens
    static.fill({"batch": batch(7), "pair": (torch.zeros(2), "text")})
    assert static.value["batch"].tokens is tokens and tokens.eq(7).all() and static.value["pair"][0].eq(0).all()
    assert static.value["batch"].sample_ids is None and static.value["pair"][1] == "text"


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (batch(2), True),
        (batch(1, sample_ids=None), True),
        (batch(1, length=4), False),
        (batch(1, mask=torch.ones(1)), False),
        (batch(1, tokens=torch.ones(2, 4, dtype=torch.int64)), False),
        (batch(1, tokens=torch.ones(2, 3)), False),
    ],
)
def test_the_signature_is_what_a_graph_depends_on(other: Batch, alike: bool) -> None:
    assert (signature(batch(1)) == signature(other)) is alike
    assert hash(signature(other)) is not None


def test_leaves_and_maps_of_nested_values() -> None:
    value = {"a": [torch.ones(1), 2], "b": batch(1)}
    assert [path for path, _ in leaves(value)] == ["a.0", "a.1", "b.tokens", "b.mask", "b.length"]
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert doubled["a"][0].item() == 2 and doubled["a"][1] == 2 and doubled["b"].tokens.eq(2).all()


def test_the_recorder_of_the_tests_replays_operations_and_not_python() -> None:
    recorder, total, calls = OperationRecorder(), torch.zeros(2), []
    given = torch.ones(2)

    def function() -> Tensor:
        calls.append(len(calls) + 1)
        total.add_(given * calls[-1])
        return total.sum() * 1.0

    recorder.warm_up(function)
    graph = recorder.capture(function)
    assert total.tolist() == [1.0, 1.0], "a capture does no work"
    given.fill_(10.0)
    graph.replay()
    graph.replay()
    assert total.tolist() == [41.0, 41.0] and graph.outputs.item() == 82.0, "2 is a constant of the graph"
    assert calls == [1, 2] and (recorder.warmed, recorder.captured, recorder.replayed) == (1, 1, 2)


def test_the_recorder_of_the_tests_refuses_what_waits() -> None:
    number = torch.ones(())
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        OperationRecorder().capture(number.item)


def test_a_failed_capture_says_what_cannot_be_captured() -> None:
    said = r"^CUDA graphs: a part cannot be captured: waits. A layer that waits for the device"
    with pytest.raises(UserError, match=said), capture_errors("a part", "A layer"):
        raise RuntimeError("waits\nfor its tensor")
    with pytest.raises(UserError, match="cannot be captured: no reason given"), capture_errors("it", "A layer"):
        raise RuntimeError
    with pytest.raises(torch.OutOfMemoryError), capture_errors("it", "A layer"):
        raise torch.OutOfMemoryError


def test_each_step_asks_once_what_graphs_depend_on() -> None:
    graphs = StepGraphs(OperationRecorder(), 1, before_step=iter("ab").__next__)
    graphs.begin_step()
    assert (graphs.step, graphs._state) == (1, "a")
    graphs.begin_step()
    assert (graphs.step, graphs._state) == (2, "b")
