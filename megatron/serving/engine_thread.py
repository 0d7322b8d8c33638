"""The thread that writes texts, and texts as asynchronous streams of their tokens."""

import asyncio
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence

import torch

from megatron.core.inference.engine import Engine, Progress, TextRequest
from megatron.core.inference.sampling import TextSoFar

_IDLE_SECONDS = 2.0
"""Time between two signs of life to the other ranks while there is nothing to write."""


class EngineThread(threading.Thread):
    """Calls `Engine.step` for as long as there are texts to write. The other threads submit and cancel texts."""

    def __init__(self, engine: Engine, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called from the thread if it ends by an error."""
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._ends = False
        self._told: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Progress], Progress]] = []
        """What the current step has told, for the threads of the texts' loops."""

    def run(self) -> None:
        """Writes texts until `stop` is called or an error ends it."""
        device = self.engine.forward.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            while not self._ends:
                self._step()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self.failure = error
            self.engine.fail(f"the server failed: {type(error).__name__}")
            self._deliver()
            self._on_failure()
            return
        self.engine.fail("the server ends")
        self._deliver()
        self.engine.stop()

    def _step(self) -> None:
        if not self.engine.has_work:
            if not self._wake.wait(_IDLE_SECONDS):
                self.engine.idle()
            self._wake.clear()
            return
        try:
            self.engine.step()
        except torch.OutOfMemoryError as error:
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise  # the other ranks wait for this one
            print(f"no memory left: {error}", file=sys.stderr, flush=True)
            self.engine.fail("the device has no memory left; ask for fewer tokens, or serve with a smaller cache")
            torch.cuda.empty_cache()
        self._deliver()

    def _deliver(self) -> None:
        """Hands what a step has told to the loops, at once: a call for each text would wake a loop, which then takes
        the interpreter from this thread, as many times in a step as there are texts."""
        told, self._told = self._told, []
        for loop in {loop for loop, _, _ in told}:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, [(queue, progress) for own, queue, progress in told if own is loop])

    def stop(self) -> None:
        """Ends the thread after the current step. Texts that are not finished end with an error."""
        self._ends = True
        self._wake.set()

    async def write(
        self, text: TextSoFar, max_new_tokens: int, num_logprobs: int | None, scores_prompt: bool
    ) -> AsyncGenerator[Progress, None]:
        """Yields the progress of a text until it is finished. If the caller stops before, the text is cancelled. Raises
        UserError if it can never fit."""
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(progress: Progress) -> None:
            self._told.append((loop, queue, progress))

        request = TextRequest(text, max_new_tokens, tell, num_logprobs, scores_prompt)
        if self._ends or self.failure is not None:
            yield Progress(finish="error", error="the server ends")
            return
        self.engine.submit(request)
        self._wake.set()
        finished = False
        try:
            while not finished:
                progress = await queue.get()
                finished = progress.finish is not None
                yield progress
        finally:
            if not finished:
                self.engine.cancel(request)
                self._wake.set()


def _put_all(told: Sequence[tuple[asyncio.Queue[Progress], Progress]]) -> None:
    for queue, progress in told:
        queue.put_nowait(progress)
