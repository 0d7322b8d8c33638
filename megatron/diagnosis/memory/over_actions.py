"""The largest number of bytes that a rank's micro-batches take at once, from the action list of its schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.diagnosis.memory.chunk_bytes import ChunkBytes


@dataclass(frozen=True)
class MicroBatchPeak:
    """The moment of a step at which a rank's micro-batches take most."""

    total: int
    messages: int
    """The part that belongs to hidden states and gradients between stages."""
    action: Action
    """What the rank computes then."""


def peak_of_actions(actions: Iterable[Action], chunks: Sequence[ChunkBytes]) -> MicroBatchPeak:
    """Returns the peak of a step with these actions. A message lives from its receive until its chunk's backward has
    ended; a result that is sent, until the end of the send."""
    kept = messages = 0
    peak = MicroBatchPeak(0, 0, Action(ActionKind.FORWARD, 0))
    for action in actions:
        before, received, after = _change(action.kind, chunks[action.chunk])
        messages += received
        total = max(kept, kept + before) + messages
        kept += after
        if total > peak.total:
            peak = MicroBatchPeak(total, messages, action)
    return peak


def host_peak_of_actions(actions: Iterable[Action], chunks: Sequence[ChunkBytes]) -> int:
    """Returns the most host memory that offloaded activations take in a step with these actions."""
    most = now = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            now += chunks[action.chunk].host
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            now -= chunks[action.chunk].host
        most = max(most, now)
    return most


def _change(kind: ActionKind, chunk: ChunkBytes) -> tuple[int, int, int]:
    """Returns the most that an action takes above what the rank keeps, the change of messages, and the change of what
    the rank keeps."""
    if kind is ActionKind.FORWARD:
        return chunk.forward_peak, 0, chunk.kept
    if kind is ActionKind.BACKWARD:
        return chunk.backward_peak - chunk.kept, -chunk.message_in, -chunk.kept
    if kind is ActionKind.INPUT_GRADIENT:
        return chunk.backward_peak - chunk.kept, -chunk.message_in, chunk.deferred - chunk.kept
    if kind is ActionKind.WEIGHT_GRADIENT:
        return chunk.deferred_peak - chunk.deferred, 0, -chunk.deferred
    if kind is ActionKind.RECEIVE_FORWARD:
        return 0, chunk.message_in, 0
    return 0, 0, 0
