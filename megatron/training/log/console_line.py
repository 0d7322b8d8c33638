"""The lines that a run prints, in the exact format that tools for Megatron-LM's logs expect."""

import math
from collections.abc import Mapping

from megatron.training.log.records import LogRecord, TaskRecord, ValidationRecord


def format_line(record: LogRecord) -> str:
    """Returns the log line of an iteration and, if there are timers, their lines below it. Leaves out values that the
    record lacks, and losses that are not positive."""
    step, speed = record.step, record.speed
    parts = [f"iteration {step.iteration:8d}/{record.train_iters:8d}", f"consumed samples: {step.consumed_samples:12d}"]
    if record.skipped_samples > 0:
        parts.append(f"skipped samples: {record.skipped_samples:12d}")
    parts.append(f"elapsed time per iteration (ms): {speed.seconds_per_iteration * 1000.0:.1f}")
    if record.shows_throughput and speed.tflops_per_device is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {speed.tflops_per_device:.1f}")
    if step.energy_joules is not None:
        parts.append(f"energy per GPU (J/iter/GPU): {step.energy_joules:.1f}")
    if step.power_watts is not None:
        parts.append(f"power per GPU (W/GPU): {step.power_watts:.1f}")
    if step.learning_rate is not None:
        parts.append(f"learning rate: {step.learning_rate:.6E}")
    if step.decoupled_learning_rate is not None:
        parts.append(f"decoupled learning rate: {step.decoupled_learning_rate:.6E}")
    parts.append(f"global batch size: {step.global_batch_size:5d}")
    parts += [f"{name}: {loss:.6E}" for name, loss in record.losses.items() if loss > 0.0]
    parts.append(f"loss scale: {1.0 if step.loss_scale is None else step.loss_scale:.1f}")
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f"num zeros: {step.num_zeros}")
    if step.params_norm is not None:
        parts.append(f"params norm: {step.params_norm:.3f}")
    if step.max_attention_logit is not None:
        parts.append(f"max attention logit: {step.max_attention_logit:.3f}")
    parts.append(f"number of skipped iterations: {record.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {record.nan_iterations:3d}")
    line = f" [{record.time:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(parts) + " |"
    return line if record.times is None else f"{line}\n{record.times}"


SHORT_WIDTH = 120
"""Largest number of columns of a line of --log-style short."""


def format_short_line(record: LogRecord) -> str:
    """Returns the log line of --log-style short and, if there are timers, their lines below it.

    The line always has the step, the first loss, tokens per second, memory and time left; if any occurred, also skipped
    steps and NaN. It also has utilisation, further losses, gradient norm and learning rate if the line then
    has at most 120 columns; otherwise the learning rate is left out first, and utilisation last.
    """
    width = len(str(record.train_iters))
    step, speed, losses = record.step, record.speed, list(record.losses.items())
    first = [f"step {step.iteration:{width}d}/{record.train_iters}"]
    first += [f"{name} {_short(loss, 4)}" for name, loss in losses[:1]]
    last = []
    if record.skipped_iterations or record.nan_iterations:
        last.append(f"skipped {record.skipped_iterations}, NaN {record.nan_iterations}")
    if speed.tokens_per_second is not None:
        rate = speed.tokens_per_second
        last.append(f"{_short(rate / 1e6, 2)}M tokens/s" if rate >= 1e6 else f"{rate:,.0f} tokens/s")
    mfu = [] if speed.mfu is None else [f"MFU {speed.mfu:.1%}"]
    last += mfu
    if step.memory is not None:
        last.append(f"{step.memory.peak / 2**30:.1f} GiB")
    if step.seconds_left is not None:
        last.append(f"{format_duration(step.seconds_left)} left")
    optional = [f"{name} {_short(loss, 4)}" for name, loss in losses[1:]]
    optional += [] if step.grad_norm is None else [f"grad norm {_short(step.grad_norm, 3)}"]
    optional += [] if step.learning_rate is None else [f"lr {step.learning_rate:.3e}"]
    spare = [*mfu, *optional]
    while spare and len(" | ".join([*first, *optional, *last])) > SHORT_WIDTH:
        (optional or last).remove(spare.pop())
    line = " | ".join([*first, *optional, *last])[:SHORT_WIDTH]
    return line if record.times is None else f"{line}\n{record.times}"


def _short(value: float, digits: int) -> str:
    """Returns a number with this many decimals; a million and more in scientific notation."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.2e}"


def format_short_validation(record: ValidationRecord) -> str:
    """Returns the line that ends an evaluation with --log-style short."""
    where = record.where or f"step {record.iteration}"
    losses = " | ".join(f"{name} {_short(loss, 4)}, PPL {perplexity(loss):.2f}" for name, loss in record.losses.items())
    return f"validation at {where} | {losses}"


def format_task(record: TaskRecord) -> str:
    """Returns the line of an evaluation task."""
    return f" task {record.task} at iteration {record.iteration} | {format_scores(record.scores, record.documents)} |"


def format_scores(scores: Mapping[str, tuple[float, float | None]], documents: int) -> str:
    """Returns the scores of a task, each with its standard error if it has one."""
    texts = [
        f"{metric}: {value:.6g}" + ("" if error is None else f" ± {error:.2g}")
        for metric, (value, error) in scores.items()
    ]
    return " | ".join([*texts, f"documents: {documents}"])


def format_duration(seconds: float) -> str:
    """Returns a duration as `1:02:03` or `3 d 1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days} d {clock}" if days else clock


def format_validation(record: ValidationRecord) -> str:
    """Returns the block of three lines that ends an evaluation."""
    where = record.where or f"iteration {record.iteration}"
    text = f" validation loss at {where} | "
    for name, loss in record.losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def perplexity(loss: float) -> float:
    """Returns exp(min(loss, 20)). NaN stays NaN."""
    return math.exp(20.0 if loss > 20.0 else loss)
