"""Plots the last losses of a sweep's runs against one of its values, a line for each combination of the others."""

import json
import math
import os
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.log.jsonl import read_metrics
from megatron.training.log.plot import new_figure, write_figure

INDEX = "sweep.json"
"""File in the folder of a sweep: name and values of each run."""
_LAST = 10
"""Training losses of so many last iterations are averaged if a run has no validation loss."""


def last_loss(folder: str | os.PathLike[str], loss: str = "lm loss") -> float | None:
    """Returns the last validation loss of a run, or without one the mean of its last training losses; None without
    either, or if the last one is not finite."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        return None
    history = read_metrics(path)
    validation = history.validation_series(loss)[1]
    values = validation[-1:] or history.series(loss)[1][-_LAST:]
    return sum(values) / len(values) if values else None


def plot_sweep(folder: str | os.PathLike[str], picture: str | os.PathLike[str], *, against: str | None = None) -> Path:
    """Plots the last loss of each run of a sweep against the value named `against` (default: the first one whose values
    are numbers), and marks the lowest of each line. Returns `picture`. Raises UserError if the folder is not that of a
    sweep, has no losses, or has no such value."""
    figure = new_figure((7, 5))
    try:
        runs = json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{Path(folder) / INDEX}: {error}; tools/sweep.py --run writes it") from error
    names = [against] if against is not None else [*runs[0]["values"]]
    numbers = [name for name in names if all(_number(run["values"].get(name, "")) is not None for run in runs)]
    if not numbers:
        raise UserError(f"{folder}: none of {', '.join(names)} is a number in each run of this sweep")
    name = numbers[0]
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        found = last_loss(Path(folder) / run["name"])
        others = ", ".join(f"{key} {value}" for key, value in run["values"].items() if key != name)
        place = _number(run["values"][name])
        if found is not None and place is not None:
            lines.setdefault(others, []).append((place, found))
    if not lines:
        raise UserError(f"{folder}: no run has a loss yet")
    axis = figure.subplots()
    for label, points in lines.items():
        points.sort()
        (drawn,) = axis.plot(*zip(*points, strict=True), "o-", label=label or None)
        axis.plot(*min(points, key=lambda point: point[1]), "*", color=drawn.get_color(), markersize=14)
    places = [place for points in lines.values() for place, _ in points]
    if min(places) > 0 and max(places) >= 4 * min(places):
        axis.set_xscale("log")
    axis.set_xlabel(name)
    axis.set_ylabel("last lm loss")
    axis.grid(alpha=0.3)
    if any(lines):
        axis.legend(fontsize="small")
    return write_figure(figure, Path(picture))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
