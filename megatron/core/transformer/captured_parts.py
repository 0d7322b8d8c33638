"""Replays parts of layers as CUDA graphs: attention, MLP or router, where a whole micro-batch cannot be one graph.

Each part has two graphs, forward and backward; everything between the parts (sending tokens to experts, the experts'
products, embedding, loss) runs eagerly. A part is a function of hidden states and `LayerInputs`. Both are copied to
fixed addresses before a replay. The static copies of `LayerInputs` are shared by all layers.

All graphs share one memory pool. They are captured in the order in which they are replayed: all forwards, then all
backwards from the last to the first. So the memory of a part's activations is free again after its backward.

Python does not run in a replay. The part's effects on the host are repeated after it: the metrics of its layer are
recorded, and accumulated gradients are reported, so that reductions start during the last backward as they do without
graphs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.distributed.main_grad import BufferMainGrad
from megatron.core.parameters import main_grad_accumulator
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.chunk_hooks import finish_param_sync
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.task import PipelineTask
from megatron.core.tokens import RngPosition
from megatron.core.transformer.layer_inputs import LayerInputs, is_plain_causal
from megatron.core.utils.graph_capture import (
    CapturedGraph,
    StaticInputs,
    StepGraphs,
    TensorRecord,
    capture_errors,
    leaves,
    map_tensors,
    signature,
)

MOST_KINDS = 8
"""Largest number of kinds of micro-batches that get graphs. Further kinds run eagerly."""

PartFunction = Callable[[Tensor, LayerInputs], Any]
"""Computes a part of a layer from hidden states [t, h]; returns a nested value of tensors."""


@dataclasses.dataclass(eq=False)
class PartGraphs(StepGraphs):
    """The parts of a run's layers, and their graphs. The records keep the further results of a part, such as
    metrics."""

    in_flight: int = dataclasses.field(default=0, init=False)
    """Number of parts that were replayed forward and not yet backward."""
    _trains: bool = dataclasses.field(default=False, init=False)
    _kinds: "dict[tuple[Hashable, Hashable], _Kind]" = dataclasses.field(default_factory=dict, init=False)
    """By the signature of the inputs and the state at the start of the step."""
    _latest: "tuple[LayerInputs, _Kind | None] | None" = dataclasses.field(default=None, init=False)
    """The inputs of the present micro-batch and their kind."""

    def part(self, function: PartFunction, parameters: Iterable[nn.Parameter]) -> PartFunction:
        """Returns `function` as a part, which training steps replay. `parameters` are the parameters that it uses."""
        parameters = tuple(parameters)
        return lambda hidden, inputs: self._call(function, parameters, hidden, inputs)

    def runner(self, task: PipelineTask, timers: Callable[..., Any] | None = None) -> Runner:
        """Returns the runner of a step or of an evaluation; see `forward_backward_no_pipelining`."""
        return PartRunner(task, timers, self)

    def run_step(self, chunks: Sequence[nn.Module], run: Callable[[], None]) -> None:
        """Executes `run`, the micro-batches of a training step, and replays the graphs of parts that have some.
        Captures the graphs of all kinds of micro-batches whose warm-up is complete."""
        finish_param_sync(chunks)  # no hook of a module in a part waits for updated weights
        self.begin_step()
        self.in_flight = 0
        kinds = [kind for (_, state), kind in self._kinds.items() if state == self._state]
        for kind in kinds:
            for graph in kind.graphs.values():
                graph.in_flight = False
            if not kind.graphs and kind.warm_steps >= self.warmup_steps:
                self.before_capture(f"step {self.step}: {len(kind.calls)} parts of layers are captured as CUDA graphs")
                kind.capture(self)
        self._trains = True
        try:
            if kinds and all(kind.graphs for kind in kinds):
                run()
            else:
                self.recorder.warm_up(run)
        finally:
            self._trains, self._latest = False, None

    def _call(
        self, function: PartFunction, parameters: tuple[nn.Parameter, ...], hidden: Tensor, inputs: LayerInputs
    ) -> Any:
        if not (self._trains and torch.is_grad_enabled() and hidden.requires_grad):
            return function(hidden, inputs)
        kind = self._kind_of(inputs, hidden.device)
        if kind is None:
            return function(hidden, inputs)
        if not kind.graphs:
            kind.note(_Call(function, parameters, hidden.shape, hidden.dtype, hidden.device), self.step)
            return function(hidden, inputs)
        graph = kind.graphs.get(function)
        if graph is None or graph.in_flight or (graph.hidden.shape, graph.hidden.dtype) != (hidden.shape, hidden.dtype):
            return function(hidden, inputs)
        tensors = _Replay.apply(hidden, graph, self)
        replayed = iter(tensors)
        return map_tensors(lambda static: next(replayed), graph.outputs)

    def _kind_of(self, inputs: LayerInputs, device: torch.device) -> "_Kind | None":
        """Returns the kind of a micro-batch and fills its static inputs; None if its parts run eagerly."""
        if self._latest is None or self._latest[0] is not inputs:
            self._latest = inputs, self._find_kind(inputs, device)
        return self._latest[1]

    def _find_kind(self, inputs: LayerInputs, device: torch.device) -> "_Kind | None":
        others = inputs.inference_context, inputs.turn, inputs.encoder
        if self.in_flight or any(other is not None for other in others) or is_plain_causal(inputs.attention_mask):
            return None
        tensors = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            return None
        inputs = _with_position_on_device(inputs, device)
        key = signature(inputs), self._state
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == MOST_KINDS:
                return None
            kind = self._kinds[key] = _Kind(StaticInputs(inputs, device))
        kind.inputs.fill(inputs)
        return kind


class PartRunner(Runner):
    """Runs training steps with parts of layers as graphs, and everything else as `Runner` does."""

    def __init__(self, task: PipelineTask, timers: Callable[..., Any] | None, graphs: PartGraphs) -> None:
        super().__init__(task, timers)
        self.graphs = graphs

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions."""
        trains = any(action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) for action in actions)
        if not trains or self.task.collect_non_loss_data:
            super().run(actions)
        else:
            plain = super().run
            self.graphs.run_step(self.task.chunks, lambda: plain(actions))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a part: the function, and the shape of its hidden states."""

    function: PartFunction
    parameters: tuple[nn.Parameter, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Kind:
    """Micro-batches with equal shapes: their static inputs, and the graphs of their parts after the warm-up."""

    def __init__(self, inputs: StaticInputs) -> None:
        self.inputs = inputs
        self.calls: dict[PartFunction, _Call] = {}
        """In the order of the forward."""
        self.warm_steps = 0
        self.graphs: dict[PartFunction, _PartGraph] = {}
        self._last_step = 0

    def note(self, call: _Call, step: int) -> None:
        """Notes a call in a step of the warm-up."""
        self.calls.setdefault(call.function, call)
        self.warm_steps += step != self._last_step
        self._last_step = step

    def capture(self, graphs: PartGraphs) -> None:
        """Captures all parts: the forwards, then the backwards from the last to the first."""
        gradients: dict[Hashable, Tensor] = {}
        parts = {function: _PartGraph(call, self.inputs.value) for function, call in self.calls.items()}
        with capture_errors("a part of a layer", "A layer"):
            for part in parts.values():
                part.capture_forward(graphs)
            for part in reversed(parts.values()):
                part.capture_backward(graphs, gradients)
        self.graphs = parts


class _PartGraph:
    """The two graphs of a part."""

    def __init__(self, call: _Call, inputs: LayerInputs) -> None:
        self.call, self.inputs = call, inputs
        self.hidden = torch.zeros(call.shape, dtype=call.dtype, device=call.device, requires_grad=True)
        self.in_flight = False
        self.outputs: Any = None
        self.gradients: list[Tensor | None] = []
        """The buffers from which a replay of backward reads the gradient of each output; None: the output has none."""
        self.hidden_gradient: Tensor | None = None
        self.forward: CapturedGraph[Any] | None = None
        self.backward: CapturedGraph[Any] | None = None
        self.told: list[list[tuple[TensorRecord, Any]]] = [[], []]
        """What forward and backward record."""
        self.accumulated: list[BufferMainGrad] = []
        """Main gradients that backward adds to, in the order of the additions."""

    @property
    def output_tensors(self) -> list[Tensor]:
        """The tensors of the outputs, in order."""
        return [leaf for _, leaf in leaves(self.outputs) if isinstance(leaf, Tensor)]

    def capture_forward(self, graphs: PartGraphs) -> None:
        """Captures the forward on the static inputs."""
        self.forward = self._capture(graphs, 0, lambda: self.call.function(self.hidden, self.inputs))
        self.outputs = self.forward.outputs

    def capture_backward(self, graphs: PartGraphs, gradients: dict[Hashable, Tensor]) -> None:
        """Captures the backward. `gradients`: buffers that all parts share, since each is read by one replay."""
        outputs = self.output_tensors
        for number, output in enumerate(outputs):
            key = number, output.shape, output.dtype
            if output.requires_grad and key not in gradients:
                gradients[key] = torch.zeros_like(output, memory_format=torch.contiguous_format)
            self.gradients.append(gradients[key] if output.requires_grad else None)
        roots = [output for output in outputs if output.requires_grad]
        given = [gradient for gradient in self.gradients if gradient is not None]
        self.backward = self._capture(graphs, 1, lambda: torch.autograd.backward(roots, given))
        self.hidden_gradient, self.hidden.grad = self.hidden.grad, None
        # Without the autograd graph, which would keep the saved activations' memory.
        self.outputs = map_tensors(torch.detach, self.outputs)
        self.forward = dataclasses.replace(self.forward, outputs=None) if self.forward is not None else None

    def _capture(self, graphs: PartGraphs, direction: int, run: Callable[[], Any]) -> CapturedGraph[Any]:
        before = [record.take_tensors() for record in graphs.records]
        with contextlib.ExitStack() as stack, torch.enable_grad():
            for parameter in self.call.parameters:
                main_grad = main_grad_accumulator(parameter)
                if isinstance(main_grad, BufferMainGrad):
                    note = functools.partial(self._note_accumulated, main_grad)
                    stack.enter_context(main_grad.reporting_to(note))
            captured = graphs.recorder.capture(run)
        for record, tensors in zip(graphs.records, before, strict=True):
            found = record.take_tensors()
            if any(isinstance(leaf, Tensor) for _, leaf in leaves(found)):
                self.told[direction].append((record, map_tensors(torch.detach, found)))
            record.add_tensors(tensors)
        return captured

    def _note_accumulated(self, main_grad: BufferMainGrad, parameter: nn.Parameter) -> None:
        self.accumulated.append(main_grad)

    def tell(self, direction: int) -> None:
        """Adds the results of a replay to the records."""
        for record, tensors in self.told[direction]:
            record.add_tensors(map_tensors(torch.clone, tensors))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, graph: _PartGraph, graphs: PartGraphs) -> tuple[Tensor, ...]:
        assert graph.forward is not None
        graph.hidden.detach().copy_(hidden)
        graph.forward.replay()
        graph.tell(0)
        graph.in_flight, graphs.in_flight = True, graphs.in_flight + 1
        ctx.graph, ctx.graphs = graph, graphs
        ctx.set_materialize_grads(False)
        outputs = [tensor.detach() for tensor in graph.output_tensors]
        without = [output for output, gradient in zip(outputs, graph.gradients, strict=True) if gradient is None]
        ctx.mark_non_differentiable(*without)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        graph = ctx.graph
        for static, gradient in zip(graph.gradients, gradients, strict=True):
            if static is not None and gradient is None:
                static.zero_()
            elif static is not None:
                static.copy_(gradient)
        graph.backward.replay()
        graph.tell(1)
        graph.in_flight, ctx.graphs.in_flight = False, ctx.graphs.in_flight - 1
        for main_grad in graph.accumulated:
            main_grad.end_write()
        return None if graph.hidden_gradient is None else graph.hidden_gradient.detach(), None, None


def _with_position_on_device(inputs: LayerInputs, device: torch.device) -> LayerInputs:
    """Returns inputs whose position in the run is on the device, so that a graph does not contain it as a constant."""
    position = inputs.tokens.random
    if position is None:
        return inputs
    scalars = [
        number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.int64, device=device)
        for number in (position.iteration, position.first_sample)
    ]
    tokens = dataclasses.replace(inputs.tokens, random=RngPosition(position.seed, *scalars))
    return dataclasses.replace(inputs, tokens=tokens)


# ---------------------------------------------------------------------------------------------------------------------
# The parts of layers


def capture_layer_parts(chunks: Iterable[nn.Module], names: Iterable[str], graphs: PartGraphs) -> None:
    """Turns functions of the layers of model chunks into parts: `attn` (attention with its norm and residual), `mamba`
    (another token mixer with its norm and residual), `mlp` (an MLP without experts, with its norm and residual),
    `moe_router`."""
    chosen = frozenset(names)
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(getattr(layer, "has_token_mixer", None), bool):
                _capture_parts_of(layer, chosen, graphs)


def _capture_parts_of(layer: Any, names: frozenset[str], graphs: PartGraphs) -> None:
    mixer = ("attn" if hasattr(layer.self_attention, "core_attention") else "mamba") in names
    has_experts = hasattr(layer.mlp, "experts")
    if layer.is_parallel:
        if mixer and "mlp" in names and not has_experts:
            layer.add_attention_and_mlp = graphs.part(layer.add_attention_and_mlp, layer.parameters())
    else:
        outside = {*layer.mlp.parameters(), *layer.cross_attention.parameters()}
        if mixer and layer.has_token_mixer:
            own = (parameter for parameter in layer.parameters() if parameter not in outside)
            layer.add_attention = graphs.part(layer.add_attention, own)
        if "mlp" in names and layer.has_channel_mixer and not has_experts:
            layer.add_mlp = graphs.part(layer.add_mlp, layer.parameters())
    if "moe_router" in names and has_experts and hasattr(layer.mlp.router, "route"):
        router = layer.mlp.router
        router.route = graphs.part(router.route, router.parameters())
