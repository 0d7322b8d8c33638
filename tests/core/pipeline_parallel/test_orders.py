"""The lists of all schedules: who computes what in which order, what is held, what waits. No communication."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.action_lists import all_rank_actions, one_stage, rank_actions
from megatron.core.pipeline_parallel.actions import COMPUTES, Action, ActionKind, format_actions, pair
from megatron.core.pipeline_parallel.orders import Schedule, compute_orders
from megatron.core.pipeline_parallel.simulator import Costs, simulate, simulate_actions
from megatron.core.pipeline_parallel.stages import Pipeline

SIZES = (1, 2, 3, 4, 7)
COUNTS = (1, 2, 3, 4, 5, 8, 13)


def schedules(forward_only: bool = False, ahead: int = 1) -> list[Schedule]:
    found = [] if forward_only else paired(ahead)
    for size in SIZES:
        for count in COUNTS:
            plain = [Schedule(name, Pipeline(size), count, forward_only, ahead=ahead) for name in ("1f1b", "zb-h1")]
            v = Schedule("zb-v", Pipeline(size, 2, v_shaped=True), count, forward_only, ahead=ahead)
            several = [
                Schedule("interleaved", Pipeline(size, chunks), count, forward_only, group, ahead)
                for chunks in (2, 3)
                for group in (None, size + 1, size + 3)
            ]
            found += [*plain, v, *several]
    return found


def paired(ahead: int = 1) -> list[Schedule]:
    """Those whose forwards and backwards take turns."""
    interleaved = [
        Schedule("interleaved", Pipeline(size, chunks), count, False, group, ahead, pairs=True)
        for size in SIZES
        for count in COUNTS
        for chunks in (2, 3)
        for group in (None, size + 1, size + 3)
    ]
    return [Schedule("1f1b", Pipeline(1), count, ahead=ahead, pairs=True) for count in COUNTS] + interleaved


def test_lists_can_be_read() -> None:
    assert format_actions(one_stage(3)) == "F0 B0 F1 B1 F2 S2 B2"
    assert format_actions(one_stage(2, forward_only=True)) == "F0 F1"
    pair = Schedule("1f1b", Pipeline(2), 3)
    assert format_actions(rank_actions(pair, 0)) == "F0 >F0 <B0 F1 >F1 B0 <B1 F2 >F2 <B2 B1 S2 B2"
    assert format_actions(rank_actions(pair, 1)) == "<F0 F0 <F1 B0 >B0 F1 <F2 B1 >B1 F2 S2 B2 >B2"


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_schedule_goes_through_and_does_each_thing_once(ahead: int, forward_only: bool) -> None:
    for schedule in schedules(forward_only, ahead):
        timeline = simulate(schedule)  # checks order, mail and dependencies
        late = schedule.name.startswith("zb")
        kinds = [ActionKind.FORWARD]
        if not forward_only:
            kinds += [ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT] if late else [ActionKind.BACKWARD]
        chunks = range(schedule.pipeline.chunks)
        wanted = {(k, n, c) for k in kinds for n in range(schedule.num_microbatches) for c in chunks}
        for spans in timeline.spans:
            parts = [part for span in spans for part in span.action.members]
            done = [(part.kind, part.micro_batch, part.chunk) for part in parts]
            assert len(done) == len(wanted) and set(done) == wanted, schedule


def test_micro_batches_keep_their_order_in_every_chunk() -> None:
    """Data iterators give one after the other."""
    for schedule in schedules():
        for actions in all_rank_actions(schedule):
            for chunk in range(schedule.pipeline.chunks):
                parts = [part for action in actions for part in action.members if part.chunk == chunk]
                for kind in COMPUTES:
                    numbers = [part.micro_batch for part in parts if part.kind is kind]
                    assert numbers == sorted(numbers), schedule


def test_gradients_are_free_to_be_reduced_before_each_chunks_last_computation_of_them() -> None:
    for schedule in schedules():
        for actions in all_rank_actions(schedule):
            for chunk in range(schedule.pipeline.chunks):
                parts = [part for action in actions for part in action.members if part.chunk == chunk]
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


def test_pairs_are_as_many_as_there_can_be() -> None:
    """Alone are the forwards that fill the pipeline and the backwards that empty it; no rank holds more than one chunk
    of a micro-batch beyond what it holds without pairs, and a step takes hardly longer."""
    assert format_actions(one_stage(4, pairs=True)) == "F0 F1|B0 F2|B1 F3|B2 S3 B3"
    assert format_actions(one_stage(1, pairs=True)) == "F0 S0 B0"
    for schedule in paired():
        pipeline, full = schedule.pipeline, schedule.num_microbatches % schedule.pipeline.pipeline_size == 0
        plain = simulate(dataclasses.replace(schedule, pairs=False))
        timeline = simulate(schedule)
        for rank, actions in enumerate(all_rank_actions(schedule)):
            more = timeline.peak_activations(rank) - plain.peak_activations(rank)
            assert -1e-9 < more < 1 / pipeline.chunks + 1e-9
            if full and schedule.group_size is None:
                count = schedule.num_microbatches * pipeline.chunks
                ahead = 2 * (pipeline.pipeline_size - rank - 1) + (pipeline.chunks - 1) * pipeline.pipeline_size + 1
                assert sum(a.kind is ActionKind.PAIR for a in actions) == max(0, count - ahead)
        if full and schedule.group_size is None:
            assert timeline.length <= plain.length + 3 * pipeline.pipeline_size, schedule


def test_a_pair_needs_what_both_its_parts_need() -> None:
    """The simulator would notice a pair of one micro-batch's own forward and backward, on one stage."""
    lists = [[pair(Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0))]]
    with pytest.raises(AssertionError, match="before its forward"):
        simulate_actions(lists, Pipeline(1))
    costs = Costs(1.0, 2.0, 4.0)
    assert [span.stop for span in simulate_actions([one_stage(2, pairs=True)], Pipeline(1), costs).spans[0]] == [
        1.0,
        8.0,
        14.0,
    ]


