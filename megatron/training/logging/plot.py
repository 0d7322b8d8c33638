"""Plots a run: losses, and the learning rate on a second axis."""

import os
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically
from megatron.training.logging.jsonl import MetricsHistory, read_metrics


def plot_metrics(
    metrics: str | os.PathLike[str], picture: str | os.PathLike[str], *, loss: str = "lm loss", title: str | None = None
) -> Path:
    """Plots a metrics.jsonl as a PNG: training and validation loss, learning rate on the right. Returns `picture`.

    Raises UserError if matplotlib or the file is missing, or if the file has no value of `loss`.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system and no global backend
    except ImportError as error:
        raise UserError("drawing a picture needs the package matplotlib (pip install matplotlib)") from error
    history = read_metrics(metrics)
    if not history.series(loss)[0] and not history.validation_series(loss)[0]:
        raise UserError(f"{os.fspath(metrics)}: no line has a value of {loss!r}")
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axis = figure.subplots()
    _draw(axis, history, loss)
    axis.set_title(title or Path(metrics).parent.name or "training")
    picture = Path(picture)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(picture) as file:
        figure.savefig(file, format="png")
    return picture


def _draw(axis: Any, history: MetricsHistory, loss: str) -> None:
    iterations, losses = history.series(loss)
    lines = axis.plot(iterations, losses, color="tab:blue", linewidth=1.2, label=f"training {loss}")
    for split, colour in (("validation", "tab:orange"), ("test", "tab:red")):
        iterations, losses = history.validation_series(loss, split)
        if iterations:
            lines += axis.plot(iterations, losses, "o-", color=colour, markersize=4, label=f"{split} {loss}")
    iterations, rates = history.series("learning rate")
    if iterations:
        right = axis.twinx()
        lines += right.plot(iterations, rates, "--", color="tab:grey", linewidth=1.0, label="learning rate")
        right.set_ylabel("learning rate")
        right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        right.set_ylim(bottom=0.0)
    axis.set_xlabel("iteration")
    axis.set_ylabel(loss)
    axis.grid(alpha=0.3)
    axis.legend(handles=lines, loc="upper right")
