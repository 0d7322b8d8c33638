"""Executes the action list of one rank: micro-batches, stages, losses and gradients. It does not depend on any
model."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.communication.collectives import Pending
from megatron.core.exceptions import UserError
from megatron.core.micro_batch import MicroBatch
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
from megatron.core.pipeline_parallel.interleaving import Interleaver, MicroBatchTurn
from megatron.core.pipeline_parallel.losses import StepLosses
from megatron.core.pipeline_parallel.p2p_communication import PipelineP2P
from megatron.core.pipeline_parallel.task import PipelineTask
from megatron.core.timers import timed


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
    ActionKind.PAIR: "forward-and-backward-compute",
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
        self._turns: dict[MicroBatchKey, MicroBatchTurn] = {}
        """The turns of the micro-batches, if the actions have pairs or backward delays weight gradients."""
        self._interleaver = Interleaver()
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
        members = [member for action in actions for member in action.members]
        self._trained = {(member.micro_batch, member.chunk) for member in members if member.kind in backward}
        if self._delays_weight_gradients or any(action.kind is ActionKind.PAIR for action in actions):
            self._turns = {key: MicroBatchTurn() for key in self._trained}
        if self._trained:
            self._auxiliary_scales = [self._auxiliary_scale(chunk) for chunk in range(len(self.task.chunks))]
        steps = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRADIENT: self._input_gradient,
            ActionKind.WEIGHT_GRADIENT: self._weight_gradient,
            ActionKind.PAIR: self._pair,
            ActionKind.SEND_FORWARD: self._send_forward,
            ActionKind.SEND_BACKWARD: self._send_backward,
            ActionKind.RECEIVE_FORWARD: self._receive_forward,
            ActionKind.RECEIVE_BACKWARD: self._receive_backward,
            ActionKind.SYNC: self._sync,
        }
        self._no_sync = [contextlib.ExitStack() for _ in self.task.chunks]
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self._interleaver)
            for stack in self._no_sync:
                cleanup.push(stack)
            if self._trained:
                contexts = no_sync_contexts(self.task.chunks, self.task.config)
                for stack, no_sync in zip(self._no_sync, contexts, strict=True):
                    stack.enter_context(no_sync())
            for action in actions:
                with timed(self.timers if action.kind in TIMERS else None, TIMERS.get(action.kind, ""), 2):
                    steps[action.kind](action)
                for member in action.members:
                    if member.chunk in self._synced and member.kind in (
                        ActionKind.BACKWARD,
                        ActionKind.WEIGHT_GRADIENT,
                    ):
                        self._start_reductions(member.chunk)
        if self.task.p2p is not None:
            self.task.p2p.finish()
        assert not any((self._forwards, self._hidden, self._gradients, self._outgoing)), (
            "the action list left tensors that no action uses"
        )

    @property
    def _delays_weight_gradients(self) -> bool:
        """Whether a backward computes its weight gradients while it exchanges tokens between experts."""
        sends = self.task.groups.size("ep") * self.task.groups.size("expt_tp") > 1
        return sends and getattr(self.task.config, "delay_wgrad_compute", False)

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
            turn=self._turns.get((number, chunk)),
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
        turn = self._turns.get((action.micro_batch, action.chunk))
        defer = find_method(self.task.chunks[action.chunk], "deferred_weight_gradients")
        if turn is None or defer is None or not self._delays_weight_gradients:
            return self._run_backward(action)
        with defer() as compute_deferred, turn.own_work_first(compute_deferred):
            return self._run_backward(action)

    def _run_backward(self, action: Action) -> None:
        number, chunk = action.micro_batch, action.chunk
        kept = self._forwards.pop((number, chunk))
        scale = self.task.grad_scale_func or _unscaled
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

    def _pair(self, action: Action) -> None:
        forward, backward = action.members
        turns = [self._turns[member.micro_batch, member.chunk] for member in action.members]
        self._interleaver.run(partial(self._forward, forward), partial(self._backward, backward), *turns)

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


def _unscaled(loss: Tensor) -> Tensor:
    return loss
