"""The list of actions of each rank: sends, receives and SYNC between the computations. No communication."""

from core.pipeline_parallel.small_schedules import one_stage, schedules

from megatron.core.pipeline_parallel.action_lists import all_rank_actions, rank_actions
from megatron.core.pipeline_parallel.actions import COMPUTES, ActionKind, format_actions
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.stages import Pipeline


def test_lists_can_be_read() -> None:
    assert format_actions(one_stage(3)) == "F0 B0 F1 B1 F2 S2 B2"
    assert format_actions(one_stage(2, forward_only=True)) == "F0 F1"
    pair = Schedule("1f1b", Pipeline(2), 3)
    assert format_actions(rank_actions(pair, 0)) == "F0 >F0 <B0 F1 >F1 B0 <B1 F2 >F2 <B2 B1 S2 B2"
    assert format_actions(rank_actions(pair, 1)) == "<F0 F0 <F1 B0 >B0 F1 <F2 B1 >B1 F2 S2 B2 >B2"


def test_gradients_are_free_to_be_reduced_before_each_chunks_last_computation_of_them() -> None:
    for schedule in schedules():
        for actions in all_rank_actions(schedule):
            for chunk in range(schedule.pipeline.chunks):
                parts = [action for action in actions if action.chunk == chunk]
                mine = [p for p in parts if p.kind is ActionKind.SYNC or p.kind in COMPUTES - {ActionKind.FORWARD}]
                assert [a.kind for a in mine].count(ActionKind.SYNC) == 1
                assert mine[-2].kind is ActionKind.SYNC and mine[-1].micro_batch == schedule.num_microbatches - 1
    assert all(a.kind is not ActionKind.SYNC for s in schedules(forward_only=True) for a in rank_actions(s, 0))


def test_receives_are_posted_in_the_order_of_sending_and_ahead_of_their_use() -> None:
    """Between two ranks of an interleaved pair, activations and gradients go both ways."""
    schedule = Schedule("interleaved", Pipeline(2, 2), 4)
    first, second = all_rank_actions(schedule)
    sent = [(a.kind.value[1], a.micro_batch) for a in second if a.kind.value[0] == ">"]
    received = [(a.kind.value[1], a.micro_batch) for a in first if a.kind.value[0] == "<"]
    assert sent == received and {kind for kind, _ in sent} == {"F", "B"}
    for actions in (first, second):
        where = {str(action): place for place, action in enumerate(actions)}
        for action in actions:
            if action.kind is ActionKind.RECEIVE_BACKWARD:
                between = actions[where[str(action)] : where["B" + str(action)[2:]]]
                assert sum(a.kind in COMPUTES for a in between) >= 1, action
