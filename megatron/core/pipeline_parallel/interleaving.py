"""Two micro-batches in one process that take turns: one's forward and another's backward.

A layer of experts sends its tokens to other ranks and can do nothing until the others' tokens have come. Whoever has
started such an exchange hands over, the other micro-batch computes, and the exchange is waited for when the turn comes
back. So what hides it is whatever the other has to do until its own next exchange: attention, experts, the head.

The backward runs in a thread of its own, and still only one of the two ever runs: a turn is handed over, never taken.
The order of everything, collectives included, is therefore a function of the program alone and the same on all ranks,
and the numbers are those of the two in a row. If one has no exchanges left, or is done, the other goes on. On a GPU
a turn is what the host puts into the one stream of computation; nobody waits there.

Backward hands over from inside autograd's nodes, so a forward step must not run a backward pass of its own on a GPU:
the engine's one thread for the device may be waiting for the turn.
"""

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_FORWARD, _BACKWARD = 0, 1


class MicroBatchTurn:
    """The turn (see `layer_inputs.CooperativeTurn`) of one micro-batch in one model chunk. It goes with what its
    forward keeps, so its backward and its recomputation find it too. Does nothing while the micro-batch is alone."""

    def __init__(self) -> None:
        self._turns: _CooperativePair | None = None
        self._side = _FORWARD
        self._first: Callable[[], None] | None = None

    def yield_turn(self) -> None:
        """Let the other micro-batch compute; returns when it is this one's turn again."""
        if self._first is not None:
            self._first()
        if self._turns is not None:
            self._turns.yield_turn(self._side)

    @contextlib.contextmanager
    def doing_first(self, work: Callable[[], None]) -> Iterator[None]:
        """Within, what this micro-batch can do itself while an exchange is under way is done before handing over, also
        while it is alone."""
        self._first = work
        try:
            yield
        finally:
            self._first = None

    @contextlib.contextmanager
    def _taking_turns(self, turns: "_CooperativePair", side: int) -> Iterator[None]:
        self._turns, self._side = turns, side
        try:
            yield
        finally:
            if not (turns.is_abandoned and side == _BACKWARD):  # which is still to meet its end
                self._turns = None


class _TheOtherFailed(Exception):
    """Ends one micro-batch because the other one has raised an error, which is the one that is shown."""


class _CooperativePair:
    """Whose turn it is. Only who has it reads or writes anything here, unless the pair is abandoned."""

    def __init__(self) -> None:
        self.now = _FORWARD
        self.is_abandoned = False
        self._wakes = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._failed = False

    def yield_turn(self, side: int) -> None:
        assert self.now == side, "a turn is handed over by who has the turn"
        if not self._ended[1 - side]:
            draws = _RandomState.here()
            self._give(1 - side)
            self.wait(side)
            draws.restore()
        if self._failed:
            raise _TheOtherFailed

    def wait(self, side: int) -> None:
        """Until it is this side's turn."""
        self._wakes[side].acquire()

    def end(self, side: int, failed: bool) -> bool:
        """This side is done, well or not; the other goes on, if it is not. Returns whether it does."""
        if self.now != side and not self.is_abandoned:  # interrupted while waiting
            self.wait(side)
        goes_on = not self._ended[1 - side]
        self._ended[side] = True
        if failed:
            self.fail()
        self._give(1 - side)
        return goes_on

    def fail(self) -> None:
        """Who goes on is to stop at its next turn."""
        self._failed = True

    def abandon(self) -> None:
        """The forward goes away whoever has the turn: the backward stops at its next one, or where it waits for one."""
        self.is_abandoned = self._failed = self._ended[_FORWARD] = True
        self._wakes[_BACKWARD].release()

    def _give(self, side: int) -> None:
        self.now = side
        self._wakes[side].release()


@dataclass(frozen=True)
class _RandomState:
    """Where torch's generators stand. A layer that is computed again, and is a user's own, repeats what it drew: it
    sets them back meanwhile. So each side of a pair goes on where it stood itself."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    """Of the current device; None without CUDA."""

    @classmethod
    def here(cls) -> "_RandomState":
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)

    def restore(self) -> None:
        """Neither this nor `here` waits for a device."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@dataclass
class _Job:
    """A backward for the other thread."""

    function: Callable[[], None]
    turns: _CooperativePair
    state: "ThreadState"
    error: BaseException | None = None

    def run(self) -> None:
        self.turns.wait(_BACKWARD)
        try:
            with self.state.entered():
                self.state.context.run(self.function)
        except BaseException as error:  # raised again where the pair was started
            self.error = error
        finally:
            self.turns.end(_BACKWARD, self.error is not None)


class Interleaver:
    """Runs pairs of a forward and a backward; a context manager, which has a thread from the first pair on."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Interleaver":
        return self

    def __exit__(self, *unused: Any) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def run(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        forward_turn: MicroBatchTurn,
        backward_turn: MicroBatchTurn,
    ) -> None:
        """Run both, the forward in this thread, which begins. An error of either ends both, at the next turn, and is
        raised as it was. So does an interrupt; a second one does not wait for the backward's turn to end."""
        turns = _CooperativePair()
        job = _Job(backward, turns, ThreadState.here())
        with forward_turn._taking_turns(turns, _FORWARD), backward_turn._taking_turns(turns, _BACKWARD):
            try:
                error = self._run_both(forward, job)
            except BaseException:
                turns.abandon()
                self._leave_thread()
                raise
        if error is None or isinstance(error, _TheOtherFailed):
            error = job.error
        if error is not None:
            try:
                raise error
            finally:
                del error, job  # whose frames hold this one

    def _run_both(self, forward: Callable[[], None], job: _Job) -> BaseException | None:
        """What ended the forward too early. Raises a second interrupt only, or one between turns."""
        error, turns = None, job.turns
        self._start(job)
        try:
            forward()
        except BaseException as raised:
            error = raised
        draws = _RandomState.here()
        if turns.end(_FORWARD, error is not None):
            try:
                turns.wait(_FORWARD)
            except BaseException as raised:  # an interrupt; nothing is left running
                error = raised
                turns.fail()
                turns.wait(_FORWARD)
            draws.restore()
        return error

    def _start(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._jobs,), name="backward of a pair", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def _leave_thread(self) -> None:
        """The thread ends when its job does; nobody waits for that."""
        self._jobs.put(None)
        self._jobs, self._thread = queue.SimpleQueue(), None

    @staticmethod
    def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
        while (job := jobs.get()) is not None:
            job.run()
            del job  # not held until the next comes


@dataclass(frozen=True)
class ThreadState:
    """What torch and Python keep by thread and a computation depends on."""

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Device types that cast by themselves, and to what."""
    caches_casts: bool
    stream: Any
    """The current CUDA stream, which names its device; None without CUDA."""
    context: contextvars.Context
    """To be run in."""

    @classmethod
    def here(cls) -> "ThreadState":
        """That of this thread."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
            ),
            torch.is_autocast_cache_enabled(),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
            contextvars.copy_context(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The same in the thread that enters."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caches_casts))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            yield
