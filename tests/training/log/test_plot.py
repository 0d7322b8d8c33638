"""The loss picture."""

import sys
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.training.log.jsonl import JsonlLog
from megatron.training.log.memory import MemoryReport
from megatron.training.log.plot import plot_metrics, smoothed
from megatron.training.log.records import Event, Speed, StepRecord, ValidationRecord


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path)
    for iteration in range(1, 30):
        log.steps([StepRecord(iteration, {"lm loss": 10.0 / iteration}, learning_rate=1e-3)], Speed(0.1))
    log.validation(ValidationRecord(29, {"lm loss": 0.5}))
    log.event(Event("exit", 29))
    log.close()
    return path


def test_picture(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    picture = plot_metrics(metrics, tmp_path / "new" / "loss.png")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert len(content) > 10_000
    assert list(picture.parent.iterdir()) == [picture]


def test_nothing_to_draw_is_said(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="no line has a value of 'sop loss'"):
        plot_metrics(metrics, tmp_path / "loss.png", loss="sop loss")
    with pytest.raises(UserError, match=r"none\.jsonl"):
        plot_metrics(tmp_path / "none.jsonl", tmp_path / "loss.png")


def test_a_missing_package_is_named(metrics, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="package matplotlib"):
        plot_metrics(metrics, tmp_path / "loss.png")


def drawn(monkeypatch):
    """Returns a list to which each picture adds its figure."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_runs_in_one_picture_with_panels(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name, speed in (("a", 10.0), ("b", 20.0)):
        log = JsonlLog(tmp_path / name / "metrics.jsonl")
        steps = [
            StepRecord(number, {"lm loss": 8.0 / number}, tokens=64 * number, memory=MemoryReport(number << 20, 0))
            for number in range(1, 9)
        ]
        log.steps(steps, Speed(0.1, speed))
        log.close()
    figures = drawn(monkeypatch)
    runs = [tmp_path / "a", tmp_path / "b" / "metrics.jsonl"]
    plot_metrics(
        runs, tmp_path / "p.png", labels=["x", "y"], panels=["throughput", "memory"], smooth=4, against="tokens"
    )
    (figure,) = figures
    losses, throughput, memory = figure.axes
    assert [line.get_label() for line in losses.lines if not line.get_label().startswith("_")] == [
        "x: training lm loss, mean of 4",
        "y: training lm loss, mean of 4",
    ]
    assert losses.lines[1].get_ydata()[3] == pytest.approx((8 + 4 + 8 / 3 + 2) / 4)
    assert [*losses.lines[0].get_xdata()] == [64 * number for number in range(1, 9)]
    assert throughput.get_ylabel() == "tokens per second" and [*throughput.lines[1].get_ydata()] == [20.0] * 8
    assert memory.get_ylabel() == "host memory (MB)" and memory.lines[0].get_ydata()[0] == 1.0


def test_smoothing_is_a_mean_of_the_last_values():
    assert smoothed([4.0, 2.0, 3.0, 7.0], 2) == [4.0, 3.0, 2.5, 5.0]
    assert smoothed([4.0, 2.0], 1) == [4.0, 2.0] and smoothed([], 3) == []


def test_labels_and_panels_that_do_not_fit(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="2 labels for 1 runs"):
        plot_metrics(metrics, tmp_path / "loss.png", labels=["a", "b"])
    with pytest.raises(UserError, match="panel memory: no run has a value of 'peak device memory"):
        plot_metrics(metrics, tmp_path / "loss.png", panels=["memory"])


def test_a_picture_that_cannot_be_written(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    for folder in (tmp_path, Path()):
        with pytest.raises(UserError, match=f"^{folder} is a folder; name the picture to write$"):
            plot_metrics(metrics, folder)
    with pytest.raises(UserError, match=r"file/loss\.png cannot be written: File exists$"):
        (tmp_path / "file").touch()
        plot_metrics(metrics, tmp_path / "file/loss.png")


def test_the_mix_has_a_line_for_each_data_set(metrics, tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes")
    log = JsonlLog(tmp_path / "mix" / "metrics.jsonl")
    for iteration, share in ((1, 0.25), (2, 0.5)):
        step = StepRecord(iteration, {"lm loss": 1.0}, mix={"a": share, "b": 1 - share})
        log.steps([step], Speed(0.1))
    log.close()
    drawn = {}
    plain = axes.Axes.plot

    def plot(axis, x, y, *style, **kwargs):
        drawn[kwargs.get("label")] = list(x), list(y)
        return plain(axis, x, y, *style, **kwargs)

    monkeypatch.setattr(axes.Axes, "plot", plot)
    plot_metrics(tmp_path / "mix", tmp_path / "mix.png", panels=["mix"])
    assert drawn["a"] == ([1, 2], [0.25, 0.5]) and drawn["b"] == ([1, 2], [0.75, 0.5])
    with pytest.raises(UserError, match=r"panel mix: no run has a value of 'share of samples on source \.\.\.'"):
        plot_metrics(metrics, tmp_path / "mix.png", panels=["mix"])
