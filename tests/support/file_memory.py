"""`PeerMemory` for processes of one computer: memory is a shared file for each rank, and a lane is a thread.

A lane runs its operations later, after random delays, as a CUDA stream runs beside the one that computes.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


class FileMemory:
    """The memory of all ranks. Every rank makes it with the same folder and sizes."""

    def __init__(self, folder: Path, ranks: int, rank: int, nbytes: int, words: int, longest_delay: float) -> None:
        paths = [folder / f"memory {each}" for each in range(ranks)]
        for path in paths:
            path.touch()
        self._bytes = [
            torch.from_file(f"{path}", shared=True, size=nbytes + 4 * words, dtype=torch.uint8) for path in paths
        ]
        self._words = [memory[nbytes:].view(torch.int32) for memory in self._bytes]
        self.copies = ThreadLane(self._words, rank, longest_delay)
        self.signals = ThreadLane(self._words, rank, longest_delay)

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the tensor at byte `start` of a rank's memory."""
        numel = torch.Size(shape).numel()
        return self._bytes[rank][start : start + numel * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Ends the lanes' threads after their last operation."""
        self.copies.end()
        self.signals.end()


class ThreadLane:
    """A lane that is a thread. The current stream is the thread that calls, whose work so far is done."""

    def __init__(self, words: list[Tensor], rank: int, longest_delay: float) -> None:
        self._words, self._rank, self._delay = words, rank, longest_delay
        self._random = random.Random(rank)
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def follow(self) -> None:
        """Does nothing."""

    def lead(self) -> None:
        """Waits for the thread."""
        self._queue.join()

    def mark(self) -> Callable[[], None]:
        """Returns a function that waits for what the thread has been given so far."""
        done = threading.Event()
        self._queue.put(done.set)

        def wait() -> None:
            assert done.wait(60)

        return wait

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies later."""
        self._queue.put(lambda: target.copy_(source))

    def wait(self, word: int, value: int) -> None:
        """Looks at the word again and again."""

        def look() -> None:
            end = time.monotonic() + 60
            while int(self._words[self._rank][word]) < value:
                assert time.monotonic() < end, f"word {word} of rank {self._rank} did not become {value}"
                time.sleep(0.0002)

        self._queue.put(look)

    def write(self, rank: int, word: int, value: int) -> None:
        """Writes later."""
        self._queue.put(lambda: self._words[rank][word].fill_(value))

    def end(self) -> None:
        """Ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            if self._delay:
                time.sleep(self._random.random() * self._delay)
            operation()
            self._queue.task_done()
