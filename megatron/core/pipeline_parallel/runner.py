"""Executes the action list of one rank: micro-batches, stages, losses and gradients. It does not depend on any
model. `PipelineTask` is its input; `StepLosses` scales the loss of each micro-batch as a part of the step's loss."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.communication.collectives import Pending, all_reduce
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import CooperativeTurn, MicroBatch
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.chunk_hooks import (
    device_of,
    find_method,
    hook_of_chunk,
    input_setter,
    micro_batch_receiver,
    no_sync_contexts,
    supply_micro_batch,
)
from megatron.core.pipeline_parallel.p2p_communication import ONE_STATE, PipelineP2P
from megatron.core.pipeline_parallel.stages import Pipeline, StatesIn
from megatron.core.timers import timed
from megatron.core.tokens import RngPosition

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


ForwardStep = Callable[..., tuple[Tensor, Callable[..., Any] | None]]


@dataclass(frozen=True)
class PipelineTask:
    """What the runner executes for every micro-batch."""

    forward_step_func: ForwardStep
    """(data_iterator, model) -> (output, loss_func); see `get_forward_backward_func`."""
    data_iterators: Sequence[Any]
    """One for each chunk."""
    chunks: Sequence[nn.Module]
    """This rank's model chunks."""
    config: "TransformerConfig"
    """The TransformerConfig of the model."""
    groups: ProcessGroupCollection
    pipeline: Pipeline
    num_microbatches: int
    p2p: PipelineP2P | None = None
    """None if one rank has all stages."""
    collect_non_loss_data: bool = False
    rng_position_of: Callable[[int], RngPosition] | None = None
    """Returns the position for random numbers of the micro-batch with this number; called on every stage."""
    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    """Multiplies a loss by the loss scale before backward; None: losses are not scaled."""
    states_in: Sequence[StatesIn] = ()
    """Hidden states that each stage receives (`stages.states_into_stages`); empty: one per token."""

    def stage_index(self, chunk: int) -> int:
        """Returns the index of the stage that is this chunk of this rank."""
        return self.pipeline.stage_index(self.groups.rank("pp"), chunk)

    def states_into(self, stage: int) -> StatesIn:
        """Returns the hidden states that a stage receives."""
        return self.states_in[stage] if self.states_in else ONE_STATE

    def local_neighbour(self, chunk: int, step: int) -> int | None:
        """Returns the chunk of this rank that is the stage before (step -1) or after (+1) a chunk; None if that stage
        is on another rank or does not exist."""
        stage = self.stage_index(chunk) + step
        if not 0 <= stage < self.pipeline.num_stages:
            return None
        rank, neighbour = self.pipeline.locate(stage)
        return neighbour if rank == self.groups.rank("pp") else None


