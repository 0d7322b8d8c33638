"""The first rank tells the other ranks of a layout which call of the model comes next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from megatron.core.communication.collectives import Group, broadcast
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext, RowPart


class CallKind(IntEnum):
    """What all ranks do next."""

    STOP = 0
    IDLE = 1
    """Nothing; sent from time to time, so that no collective waits until it times out."""
    FORWARD = 2
    FORWARD_ALL_LOGITS = 3
    CLEAR_PAGES = 4


@dataclass(frozen=True)
class Call:
    """A call of the model, or another thing that all ranks do together."""

    kind: CallKind
    rows: tuple[RowPart, ...] = ()
    pages: tuple[int, ...] = ()
    """Pages to clear."""


class CallChannel:
    """Broadcasts calls over the host tensors of a group; without a group it does nothing."""

    def __init__(self, world: Group) -> None:
        self._world = world

    def send(self, call: Call) -> None:
        """Sends a call to all other ranks. The first rank calls this."""
        if self._world is None:
            return
        numbers = torch.tensor([*call.pages] if call.kind is CallKind.CLEAR_PAGES else [*_encoded(call.rows)])
        broadcast(torch.tensor([call.kind, len(numbers)]), self._world)
        if len(numbers):
            broadcast(numbers.long(), self._world)

    def receive(self) -> Call:
        """Waits for the next call of the first rank."""
        kind, length = broadcast(torch.zeros(2, dtype=torch.long), self._world).tolist()
        numbers = broadcast(torch.zeros(length, dtype=torch.long), self._world).tolist() if length else []
        if kind == CallKind.CLEAR_PAGES:
            return Call(CallKind.CLEAR_PAGES, pages=tuple(numbers))
        return Call(CallKind(kind), rows=tuple(_decoded(numbers)))


def follow(forward: LayoutForward, context: PagedInferenceContext, channel: CallChannel) -> None:
    """Makes the calls of the first rank, until it stops. The other ranks run this."""
    while (call := channel.receive()).kind is not CallKind.STOP:
        make_call(forward, context, call)


def make_call(forward: LayoutForward, context: PagedInferenceContext, call: Call) -> torch.Tensor | None:
    """Makes a call on this rank. Returns the logits [b, 1, V], or [b, s, V] of all tokens; None if it is no call of the
    model. Collective."""
    if call.kind is CallKind.CLEAR_PAGES:
        context.clear_pages(call.pages)
    if call.kind not in (CallKind.FORWARD, CallKind.FORWARD_ALL_LOGITS):
        return None
    all_logits = call.kind is CallKind.FORWARD_ALL_LOGITS
    tokens, positions = context.begin(call.rows, forward.device, all_logits=all_logits)
    count = tokens.shape[1] if all_logits else 1
    return forward(tokens, positions, context, num_predicted=count, padding=context.padding)


def _encoded(rows: Sequence[RowPart]) -> Iterator[int]:
    for row in rows:
        yield from (row.slot, row.start, len(row.tokens), len(row.pages), *row.tokens, *row.pages)


def _decoded(numbers: Sequence[int]) -> Iterator[RowPart]:
    at = 0
    while at < len(numbers):
        slot, start, tokens, pages = numbers[at : at + 4]
        middle, end = at + 4 + tokens, at + 4 + tokens + pages
        yield RowPart(slot, start, tuple(numbers[at + 4 : middle]), tuple(numbers[middle:end]))
        at = end
