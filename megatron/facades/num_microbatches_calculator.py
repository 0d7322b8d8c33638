"""Megatron-LM's functions for scripts about the number of micro-batches. They act on one schedule, that of the current
run."""

import logging
from collections.abc import Sequence

from megatron.core.exceptions import UserError
from megatron.training.batch_schedule import BatchSchedule, RampUp

logger = logging.getLogger(__name__)

_schedule: BatchSchedule | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Creates the schedule of the functions below. Raises UserError if there is one already."""
    if _schedule is not None:
        raise UserError(
            "the micro-batches calculator exists already: call reconfigure_num_microbatches_calculator, or "
            "destroy_num_microbatches_calculator first"
        )
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Replaces the schedule."""
    global _schedule
    if rampup_batch_size is not None and len(rampup_batch_size) != 3:
        raise UserError(f"--rampup-batch-size takes three numbers: start, increment, samples; got {rampup_batch_size}")
    rampup = RampUp(*map(int, rampup_batch_size)) if rampup_batch_size is not None else None
    _schedule = BatchSchedule(
        global_batch_size, micro_batch_size, data_parallel_size, rampup, decrease_batch_size_if_needed
    )


def use_schedule(schedule: BatchSchedule) -> None:
    """Sets a schedule that the caller advances."""
    global _schedule
    _schedule = schedule


def unset_num_microbatches_calculator() -> None:
    """Removes the schedule."""
    global _schedule
    _schedule = None


destroy_num_microbatches_calculator = unset_num_microbatches_calculator


def _kept() -> BatchSchedule:
    if _schedule is None:
        raise UserError("call init_num_microbatches_calculator first")
    return _schedule


def get_num_microbatches() -> int:
    """Returns the number of micro-batches of a step on each data parallel rank, now."""
    return _kept().num_microbatches


def get_current_global_batch_size() -> int:
    """Returns the scheduled global batch size now."""
    return _kept().scheduled_global_batch_size


def get_current_running_global_batch_size() -> int:
    """Returns the number of samples of a step now: the scheduled size, possibly rounded down."""
    return _kept().global_batch_size


def get_micro_batch_size() -> int:
    """Returns the number of samples of a micro-batch on one data parallel rank."""
    return _kept().micro_batch_size


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Sets the sizes for the step that starts after `consumed_samples`."""
    kept = _kept()
    before = kept.global_batch_size
    kept.update(consumed_samples, consistency_check)
    if verbose and kept.global_batch_size != before:
        logger.info("global batch size is %d from sample %d on", kept.global_batch_size, consumed_samples)