# What is held and what waits -----------------------------------------------------------------------------------------


def test_one_forward_one_backward_holds_a_micro_batch_for_each_rank_from_here_on() -> None:
    for size in SIZES:
        for count in COUNTS:
            timeline = simulate(Schedule("1f1b", Pipeline(size), count))
            assert [timeline.peak_activations(r) for r in range(size)] == [min(count, size - r) for r in range(size)]


def test_late_weight_gradients_hold_no_more_than_the_first_rank_of_1f1b() -> None:
    for size in SIZES:
        for count in COUNTS:
            for schedule in (
                Schedule("zb-h1", Pipeline(size), count),
                Schedule("zb-v", Pipeline(size, 2, v_shaped=True), count),
            ):
                timeline = simulate(schedule)
                assert max(timeline.peak_activations(rank) for rank in range(size)) <= min(count, size), schedule


def test_zb_h1_keeps_whole_activations_of_as_many_as_1f1b_does() -> None:
    """What is put off beyond that are products alone."""
    for size in SIZES:
        for rank, actions in enumerate(compute_orders(Schedule("zb-h1", Pipeline(size), 13))):
            held = late = peak = most_late = 0
            for action in actions:
                held += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.INPUT_GRADIENT)
                late += (action.kind is ActionKind.INPUT_GRADIENT) - (action.kind is ActionKind.WEIGHT_GRADIENT)
                peak, most_late = max(peak, held), max(most_late, late)
            assert peak == size - rank and most_late == rank + 1


def test_interleaved_holds_what_fills_the_pipeline() -> None:
    for size, chunks in ((2, 2), (4, 2), (4, 3)):
        timeline = simulate(Schedule("interleaved", Pipeline(size, chunks), 4 * size))
        assert [timeline.peak_activations(r) * chunks for r in range(size)] == pytest.approx(
            [2 * (size - r - 1) + (chunks - 1) * size + 1 for r in range(size)]
        )


def waiting(name: str, size: int, count: int, chunks: int = 1) -> float:
    """Time that passes idly on the whole pipeline, a forward of a rank's whole share taking 1, in all ranks' mean."""
    pipeline = Pipeline(size, chunks, v_shaped=name == "zb-v")
    timeline = simulate(Schedule(name, pipeline, count), Costs(1 / chunks, 1 / chunks, 1 / chunks))
    assert timeline.bubble == pytest.approx(1 - 3 * count / timeline.length)
    return timeline.length - 3 * count


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bubbles_are_those_of_the_papers(size: int) -> None:
    count = 4 * size
    assert waiting("1f1b", size, count) == pytest.approx(3 * (size - 1))
    assert waiting("interleaved", size, count, 2) == pytest.approx(3 * (size - 1) / 2)
    assert waiting("interleaved", size, count, 4) == pytest.approx(3 * (size - 1) / 4)
    assert waiting("zb-h1", size, count) == pytest.approx(size - 1)
    # The time until the last rank has something to do, and no more.
    assert waiting("zb-v", size, count, 2) == pytest.approx((size - 1) / 2)


def test_a_message_that_takes_time_is_hidden_where_the_order_has_room_for_it() -> None:
    alone = simulate(Schedule("1f1b", Pipeline(4), 16))
    slow = simulate(Schedule("1f1b", Pipeline(4), 16), Costs(message=0.25))
    # It delays filling and draining; in between the receive is posted before a computation that takes longer.
    assert slow.length - alone.length <= 0.25 * 3 * 2 + 0.25 * 2 * 16
    assert slow.length > alone.length


# The simulator notices what is wrong ---------------------------------------------------------------------------------


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
