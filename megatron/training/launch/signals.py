"""Handles signals that ask a run to end: before training they end it at once, during training after the current step.

A `SignalWatch` has two phases. Before `training` is entered (arguments, data indices, loading) a signal raises
SystemExit(128 + number) at the present statement, so that half-written files are removed; if the program is inside a
call that does not return to Python, a thread ends the process some seconds later. Inside `training` the signal is
remembered, and `exit.ExitAgreement` makes all ranks stop after the same step. A signal that comes after training is
remembered too, and changes nothing. The same holds for a signal while an error ends the program (`leave_error_alone`):
a launcher sends SIGTERM as soon as one rank is gone, and the other ranks must first print which rank that is.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
"""Signals by which launchers, schedulers and terminals end a run. SIGHUP stays ignored where it is ignored already
(nohup)."""

SECOND_PRESS_AFTER = 1.0
"""Seconds before a second SIGINT counts as impatience: a launcher repeats the one that the terminal sent already."""


class SignalWatch:
    """Watches signals around a run (see the module's text). Use it as a context manager in the main thread.

    Args:
        signals: which ones to watch.
        grace: seconds that the program has to react before training; then a thread ends the process.
    """

    def __init__(self, signals: Sequence[int] = DEFAULT_SIGNALS, grace: float = 10.0) -> None:
        self.signals = tuple(signals)
        self.grace = grace
        self.received: int | None = None
        """Number of the first signal that came."""
        self._received_at = 0.0
        self._training = False
        self._ending = False
        """Whether an error ends the program."""
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_wakeup = -1

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is not threading.main_thread():
            print("signals are not watched: training was not started from the main thread", file=sys.stderr)
            return self
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._pipe = reader, writer
        self._previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        watched = [number for number in self.signals if number != signal.SIGHUP or not ignored]
        self._previous = {number: signal.signal(number, self._handle) for number in watched}
        threading.Thread(target=self._enforce, args=(reader,), name="signal-watch", daemon=True).start()
        _Watching.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _Watching.current = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
            self._pipe = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Remembers signals inside the context and after it. Earlier signals have already been obeyed. If the context
        ends with an exception, a signal gives the program `grace` seconds to end."""
        self._training = True
        try:
            yield
        except BaseException:
            self.leave_error_alone()
            raise

    def remember(self, number: int | None) -> None:
        """Takes a signal that another handler received before this watch began, unless one has come since. None changes
        nothing."""
        self.received = self.received or number

    def leave_error_alone(self) -> None:
        """Lets an error end the program: a later signal does not end it at once, but within `grace` seconds. Ctrl-C
        still ends it at once."""
        self._training, self._ending = False, True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received, self._received_at = number, time.monotonic()
        if self._ending and number != signal.SIGINT:
            return
        if not self._training:
            when = "while an error ends the run" if self._ending else "before training"
            print(f"{signal.Signals(number).name} {when}: exiting", file=sys.stderr, flush=True)
            raise SystemExit(128 + number)
        if number == signal.SIGINT and not first and time.monotonic() - self._received_at > SECOND_PRESS_AFTER:
            raise KeyboardInterrupt
        if first:
            again = "; press again to stop at once" if number == signal.SIGINT else ""
            print(f"{signal.Signals(number).name}: stopping after this step{again}", file=sys.stderr, flush=True)

    def _enforce(self, reader: int) -> None:
        """Runs in a thread; the interpreter writes a signal's number into the pipe even while the main thread waits."""
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(1):
                if numbers[0] in self.signals and not self._training:
                    time.sleep(self.grace)
                    if self._pipe is not None and not self._training:
                        os.write(2, b"no reaction %g seconds after the signal: ending the process\n" % self.grace)
                        os._exit(128 + numbers[0])

    def leave_to_child(self) -> None:
        """Restores the default handling of signals in a forked child."""
        signal.set_wakeup_fd(-1)
        for end in self._pipe or ():
            os.close(end)
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)


class _Watching:
    """The watch of this process."""

    current: SignalWatch | None = None


def leave_error_alone() -> None:
    """Calls `SignalWatch.leave_error_alone` of this process's watch, if there is one."""
    if _Watching.current is not None:
        _Watching.current.leave_error_alone()


def _after_fork() -> None:
    if _Watching.current is not None:
        _Watching.current.leave_to_child()
        _Watching.current = None


os.register_at_fork(after_in_child=_after_fork)


def shield_worker() -> None:
    """Keeps a process that loads data alive when a signal goes to the whole process group.

    Launchers and terminals signal the group, and the training process needs its data workers until all ranks stop,
    which may take long: a step, an evaluation or a save comes before. The other signals that end a run are ignored; a
    second SIGTERM ends the worker.
    """
    for number in set(DEFAULT_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
