"""Actions: how they are written, and the members of a pair."""

import pytest

from megatron.core.pipeline_parallel.actions import COMPUTES, RECEIVES, SENDS, Action, ActionKind, format_actions, pair

FORWARD = Action(ActionKind.FORWARD, 3, 1)
BACKWARD = Action(ActionKind.BACKWARD, 2)


def test_actions_are_written_as_kind_micro_batch_and_chunk() -> None:
    send = Action(ActionKind.SEND_BACKWARD, 4, 2, peer=1)
    weights = Action(ActionKind.WEIGHT_GRADIENT, 0)
    assert format_actions([FORWARD, BACKWARD, send, weights, pair(FORWARD, BACKWARD)]) == "F3.1 B2 >B4.2 W0 F3.1|B2"


def test_a_pair_has_two_members_and_any_other_action_is_its_own() -> None:
    both = pair(FORWARD, BACKWARD)
    assert (both.kind, both.micro_batch, both.chunk) == (ActionKind.PAIR, 3, 1)
    assert both.members == (FORWARD, BACKWARD)
    assert BACKWARD.members == (BACKWARD,)


def test_a_pair_is_a_forward_and_a_backward_in_this_order() -> None:
    for members in ((BACKWARD, FORWARD), (FORWARD, Action(ActionKind.INPUT_GRADIENT, 2))):
        with pytest.raises(AssertionError):
            pair(*members)


def test_every_kind_computes_or_communicates_or_is_sync() -> None:
    assert not COMPUTES & SENDS and not COMPUTES & RECEIVES and not SENDS & RECEIVES
    assert COMPUTES | SENDS | RECEIVES | {ActionKind.SYNC} == set(ActionKind)
