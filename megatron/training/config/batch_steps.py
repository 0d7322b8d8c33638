"""The batch sizes of --step-batch-size-schedule."""

from megatron.core.exceptions import UserError
from megatron.training.batch_schedule import BatchSteps
from megatron.training.config.settings import Settings


def batch_steps(s: Settings) -> BatchSteps | None:
    """Returns the value of --step-batch-size-schedule; None without the flag or if the value is impossible."""
    if s.step_batch_size_schedule is None or not s.seq_length or s.seq_length < 1:
        return None
    try:
        return BatchSteps.parse(s.step_batch_size_schedule, s.seq_length)
    except UserError:  # the checks report it
        return None
