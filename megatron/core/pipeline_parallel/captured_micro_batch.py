"""Replays the micro-batches of training steps as a CUDA graph, for models so small that launching kernels takes longer
than running them.

The forward, the loss and the backward of one micro-batch are one graph. Its inputs are buffers at fixed addresses: the
batch, the step's number and the first sample (from which dropout masks follow). Weights, main gradients and the loss
scale have fixed addresses anyway. The graph adds to the main gradients, so it fits every micro-batch of a step. Its
outputs (the loss report, the number of tokens, metrics of layers) are copied after each replay.

Weights in fp8 are quantised before the first micro-batch of a step, into memory at fixed addresses.

Python does not run in a replay, and neither do the hooks that act when a gradient is complete. If these hooks start
reductions of gradients during the last backward, the last micro-batch of a step runs without the graph.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.chunk_hooks import device_of, find_method
from megatron.core.pipeline_parallel.runner import PipelineTask, Runner
from megatron.core.timers import timed
from megatron.core.tokens import RngPosition
from megatron.core.utils.graph_capture import (
    CapturedGraph,
    StaticInputs,
    StepGraphs,
    capture_errors,
    map_tensors,
    signature,
)

MOST_GRAPHS = 8
"""Largest number of graphs of a run. Each batch shape and each number of micro-batches has its own graph."""

Outputs = tuple[Any, Tensor | None, list[Any]]
"""(report of the loss function, number of tokens, tensors of the records) of a micro-batch."""


@dataclasses.dataclass(eq=False)
class MicroBatchGraphs(StepGraphs):
    """The graphs of a run, by the signature of the micro-batch."""

    _graphs: "dict[Hashable, _MicroBatchGraph]" = dataclasses.field(default_factory=dict, init=False)

    def runner(self, task: PipelineTask, timers: Callable[..., object] | None = None) -> Runner:
        """Returns the runner of a step or of an evaluation; see `forward_backward_no_pipelining`."""
        return GraphRunner(task, timers, self)

    def compute(self, task: PipelineTask, number: int) -> Outputs:
        """Draws the micro-batch with this number and runs it, eagerly or as a graph. Raises UserError if micro-batches
        have too many shapes."""
        data, position = task.data_iterators[0], None
        if data is None:
            raise UserError("CUDA graphs: this rank reads no data itself, and a graph cannot receive it")
        batch = next(data)
        if task.rng_position_of is not None:
            position = task.rng_position_of(number)
        kind = (signature(batch), task.num_microbatches, None if position is None else position.seed)
        key = (
            *kind,
            self._state,
            task.forward_step_func,
            task.grad_scale_func,
            task.chunks[0],
            task.chunks[0].training,
        )
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) == MOST_GRAPHS:
                raise UserError(
                    f"CUDA graphs: {MOST_GRAPHS} kinds of micro-batches have a graph, and this one is of yet another "
                    f"kind: {_shapes(batch)}; give all batches one shape, or leave out CUDA graphs"
                )
            graph = self._graphs[key] = _MicroBatchGraph(task, batch, position, self)
        outputs = graph.run(batch, position)
        for record, tensors in zip(self.records, outputs[2], strict=True):
            record.add_tensors(tensors)
        return outputs


class GraphRunner(Runner):
    """Runs the micro-batches of a training step as graphs. Runs everything else as `Runner` does."""

    def __init__(self, task: PipelineTask, timers: Callable[..., Any] | None, graphs: MicroBatchGraphs) -> None:
        super().__init__(task, timers)
        self.graphs = graphs

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions. Raises UserError for the actions of a pipeline."""
        if not any(action.kind is ActionKind.BACKWARD for action in actions) or self.task.collect_non_loss_data:
            return super().run(actions)
        if self.task.pipeline.num_stages > 1:
            raise UserError("CUDA graphs: a graph holds whole micro-batches, so the model must be one pipeline stage")
        call_if_defined(self.task.chunks, "finish_param_sync")  # no hook of a module waits for weights in a replay
        call_if_defined(self.task.chunks, "zero_outdated_gradients")  # else every replay would replace gradients
        self.graphs.begin_step()
        count = self.task.num_microbatches
        alone = {count - 1} if self._reduces_in_backward() else set()
        for number in range(count):
            if number in alone:
                super().run([action for action in actions if action.micro_batch == number])
                continue
            with timed(self.timers, "forward-and-backward-compute", 2):
                report, tokens, _ = self.graphs.compute(self.task, number)
            self.losses.add(report, tokens)
        return None

    def _reduces_in_backward(self) -> bool:
        """Whether reductions of gradients start during the last backward, by hooks that a replay does not run."""
        if getattr(self.task.config, "grad_sync_func", None) is not None:
            return True
        ddp_config = getattr(self.task.chunks[0], "ddp_config", None)
        return bool(getattr(ddp_config, "overlap_grad_reduce", False)) and self.task.groups.size("dp_cp") > 1


