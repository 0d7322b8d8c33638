"""Executes a list of actions for one rank. Knows micro-batches, stages, losses and gradients; nothing about models."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.collectives import Pending
from megatron.core.exceptions import UserError
from megatron.core.micro_batch import MicroBatch
from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.chunk_hooks import (
    device_of,
    method_of,
    micro_batch_receiver,
    no_sync_of,
    of_chunk,
    set_input_of,
    supply_micro_batch,
)
from megatron.core.pipeline_parallel.interleaving import Interleaver, MicroBatchTurn
from megatron.core.pipeline_parallel.losses import Losses
from megatron.core.pipeline_parallel.p2p_communication import PipelineP2P
from megatron.core.pipeline_parallel.task import Task


@dataclass
class _Forward:
    """What backward needs of a micro-batch that went forward through a chunk."""

    hidden_in: Tensor | None
    """The stage's input, whose gradient goes to the stage before."""
    hidden_out: GradientEdge | None = None
    """Where the gradient of the stage's output enters: its numbers are not kept."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    loss: Tensor | None = None
    """Of the last stage."""


MicroBatchKey = tuple[int, int]
"""A micro-batch and a chunk."""


class Runner:
    """Runs a list of actions over a task; results gather in `losses`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.losses = Losses(task.config, task.groups, task.num_microbatches, task.collect_non_loss_data)
        self._to_come: set[MicroBatchKey] = set()
        """Forwards whose backward is still to come."""
        self._forwards: dict[MicroBatchKey, _Forward] = {}
        self._hidden: dict[MicroBatchKey, Pending] = {}
        """Inputs of stages, on their way or here."""
        self._gradients: dict[MicroBatchKey, Pending] = {}
        """Gradients of stages' outputs, on their way or here."""
        self._outgoing: dict[tuple[Kind, int, int], Tensor] = {}
        """What the next sends take, by their kind and key."""
        self._turns: dict[MicroBatchKey, MicroBatchTurn] = {}
        """Of micro-batches in flight, if any are to be interleaved."""
        self._interleaver = Interleaver()
        self._held_back: list[contextlib.ExitStack] = []
        self._last: set[int] = set()
        """Chunks of which one computation of gradients is left."""
        self._receivers = [micro_batch_receiver(chunk) for chunk in task.chunks]
        """The module of each chunk that is told about its micro-batches."""
        self._auxiliary_scales: list[Tensor | None] = [None] * len(task.chunks)

    def run(self, actions: Sequence[Action]) -> None:
        """Execute the actions in order. No reduction of a chunk's gradients starts before its SYNC action."""
        backward = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        parts = [part for action in actions for part in action.parts]
        self._to_come = {(part.micro_batch, part.chunk) for part in parts if part.kind in backward}
        if any(action.kind is Kind.PAIR for action in actions):
            self._turns = {key: MicroBatchTurn() for key in self._to_come}
        if self._to_come:
            self._auxiliary_scales = [self._auxiliary_scale(chunk) for chunk in range(len(self.task.chunks))]
        steps = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.PAIR: self._pair,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.SYNC: self._sync,
        }
        self._held_back = [contextlib.ExitStack() for _ in self.task.chunks]
        with contextlib.ExitStack() as whatever_happens:
            whatever_happens.enter_context(self._interleaver)
            for held in self._held_back:
                whatever_happens.push(held)
            if self._to_come:
                for held, hold in zip(self._held_back, no_sync_of(self.task.chunks, self.task.config), strict=True):
                    held.enter_context(hold())
            for action in actions:
                steps[action.kind](action)
                for part in action.parts:
                    if part.chunk in self._last and part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                        self._start_reductions(part.chunk)
        if self.task.p2p is not None:
            self.task.p2p.finish()
        assert not any((self._forwards, self._hidden, self._gradients, self._outgoing)), (
            "the list left something undone"
        )

    def _auxiliary_scale(self, chunk: int) -> Tensor | None:
        """The gradient of losses that a chunk's layers add in this step; None for a chunk that is not told."""
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
        self._held_back[action.chunk].close()
        self._last.add(action.chunk)

    def _start_reductions(self, chunk: int) -> None:
        """The published hook that starts them; our own wrapper does by itself."""
        start = of_chunk(getattr(self.task.config, "grad_sync_func", None), chunk)
        if start is not None:
            start(self.task.chunks[chunk].parameters())

    def _start_gather(self, chunk: int) -> None:
        """The published hook that gathers a chunk's weights; our own wrapper does by itself."""
        start = None
        if chunk < len(self.task.chunks):
            start = of_chunk(getattr(self.task.config, "param_sync_func", None), chunk)
        if start is not None:
            start(self.task.chunks[chunk].parameters())

    # Forward ---------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        task, number, chunk = self.task, action.micro_batch, action.chunk
        trains = (number, chunk) in self._to_come
        model = task.chunks[chunk]
        if number == 0:
            self._start_gather(chunk + 1)
        hidden_in = None
        if task.stage(chunk) > 0:
            hidden_in = self._hidden.pop((number, chunk)).wait().detach().requires_grad_(trains)
            set_input_of(model)(hidden_in)
        with supply_micro_batch(self._receivers[chunk], self._micro_batch(number, chunk)):
            output, loss_func = task.forward_step_func(task.data_iterators[chunk], model)
        kept = _Forward(hidden_in)
        if task.stage(chunk) == task.pipeline.num_stages - 1:
            kept.loss = self.losses.take(output, loss_func)
        else:
            self._pass_on(output, kept, number, chunk)
        if trains:
            self._forwards[number, chunk] = kept

    def _pass_on(self, hidden: Tensor, kept: _Forward, number: int, chunk: int) -> None:
        """The output of a stage that is not the last, to the next chunk of this rank or to be sent."""
        kept.shape, kept.dtype = tuple(hidden.shape), hidden.dtype
        if (number, chunk) in self._to_come:
            if not hidden.requires_grad:
                raise UserError(
                    f"the output of pipeline stage {self.task.stage(chunk)} depends on nothing that is trained"
                )
            kept.hidden_out = get_gradient_edge(hidden)
        to = self.task.neighbour(chunk, +1)
        if to is None:
            self._outgoing[Kind.SEND_FORWARD, number, chunk] = hidden.detach()
        else:
            self._hidden[number, to] = Pending(hidden.detach(), None)

    # Backward --------------------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        turn = self._turns.get((action.micro_batch, action.chunk))
        lag = method_of(self.task.chunks[action.chunk], "deferred_weight_gradients")
        if turn is None or lag is None or not getattr(self.task.config, "delay_wgrad_compute", False):
            return self._run_backward(action)
        with lag() as catch_up, turn.doing_first(catch_up):
            return self._run_backward(action)

    def _run_backward(self, action: Action) -> None:
        number, chunk = action.micro_batch, action.chunk
        kept = self._forwards.pop((number, chunk))
        scale = self.task.config.grad_scale_func or _unscaled
        if kept.hidden_out is None:
            assert kept.loss is not None
            torch.autograd.backward(scale(kept.loss))
        else:
            arrived = self._gradients.pop((number, chunk)).wait().to(kept.dtype)
            torch.autograd.backward([kept.hidden_out], [arrived])
        if kept.hidden_in is not None:
            gradient = kept.hidden_in.grad
            if gradient is None:
                raise UserError(f"pipeline stage {self.task.stage(chunk)} does not use its input")
            to = self.task.neighbour(chunk, -1)
            if to is None:
                self._outgoing[Kind.SEND_BACKWARD, number, chunk] = gradient
            else:
                self._gradients[number, to] = Pending(gradient, None)

    def _input_gradient(self, action: Action) -> None:
        put_off = method_of(self.task.chunks[action.chunk], "defer_weight_gradients")
        with contextlib.nullcontext() if put_off is None else put_off(action.micro_batch):
            self._backward(action)

    def _pair(self, action: Action) -> None:
        forward, backward = action.parts
        turns = [self._turns[part.micro_batch, part.chunk] for part in action.parts]
        self._interleaver.run(partial(self._forward, forward), partial(self._backward, backward), *turns)

    def _weight_gradient(self, action: Action) -> None:
        compute = method_of(self.task.chunks[action.chunk], "compute_weight_gradients")
        if compute is not None:
            compute(action.micro_batch)

    # The mail --------------------------------------------------------------------------------------------------------

    def _send_forward(self, action: Action) -> None:
        p2p, peer = self._line(action)
        hidden = self._outgoing.pop((action.kind, action.micro_batch, action.chunk))
        p2p.send_hidden(hidden, peer, self.task.states_into(self.task.stage(action.chunk) + 1))

    def _send_backward(self, action: Action) -> None:
        p2p, peer = self._line(action)
        p2p.send_gradient(self._outgoing.pop((action.kind, action.micro_batch, action.chunk)), peer)

    def _receive_forward(self, action: Action) -> None:
        p2p, peer = self._line(action)
        states = self.task.states_into(self.task.stage(action.chunk))
        self._hidden[action.micro_batch, action.chunk] = p2p.receive_hidden(peer, states)

    def _receive_backward(self, action: Action) -> None:
        p2p, peer = self._line(action)
        key = action.micro_batch, action.chunk
        self._gradients[key] = p2p.receive_gradient(self._forwards[key].shape, peer)

    def _line(self, action: Action) -> tuple[PipelineP2P, int]:
        assert self.task.p2p is not None and action.peer is not None, action
        return self.task.p2p, action.peer


def _unscaled(loss: Tensor) -> Tensor:
    return loss
