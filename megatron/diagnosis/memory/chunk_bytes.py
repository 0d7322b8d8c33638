"""The bytes that one micro-batch takes in one model chunk, from a forward and a backward on the meta device."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.main_grad import WeightGradientQueue, attach_main_grad
from megatron.core.micro_batch import CooperativeTurn, MicroBatch
from megatron.core.pipeline_parallel.chunk_hooks import (
    find_method,
    input_setter,
    micro_batch_receiver,
    supply_micro_batch,
)
from megatron.core.pipeline_parallel.runner import StepLosses
from megatron.core.pipeline_parallel.stage_map import StageModules
from megatron.core.pipeline_parallel.stages import StatesIn, pipeline_of, states_into_stages
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.diagnosis.memory.allocations import Allocations, HostAllocations, Span
from megatron.diagnosis.memory.micro_batches import ShapeOnlyData
from megatron.training.providers import Context, ForwardStep


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one micro-batch in one model chunk. All but `message_in` and `message_out` are without its input, which
    another stage sent."""

    forward_peak: int
    """The most during forward."""
    kept: int
    """From the end of forward to the beginning of backward."""
    backward_peak: int
    """The most during backward, or during the part of backward that computes the gradients of inputs."""
    deferred: int
    """Between that part and the products of weight gradients; 0 if backward computes both."""
    deferred_peak: int
    """The most during the products of deferred weight gradients."""
    message_in: int
    """The hidden states that the chunk receives; their gradient takes the same."""
    message_out: int
    """The hidden states that the chunk sends."""
    head: int
    """The part of `kept` that the head and the loss made: logits, mostly."""
    host: int = 0
    """Offloaded activations in host memory, from the end of forward to backward."""


@dataclass(frozen=True)
class CountedChunk:
    """The bytes of a chunk, and how they come about."""

    total: ChunkBytes
    forward: Sequence[Span]
    """What is before the layers, then each unit (`layers_at_once` layers); the last one includes what is behind."""
    backward: Sequence[Span]
    """Each unit, from the last to the first, then what is before the layers; the first one includes the loss."""
    defers: bool
    """Whether the products of weight gradients are deferred."""


