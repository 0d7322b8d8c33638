"""Cooperative multitasking of two micro-batches in one process: the forward of one and the backward of another.

A layer with experts sends its tokens to other ranks and must wait for theirs. After a micro-batch has started such a
communication, it yields its turn. The other micro-batch computes until its own next communication, which hides the
communication of the first one. When the turn comes back, the first micro-batch waits for its result and continues.

The backward runs in its own thread, but only the side that has the turn runs: a turn is yielded, never taken away. The
order of all operations, collectives included, is therefore determined by the program alone and equal on all ranks, and
the results are those of the two passes in sequence. A side that has no communication left, or has ended, lets the other
side continue. On a GPU, taking turns means that the host issues kernels of both sides to one stream; the device never
waits.

Backward yields inside autograd nodes. So a forward step must not run a backward pass of its own on a GPU: autograd's
only thread for the device may be waiting for its turn.
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
    """The turn (see `micro_batch.CooperativeTurn`) of one micro-batch in one model chunk.

    The tensors that forward saves refer to it, so backward and recomputation of the micro-batch find it too. Yielding
    does nothing while the micro-batch runs alone.
    """

    def __init__(self) -> None:
        self._pair: _CooperativePair | None = None
        self._side = _FORWARD
        self._own_work: Callable[[], None] | None = None

    def yield_turn(self) -> None:
        """Lets the other micro-batch compute; returns when this one has the turn again."""
        if self._own_work is not None:
            self._own_work()
        if self._pair is not None:
            self._pair.yield_turn(self._side)

    @contextlib.contextmanager
    def own_work_first(self, work: Callable[[], None]) -> Iterator[None]:
        """Inside the context, every `yield_turn` calls `work` first, so that computation of this micro-batch itself
        hides its communication. This is also true while the micro-batch runs alone."""
        self._own_work = work
        try:
            yield
        finally:
            self._own_work = None

    @contextlib.contextmanager
    def _paired(self, pair: "_CooperativePair", side: int) -> Iterator[None]:
        self._pair, self._side = pair, side
        try:
            yield
        finally:
            if not (pair.is_abandoned and side == _BACKWARD):  # an abandoned backward still runs until its next turn
                self._pair = None


class _PartnerFailed(Exception):
    """Raised to end one side of a pair because the other side has raised an error. Only that error is shown."""


class _CooperativePair:
    """Records which side has the turn. Only that side reads or writes this object, unless the pair is abandoned."""

    def __init__(self) -> None:
        self.now = _FORWARD
        self.is_abandoned = False
        self._wakes = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._failed = False

    def yield_turn(self, side: int) -> None:
        assert self.now == side, "only the side that has the turn can yield it"
        if not self._ended[1 - side]:
            draws = _RandomState.here()
            self._give(1 - side)
            self.wait(side)
            draws.restore()
        if self._failed:
            raise _PartnerFailed

    def wait(self, side: int) -> None:
        """Blocks until this side has the turn."""
        self._wakes[side].acquire()

    def end(self, side: int, failed: bool) -> bool:
        """Marks this side as ended and gives the turn to the other one. Returns whether the other side is still
        running."""
        if self.now != side and not self.is_abandoned:  # interrupted while waiting
            self.wait(side)
        other_runs = not self._ended[1 - side]
        self._ended[side] = True
        if failed:
            self.fail()
        self._give(1 - side)
        return other_runs

    def fail(self) -> None:
        """Makes the side that still runs stop at its next turn."""
        self._failed = True

    def abandon(self) -> None:
        """Ends the forward without waiting for the turn. The backward stops at its next turn, or where it waits for
        one."""
        self.is_abandoned = self._failed = self._ended[_FORWARD] = True
        self._wakes[_BACKWARD].release()

    def _give(self, side: int) -> None:
        self.now = side
        self._wakes[side].release()


@dataclass(frozen=True)
class _RandomState:
    """The states of torch's random number generators.

    Recomputation of a user's layer sets the generators back for a while, to draw the same numbers again. Each side of a
    pair therefore restores the states that it had when it yielded.
    """

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    """State of the current device; None without CUDA."""

    @classmethod
    def here(cls) -> "_RandomState":
        """Returns the current states."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)

    def restore(self) -> None:
        """Sets the generators back to these states. Like `here`, it does not wait for a device."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@dataclass
class _Job:
    """A backward that the other thread runs."""

    function: Callable[[], None]
    pair: _CooperativePair
    state: "ThreadState"
    error: BaseException | None = None

    def run(self) -> None:
        """Runs the backward when it has the turn; keeps its error."""
        self.pair.wait(_BACKWARD)
        try:
            with self.state.entered():
                self.state.context.run(self.function)
        except BaseException as error:  # raised again by `Interleaver.run`
            self.error = error
        finally:
            self.pair.end(_BACKWARD, self.error is not None)


class Interleaver:
    """Runs pairs of a forward and a backward. A context manager: it starts a thread at the first pair and ends it."""

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
        """Runs both functions in turns: first the forward, in this thread.

        An error of one side ends the other at its next turn, and is raised unchanged. An interrupt does the same; a
        second interrupt does not wait until the backward has stopped.
        """
        pair = _CooperativePair()
        job = _Job(backward, pair, ThreadState.here())
        with forward_turn._paired(pair, _FORWARD), backward_turn._paired(pair, _BACKWARD):
            try:
                error = self._run_both(forward, job)
            except BaseException:
                pair.abandon()
                self._leave_thread()
                raise
        if error is None or isinstance(error, _PartnerFailed):
            error = job.error
        if error is not None:
            try:
                raise error
            finally:
                del error, job  # their frames refer to this frame

    def _run_both(self, forward: Callable[[], None], job: _Job) -> BaseException | None:
        """Returns the error that ended the forward, or None. Raises only a second interrupt, or one between turns."""
        error, pair = None, job.pair
        self._start(job)
        try:
            forward()
        except BaseException as raised:
            error = raised
        draws = _RandomState.here()
        if pair.end(_FORWARD, error is not None):
            try:
                pair.wait(_FORWARD)
            except BaseException as raised:  # an interrupt: wait until the backward has stopped too
                error = raised
                pair.fail()
                pair.wait(_FORWARD)
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
        """Lets the thread end after its job, without waiting for it."""
        self._jobs.put(None)
        self._jobs, self._thread = queue.SimpleQueue(), None

    @staticmethod
    def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
        while (job := jobs.get()) is not None:
            job.run()
            del job  # frees its tensors before the next job comes


@dataclass(frozen=True)
class ThreadState:
    """The per-thread settings of torch and Python that a computation depends on."""

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Device types under autocast, and the type that each casts to."""
    caches_casts: bool
    stream: Any
    """The current CUDA stream, which names its device; None without CUDA."""
    context: contextvars.Context
    """A copy of the context variables."""

    @classmethod
    def here(cls) -> "ThreadState":
        """Returns the settings of the calling thread."""
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
        """Applies the settings in the thread that enters, except for `context`, in which the caller runs its
        function."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caches_casts))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            yield
