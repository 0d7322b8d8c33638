"""What the ranks of a pipeline send each other: hidden states down the stages, their gradients up.

Nothing here waits unless it is asked to: a send is posted and forgotten, a receive is posted ahead and waited for by
the computation that needs it; on a GPU the host never waits, later kernels do. The one exception is stated:
`variable_seq_lengths` has the host wait for the shape of what comes.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import Group, Pending, start_receive, start_send
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Wire:
    """What a message between stages looks like."""

    shape: tuple[int, ...]
    """[s, b, h] of hidden states, s being this rank's share of the sequence."""
    dtype: torch.dtype
    device: torch.device
    shape_is_sent: bool = False
    """Sequence lengths differ between micro-batches: the shape goes ahead of hidden states."""

    def shape_of(self, states: int) -> tuple[int, ...]:
        """The shape of the hidden states of several layers, one behind the other along the sequence."""
        return (states * self.shape[0], *self.shape[1:])

    def adjusted(self, adjust: Callable[..., Any] | None) -> "Wire":
        """With the shape that the published `adjust_tensor_shapes_fn` makes of it, for what is received and sent."""
        if adjust is None:
            return self
        (shape,), _ = adjust([self.shape], [self.shape])
        return dataclasses.replace(self, shape=tuple(shape))


def max_sends_in_flight(pipeline: Pipeline) -> int:
    """How many sends to one rank may be unfinished before the oldest is waited for.

    Their memory is held until then, so there is a bound. With this one no rank waits for a receive that could only be
    posted once it has gone on itself: the tests play all schedules through with it.
    """
    return 2 * pipeline.num_stages


class PipelineP2P:
    """The messages of one rank during a step."""

    def __init__(self, groups: ProcessGroupCollection, pipeline: Pipeline, wire: Wire) -> None:
        self.wire = wire
        self._bound = max_sends_in_flight(pipeline)
        self._ranks = groups.ranks("pp")
        self._channels = _channels(groups, pipeline)
        self._me = groups.rank("pp")
        self._sent: dict[int, deque[Pending]] = defaultdict(deque)

    def send_hidden(self, hidden: Tensor, peer: int, states: int = 1) -> None:
        """Hidden states to the pipeline rank `peer`: of `states` layers, one behind the other along the sequence."""
        if self.wire.shape_is_sent:
            shape = torch.tensor(hidden.shape, dtype=torch.int64)
            self._send(shape.to(self.wire.device, non_blocking=True), peer)
        elif hidden.numel() != torch.Size(self.wire.shape_of(states)).numel():
            raise UserError(
                f"a pipeline stage gives hidden states of shape {tuple(hidden.shape)}, while seq_length and "
                f"micro_batch_size say {self.wire.shape_of(states)}; pass what fits, or set config.variable_seq_lengths"
            )
        if torch.promote_types(hidden.dtype, self.wire.dtype) != self.wire.dtype:
            raise UserError(
                f"a pipeline stage gives hidden states in {hidden.dtype}, which config.pipeline_dtype "
                f"{self.wire.dtype} would round; set it to that"
            )
        self._send(hidden.to(self.wire.dtype), peer)

    def send_gradient(self, gradient: Tensor, peer: int) -> None:
        """The gradient of hidden states to the rank that they came from."""
        self._send(gradient.to(self.wire.dtype), peer)

    def receive_hidden(self, peer: int, states: int = 1) -> Pending:
        """Post a receive of hidden states, as they were sent."""
        shape = self.wire.shape_of(states)
        if self.wire.shape_is_sent:
            lengths = self._receive(torch.empty(len(shape), dtype=torch.int64, device=self.wire.device), peer)
            shape = tuple(lengths.wait().tolist())
        return self._receive(self._empty(shape), peer)

    def receive_gradient(self, shape: tuple[int, ...], peer: int) -> Pending:
        """Post a receive of the gradient of hidden states of this shape."""
        return self._receive(self._empty(shape), peer)

    def finish(self) -> None:
        """Wait until all that was sent is out (on a GPU: have later kernels wait)."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.wire.dtype, device=self.wire.device)

    def _send(self, tensor: Tensor, peer: int) -> None:
        sent = self._sent[peer]
        while sent and (len(sent) >= self._bound or sent[0].is_done()):
            sent.popleft().wait()
        sent.append(start_send(tensor.detach().contiguous(), self._ranks[peer], self._channels[self._me, peer]))

    def _receive(self, tensor: Tensor, peer: int) -> Pending:
        return start_receive(tensor, self._ranks[peer], self._channels[peer, self._me])


def _channels(groups: ProcessGroupCollection, pipeline: Pipeline) -> dict[tuple[int, int], Group]:
    """The group for each direction between this rank and its neighbours, by (from, to) as pipeline ranks.

    With NCCL every one is a communicator by itself, made and used once in an order that is the same on all ranks, so
    that none waits for another while a step is under way.
    """
    me, ranks = groups.rank("pp"), groups.ranks("pp")
    pairs = {(pipeline.place(s)[0], pipeline.place(s + 1)[0]) for s in range(pipeline.num_stages - 1)}
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


def wire_of(
    config: Any,
    groups: ProcessGroupCollection,
    device: torch.device,
    seq_length: int | None,
    micro_batch_size: int | None,
) -> Wire:
    """The wire of a config: a sequence is cut by context parallel ranks, and under sequence parallelism by tensor
    parallel ones. Raises UserError for sizes that are missing or do not divide."""
    if seq_length is None or micro_batch_size is None:
        raise UserError("a pipeline needs seq_length and micro_batch_size: stages must know what they will receive")
    parts = groups.size("cp") * (groups.size("tp") if config.sequence_parallel else 1)
    if seq_length % parts:
        raise UserError(
            f"seq_length {seq_length} does not divide by {parts}, the context and sequence parallel ranks; "
            f"{seq_length // parts * parts or parts} does"
        )
    shape = (seq_length // parts, micro_batch_size, config.hidden_size)
    return Wire(shape, config.pipeline_dtype, device, config.variable_seq_lengths)