def call_if_defined(chunks: Sequence[nn.Module], name: str) -> None:
    """Calls a method of the chunks whose wrapper has it."""
    for chunk in chunks:
        method = find_method(chunk, name)
        if method is not None:
            method()


class _StaticData(Iterator[Any]):
    """The data iterator of a captured forward step: yields the static batch."""

    def __init__(self, batch: Any, position: RngPosition | None) -> None:
        self.batch, self.drawn = batch, 0
        if position is not None:
            self.rng_position = position

    def __next__(self) -> Any:
        self.drawn += 1
        return self.batch

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"CUDA graphs: the forward step reads `{name}` of its data iterator; a graph would not see it change"
        )


class _MicroBatchGraph:
    """One kind of micro-batch: its static inputs, and its graph after the warm-up."""

    def __init__(self, task: PipelineTask, batch: Any, position: RngPosition | None, graphs: MicroBatchGraphs) -> None:
        device = device_of(task.chunks)
        self.graphs, self.inputs = graphs, StaticInputs(batch, device)
        self.capture_at = graphs.step + graphs.warmup_steps
        self.iteration, self.first_sample = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        static = None if position is None else RngPosition(position.seed, self.iteration, self.first_sample)
        self.data = _StaticData(self.inputs.value, static)
        self.task = dataclasses.replace(
            task, data_iterators=[self.data], rng_position_of=None if static is None else lambda number: static
        )
        self.graph: CapturedGraph[Outputs] | None = None

    def run(self, batch: object, position: RngPosition | None) -> Outputs:
        """Runs a micro-batch; returns copies of its outputs."""
        self.inputs.fill(batch)
        if position is not None:
            self.iteration.fill_(position.iteration)
            self.first_sample.fill_(position.first_sample)
        if self.graph is None and self.graphs.step < self.capture_at:
            return self.graphs.recorder.warm_up(self._compute)
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()
        return map_tensors(torch.clone, self.graph.outputs)

    def _capture(self) -> CapturedGraph[Outputs]:
        self.graphs.before_capture(f"step {self.graphs.step}: a micro-batch is captured as a CUDA graph")
        with capture_errors("the micro-batch", "A forward step or layer"):
            return self.graphs.recorder.capture(self._compute)

    def _compute(self) -> Outputs:
        """Computes forward, loss and backward of the static micro-batch."""
        records = self.graphs.records
        before = [record.take_tensors() for record in records]
        self.data.drawn = 0
        runner = Runner(self.task)
        runner.run([Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)])
        if self.data.drawn != 1:
            raise UserError(
                f"CUDA graphs: the forward step draws {self.data.drawn} batches from its data iterator; a graph has one"
            )
        recorded = [record.take_tensors() for record in records]
        for record, tensors in zip(records, before, strict=True):
            record.add_tensors(tensors)
        outputs = (runner.losses.reports[0], runner.losses.num_tokens, recorded)
        return map_tensors(torch.detach, outputs)


def _shapes(batch: object) -> str:
    kinds = signature(batch)
    assert isinstance(kinds, tuple)
    return ", ".join(f"{path} {kind[0] if isinstance(kind, tuple) else kind}" for path, kind in kinds)
