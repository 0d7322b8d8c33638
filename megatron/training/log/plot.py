"""Plots runs in one picture: losses, and panels with learning rate, gradient norm, throughput or memory."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically
from megatron.training.log.jsonl import MetricsHistory, read_metrics

PANELS = {
    "throughput": (("tokens per second", "throughput (TFLOP/s/GPU)"), "throughput"),
    "memory": (("peak device memory (MB)", "device memory (MB)", "host memory (MB)"), "memory"),
    "grad-norm": (("grad norm",), "gradient norm"),
    "learning-rate": (("learning rate",), "learning rate"),
    "mix": ((), "share of samples"),
}
"""Panels below the losses. Each has a title and the names of values in the metrics; the first of these that a run has
is drawn. The mix has a line for each data set of a blend."""


@dataclass(frozen=True)
class _PlottedRun:
    label: str
    path: Path
    history: MetricsHistory
    colour: str


def plot_metrics(
    metrics: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    picture: str | os.PathLike[str],
    *,
    loss: str = "lm loss",
    title: str | None = None,
    labels: Sequence[str] = (),
    panels: Sequence[str] = (),
    smooth: int = 1,
    against: str = "iteration",
    levels: Mapping[str, float] | None = None,
    marked_steps: Sequence[int] = (),
) -> Path:
    """Plots one or several metrics.jsonl as a PNG. Returns `picture`.

    Args:
        labels: names of the runs; their folders when not given.
        panels: names of `PANELS`, drawn below the losses. A single run without panels has the learning rate on a second
            axis.
        smooth: draw training losses and panels as means over this many iterations; the losses themselves are drawn
            pale.
        against: the unit of the horizontal axis: "iteration", "tokens" or "consumed samples".
        levels: losses to draw as horizontal lines, by name.
        marked_steps: iterations of the first run to draw as vertical lines.

    Raises UserError if matplotlib or a file is missing, if `picture` cannot be written, if a run has no value of `loss`
    or of any panel, or if labels do not fit.
    """
    paths = [Path(path) for path in ([metrics] if isinstance(metrics, str | os.PathLike) else metrics)]
    runs = _open(paths, labels)
    for run in runs:
        if not run.history.series(loss)[0] and not run.history.validation_series(loss)[0]:
            raise UserError(f"{run.path}: no line has a value of {loss!r}")
    figure = new_figure((9, 5 + 2.2 * len(panels)))
    heights = [2.4, *([1.0] * len(panels))]
    axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for number, (name, value) in enumerate((levels or {}).items()):
        axes[0].axhline(value, color="tab:grey", linewidth=0.8, linestyle=":")
        axes[0].annotate(name, (0.01 + 0.3 * number, value), xycoords=("axes fraction", "data"), fontsize="small")
    for place in _places(runs[0], marked_steps, against):
        axes[0].axvline(place, color="tab:red", linewidth=0.8, linestyle=":")
    _draw_losses(axes[0], runs, loss, smooth, against, with_rate=len(runs) == 1 and not panels)
    for axis, panel in zip(axes[1:], panels, strict=True):
        _draw_panel(axis, runs, panel, smooth, against)
    axes[-1].set_xlabel(against)
    axes[0].set_title(title or (runs[0].label if len(runs) == 1 else f"{len(runs)} runs"), wrap=True)
    return write_figure(figure, Path(picture))


def new_figure(inches: tuple[float, float]) -> Any:
    """Returns an empty figure of this width and height. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system and no global backend
    except ImportError as error:
        raise UserError("drawing a picture needs the package matplotlib (pip install matplotlib)") from error
    return Figure(figsize=inches, dpi=120, layout="constrained")


def write_figure(figure: Any, picture: Path) -> Path:
    """Writes a figure as PNG or SVG, by the name, and returns the path. Raises UserError if it cannot be written."""
    if picture.is_dir():
        raise UserError(f"{picture} is a folder; name the picture to write")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(picture) as file:
            figure.savefig(file, format="svg" if picture.suffix == ".svg" else "png")
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}") from error
    return picture