class ChunkCounter:
    """Counts micro-batches of chunks of one run. Call it inside `as_on_gpu`."""

    def __init__(self, context: Context, forward_step: ForwardStep, num_microbatches: int) -> None:
        self.context, self.forward_step = context, forward_step
        transformer = context.config.transformer
        self._losses = StepLosses(transformer, context.environment.groups, num_microbatches, False)
        self._scale = self._losses.auxiliary_scale(torch.device("meta"))
        self._states_in = states_into_stages(transformer, pipeline_of(transformer))

    def count(self, chunk: nn.Module, stage: StageModules, defers: bool = False) -> CountedChunk:
        """Returns the bytes of a micro-batch. `defers`: the schedule defers the products of weight gradients. The
        chunk's parameters are on the meta device."""
        parameters = list(chunk.parameters())
        with torch.no_grad():
            gradients = _main_grads(parameters, self.context.config.ddp.main_grads_dtype)
        queue = WeightGradientQueue(parameters)
        hidden_in = self._hidden_in(stage)
        allocations, host, delays = Allocations(), HostAllocations(), self._delays
        allocations.leave_out([*parameters, *gradients, *chunk.buffers(), *_of(hidden_in)])
        with allocations, host, _start_of_head(chunk, allocations) as before_head, _spans_of_units(chunk, allocations):
            self._forward(chunk, stage, hidden_in, None)  # fills caches: rotary angles, weights in fp8
            first, first_on_host = allocations.live, host.live
            allocations.start()
            turn = CooperativeTurn() if delays else None
            result: Any = self._forward(chunk, stage, hidden_in, turn)
            allocations.end_span()
            forward, out, gradient = allocations.spans, 0, None
            if not stage.loss:
                out, gradient = result.untyped_storage().nbytes(), torch.empty_like(result)
                result = torch.autograd.graph.get_gradient_edge(result)
            kept, kept_on_host = allocations.live - out, host.live - first_on_host
            allocations.start()
            with contextlib.ExitStack() as stack:
                if defers:
                    stack.enter_context(queue.defer(0))
                elif turn is not None:
                    stack.enter_context(turn.given_to(stack.enter_context(queue.deferred())))
                torch.autograd.backward([result], None if gradient is None else [gradient])
            del result, gradient
            for tensor in _of(hidden_in):
                tensor.grad = None
            allocations.end_span()
            backward, deferred = allocations.spans, allocations.live
            allocations.start()
            if defers:
                queue.compute(0)
        total = ChunkBytes(
            forward_peak=max(span.peak for span in forward) - first,
            kept=kept - first,
            backward_peak=max(span.peak for span in backward) - first,
            deferred=deferred - first,
            deferred_peak=allocations.peak - first,
            message_in=sum(tensor.untyped_storage().nbytes() for tensor in _of(hidden_in)),
            message_out=out,
            head=kept - before_head[-1] if stage.loss and before_head else 0,
            host=kept_on_host if self._offloads else 0,
        )
        return CountedChunk(total, _above(first, forward), _above(first, backward), defers)

    @property
    def _offloads(self) -> bool:
        """Whether activations are moved to host memory."""
        transformer = self.context.config.transformer
        return transformer.cpu_offloading_num_layers > 0 or transformer.fine_grained_activation_offloading

    @property
    def _delays(self) -> bool:
        """Whether backward computes weight gradients while it exchanges tokens between experts."""
        groups = self.context.environment.groups
        sends = groups.size("ep") * groups.size("expt_tp") > 1
        return sends and self.context.config.transformer.delay_wgrad_compute

    def _forward(
        self, chunk: nn.Module, stage: StageModules, hidden_in: Tensor | None, turn: CooperativeTurn | None
    ) -> Tensor:
        """Returns the output of the chunk, or its loss."""
        if hidden_in is not None:
            input_setter(chunk)(hidden_in)
        with supply_micro_batch(micro_batch_receiver(chunk), MicroBatch(auxiliary_scale=self._scale, turn=turn)):
            output, loss_func = self.forward_step(ShapeOnlyData(self.context.config), chunk)
        return self._losses.record(output, loss_func) if stage.loss else output

    def _hidden_in(self, stage: StageModules) -> Tensor | None:
        """Returns the hidden states that a stage receives, [s, b, h] of this rank's tokens."""
        if stage.embedding or stage.index == 0:
            return None
        config, transformer = self.context.config, self.context.config.transformer
        shards = transformer.context_parallel_size
        shards *= transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
        states: StatesIn = self._states_in[stage.index]
        assert config.data.seq_length is not None
        rows = states.decoder * (config.decoder_seq_length or config.data.seq_length)
        rows += states.encoder * config.data.seq_length
        dtype = transformer.pipeline_dtype or transformer.params_dtype
        shape = rows // shards, config.training.micro_batch_size, transformer.hidden_size
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


@contextlib.contextmanager
def _start_of_head(chunk: nn.Module, allocations: Allocations) -> Iterator[list[int]]:
    """Inside the context, puts what is live whenever the head of the chunk starts on a list; nothing without a head."""
    live: list[int] = []
    head = next((find_method(chunk, name) for name in ("output_layer", "lm_head") if find_method(chunk, name)), None)
    if head is None:
        yield live
        return
    assert isinstance(head, nn.Module)
    hook = head.register_forward_pre_hook(lambda *_: live.append(allocations.live))
    try:
        yield live
    finally:
        hook.remove()


def only_block(chunk: nn.Module) -> TransformerBlock | None:
    """Returns the stack of layers of a chunk; None if there are several or none."""
    blocks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    return blocks[0] if len(blocks) == 1 else None


@contextlib.contextmanager
def _spans_of_units(chunk: nn.Module, allocations: Allocations) -> Iterator[None]:
    """Inside the context, ends a span before each unit's forward and behind its backward, if there is one stack."""
    block = only_block(chunk)
    if block is None:
        yield
        return
    run, is_own = block.run_layers, "run_layers" in vars(block)

    def noted(layers: Iterable[nn.Module], hidden: Tensor, inputs: Any) -> Tensor:
        allocations.end_span()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: allocations.end_span())
        return run(layers, hidden, inputs)

    block.run_layers = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        if is_own:
            block.run_layers = run  # type: ignore[method-assign]
        else:
            del block.run_layers


def _above(first: int, spans: Iterable[Span]) -> list[Span]:
    return [Span(span.live - first, span.peak - first) for span in spans]


def _of(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _main_grads(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> list[Tensor]:
    """Gives parameters main gradients, which the flat buffers of a run hold; returns them."""
    made = []
    for parameter in parameters:
        if parameter.requires_grad:
            wide = dtype or torch.promote_types(parameter.dtype, torch.float32)
            made.append(torch.empty_like(parameter, dtype=wide))
            attach_main_grad(parameter, made[-1], _do_nothing)
    return made


def _do_nothing(parameter: nn.Parameter) -> None:
    """No reduction follows."""
