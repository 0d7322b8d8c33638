"""What a run tells of itself is kept where Megatron-LM's functions for scripts look for it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.facades import global_vars, parallel_state
from megatron.facades.num_microbatches_calculator import use_schedule
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.providers import Context, Providers
from megatron.training.publication import Publication


class PublishedRun(Publication):
    """Keeps the run in `global_vars`, `parallel_state` and `num_microbatches_calculator`."""

    @contextlib.contextmanager
    def stages(self, pipeline: Pipeline) -> Iterator[None]:
        """Inside the context, `parallel_state` knows these virtual stages."""
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        v_shaped = parallel_state.is_pipeline_v_shaped()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(
            pipeline.chunks if pipeline.chunks > 1 else None, v_shaped=pipeline.v_shaped
        )
        try:
            yield
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks, v_shaped=v_shaped)

    @contextlib.contextmanager
    def run_for_now(self, context: Context, **facts: Any) -> Iterator[None]:
        """Inside the context, this is the run of `get_args()`."""
        with global_vars.run_for_now(context, **facts):
            yield

    def begin(self, context: Context, **facts: Any) -> None:
        """Makes this the run of `get_args()`."""
        global_vars.set_current_run(context, **facts)

    def set_schedule(self, schedule: BatchSchedule) -> None:
        """Sets the schedule of `get_num_microbatches()`."""
        use_schedule(schedule)

    def set_writers(self, tensorboard: Any, wandb: Any) -> None:
        """Sets the results of `get_tensorboard_writer()` and `get_wandb_writer()`."""
        global_vars.set_writers(tensorboard, wandb)


def published(providers: Providers) -> Providers:
    """Returns the providers of a run that Megatron-LM's functions for scripts act on."""
    return dataclasses.replace(providers, publication=PublishedRun())
