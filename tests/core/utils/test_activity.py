"""Counts of collectives, and what a thread waits for."""

import pytest

from megatron.core.utils.activity import Activity


def test_calls_are_counted_by_channel() -> None:
    activity = Activity()
    assert activity.begin("all_reduce", "tp", lambda: (0, 1)).number == 1
    assert activity.begin("all_gather", "tp", lambda: pytest.fail("the ranks are known")).number == 2
    call = activity.begin("send", (1, 3), lambda: (1, 3))
    assert (call.number, call.operation, call.channel.name, call.channel.ranks) == (1, "send", "1>3", (1, 3))
    assert activity.total == 3
    assert [(each.name, each.number, each.operation) for each in activity.channels.values()] == [
        ("tp", 2, "all_gather"),
        ("1>3", 1, "send"),
    ]


def test_a_wait_ends_with_its_context_and_stays_after_an_error() -> None:
    activity = Activity()
    call = activity.begin("all_reduce", "tp", lambda: (0, 1))
    with activity.waiting(call):
        assert list(activity.waits.values()) == [call]
    assert not activity.waits
    with pytest.raises(RuntimeError), activity.waiting(call):
        raise RuntimeError
    assert list(activity.waits.values()) == [call]
