"""Actions: how they are written, and what each kind does."""

from megatron.core.pipeline_parallel.actions import COMPUTES, RECEIVES, SENDS, Action, ActionKind, format_actions

FORWARD = Action(ActionKind.FORWARD, 3, 1)
BACKWARD = Action(ActionKind.BACKWARD, 2)


def test_actions_are_written_as_kind_micro_batch_and_chunk() -> None:
    send = Action(ActionKind.SEND_BACKWARD, 4, 2, peer=1)
    weights = Action(ActionKind.WEIGHT_GRADIENT, 0)
    assert format_actions([FORWARD, BACKWARD, send, weights]) == "F3.1 B2 >B4.2 W0"


def test_every_kind_computes_or_communicates_or_is_sync() -> None:
    assert not COMPUTES & SENDS and not COMPUTES & RECEIVES and not SENDS & RECEIVES
    assert COMPUTES | SENDS | RECEIVES | {ActionKind.SYNC} == set(ActionKind)
