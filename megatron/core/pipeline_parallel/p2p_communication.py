"""Messages between the ranks of a pipeline: hidden states to the next stage, their gradients to the stage before.

Sends do not wait. A receive is posted ahead, and the computation that needs it waits for it. On a GPU later kernels
wait, not the host, with one exception: with `variable_seq_lengths` the host waits for the shape of a message.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication.collectives import Group, Pending, start_receive, start_send
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.stages import Pipeline, StatesIn, num_encoder_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

ONE_STATE = StatesIn()
"""One hidden state per token."""


@dataclass(frozen=True)
class MessageFormat:
    """Shape, type and device of a message between stages."""

    shape: tuple[int, ...]
    """[s, b, h] of hidden states, where s is the length of this rank's part of the sequence."""
    dtype: torch.dtype
    device: torch.device
    shape_is_sent: bool = False
    """Whether sequence lengths differ between micro-batches; then the shape is sent before the hidden states."""
    encoder_length: int = 0
    """Length of this rank's part of the encoder's sequence; `shape` is that of the decoder's hidden states then."""

    def shape_of(self, states: StatesIn) -> tuple[int, ...]:
        """Returns the shape of several hidden states, concatenated along the sequence."""
        return (states.decoder * self.shape[0] + states.encoder * self.encoder_length, *self.shape[1:])

    def adjusted(self, adjust: Callable[..., Any] | None) -> "MessageFormat":
        """Returns the format with the shape that Megatron-LM's `adjust_tensor_shapes_fn` gives for receives and
        sends."""
        if adjust is None:
            return self
        (shape,), _ = adjust([self.shape], [self.shape])
        return dataclasses.replace(self, shape=tuple(shape))


def max_sends_in_flight(pipeline: Pipeline) -> int:
    """Returns how many sends to one rank may be unfinished; the next send waits for the oldest.

    There is a bound because an unfinished send keeps its memory. No schedule gets stuck with this bound: no rank waits
    for a receive that its peer can post only after that rank has continued. Tests simulate all schedules with it.
    """
    return 2 * pipeline.num_stages


