"""What a finished run has left for the gates: its metrics, and the flags and ranks in its newest checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.training.checkpoint_checks import command_line_in, ranks_of_checkpoint
from megatron.training.config.recorded_flags import read_recorded
from megatron.training.log.jsonl import MetricsHistory, read_metrics


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over, or still goes on."""

    metrics_path: Path
    metrics: MetricsHistory
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of its flags by field name; empty if there is no checkpoint that tells them."""
    ranks: int | None = None
    """Number of its ranks; None if no checkpoint tells it."""


def open_finished_run(path: Path) -> FinishedRun:
    """Opens a run by its folder (of --save) or by its metrics.jsonl. Raises UserError if there are no metrics."""
    folder = path if path.is_dir() else path.parent
    metrics = path / "metrics.jsonl" if path.is_dir() else path
    if not metrics.is_file():
        raise UserError(f"--run {path}: there is no metrics.jsonl; give the folder of --save, or the file itself")
    history = read_metrics(metrics)
    if not history.training:
        raise UserError(f"--run {path}: {metrics} has no training steps")
    try:
        checkpoint = find_checkpoint(folder, log=lambda text: None)
    except (UserError, OSError):  # its metrics can be judged without it
        checkpoint = None
    if checkpoint is None:
        return FinishedRun(metrics, history)
    values = read_recorded(command_line_in(checkpoint.folder, checkpoint.manifest)).values
    return FinishedRun(metrics, history, values, ranks_of_checkpoint(checkpoint))