def _open(paths: Sequence[Path], labels: Sequence[str]) -> list[_PlottedRun]:
    paths = [path / "metrics.jsonl" if path.is_dir() else path for path in paths]
    if labels and len(labels) != len(paths):
        raise UserError(f"{len(labels)} labels for {len(paths)} runs; give one for each")
    names = list(labels) or [path.parent.name or "training" for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [
        _PlottedRun(name, path, read_metrics(path), f"C{number}")
        for number, (name, path) in enumerate(zip(names, paths, strict=True))
    ]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Returns for each value the mean of the last `window` values up to it, or of fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = range(1, len(values) + 1)
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in ends]


def _places(run: _PlottedRun, iterations: Sequence[int], against: str) -> list[float]:
    """Returns the positions of iterations on the horizontal axis. Raises UserError if the metrics of the run do not
    have them."""
    if against == "iteration":
        return list(iterations)
    known = dict(zip(*run.history.series(against), strict=True))
    if any(iteration not in known for iteration in iterations):
        raise UserError(f"{run.path}: a line has no value of {against!r}, which the horizontal axis counts")
    return [known[iteration] for iteration in iterations]


def _draw_losses(axis: Any, runs: Sequence[_PlottedRun], loss: str, smooth: int, against: str, with_rate: bool) -> None:
    lines = []
    for run in runs:
        name = "" if len(runs) == 1 else f"{run.label}: "
        iterations, losses = run.history.series(loss)
        places = _places(run, iterations, against)
        if smooth > 1:
            axis.plot(places, losses, color=run.colour, linewidth=0.6, alpha=0.3)
        label = f"{name}training {loss}" + (f", mean of {smooth}" if smooth > 1 else "")
        lines += axis.plot(places, smoothed(losses, smooth), color=run.colour, linewidth=1.2, label=label)
        for split, style in (("validation", "o--"), ("test", "s:")):
            iterations, losses = run.history.validation_series(loss, split)
            if iterations:
                places = _places(run, iterations, against)
                lines += axis.plot(places, losses, style, color=run.colour, markersize=4, label=f"{name}{split} {loss}")
    if with_rate:
        lines += _draw_rate(axis, runs[0], against)
    axis.set_ylabel(loss)
    axis.grid(alpha=0.3)
    axis.legend(handles=lines, loc="upper right", fontsize="small")


def _draw_rate(axis: Any, run: _PlottedRun, against: str) -> list[object]:
    iterations, rates = run.history.series("learning rate")
    if not iterations:
        return []
    right = axis.twinx()
    places = _places(run, iterations, against)
    lines = right.plot(places, rates, "--", color="tab:grey", linewidth=1.0, label="learning rate")
    right.set_ylabel("learning rate")
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    right.set_ylim(bottom=0.0)
    return list(lines)


def _draw_panel(axis: Any, runs: Sequence[_PlottedRun], panel: str, smooth: int, against: str) -> None:
    keys, title = PANELS[panel]
    if panel == "mix":
        return _draw_mix(axis, runs, title, against)
    key = next((key for key in keys if any(run.history.series(key)[0] for run in runs)), None)
    if key is None:
        raise UserError(f"panel {panel}: no run has a value of {' or '.join(map(repr, keys))}")
    for run in runs:
        iterations, values = run.history.series(key)
        places = _places(run, iterations, against)
        marker = "." if len(values) < 50 else None  # memory has one value for each line of the log
        axis.plot(places, smoothed(values, smooth), color=run.colour, linewidth=1.0, marker=marker, label=run.label)
    axis.set_ylabel(key if key != title else title, fontsize="small")
    axis.set_ylim(bottom=0.0)
    axis.grid(alpha=0.3)


_SHARE = "share of samples on source "


def _draw_mix(axis: Any, runs: Sequence[_PlottedRun], title: str, against: str) -> None:
    """Draws the mix of the run so far: a colour for each data set, a style of line for each run."""
    keys = dict.fromkeys(key for run in runs for line in run.history.training for key in line if key.startswith(_SHARE))
    if not keys:
        raise UserError(f"panel mix: no run has a value of '{_SHARE}...'; runs with one data set have none")
    for run, style in zip(runs, itertools.cycle(("-", "--", ":", "-.")), strict=False):
        for number, key in enumerate(keys):
            iterations, shares = run.history.series(key)
            name = key.removeprefix(_SHARE) if len(runs) == 1 else f"{run.label}: {key.removeprefix(_SHARE)}"
            axis.plot(_places(run, iterations, against), shares, style, color=f"C{number}", linewidth=1.0, label=name)
    axis.set_ylabel(title, fontsize="small")
    axis.set_ylim(0.0, 1.0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
