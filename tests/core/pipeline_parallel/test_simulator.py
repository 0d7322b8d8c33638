"""The simulator keeps time as the formulas say, and notices lists that cannot be executed."""

import pytest

from megatron.core.pipeline_parallel.action_lists import all_rank_actions
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, simulate, simulate_actions
from megatron.core.pipeline_parallel.stages import Pipeline


def test_a_message_that_takes_time_is_hidden_where_the_order_has_room_for_it() -> None:
    alone = simulate(Schedule("1f1b", Pipeline(4), 16))
    slow = simulate(Schedule("1f1b", Pipeline(4), 16), Costs(message=0.25))
    # It delays filling and draining; in between the receive is posted before a computation that takes longer.
    assert slow.length - alone.length <= 0.25 * 3 * 2 + 0.25 * 2 * 16
    assert slow.length > alone.length


def broken(change: str) -> list[list[Action]]:
    lists = [list(actions) for actions in all_rank_actions(Schedule("1f1b", Pipeline(3), 4))]
    if change == "lost":
        lists[1] = [a for a in lists[1] if str(a) != ">F2"]
    elif change == "swapped":
        places = [i for i, a in enumerate(lists[1]) if a.kind is ActionKind.RECEIVE_FORWARD][1:3]
        lists[1][places[0]], lists[1][places[1]] = lists[1][places[1]], lists[1][places[0]]
    elif change == "twice":
        lists[2].append(next(a for a in lists[2] if a.kind is ActionKind.FORWARD))
    elif change == "early":
        place = next(i for i, a in enumerate(lists[2]) if a.kind is ActionKind.BACKWARD)
        lists[2].insert(0, lists[2].pop(place))
    else:
        assert change == "unread"
        lists[2].insert(1, Action(ActionKind.SEND_BACKWARD, 9, peer=1))
    return lists


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lost", "wait for each other|receives"),
        ("swapped", "receives|posted no receive"),
        ("twice", "twice"),
        ("early", "before its forward"),
        ("unread", "receives|does not receive"),
    ],
)
def test_a_broken_list_is_noticed(change: str, message: str) -> None:
    simulate_actions(all_rank_actions(Schedule("1f1b", Pipeline(3), 4)), Pipeline(3))
    with pytest.raises((RuntimeError, AssertionError), match=message):
        simulate_actions(broken(change), Pipeline(3))


def test_ranks_that_would_wait_for_each_other_are_noticed() -> None:
    """Two ranks that may have one message under way, and none that is received."""
    lists = all_rank_actions(Schedule("interleaved", Pipeline(2, 2), 8))
    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate_actions(lists, Pipeline(2, 2), bound=0)


def test_times_of_two_stages_worked_out_by_hand() -> None:
    timeline = simulate(Schedule("1f1b", Pipeline(2), 2), Costs(1.0, 2.0, 3.0, message=0.5))
    times = [[(str(span.action), span.start, span.stop) for span in row] for row in timeline.spans]
    assert times == [
        [("F0", 0.0, 1.0), ("F1", 1.0, 2.0), ("B0", 8.0, 13.0), ("B1", 14.0, 19.0)],
        [("F0", 1.5, 2.5), ("B0", 2.5, 7.5), ("F1", 7.5, 8.5), ("B1", 8.5, 13.5)],
    ]
    assert timeline.length == 19.0 and timeline.bubble == pytest.approx(1 - 24 / 38)
    assert [timeline.peak_activations(rank) for rank in (0, 1)] == [2.0, 1.0]
