"""The picture of a sweep."""

import json
from pathlib import Path

import pytest

from megatron.training.log.plot_sweep import INDEX, plot_sweep


def test_the_picture_has_a_line_for_each_combination_of_the_other_values(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.axes")
    runs = [
        {"name": f"{width}-{rate}", "values": {"width": width, "lr": rate}} for width in "ab" for rate in ("1", "10")
    ]
    for number, run in enumerate(runs):
        (tmp_path / run["name"]).mkdir()
        line = {"iteration": 1, "split": "validation", "lm loss": number + 0.5}
        (tmp_path / run["name"] / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / INDEX).write_text(json.dumps(runs))
    drawn: list[tuple[object, ...]] = []
    plot = matplotlib.Axes.plot

    def recorded(axis: object, *values: object, **more: object) -> object:
        drawn.append(values)
        return plot(axis, *values, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            matplotlib.Axes, "plot", lambda self, *values, **more: drawn.append(values) or plot(self, *values, **more)
        )
        plot_sweep(tmp_path, tmp_path / "picture.png")
    assert [values[:2] for values in drawn] == [
        *(((1.0, 10.0), (0.5, 1.5)), (1.0, 0.5)),
        *(((1.0, 10.0), (2.5, 3.5)), (1.0, 2.5)),
    ]
