"""metrics.jsonl: what is written, what a resumed run does to it, what a reader gets."""

import json
import math
import os

import pytest

from megatron.core.exceptions import UserError
from megatron.training.log.jsonl import JsonlLog, read_metrics, supersede, to_json
from megatron.training.log.records import Event, Speed, StepRecord, ValidationRecord

SPEED = Speed(seconds_per_iteration=0.5, tokens_per_second=100.0)


def step(iteration, loss=1.0, **other):
    return StepRecord(iteration, {"lm loss": loss}, consumed_samples=4 * iteration, tokens=40 * iteration, **other)


def write_run(path, first, last, resumed=0):
    log = JsonlLog(path, resumed)
    for iteration in range(first, last + 1):
        log.steps([step(iteration, loss=iteration + resumed / 1000)], SPEED)
    log.close()
    return log


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    log = JsonlLog(path)
    log.steps([step(1, grad_norm=0.5, learning_rate=1e-3, loss_scale=2.0, global_batch_size=4)], SPEED)
    log.steps([step(2, applied=False, num_zeros=3, params_norm=7.0)], Speed(0.25, None, 12.0, 0.4))
    log.validation(ValidationRecord(2, {"lm loss": 0.0}, consumed_samples=8, tokens=80, samples=2, seconds=1.5))
    log.event(Event("save", 2, {"path": "iter_0000002"}))
    log.close()
    assert lines(path) == [
        {"iteration": 1, "consumed samples": 4, "tokens": 40, "lm loss": 1.0, "grad norm": 0.5, "learning rate": 1e-3,
         "loss scale": 2.0, "global batch size": 4, "ms per iteration": 500.0, "tokens per second": 100.0},
        {"iteration": 2, "consumed samples": 8, "tokens": 80, "lm loss": 1.0, "global batch size": 0, "num zeros": 3,
         "params norm": 7.0, "ms per iteration": 250.0, "throughput (TFLOP/s/GPU)": 12.0, "mfu": 0.4, "skipped": True},
        {"iteration": 2, "split": "validation", "lm loss": 0.0, "lm loss PPL": 1.0, "consumed samples": 8,
         "seconds": 1.5, "evaluated tokens": 80, "evaluated samples": 2},
        {"iteration": 2, "event": "save", "path": "iter_0000002"},
    ]  # fmt: skip


def test_what_is_not_finite_is_null_and_said():
    text = to_json({"iteration": 1, "lm loss": math.nan, "grad norm": math.inf, "learning rate": 0.5})
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict["lm loss"] is None
    assert strict["non_finite"] == {"lm loss": "nan", "grad norm": "inf"}


def test_a_resumed_run_continues_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, 1, 10)
    log = write_run(path, 11, 20, resumed=10)
    assert log.superseded.lines == 0
    assert [line["iteration"] for line in lines(path)] == list(range(1, 21))
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_lines_beyond_the_checkpoint_are_superseded(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    write_run(path, 1, 14)
    log = write_run(path, 11, 20, resumed=10)
    assert (log.superseded.lines, log.superseded.torn) == (4, False)
    assert capsys.readouterr().out == f"{path}: 4 lines beyond iteration 10: moved to {log.superseded.path}\n"
    history = read_metrics(path)
    assert history.series("lm loss") == (
        list(range(1, 21)),
        [float(i) for i in range(1, 11)] + [i + 0.01 for i in range(11, 21)],
    )
    assert [line["iteration"] for line in lines(log.superseded.path)] == [11, 12, 13, 14]
    write_run(path, 1, 2)  # and a run from the start supersedes all
    assert [line["iteration"] for line in lines(path)] == [1, 2]
    assert len(lines(log.superseded.path)) == 24


def test_evaluations_that_are_done_again_are_superseded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kinds = ({"split": "validation"}, {"event": "save"}, {"split": "test"}, {"event": "exit"})
    path.write_text("".join(json.dumps({"iteration": number, **kind}) + "\n" for number in (1, 2) for kind in kinds))
    found = supersede(path, 2, evaluates_again=True)
    assert [line.get("event", line.get("split")) for line in lines(path)[4:]] == ["save", "exit"]
    assert (found.lines, [line["split"] for line in lines(found.path)]) == (2, ["validation", "test"])
    assert supersede(path, 2, evaluates_again=True).lines == 0


@pytest.mark.parametrize("keep", [1, 5, 30])
def test_a_line_torn_by_a_kill_is_cut(tmp_path, keep, capsys):
    path = tmp_path / "metrics.jsonl"
    write_run(path, 1, 3)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[: last + keep])
    assert read_metrics(path).series("lm loss")[0] == [1, 2]
    assert capsys.readouterr().err == f"warning: {path}: 1 lines are not JSON objects and are left out\n"
    log = write_run(path, 3, 4, resumed=2)
    assert (log.superseded.lines, log.superseded.torn) == (1, True)
    history = read_metrics(path)
    assert not capsys.readouterr().err
    assert history.series("lm loss")[0] == [1, 2, 3, 4]


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, 1, 3)
    path.write_bytes(path.read_bytes()[:-1])
    write_run(path, 4, 5, resumed=3)
    assert [line["iteration"] for line in read_metrics(path).training] == [1, 2, 3, 4, 5]


def test_the_cut_is_repeatable_after_a_kill_in_its_middle(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, 1, 5)
    before = path.read_bytes()
    supersede(path, 3)
    path.write_bytes(before)  # as if the process had died before the truncation
    supersede(path, 3)
    assert [line["iteration"] for line in lines(path)] == [1, 2, 3]


def test_a_full_disk_drops_lines_but_not_the_run(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path)
    log.steps([step(1)], SPEED)
    real, calls = os.write, []

    def full_after_ten_bytes(descriptor, content):
        if descriptor != log._file:
            return real(descriptor, content)
        calls.append(len(content))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, content[:10])

    monkeypatch.setattr(os, "write", full_after_ten_bytes)
    log.steps([step(2)], SPEED)
    log.steps([step(3)], SPEED)
    monkeypatch.setattr(os, "write", real)
    log.steps([step(4)], SPEED)
    log.close()
    assert log.dropped == 2
    assert capsys.readouterr().out.count("No space left on device") == 1
    history = read_metrics(path)
    assert history.series("lm loss")[0] == [1, 4] and ": 1 lines are not JSON" in capsys.readouterr().err


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--metrics-path .*file/metrics\.jsonl"):
        JsonlLog(tmp_path / "file" / "metrics.jsonl")


def test_reading_sorts_the_kinds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path)
    log.steps([step(1), step(2, loss=math.nan), step(3)], SPEED)
    log.validation(ValidationRecord(3, {"lm loss": 5.0}))
    log.validation(ValidationRecord(3, {"lm loss": 6.0}, split="test"))
    log.event(Event("exit", 3))
    history = read_metrics(path)
    assert history.series("lm loss") == ([1, 3], [1.0, 1.0])
    assert history.validation_series("lm loss") == ([3], [5.0])
    assert history.validation_series("lm loss", "test") == ([3], [6.0])
    assert [event["event"] for event in history.events] == ["exit"]
    with pytest.raises(UserError, match=r"none\.jsonl"):
        read_metrics(tmp_path / "none.jsonl")
