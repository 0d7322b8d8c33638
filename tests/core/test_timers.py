"""Timers: levels, sums, reports over ranks."""

import contextlib
import re
import time
from collections.abc import Iterator

import pytest
from support.processes import run_on_ranks

from megatron.core.exceptions import UserError
from megatron.core.timers import Timers, timed


def spend(timers: Timers, name: str, seconds: float, level: int = 0) -> None:
    timer = timers(name, log_level=level)
    timer.start()
    time.sleep(seconds)
    timer.stop()


def test_spans_add_up_and_reset() -> None:
    timers = Timers(2, "max")
    spend(timers, "work", 0.02)
    spend(timers, "work", 0.03)
    total = timers("work").elapsed(reset=False)
    assert total >= 0.05
    assert timers("work").elapsed() == total
    assert timers("work").elapsed() == 0.0


def test_a_running_timer_can_be_read() -> None:
    timers = Timers(0, "max")
    timers("interval", log_level=0).start()
    time.sleep(0.01)
    assert timers("interval").elapsed() >= 0.01
    with pytest.raises(RuntimeError, match="'interval' is running already"):
        timers("interval").start()
    timers("interval").stop()
    with pytest.raises(RuntimeError, match="'interval' is not running"):
        timers("interval").stop()


def test_levels_above_the_log_level_do_nothing() -> None:
    timers = Timers(1, "max")
    spend(timers, "detail", 0.001, level=2)
    spend(timers, "step", 0.001, level=1)
    assert timers("detail").elapsed() == 0.0
    text = timers.get_all_timers_string(["detail", "step"])
    assert text is not None
    assert "step" in text and "detail" not in text
    with pytest.raises(UserError, match="'step' has level 1, not 2"):
        timers("step", log_level=2)
    with pytest.raises(UserError, match="--timing-log-level 3"):
        Timers(3, "max")
    with pytest.raises(UserError, match="--timing-log-option 'mean'"):
        Timers(1, "mean")  # type: ignore[arg-type]


def test_nothing_ran_nothing_shown() -> None:
    timers = Timers(2, "minmax")
    assert timers.get_all_timers_string() is None
    timers.log(["unknown"])


class Writer:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        self.seen.append((tag, value, iteration))


def times_of_two_ranks(option: str) -> tuple[str | None, list[tuple[str, float, int]]]:
    import torch.distributed as dist

    timers = Timers(1, option)  # type: ignore[arg-type]
    spend(timers, "forward-backward", 0.01 + 0.05 * dist.get_rank(), level=1)
    text = timers.get_all_timers_string(normalizer=2.0, reset=False, barrier=True)
    writer = Writer()
    timers.write(["forward-backward"], writer if dist.get_rank() == 1 else None, iteration=7)
    return text, writer.seen


@pytest.mark.parametrize(("option", "numbers"), [("max", 1), ("minmax", 2), ("all", 2)])
def test_times_are_those_of_all_ranks(option: str, numbers: int) -> None:
    (first, nothing), (second, written) = run_on_ranks(times_of_two_ranks, 2, option)
    assert first == second and first is not None
    found = [float(number) for number in re.findall(r"\d+\.\d+", first)]
    assert len(found) == numbers
    assert found[-1] >= 30.0  # (0.01 + 0.05) s / 2 in ms
    assert nothing == []
    ((tag, value, iteration),) = written
    assert (tag, iteration) == ("forward-backward-time", 7)
    assert value >= 0.06


def times_of_different_parts() -> dict[str, list[float]]:
    """The first rank sends, the last one receives, as in a pipeline."""
    import torch.distributed as dist

    timers = Timers(2, "max")
    spend(timers, ["send", "receive"][dist.get_rank()], 0.01, level=2)
    return timers.seconds_of_ranks(["send", "receive", "nothing"])


def test_a_timer_that_runs_on_some_ranks() -> None:
    first, second = run_on_ranks(times_of_different_parts, 2)
    assert first == second and list(first) == ["send", "receive", "nothing"]
    assert [[seconds > 0.0 for seconds in first[name]] for name in first] == [[True, False], [False, True], [False] * 2]


def test_a_part_is_timed_also_if_it_fails() -> None:
    timers = Timers(1, "max")
    with pytest.raises(ValueError, match="x"), timed(timers, "part", 1):
        time.sleep(0.01)
        raise ValueError("x")
    assert timers("part").elapsed() >= 0.01
    with timed(None, "part", 1), timed(timers, "detail", 2):
        pass
    assert timers("detail").elapsed() == 0.0


def test_marks_of_a_profile_are_made_at_every_level() -> None:
    marked: list[str] = []

    @contextlib.contextmanager
    def mark(name: str) -> Iterator[None]:
        marked.append(f"begin {name}")
        try:
            yield
        finally:
            marked.append(f"end {name}")

    timers = Timers(0, "max", mark)
    with timed(timers, "forward-backward", 1), pytest.raises(ValueError), timed(timers, "forward-compute", 2):
        raise ValueError
    assert marked == ["begin forward-backward", "begin forward-compute", "end forward-compute", "end forward-backward"]
