"""The loss picture."""

import sys

import pytest

from megatron.core.exceptions import UserError
from megatron.training.logging.jsonl import JsonlLog
from megatron.training.logging.plot import plot_metrics
from megatron.training.logging.records import Event, Speed, StepRecord, ValidationRecord


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