class StepLosses:
    """Scales the losses of a step's micro-batches, and collects what the loss function reports."""

    def __init__(
        self,
        config: "TransformerConfig",
        groups: ProcessGroupCollection,
        num_microbatches: int,
        collect_non_loss_data: bool,
        grad_scale_func: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self.groups, self.num_microbatches = config, groups, num_microbatches
        self.collect_non_loss_data, self.grad_scale_func = collect_non_loss_data, grad_scale_func
        self.reports: list[Any] = []
        """The reports of the loss function, one per micro-batch; empty on ranks without the last stage."""
        self.num_tokens: Tensor | None = None
        """Tokens of all micro-batches, summed from loss functions that return three values: a float64 scalar on the
        device. None on ranks without the last stage."""

    def record(self, output: Tensor, loss_func: Callable[..., Any] | None) -> Tensor:
        """Calls the loss function on an output of the last stage and keeps its report. Returns the tensor from which
        backward starts."""
        if loss_func is None:
            self.reports.append(output)
            return output
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        return self._loss(loss_func(output))

    def add(self, report: Any, num_tokens: Tensor | None) -> None:
        """Adds the report and the number of tokens of a micro-batch whose loss another object has recorded."""
        self.reports.append(report)
        if num_tokens is not None:
            self._count(num_tokens)

    def auxiliary_scale(self, device: torch.device) -> Tensor:
        """Returns the gradient of an auxiliary loss, which a layer adds to the model's loss (for example to balance its
        experts): a float64 scalar on the device. It is scaled as the model's loss is, loss scale included.

        An auxiliary loss is a sum over context parallel ranks; each rank has one addend. With a loss per token the
        layer has already multiplied it by its number of tokens.
        """
        scale = 1.0 if self.config.calculate_per_token_loss else self.groups.size("cp") / self.num_microbatches
        one = torch.full((), scale, dtype=torch.float64, device=device)
        return one if self.grad_scale_func is None else self.grad_scale_func(one)

    def _loss(self, result: Sequence[Any]) -> Tensor:
        context_parallel, count = self.groups.size("cp"), self.num_microbatches
        if len(result) == 2:
            loss, report = result
            if self.config.calculate_per_token_loss:
                raise UserError(
                    "--calculate-per-token-loss needs a loss function that returns three values (sum, number of "
                    "tokens, report); this one returned two"
                )
            # Gradients are also averaged over context parallel ranks, although each has only a part of the sequence.
            loss = loss * context_parallel / count
        else:
            loss, tokens, report = result
            if not isinstance(tokens, Tensor):
                tokens = torch.full((), tokens, device=loss.device)  # fills on the device; a copy would wait
            self._count(tokens)
            if not self.config.calculate_per_token_loss:
                loss = loss * context_parallel / self._over_context_parallel(tokens).clamp(min=1) / count
        self.reports.append(report)
        return loss

    def _over_context_parallel(self, tokens: Tensor) -> Tensor:
        """Returns the tokens of the micro-batch on all context parallel ranks."""
        if self.groups.size("cp") == 1:
            return tokens
        return all_reduce(tokens.clone(), self.groups.cp)

    def _count(self, tokens: Tensor) -> None:
        tokens = tokens.detach().reshape(()).double()
        self.num_tokens = tokens if self.num_tokens is None else self.num_tokens + tokens


@dataclass
class _Forward:
    """The results of a forward of a micro-batch through a chunk that its backward needs."""

    hidden_in: Tensor | None
    """The stage's input. Its gradient goes to the stage before."""
    hidden_out: GradientEdge | None = None
    """The point of the autograd graph at which the gradient of the stage's output enters. The output itself is not
    kept."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    loss: Tensor | None = None
    """The loss, on the last stage."""


MicroBatchKey = tuple[int, int]
"""(number of the micro-batch, chunk)."""


TIMERS = {
    ActionKind.FORWARD: "forward-compute",
    ActionKind.BACKWARD: "backward-compute",
    ActionKind.INPUT_GRADIENT: "backward-compute",
    ActionKind.WEIGHT_GRADIENT: "weight-gradient-compute",
    ActionKind.SEND_FORWARD: "forward-send",
    ActionKind.RECEIVE_FORWARD: "forward-recv",
    ActionKind.SEND_BACKWARD: "backward-send",
    ActionKind.RECEIVE_BACKWARD: "backward-recv",
}
"""Timer of each kind of action, at level 2. The timer of a receive covers only its start; the forward or backward that
needs the message waits for it."""


def _num_averaged(task: PipelineTask) -> int:
    """Returns the number of micro-batches over whose losses the step's loss is the mean: this rank's, since gradients
    are divided by the number of ranks later, or with exact sums those of all ranks, since nothing is rounded later."""
    configs = [getattr(chunk, "ddp_config", None) for chunk in task.chunks]
    is_exact = any(config is not None and config.exact_gradient_sums for config in configs)
    return task.num_microbatches * (task.groups.size("dp") if is_exact else 1)


class Runner:
    """Runs an action list; results are collected in `losses`."""

    def __init__(self, task: PipelineTask, timers: Callable[..., Any] | None = None) -> None:
        self.task = task
        self.timers = timers
        """Measure each action, by `TIMERS`; None: nothing is timed."""
        self.losses = StepLosses(
            task.config, task.groups, _num_averaged(task), task.collect_non_loss_data, task.grad_scale_func
        )
        self._trained: set[MicroBatchKey] = set()
        """Micro-batches and chunks that get a backward in this step."""
        self._forwards: dict[MicroBatchKey, _Forward] = {}
        self._hidden: dict[MicroBatchKey, Pending] = {}
        """Inputs of stages that are being received or have arrived."""
        self._gradients: dict[MicroBatchKey, Pending] = {}
        """Gradients of stages' outputs that are being received or have arrived."""
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        """The tensors of sends that have not started, by kind, micro-batch and chunk of the send."""
        sends = task.groups.size("ep") * task.groups.size("expt_tp") > 1
        delays = sends and getattr(task.config, "delay_wgrad_compute", False)
        self._turn = CooperativeTurn() if delays else None
        """Set if a backward computes its weight gradients while it exchanges tokens between experts."""
        self._no_sync: list[contextlib.ExitStack] = []
        """For each chunk, the context that delays the reduction of its gradients."""
        self._synced: set[int] = set()
        """Chunks whose SYNC action has come: one computation of gradients is left."""
        self._receivers = [micro_batch_receiver(chunk) for chunk in task.chunks]
        """For each chunk, the module whose forward takes the `MicroBatch` record; None if there is none."""
        self._auxiliary_scales: list[Tensor | None] = [None] * len(task.chunks)

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions in order. No reduction of a chunk's gradients starts before its SYNC action."""
        backward = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        self._trained = {(action.micro_batch, action.chunk) for action in actions if action.kind in backward}
        if self._trained:
            self._auxiliary_scales = [self._auxiliary_scale(chunk) for chunk in range(len(self.task.chunks))]
        steps = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRADIENT: self._input_gradient,
            ActionKind.WEIGHT_GRADIENT: self._weight_gradient,
            ActionKind.SEND_FORWARD: self._send_forward,
            ActionKind.SEND_BACKWARD: self._send_backward,
            ActionKind.RECEIVE_FORWARD: self._receive_forward,
            ActionKind.RECEIVE_BACKWARD: self._receive_backward,
            ActionKind.SYNC: self._sync,
        }
        self._no_sync = [contextlib.ExitStack() for _ in self.task.chunks]
        with contextlib.ExitStack() as cleanup:
            for stack in self._no_sync:
                cleanup.push(stack)
            if self._trained:
                contexts = no_sync_contexts(self.task.chunks, self.task.config)
                for stack, no_sync in zip(self._no_sync, contexts, strict=True):
                    stack.enter_context(no_sync())
            for action in actions:
                with timed(self.timers if action.kind in TIMERS else None, TIMERS.get(action.kind, ""), 2):
                    steps[action.kind](action)
                completes = action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
                if completes and action.chunk in self._synced:
                    self._start_reductions(action.chunk)
        if self.task.p2p is not None:
            self.task.p2p.finish()
        assert not any((self._forwards, self._hidden, self._gradients, self._outgoing)), (
            "the action list left tensors that no action uses"
        )

    def _auxiliary_scale(self, chunk: int) -> Tensor | None:
        """Returns the gradient of auxiliary losses of a chunk's layers; None if the chunk takes no `MicroBatch`
        record."""
        if self._receivers[chunk] is None:
            return None
        return self.losses.auxiliary_scale(device_of([self.task.chunks[chunk]]))

    def _micro_batch(self, number: int, chunk: int) -> MicroBatch:
        position = self.task.rng_position_of
        return MicroBatch(
            rng_position=None if position is None else position(number),
            auxiliary_scale=self._auxiliary_scales[chunk],
            turn=self._turn,
        )

    def _sync(self, action: Action) -> None:
        self._no_sync[action.chunk].close()
        self._synced.add(action.chunk)

    def _start_reductions(self, chunk: int) -> None:
        """Calls Megatron-LM's hook `grad_sync_func`. Our own wrapper starts reductions without it."""
        start = hook_of_chunk(getattr(self.task.config, "grad_sync_func", None), chunk)
        if start is not None:
            start(self.task.chunks[chunk].parameters())

    def _start_gather(self, chunk: int) -> None:
        """Calls Megatron-LM's hook `param_sync_func`. Our own wrapper gathers weights without it."""
        start = None
        if chunk < len(self.task.chunks):
            start = hook_of_chunk(getattr(self.task.config, "param_sync_func", None), chunk)
        if start is not None:
            start(self.task.chunks[chunk].parameters())

    # Forward ---------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        task, number, chunk = self.task, action.micro_batch, action.chunk
        trains = (number, chunk) in self._trained
        model = task.chunks[chunk]
        if number == 0:
            self._start_gather(chunk + 1)
        hidden_in = None
        if task.stage_index(chunk) > 0:
            hidden_in = self._hidden.pop((number, chunk)).wait().detach().requires_grad_(trains)
            input_setter(model)(hidden_in)
        with supply_micro_batch(self._receivers[chunk], self._micro_batch(number, chunk)):
            output, loss_func = task.forward_step_func(task.data_iterators[chunk], model)
        kept = _Forward(hidden_in)
        if task.stage_index(chunk) == task.pipeline.num_stages - 1:
            kept.loss = self.losses.record(output, loss_func)
        else:
            self._forward_output(output, kept, number, chunk)
        if trains:
            self._forwards[number, chunk] = kept

    def _forward_output(self, hidden: Tensor, kept: _Forward, number: int, chunk: int) -> None:
        """Passes the output of a stage to the next chunk, if that is on this rank, or keeps it for its send. Not for
        the last stage."""
        kept.shape, kept.dtype = tuple(hidden.shape), hidden.dtype
        if (number, chunk) in self._trained:
            if not hidden.requires_grad:
                raise UserError(
                    f"the output of pipeline stage {self.task.stage_index(chunk)} depends on nothing that is trained"
                )
            kept.hidden_out = get_gradient_edge(hidden)
        to = self.task.local_neighbour(chunk, +1)
        if to is None:
            self._outgoing[ActionKind.SEND_FORWARD, number, chunk] = hidden.detach()
        else:
            self._hidden[number, to] = Pending(hidden.detach(), None)

    # Backward --------------------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        defer = find_method(self.task.chunks[action.chunk], "deferred_weight_gradients")
        if self._turn is None or defer is None:
            return self._run_backward(action)
        with defer() as compute_deferred, self._turn.given_to(compute_deferred):
            return self._run_backward(action)

    def _run_backward(self, action: Action) -> None:
        number, chunk = action.micro_batch, action.chunk
        kept = self._forwards.pop((number, chunk))
        scale = self.task.grad_scale_func or (lambda loss: loss)
        if kept.hidden_out is None:
            assert kept.loss is not None
            torch.autograd.backward(scale(kept.loss))
        else:
            arrived = self._gradients.pop((number, chunk)).wait().to(kept.dtype)
            torch.autograd.backward([kept.hidden_out], [arrived])
        if kept.hidden_in is not None:
            gradient = kept.hidden_in.grad
            if gradient is None:
                raise UserError(f"pipeline stage {self.task.stage_index(chunk)} does not use its input")
            to = self.task.local_neighbour(chunk, -1)
            if to is None:
                self._outgoing[ActionKind.SEND_BACKWARD, number, chunk] = gradient
            else:
                self._gradients[number, to] = Pending(gradient, None)

    def _input_gradient(self, action: Action) -> None:
        defer = find_method(self.task.chunks[action.chunk], "defer_weight_gradients")
        with contextlib.nullcontext() if defer is None else defer(action.micro_batch):
            self._run_backward(action)

    def _weight_gradient(self, action: Action) -> None:
        compute = find_method(self.task.chunks[action.chunk], "compute_weight_gradients")
        if compute is not None:
            compute(action.micro_batch)

    # Messages --------------------------------------------------------------------------------------------------------

    def _send_forward(self, action: Action) -> None:
        p2p, peer = self._route(action)
        hidden = self._outgoing.pop((action.kind, action.micro_batch, action.chunk))
        p2p.send_hidden(hidden, peer, self.task.states_into(self.task.stage_index(action.chunk) + 1))

    def _send_backward(self, action: Action) -> None:
        p2p, peer = self._route(action)
        p2p.send_gradient(self._outgoing.pop((action.kind, action.micro_batch, action.chunk)), peer)

    def _receive_forward(self, action: Action) -> None:
        p2p, peer = self._route(action)
        states = self.task.states_into(self.task.stage_index(action.chunk))
        self._hidden[action.micro_batch, action.chunk] = p2p.receive_hidden(peer, states)

    def _receive_backward(self, action: Action) -> None:
        p2p, peer = self._route(action)
        key = action.micro_batch, action.chunk
        self._gradients[key] = p2p.receive_gradient(self._forwards[key].shape, peer)

    def _route(self, action: Action) -> tuple[PipelineP2P, int]:
        assert self.task.p2p is not None and action.peer is not None, action
        return self.task.p2p, action.peer
