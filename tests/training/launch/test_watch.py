"""Which rank has failed, decided from messages and times alone."""

from typing import Any

import pytest

from megatron.training.launch.watch import COMMUNICATION, ERROR, SIGNAL, USER_ERROR, Limits, Watch

PLACE = {"phase": "training", "iteration": 5}


class Run:
    """Three ranks; 0 and 1 are on one machine."""

    def __init__(self) -> None:
        self.watch, self.now = Watch(3, Limits(hang=100.0)), 0.0
        for rank, machine in enumerate(("a", "a", "b")):
            self.watch.join(rank, {"machine": machine, "pid": 10 + rank}, 0.0)
        self.totals = [0, 0, 0]
        self.sent: list[tuple[int, dict[str, Any]]] = []

    def hear(self, rank: int, type: str, **more: Any) -> None:
        self.watch.receive(rank, {"type": type, **PLACE, **more}, self.now)

    def beat(self, *ranks: int, waits: bool = False, moves: bool = True) -> None:
        for rank in ranks:
            self.totals[rank] += moves
            self.hear(rank, "beat", total=self.totals[rank], waits=waits)

    def wait(self, seconds: float, *ranks: int, waits: bool = False, moves: bool = True) -> None:
        """Time passes; these ranks beat."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.beat(*ranks, waits=waits, moves=moves)
            self.sent += self.watch.tick(self.now)

    def report(self, rank: int, waits: list[Any] = [], number: int = 0) -> None:  # noqa: B006
        counts = [["w", [0, 1, 2], number]]
        self.watch.receive(rank, {"type": "report", "waits": waits, "counts": counts, "place": "f (a.py:1)"}, self.now)

    def end(self) -> dict[str, Any]:
        """Returns the order to end, which all living ranks get."""
        self.sent += self.watch.tick(self.now)
        self.wait(3)
        orders = [message for _, message in self.sent if message["type"] == "end"]
        assert orders and all(order == orders[0] for order in orders)
        told = [rank for rank, message in self.sent if message["type"] == "end"]
        assert 0 not in told[:-1], "rank 0, which tells the others, must end last"
        return orders[0]


WAITS = [["w", [0, 1, 2], 9, "all_reduce"]]


def test_a_healthy_run_is_left_alone_and_waits_for_all_at_its_end() -> None:
    run = Run()
    run.wait(300, 0, 1, 2)
    for rank in range(3):
        assert not run.watch.all_left()
        run.hear(rank, "bye")
    assert run.watch.all_left() and not run.sent and run.watch.cause is None


def test_a_closed_connection_is_an_end_and_names_who_waits() -> None:
    run = Run()
    run.wait(2, 0, 1, 2)
    run.watch.lost(1, run.now)
    assert [message["type"] for _, message in run.watch.tick(run.now)] == ["report", "report"]
    run.report(0, WAITS, 9)
    run.report(2, [], 8)
    order = run.end()
    assert order["text"].startswith("the run ends: rank 1 of 3 ended in training, after iteration 5, without a word")
    assert order["text"].endswith("rank 0 waits in all_reduce number 9 of ranks 0, 1 and 2; missed by ranks 1 and 2")
    assert (order["rank"], order["printer"], order["code"]) == (1, 0, 1)


def test_an_error_counts_before_the_communication_that_it_broke() -> None:
    run = Run()
    run.hear(0, "failed", kind=COMMUNICATION, text="connection closed by peer")
    run.wait(3, 0, 1, 2)
    run.hear(2, "failed", kind=ERROR, text="ValueError: x")
    assert run.end()["text"] == "the run ends: rank 2 of 3 failed in training, after iteration 5: ValueError: x"


def test_a_failed_communication_without_a_better_cause_names_no_failed_rank() -> None:
    run = Run()
    run.hear(1, "failed", kind=COMMUNICATION, text="timed out")
    run.wait(25, 0, 1, 2)
    order = run.end()
    assert order["rank"] is None and "no rank has ended, but communication failed on rank 1" in order["text"]


def test_a_stopped_process_is_seen_by_a_neighbour() -> None:
    run = Run()
    run.wait(11, 0, 2)
    looks = [(rank, message) for rank, message in run.sent if message["type"] == "look"]
    assert looks[0] == (0, {"type": "look", "rank": 1, "pid": 11})
    run.watch.receive(0, {"type": "seen", "rank": 1, "state": "running"}, run.now)
    run.wait(60, 0, 2)
    assert run.watch.cause is None  # long work that keeps Python's lock
    run.watch.receive(0, {"type": "seen", "rank": 1, "state": "stopped"}, run.now)
    order = run.end()
    assert "rank 1 of 3 was stopped by a signal" in order["text"] and order["kill"] == ["a", 11]


def test_a_rank_that_has_spoken_since_is_not_stopped() -> None:
    run = Run()
    run.wait(11, 0, 2)
    run.beat(1)
    run.watch.receive(0, {"type": "seen", "rank": 1, "state": "stopped"}, run.now)
    run.wait(5, 0, 1, 2)
    assert run.watch.cause is None


def test_signs_of_life_that_come_seldom_are_no_silence() -> None:
    assert Limits().for_interval(1.0) == Limits()
    many = Limits().for_interval(10.0)
    assert (many.silence, many.unreachable) == (50.0, 100.0)


def test_a_silent_machine_is_gone() -> None:
    run = Run()
    run.wait(22, 0, 1)
    assert "rank 2 of 3 gave no sign of life for 21 s" in run.end()["text"]


def test_all_ranks_of_a_lost_machine_are_named() -> None:
    """Killed with their machine, or silent because its network is gone."""
    for closed in (True, False):
        run = Run()
        run.watch.join(3, {"machine": "b", "pid": 13}, 0.0)
        assert run.watch.first_elsewhere() == 2
        for rank in (2, 3) if closed else ():
            run.watch.lost(rank, run.now)
        run.wait(23, 0, 1)
        first, second = run.end()["text"].splitlines()
        what = "ended in start, without a word" if closed else "gave no sign of life"
        assert first.startswith(f"the run ends: rank 2 of 3 {what}") and second == "  rank 3 is gone, too"


def test_a_rank_without_progress_is_named_when_the_others_wait() -> None:
    run = Run()
    run.wait(90, 0, 1, 2, waits=True, moves=False)
    assert not run.sent
    run.wait(12, 0, 1, 2, waits=True, moves=False)
    run.report(0, WAITS, 9)
    run.report(1, WAITS, 9)
    run.report(2, [], 8)
    order = run.end()
    assert "rank 2 of 3 has made no progress for 1" in order["text"] and "f (a.py:1)" in order["text"]
    assert "ranks 0 and 1 wait in all_reduce number 9 of ranks 0, 1 and 2; missed by rank 2" in order["text"]


def test_long_work_of_all_is_no_hang() -> None:
    run = Run()
    run.wait(1000, 0, 1, 2, waits=False, moves=False)
    assert not run.sent


def test_ranks_that_wait_for_one_another() -> None:
    run = Run()
    run.wait(102, 0, 1, 2, waits=True, moves=False)
    for rank in range(3):
        run.report(rank, WAITS, 9)
    assert "all ranks have waited for one another" in run.end()["text"]


def test_a_rank_that_left_while_others_wait_for_it() -> None:
    run = Run()
    run.hear(1, "bye")
    run.wait(7, 0, 1, 2, waits=True, moves=False)
    assert [message["type"] for _, message in run.sent] == ["report"] * 3
    run.report(0, WAITS, 9)
    run.report(1, [], 8)
    run.report(2, WAITS, 9)
    assert "rank 1 of 3 left the run early" in run.end()["text"]


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0), (2, 9)])
def test_a_mistake_is_printed_by_the_rank_that_has_it(rank: int, seconds: int) -> None:
    run = Run()
    run.hear(rank, "failed", kind=USER_ERROR, text="--load")
    run.wait(seconds, 0, 1, 2)
    order = run.end()
    assert (order["text"], order["printer"], order["code"], order["rank"]) == ("", None, 2, rank)


def test_a_signal_waits_for_the_cause_that_made_a_launcher_send_it() -> None:
    run = Run()
    run.hear(0, "failed", kind=SIGNAL, text="SystemExit(143)")
    assert not run.watch.tick(run.now)
    run.watch.lost(2, run.now)
    assert "rank 2 of 3 ended" in run.end()["text"]
    run = Run()
    run.hear(0, "failed", kind=SIGNAL, text="SystemExit(143)")
    run.wait(2, 0, 1, 2)
    assert "rank 0 of 3 was ended in training, after iteration 5: SystemExit(143)" in run.end()["text"]
