"""Where a run tells its parts to code that they are not handed to.

Megatron-LM's functions for scripts (`get_args()`, `get_num_microbatches()`, `parallel_state`) act on the current run.
The run itself does not know them: it is handed a `Publication`, and `megatron.facades.published_run` has theirs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.training.batch_schedule import BatchSchedule


class Publication:
    """Tells nobody. A subclass keeps what it is told. A `context` is the run's `providers.Context`."""

    @contextlib.contextmanager
    def stages(self, pipeline: Pipeline) -> Iterator[None]:
        """Inside the context, these are the pipeline stages of the current run."""
        yield

    @contextlib.contextmanager
    def run_for_now(self, context: Any, **facts: Any) -> Iterator[None]:
        """Inside the context, this is the current run. At the end the one before is, if there was one."""
        yield

    def begin(self, context: Any, **facts: Any) -> None:
        """Makes this the current run. `facts` are further values that scripts may read."""

    def set_schedule(self, schedule: BatchSchedule) -> None:
        """Tells the batch sizes of the current run."""

    def set_writers(self, tensorboard: Any, wandb: Any) -> None:
        """Tells the writers of the log."""
