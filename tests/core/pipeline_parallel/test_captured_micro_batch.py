"""Micro-batches as graphs, of a model of one matrix. tests/training/setup/test_graphs.py compares whole runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.graph_recorder import OperationRecorder
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel.captured_micro_batch import MOST_GRAPHS, MicroBatchGraphs
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tokens import RngPosition
from megatron.core.transformer.transformer_config import TransformerConfig


class Matrix(nn.Module):
    """loss = sum(weight * batch) * (iteration + first sample): its gradient shows what a micro-batch has read."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.weight.grad = torch.zeros_like(self.weight)
        self.waited = 0

    def finish_param_sync(self) -> None:
        self.waited += 1

    def forward(self, batch: Tensor, position: RngPosition) -> Tensor:
        return (self.weight * batch).sum() * (position.iteration + position.first_sample)


class Record:
    """Keeps the sum of each micro-batch."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def take_tensors(self) -> list[Tensor]:
        taken, self.sums = self.sums, []
        return taken

    def add_tensors(self, tensors: list[Tensor]) -> None:
        self.sums += tensors


def forward_step(record: Record) -> Any:
    def step(data: Any, model: Matrix) -> Any:
        batch = next(data)
        record.sums.append(batch.sum())
        return model(batch, data.rng_position), lambda output: (output, {"loss": output.detach()})

    return step


def batches(*values: float, size: int = 2) -> Iterator[Tensor]:
    return iter([torch.full((size,), value, dtype=torch.float64) for value in values])


class Data:
    """Batches and their positions, as a loop without graphs has them."""

    def __init__(self, *values: float) -> None:
        self.values, self.rng_position = batches(*values), RngPosition(7, 1)

    def __next__(self) -> Tensor:
        return next(self.values)


def run(graphs: MicroBatchGraphs, model: Matrix, step: Any, data: Any, iteration: int = 0, **changed: Any) -> list[Any]:
    """Runs one step of two micro-batches, or as the arguments say."""
    given = {
        "forward_step_func": step,
        "data_iterator": data,
        "model": model,
        "num_microbatches": 2,
        "pg_collection": ProcessGroupCollection.from_grid(RankGrid(1), 0),
        "rng_position_of": lambda number: RngPosition(7, iteration, number),
        "make_runner": graphs.runner,
    }
    model.weight.grad.zero_()
    return forward_backward_no_pipelining(**(given | changed))


def test_every_replay_reads_its_own_batch_and_position_and_records_what_an_eager_one_does() -> None:
    recorder, record, model, said = OperationRecorder(), Record(), Matrix(), []
    step, graphs = forward_step(record), MicroBatchGraphs(recorder, 1, [record], said.append)
    for iteration, values in enumerate([(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]):
        reports = run(graphs, model, step, batches(*values), iteration)
        expected = [2 * value * (iteration + number) for number, value in enumerate(values)]
        assert [report["loss"].item() for report in reports] == expected
        assert model.weight.grad.tolist() == [sum(expected) / 4] * 2  # the mean over two micro-batches
        assert [total.item() for total in record.take_tensors()] == [2 * value for value in values]
    assert said == ["step 2: a micro-batch is captured as a CUDA graph"]
    assert (recorder.warmed, recorder.captured, recorder.replayed) == (2, 1, 4)
    assert model.waited == 3, "updated weights are waited for before each step"


def test_an_evaluation_is_not_captured() -> None:
    recorder, model = OperationRecorder(), Matrix()
    graphs = MicroBatchGraphs(recorder, 1)
    reports = run(graphs, model, forward_step(Record()), Data(1.0, 2.0), forward_only=True)
    assert len(reports) == 2 and recorder.warmed == recorder.captured == 0 and graphs.step == 0


def test_other_shapes_have_graphs_of_their_own_up_to_a_limit() -> None:
    recorder, model = OperationRecorder(), Matrix()
    step, graphs = forward_step(Record()), MicroBatchGraphs(recorder, 1)
    for count in range(1, MOST_GRAPHS + 1):  # numbers of micro-batches are constants of a graph
        run(graphs, model, step, batches(*[1.0] * count), num_microbatches=count)
    with pytest.raises(UserError, match=r"8 kinds of micro-batches have a graph, and this one is .* \(1,\)"):
        run(graphs, model, step, batches(1.0, size=1), num_microbatches=1)


def test_a_rank_without_data_and_a_forward_step_that_draws_nothing_are_refused() -> None:
    model = Matrix()
    with pytest.raises(UserError, match="this rank reads no data itself"):
        run(MicroBatchGraphs(OperationRecorder(), 1), model, forward_step(Record()), None)
    idle = lambda data, model: (model.weight.sum(), lambda output: (output, {}))  # noqa: E731
    with pytest.raises(UserError, match="the forward step draws 0 batches"):
        run(MicroBatchGraphs(OperationRecorder(), 1), model, idle, batches(1.0))


def test_a_script_that_starts_reductions_itself_has_its_last_micro_batch_without_a_graph() -> None:
    recorder, model, started = OperationRecorder(), Matrix(), []
    model.config.grad_sync_func = lambda parameters: started.append(len(list(parameters)))
    step, graphs = forward_step(Record()), MicroBatchGraphs(recorder, 1)
    for _ in range(3):
        run(graphs, model, step, Data(1.0, 2.0))
    assert started == [1, 1, 1] and (recorder.warmed, recorder.replayed) == (1, 2)
