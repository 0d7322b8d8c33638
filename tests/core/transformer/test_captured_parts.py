"""Parts of layers as graphs, of a layer that is one matrix. tests/training/setup/test_graphs.py compares whole runs."""

from types import SimpleNamespace
from typing import Any

import torch
from support.graph_recorder import OperationRecorder
from torch import Tensor, nn

from megatron.core.distributed.main_grad import attach_main_grad
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.captured_parts import MOST_KINDS, PartGraphs, capture_layer_parts
from megatron.core.transformer.layer_inputs import LayerInputs


class Record:
    """Keeps what parts tell."""

    def __init__(self) -> None:
        self.told: list[Tensor] = []

    def take_tensors(self) -> list[Tensor]:
        taken, self.told = self.told, []
        return taken

    def add_tensors(self, tensors: list[Tensor]) -> None:
        self.told += tensors


class Layer(nn.Module):
    """Two parts: hidden * weight * (iteration + scale), and a choice of rows by the hidden states."""

    has_token_mixer = has_channel_mixer = True
    is_parallel = False

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record, self.calls, self.accumulated = record, 0, 0
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        attach_main_grad(self.weight, torch.zeros(2), self._count)
        self.self_attention = SimpleNamespace(core_attention=None)
        self.cross_attention = nn.Identity()
        self.mlp = nn.Identity()
        self.mlp.experts = nn.Identity()
        self.mlp.router = nn.Identity()
        self.mlp.router.route = self._route

    def _count(self, parameter: nn.Parameter) -> None:
        self.accumulated += 1

    def add_attention(self, hidden: Tensor, inputs: LayerInputs) -> Tensor:
        self.calls += 1
        assert inputs.tokens.random is not None and inputs.auxiliary_scale is not None
        output = hidden * self.weight * (inputs.tokens.random.iteration + inputs.auxiliary_scale)
        self.record.add_tensors([output.detach().sum()])
        return output

    def _route(self, hidden: Tensor, inputs: LayerInputs) -> dict[str, Tensor]:
        return {"rows": hidden.argmax(0), "weights": hidden.softmax(0)}

    def forward(self, hidden: Tensor, inputs: LayerInputs) -> Tensor:
        hidden = self.add_attention(hidden, inputs)
        routed = self.mlp.router.route(hidden, inputs)
        return hidden[routed["rows"]].sum() + (routed["weights"] * hidden).sum()


def inputs_of(iteration: int, scale: float = 1.0, tokens: int = 3) -> LayerInputs:
    return LayerInputs(Tokens(tokens, 1, random=RngPosition(1, iteration)), auxiliary_scale=torch.tensor(scale))


def micro_batch(layer: Layer, iteration: int, tokens: int = 3) -> tuple[float, list[float]]:
    """Returns the output and the gradient of the hidden states."""
    hidden = torch.arange(2.0 * tokens).view(tokens, 2).sin().mul(iteration + 1).requires_grad_()
    output = layer(hidden, inputs_of(iteration, 0.5 * iteration, tokens))
    output.backward()
    return output.item(), hidden.grad.flatten().tolist()


def results(captured: bool, steps: int = 4, sizes: tuple[int, ...] = (3, 3)) -> tuple[Any, ...]:
    record = Record()
    layer, recorder = Layer(record), OperationRecorder()
    graphs, found, said = PartGraphs(recorder, 1, [record], lambda sentence: said.append(sentence)), [], []
    if captured:
        capture_layer_parts([layer], ["attn", "moe_router"], graphs)
    for step in range(steps):
        work = lambda step=step: found.extend(micro_batch(layer, 2 * step + i, n) for i, n in enumerate(sizes))  # noqa: E731
        graphs.run_step([layer], work) if captured else work()
    told = [number.item() for number in record.told]
    return found, told, layer.weight.main_grad.tolist(), layer.accumulated, layer.calls, recorder.captured, said


def test_replays_compute_record_and_count_what_the_eager_parts_do() -> None:
    expected, found = results(captured=False), results(captured=True)
    assert found[:4] == expected[:4] and expected[3] == 8
    assert expected[4] == 8 and found[4] == 3, "two calls of the first step, and one that was captured"
    assert found[5:] == (4, ["step 2: 2 parts of layers are captured as CUDA graphs"])


def test_other_shapes_have_their_own_graphs_and_too_many_run_eagerly() -> None:
    sizes = tuple(range(1, MOST_KINDS + 3))
    expected, found = results(captured=False, sizes=sizes), results(captured=True, sizes=sizes)
    assert found[:4] == expected[:4] and found[5] == 4 * MOST_KINDS


def test_a_second_micro_batch_in_flight_and_an_evaluation_run_eagerly() -> None:
    layer, recorder = Layer(Record()), OperationRecorder()
    graphs = PartGraphs(recorder, 1)
    capture_layer_parts([layer], ["attn"], graphs)
    hidden = torch.ones(3, 2, requires_grad=True)

    def two_at_once() -> None:
        outputs = [layer(hidden * number, inputs_of(number)) for number in (1, 2)]
        sum(outputs).backward()  # type: ignore[union-attr]

    for _ in range(3):
        graphs.run_step([layer], two_at_once)
    first = hidden.grad.clone()
    assert recorder.captured == 2 and layer.calls == 2 + 1 + 2, "in each of two steps one call is replayed"
    hidden.grad = None
    for _ in range(3):
        two_at_once()
    assert torch.equal(first, hidden.grad)
    with torch.no_grad():
        graphs.run_step([layer], lambda: layer(hidden, inputs_of(1)))
    assert recorder.captured == 2
