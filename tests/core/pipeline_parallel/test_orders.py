"""The orders of all schedules: which rank computes what in which order, what is held, what waits."""

import pytest
from core.pipeline_parallel.small_schedules import COUNTS, SIZES, schedules

from megatron.core.pipeline_parallel import orders
from megatron.core.pipeline_parallel.action_lists import all_rank_actions
from megatron.core.pipeline_parallel.actions import COMPUTES, Action, ActionKind
from megatron.core.pipeline_parallel.orders import ONE_CHUNK_ORDERS, Schedule, compute_orders, schedule_name
from megatron.core.pipeline_parallel.simulator import Costs, simulate
from megatron.core.pipeline_parallel.stages import Pipeline


@pytest.mark.fast("0-True", "3-False")
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow), 3])
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
            done = [(span.action.kind, span.action.micro_batch, span.action.chunk) for span in spans]
            assert len(done) == len(wanted) and set(done) == wanted, schedule


def test_micro_batches_keep_their_order_in_every_chunk() -> None:
    """Data iterators give one after the other."""
    for schedule in schedules():
        for actions in all_rank_actions(schedule):
            for chunk in range(schedule.pipeline.chunks):
                parts = [action for action in actions if action.chunk == chunk]
                for kind in COMPUTES:
                    numbers = [part.micro_batch for part in parts if part.kind is kind]
                    assert numbers == sorted(numbers), schedule


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


def test_a_row_of_the_table_is_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to add one in docs/extending.md: here all forwards, then all backwards."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    gpipe = [Action(kind, number) for kind in kinds for number in range(3)]
    monkeypatch.setattr(orders, "SCHEDULES", (*orders.SCHEDULES, "gpipe"))
    monkeypatch.setitem(ONE_CHUNK_ORDERS, "gpipe", lambda size, count, rank: gpipe)  # type: ignore[arg-type]
    assert schedule_name("gpipe", Pipeline(2)) == "gpipe" and schedule_name("gpipe", Pipeline(2, 2)) == "interleaved"
    assert compute_orders(Schedule("gpipe", Pipeline(2), 3)) == [gpipe, gpipe]
    assert schedule_name(None, Pipeline(2)) == "1f1b"
