"""Decides whether a rank of a run has failed, which one, and why, from the reports of all ranks.

This module has no sockets and no clock: `heartbeat_server` passes messages and times to a `Watch`. The last message of
a run names one rank. If a communication fails because another rank is gone, the error does not say which rank. So the
watch waits for a better cause before it reports such an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.training.launch.missed_calls import missed_calls, named_ranks, ranks_behind

Message = dict[str, Any]

USER_ERROR, ERROR, SIGNAL, COMMUNICATION = "user error", "error", "signal", "communication"
"""Kinds of failure that a rank reports about itself."""


@dataclass(frozen=True)
class Limits:
    """How long the watch waits, in seconds."""

    silence: float = 10.0
    """Time without a sign of life after which another process of the same machine checks the silent one."""
    unreachable: float = 20.0
    """Time without a sign of life after which a rank counts as gone if no other process can look at it."""
    hang: float = 540.0
    """Time without progress of any rank, while some wait, after which the run ends."""
    communication: float = 15.0
    """Time after a failed communication, after which the watch reports it without a better cause."""
    signal: float = 1.5
    """Time to wait for a better cause after a signal ended a rank: a launcher sends signals because of an earlier
    failure."""
    user_error: float = 8.0
    """Time to wait for the other ranks after one reports a mistake of the user, which they may find too."""
    left: float = 5.0
    """Time without progress after which a rank that waits, while others have left, is asked what it waits for."""
    report: float = 2.0
    """Time in which the ranks must answer what they wait for."""

    def for_interval(self, interval: float) -> "Limits":
        """Returns limits for signs of life that come every `interval` seconds: silence lasts five of them at least."""
        silence, unreachable = max(self.silence, 5 * interval), max(self.unreachable, 10 * interval)
        return replace(self, silence=silence, unreachable=unreachable)


@dataclass(frozen=True)
class Cause:
    """Why a run ends."""

    rank: int | None
    """The rank that failed; None if ranks wait for each other."""
    what: str
    """Continues "rank 3 of 8"."""
    code: int = 1
    """Exit code of the other ranks."""
    silent: bool = False
    """Whether the failed rank prints the message itself."""


@dataclass
class RankState:
    """What the watch knows about a rank."""

    machine: str
    pid: int
    heard: float
    """Time of the last message."""
    moved: float
    """Time of the last progress."""
    progress: Any = None
    phase: str = "start"
    iteration: int | None = None
    waits: bool = False
    connected: bool = True
    left: bool = False
    """Whether the rank has reached the end of its program."""
    failure: Message | None = None
    failed: float = 0.0
    report: Message | None = None
    looked: float = 0.0
    state: str | None = None
    """The state of the process as another process of the same machine saw it."""

    @property
    def where(self) -> str:
        """The phase and the iteration, for a message."""
        return self.phase if self.iteration is None else f"{self.phase}, after iteration {self.iteration}"


@dataclass
class Watch:
    """The state of all ranks. `tick` returns the messages to send."""

    size: int
    limits: Limits = field(default_factory=Limits)
    ranks: dict[int, RankState] = field(default_factory=dict)
    cause: Cause | None = None
    ended: bool = False
    """Whether all ranks have been told to end."""
    _asked: float | None = None
    """Time at which the ranks were asked what they wait for."""
    _asked_before: float = float("-inf")

    # What happens ----------------------------------------------------------------------------------------------------

    def join(self, rank: int, message: Message, now: float) -> None:
        """A rank has connected."""
        self.ranks[rank] = RankState(message["machine"], message["pid"], heard=now, moved=now)

    def receive(self, rank: int, message: Message, now: float) -> None:
        """A rank has sent a message."""
        state = self.ranks[rank]
        state.heard, state.state = now, None
        kind = message["type"]
        if kind == "seen":
            seen = self.ranks[message["rank"]]
            if now - seen.heard > self.limits.silence:  # otherwise it has spoken since the question
                seen.state = message["state"]
        elif kind == "report":
            state.report = message
        else:
            state.phase, state.iteration = message["phase"], message["iteration"]
            if kind == "beat":
                state.waits = message["waits"]
                progress = message["total"], message["phase"], message["iteration"]
                if progress != state.progress:
                    state.progress, state.moved = progress, now
            elif kind == "failed" and state.failure is None:
                state.failure, state.failed = message, now
            elif kind == "bye":
                state.left, state.moved = True, now

    def lost(self, rank: int, now: float) -> None:
        """The connection of a rank has closed."""
        self.ranks[rank].connected = False

    def all_left(self) -> bool:
        """Whether every rank that is still connected has reached the end of its program."""
        return all(state.left for state in self.ranks.values() if state.connected)

    # What follows ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Returns messages to ranks: questions, and at the end of the run the order to stop, with the text to print."""
        if self.ended:
            return []
        messages: list[tuple[int, Message]] = []
        if self.cause is None:
            self.cause = self._evident(now)
            if self.cause is None:
                messages += self._looks(now)
        if self.cause is not None and self.cause.silent:
            return [*messages, *self._end(now)]
        if self._asked is None and (self.cause is not None or self._suspicious(now)):
            self._asked = self._asked_before = now
            for state in self.ranks.values():
                state.report = None
            return [*messages, *((rank, {"type": "report"}) for rank in self._live())]
        if self._asked is not None and (self._all_reported() or now - self._asked > self.limits.report):
            self._asked = None
            self.cause = self.cause or self._inferred(now)
            if self.cause is not None:
                messages += self._end(now)
        return messages

    def first_elsewhere(self) -> int | None:
        """Returns the lowest rank on another machine than rank 0; None without one. It prints the message if the
        machine of rank 0 is gone."""
        machine = self.ranks[0].machine if 0 in self.ranks else None
        return min((rank for rank, state in self.ranks.items() if state.machine != machine), default=None)

    def _live(self) -> list[int]:
        return [rank for rank, state in self.ranks.items() if state.connected]

    def _all_reported(self) -> bool:
        gone = {self.cause.rank} if self.cause is not None else set()
        return all(self.ranks[rank].report is not None for rank in self._live() if rank not in gone)

    def _evident(self, now: float) -> Cause | None:
        """Returns a cause that needs no further questions."""
        ranks = sorted(self.ranks.items(), key=lambda item: item[1].failed)
        for rank, state in ranks:
            if state.failure is not None and state.failure["kind"] == ERROR:
                return Cause(rank, f"failed in {state.where}: {state.failure['text']}")
        for rank, state in ranks:
            if not state.connected and not state.left and state.failure is None:
                return Cause(
                    rank,
                    f"ended in {state.where}, without a word: it was killed (by a signal, or because the machine had "
                    "no memory left), it crashed, or its script left the run",
                )
        for rank, state in ranks:
            if state.state == "stopped" and not state.left:
                return Cause(rank, f"was stopped by a signal (SIGSTOP or SIGTSTP) in {state.where}")
            if state.connected and now - state.heard > self.limits.unreachable and self._watcher_of(rank) is None:
                seconds = now - state.heard
                return Cause(rank, f"gave no sign of life for {seconds:.0f} s in {state.where}")
        for rank, state in ranks:
            kind, age = (state.failure or {}).get("kind"), now - state.failed
            if kind == USER_ERROR and (rank == 0 or not state.connected or age > self.limits.user_error):
                assert state.failure is not None
                return Cause(rank, f"failed in {state.where}: {state.failure['text']}", code=2, silent=True)
            if kind == SIGNAL and age > self.limits.signal:
                assert state.failure is not None
                return Cause(rank, f"was ended in {state.where}: {state.failure['text']}")
        return None

    def _watcher_of(self, rank: int) -> int | None:
        """Returns a living rank on the same machine."""
        machine = self.ranks[rank].machine
        newest = max(state.heard for state in self.ranks.values())
        for other, state in sorted(self.ranks.items()):
            heard = newest - state.heard < self.limits.silence
            if other != rank and state.connected and heard and state.machine == machine:
                return other
        return None

    def _looks(self, now: float) -> list[tuple[int, Message]]:
        """Returns questions about silent ranks to ranks of their machines."""
        messages = []
        for rank, state in self.ranks.items():
            silent = state.connected and now - state.heard > self.limits.silence
            if silent and now - state.looked > self.limits.silence / 4:
                watcher, state.looked = self._watcher_of(rank), now
                if watcher is not None:
                    messages.append((watcher, {"type": "look", "rank": rank, "pid": state.pid}))
        return messages

    def _suspicious(self, now: float) -> bool:
        """Whether to ask the ranks what they wait for."""
        if now - self._asked_before < self.limits.left:
            return False
        live = [state for state in self.ranks.values() if state.connected]
        if self._hangs(now) or any((state.failure or {}).get("kind") == COMMUNICATION for state in live):
            return True
        waits_long = any(state.waits and now - state.moved > self.limits.left for state in live)
        return waits_long and any(state.left for state in live)

    def _hangs(self, now: float) -> bool:
        live = [state for state in self.ranks.values() if state.connected]
        stuck = all(now - state.moved > self.limits.hang for state in live)
        waits = any(state.waits or state.left for state in live)
        return bool(live) and stuck and waits and not self.all_left()

    def _inferred(self, now: float) -> Cause | None:
        """Returns a cause that follows from what the ranks wait for."""
        reports = self._reports()
        behind = ranks_behind(reports)
        for rank, state in sorted(self.ranks.items()):
            if state.left and rank in behind:
                return Cause(rank, "left the run early: it reached the end of its program while others wait for it")
        if self._hangs(now):
            waiting = {rank for rank, report in reports.items() if report["waits"]}
            idle = [rank for rank, state in self.ranks.items() if not state.left and rank not in waiting]
            for rank in sorted(set(behind) & set(idle)) or sorted(idle):
                state = self.ranks[rank]
                place = (state.report or {}).get("place", "unknown")
                return Cause(
                    rank,
                    f"has made no progress for {now - state.moved:.0f} s in {state.where} (--hang-timeout-seconds); "
                    f"its main thread is in {place}",
                )
            return Cause(None, f"for {self.limits.hang:.0f} s all ranks have waited for one another")
        for rank, state in sorted(self.ranks.items(), key=lambda item: item[1].failed):
            failure = state.failure
            told = failure is not None and failure["kind"] == COMMUNICATION
            if failure is not None and told and now - state.failed > self.limits.communication:
                what = f"no rank has ended, but communication failed on rank {rank} in {state.where}"
                return Cause(None, f"{what}: {failure['text']}")
        return None

    def _reports(self) -> Mapping[int, Message]:
        return {rank: state.report for rank, state in self.ranks.items() if state.report is not None}

    def _gone(self, now: float) -> list[int]:
        """Returns the ranks that ended or fell silent without a report, as all ranks of a lost machine do."""
        return [
            rank
            for rank, state in sorted(self.ranks.items())
            if not state.left
            and state.failure is None
            and (not state.connected or now - state.heard > self.limits.unreachable)
        ]

    def _end(self, now: float) -> list[tuple[int, Message]]:
        """Returns the order to end, for every rank. Rank 0 comes last: this object is in its process, and the others
        would take its end for the cause if they had no order yet."""
        assert self.cause is not None
        self.ended = True
        live = self._live()
        failed = self.cause.rank
        gone = [rank for rank in self._gone(now) if rank != failed]
        printer = min((rank for rank in live if rank != failed and rank not in gone), default=failed)
        order = {
            "type": "end",
            "text": "" if self.cause.silent else end_text(self.cause, self.size, self._reports(), gone),
            "rank": failed,
            "code": self.cause.code,
            "printer": None if self.cause.silent else printer,
            "kill": [self.ranks[failed].machine, self.ranks[failed].pid] if failed is not None else None,
        }
        return [(rank, order) for rank in sorted(live, key=lambda rank: rank == 0)]


def end_text(cause: Cause, size: int, reports: Mapping[int, Message], gone: Sequence[int] = ()) -> str:
    """Returns the message of the end of a run: rank, phase, cause, other ranks that are gone, and the collectives that
    ranks have missed."""
    who = "" if cause.rank is None else f"rank {cause.rank} of {size} "
    others = [f"{named_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone, too"] if gone else []
    return "\n  ".join([f"the run ends: {who}{cause.what}", *others, *missed_lines(cause.rank, reports)])


def missed_lines(failed: int | None, reports: Mapping[int, Message], most: int = 8) -> Sequence[str]:
    """Returns a sentence for each collective in which some ranks wait and which others have missed."""
    lines = []
    for missed in missed_calls(reports, failed):
        waiting = f"{named_ranks(missed.waiting)} wait{'s' * (len(missed.waiting) == 1)}"
        call = f"{missed.operation} number {missed.number} of {named_ranks(missed.ranks)}"
        absent = f"; missed by {named_ranks(missed.absent)}" if missed.absent else ""
        lines.append(f"{waiting} in {call}{absent}")
    return [*lines[:most], f"and {len(lines) - most} more"] if len(lines) > most else lines
