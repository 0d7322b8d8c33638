"""--log-progress: the file progress.txt in the folder of --save, with a line for each start, checkpoint and end."""

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.hooks.hook import Hook
from megatron.training.state import TrainState

FILE = "progress.txt"


class ProgressFile(Hook):
    """Appends lines to a file: time, SLURM job, ranks, event, and the work done so far. Only one rank has this hook.

    Raises UserError if the file cannot be written at the start. A later failure is printed, and the run continues.
    """

    def __init__(
        self, folder: str | Path, state: TrainState, world_size: int, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.path = Path(folder) / FILE
        self._state = state
        self._world_size = world_size
        self._now = now
        self._began = time.monotonic()
        self._operations_at_start = 0.0

    def on_start(self, iteration: int) -> None:
        """Writes that the job starts."""
        self._began, self._operations_at_start = time.monotonic(), self._state.floating_point_operations_so_far
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append("Starting job")
        except OSError as error:
            raise UserError(f"--log-progress: {self.path}: {error.strerror}") from None

    def after_save(self, iteration: int) -> None:
        """Writes that a checkpoint is complete, and the throughput of this job so far."""
        done = self._state.floating_point_operations_so_far - self._operations_at_start
        rate = done / (max(time.monotonic() - self._began, 1e-9) * 1e12 * self._world_size)
        throughput = f"Job throughput: {rate:.1f} TFLOP/s/GPU"
        self._try_append(f"Saved checkpoint\tIteration: {iteration}\t{throughput}\t{self._work()}")

    def on_exit(self, iteration: int) -> None:
        """Writes that the job ends."""
        self._try_append(f"Ending job\tIteration: {iteration}\t{self._work()}")

    def _work(self) -> str:
        tokens = self._state.consumed_tokens / 1e9
        operations = self._state.floating_point_operations_so_far
        return f"Floating-point operations: {operations:.2e}\tTokens (in billions): {tokens:.2f}"

    def _try_append(self, text: str) -> None:
        try:
            self._append(text)
        except OSError as error:
            print(f"WARNING: --log-progress: {self.path}: {error.strerror}", flush=True)

    def _append(self, text: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{self._now():%Y-%m-%d %H:%M:%S}\tJob ID: {job}\t# GPUs: {self._world_size}\t{text}\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