class PipelineP2P:
    """The messages of one rank during a step."""

    def __init__(self, groups: ProcessGroupCollection, pipeline: Pipeline, message_format: MessageFormat) -> None:
        self.format = message_format
        self._bound = max_sends_in_flight(pipeline)
        self._ranks = groups.ranks("pp")
        self._channels = _channels(groups, pipeline)
        self._me = groups.rank("pp")
        self._sent: dict[int, deque[Pending]] = defaultdict(deque)

    def send_hidden(self, hidden: Tensor, peer: int, states: StatesIn = ONE_STATE) -> None:
        """Sends hidden states to the pipeline rank `peer`; several `states` are concatenated along the sequence.

        Raises UserError if they do not have the shape of the message format, or if their type would be rounded to its
        type.
        """
        if self.format.shape_is_sent:
            shape = torch.tensor(hidden.shape, dtype=torch.int64)
            self._send(shape.to(self.format.device, non_blocking=True), peer)
        elif hidden.numel() != torch.Size(self.format.shape_of(states)).numel():
            raise UserError(
                f"a pipeline stage gives hidden states of shape {tuple(hidden.shape)}, while seq_length and "
                f"micro_batch_size say {self.format.shape_of(states)}; pass sizes that fit, or "
                "set config.variable_seq_lengths"
            )
        if torch.promote_types(hidden.dtype, self.format.dtype) != self.format.dtype:
            raise UserError(
                f"a pipeline stage gives hidden states in {hidden.dtype}, and config.pipeline_dtype "
                f"{self.format.dtype} would round them; set it to the former"
            )
        self._send(hidden.to(self.format.dtype), peer)

    def send_gradient(self, gradient: Tensor, peer: int) -> None:
        """Sends the gradient of hidden states to the rank that they came from."""
        self._send(gradient.to(self.format.dtype), peer)

    def receive_hidden(self, peer: int, states: StatesIn = ONE_STATE) -> Pending:
        """Posts a receive of hidden states, shaped as `send_hidden` sends them."""
        shape = self.format.shape_of(states)
        if self.format.shape_is_sent:
            lengths = self._receive(torch.empty(len(shape), dtype=torch.int64, device=self.format.device), peer)
            shape = tuple(lengths.wait().tolist())
        return self._receive(self._empty(shape), peer)

    def receive_gradient(self, shape: tuple[int, ...], peer: int) -> Pending:
        """Posts a receive of the gradient of hidden states of this shape."""
        return self._receive(self._empty(shape), peer)

    def finish(self) -> None:
        """Waits until all sends have ended (on a GPU, later kernels wait)."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.format.dtype, device=self.format.device)

    def _send(self, tensor: Tensor, peer: int) -> None:
        sent = self._sent[peer]
        while sent and (len(sent) >= self._bound or sent[0].is_done()):
            sent.popleft().wait()
        sent.append(start_send(tensor.detach().contiguous(), self._ranks[peer], self._channels[self._me, peer]))

    def _receive(self, tensor: Tensor, peer: int) -> Pending:
        return start_receive(tensor, self._ranks[peer], self._channels[peer, self._me])


def _channels(groups: ProcessGroupCollection, pipeline: Pipeline) -> dict[tuple[int, int], Group]:
    """Returns the group for each direction between this rank and its neighbours, by (from, to) as pipeline ranks.

    With NCCL each direction has its own communicator. They are made, and used once, in an order that is the same on all
    ranks, so that no communicator waits for another during a step.
    """
    me, ranks = groups.rank("pp"), groups.ranks("pp")
    pairs = {(pipeline.locate(s)[0], pipeline.locate(s + 1)[0]) for s in range(pipeline.num_stages - 1)}
    directed = sorted({pair for a, b in pairs if a != b and me in (a, b) for pair in ((a, b), (b, a))})
    if not directed or "nccl" not in dist.get_backend_config(groups.pp):  # type: ignore[arg-type]
        return dict.fromkeys(directed, groups.pp if directed else None)
    found: dict[tuple[int, int], Group] = {}
    for source, destination in directed:
        known = groups.has_channel(ranks[source], ranks[destination])
        found[source, destination] = group = groups.channel(ranks[source], ranks[destination])
        if not known:
            token = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
            start = start_send if source == me else start_receive
            start(token, ranks[destination if source == me else source], group).wait()
    return found


def message_format_of(
    config: "TransformerConfig",
    groups: ProcessGroupCollection,
    device: torch.device,
    seq_length: int | None,
    micro_batch_size: int | None,
    decoder_seq_length: int | None = None,
) -> MessageFormat:
    """Returns the message format of a config. Context parallel ranks divide the sequence, and under sequence
    parallelism tensor parallel ranks too. For an encoder-decoder model `seq_length` is the encoder's. Raises UserError
    for sizes that are missing or do not divide."""
    if seq_length is None or micro_batch_size is None:
        raise UserError("a pipeline needs seq_length and micro_batch_size: a stage must know the shape of its messages")
    parts = groups.size("cp") * (groups.size("tp") if config.sequence_parallel else 1)
    lengths = {"seq_length": seq_length}
    if num_encoder_layers(config):
        if decoder_seq_length is None:
            raise UserError("a pipeline of an encoder and a decoder needs decoder_seq_length beside seq_length")
        lengths["decoder_seq_length"] = decoder_seq_length
    elif decoder_seq_length not in (None, seq_length):
        raise UserError(
            f"decoder_seq_length {decoder_seq_length} beside seq_length {seq_length}: the model has one stack of "
            "layers; leave decoder_seq_length out"
        )
    for name, length in lengths.items():
        if length % parts:
            raise UserError(
                f"{name} {length} is not divisible by {parts}, the context and sequence parallel ranks; "
                f"use {length // parts * parts or parts}"
            )
    first, last = (lengths[name] // parts for name in ("seq_length", next(reversed(lengths))))
    shape = (last, micro_batch_size, config.hidden_size)
    encoder_length = first if num_encoder_layers(config) else 0
    assert config.pipeline_dtype is not None
    return MessageFormat(shape, config.pipeline_dtype, device, config.variable_seq_lengths, encoder_length)
