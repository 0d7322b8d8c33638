"""The loop's log as a whole: when lines come, what they average, what goes into the file."""

import math
import re
from datetime import datetime

import pytest
import torch
from support.step_results import step

from megatron.core.timers import Timers
from megatron.training.log import training_log
from megatron.training.log.console_line import format_line
from megatron.training.log.energy import EnergyMeter
from megatron.training.log.jsonl import JsonlLog, read_metrics
from megatron.training.log.memory import MemoryReport
from megatron.training.log.metrics import StepMetrics
from megatron.training.log.records import LogWriter, ValidationRecord
from megatron.training.log.tensorboard import ScalarLog, TagChoices
from megatron.training.log.training_log import TrainingLog


class Lines(LogWriter):
    def __init__(self):
        self.lines, self.seen, self.closed = [], [], 0

    def line(self, record):
        self.lines.append(record)

    def progress(self, iteration):
        self.seen.append(iteration)

    def close(self):
        self.closed += 1


def make_log(path, writer, **arguments):
    return TrainingLog(
        StepMetrics("cpu"),
        [JsonlLog(path), writer],
        train_iters=10,
        tokens_per_sample=32,
        flops_per_sample=1e9,
        now=lambda: datetime(2026, 1, 2),
        **arguments,
    )


def take_steps(log, first, last, loss=float, **values):
    named = []
    for iteration in range(first, last + 1):
        named += log.step(
            *step(
                iteration,
                [{"lm loss": torch.tensor([loss(iteration), 1.0])}],
                consumed_samples=4 * iteration,
                tokens=128 * iteration,
                global_batch_size=4,
                learning_rate=torch.tensor(0.1, dtype=torch.float64),
                **values,
            )
        )
    return named


def test_lines_come_after_the_first_iteration_and_at_the_interval(tmp_path):
    writer = Lines()
    log = make_log(tmp_path / "metrics.jsonl", writer, log_interval=4, log_throughput=True)
    log.start(0)
    take_steps(log, 1, 10)
    log.close()
    assert [record.step.iteration for record in writer.lines] == [1, 4, 8]
    assert [record.losses["lm loss"] for record in writer.lines] == [1.0, 2.5, 6.5]  # the first did not reset
    assert "throughput per GPU" in format_line(writer.lines[1]) and writer.lines[1].speed.tokens_per_second > 0.0
    assert writer.seen == list(range(1, 11))
    assert writer.closed == 1
    # The file has every iteration once, also those after the last line.
    assert read_metrics(tmp_path / "metrics.jsonl").series("lm loss") == (
        list(range(1, 11)),
        [float(i) for i in range(1, 11)],
    )
    assert "learning rate: 1.000000E-01 | global batch size:     4 | lm loss: 2.500000E+00 |" in format_line(
        writer.lines[1]
    )


def test_a_line_says_how_many_samples_the_run_skipped(tmp_path):
    writer = Lines()
    log = make_log(tmp_path / "metrics.jsonl", writer, log_interval=1)
    log.start(0)
    take_steps(log, 1, 1)
    take_steps(log, 2, 2, skipped_samples=32)
    assert "skipped samples:" not in format_line(writer.lines[0])
    assert "| skipped samples:           32 |" in format_line(writer.lines[1])


def test_times_of_the_parts_of_a_step(tmp_path):
    """They follow the log line, and stand in the file with the interval's last iteration."""
    writer, timers = Lines(), Timers(1, "max")
    log = make_log(tmp_path / "metrics.jsonl", writer, log_interval=2, timers=timers)
    log.start(0)
    for iteration in range(1, 5):
        timers("optimizer", 1)._spans.append((0.0, 0.01 * iteration))
        take_steps(log, iteration, iteration)
    assert [re.search(r"optimizer:\.+ (.*)", record.times)[1] for record in writer.lines] == ["10.00", "15.00", "35.00"]
    assert format_line(writer.lines[-1]).endswith(f" |\n{writer.lines[-1].times}")
    log.close()
    times = [line.get("optimizer ms") for line in read_metrics(tmp_path / "metrics.jsonl").training]
    assert times == [pytest.approx(10.0), pytest.approx(15.0), None, pytest.approx(35.0)]


def test_a_line_of_the_file_at_each_log_line_has_memory_and_time_left(tmp_path):
    log = make_log(tmp_path / "metrics.jsonl", Lines(), log_interval=2)
    time = [0.0]
    log._since_line._now = log._since_flush._now = lambda: time[0]
    log.start(0)
    for iteration in range(1, 5):
        time[0] += 3.0
        take_steps(log, iteration, iteration)
    log.close()
    training = read_metrics(tmp_path / "metrics.jsonl").training
    assert [line.get("seconds left") for line in training] == [27.0, 24.0, None, 18.0]  # of 10 iterations
    assert [line.get("host memory (MB)", 0) > 10 for line in training] == [True, True, False, True]
    assert "device memory (MB)" not in training[0]


def test_the_memory_of_a_rank_is_printed_once(tmp_path, capsys):
    log = make_log(tmp_path / "metrics.jsonl", Lines(), log_interval=1, reports_memory=True)
    log.start(10)
    take_steps(log, 11, 12)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[Rank 0] (after 11 iterations) memory (MB) | host: ")


def test_memory_is_reported_at_an_interval(tmp_path, capsys):
    """--log-memory-interval does not depend on --log-interval."""
    log = make_log(tmp_path / "metrics.jsonl", Lines(), log_interval=4, reports_memory=True, memory_interval=3)
    log.start(1)
    take_steps(log, 2, 7)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(")")[0] for line in lines] == [f"[Rank 0] (after {n} iterations" for n in (2, 3, 6)]


def test_memory_of_the_whole_device_stands_where_it_was_read(tmp_path, monkeypatch, capsys):
    """--log-device-memory-used: the report, the file and TensorBoard; read for log lines and reports only."""
    asked = []

    def report(device, *, device_used=False):
        asked.append(device_used)
        return MemoryReport(1 << 30, 1 << 30, 0, 0, 0, 0, 0, device_used=(5 << 30) if device_used else None)

    monkeypatch.setattr(training_log, "memory_report", report)
    scalars = []
    board = ScalarLog(lambda *point: scalars.append(point), TagChoices())
    log = make_log(tmp_path / "metrics.jsonl", board, log_interval=3, reports_memory=True, device_memory_used=True)
    log.start(0)
    take_steps(log, 1, 4)
    log.close()
    assert asked == [True, True, True]  # two lines, one report
    assert "| device memory used: 5120" in capsys.readouterr().out
    training = read_metrics(tmp_path / "metrics.jsonl").training
    assert [line.get("device memory used (MB)") for line in training] == [5120.0, None, 5120.0, None]
    assert [point[1:] for point in scalars if point[0] == "mem-device-used-bytes"] == [(5 << 30, 1), (5 << 30, 3)]


def test_energy_of_a_step(tmp_path):
    """--log-energy: of training steps alone, in the line, the file and TensorBoard."""
    joules, time, writer, scalars = [0.0], [0.0], Lines(), []
    board = ScalarLog(lambda *point: scalars.append(point), TagChoices())
    log = make_log(
        tmp_path / "metrics.jsonl", writer, log_interval=2, energy=EnergyMeter(torch.device("cpu"), lambda: joules[0])
    )
    log.writers += (board,)
    log._since_line._now = log._since_flush._now = lambda: time[0]
    log.start(0)
    for iteration in range(1, 5):
        joules[0] += 600.0 * iteration
        time[0] += 2.0
        take_steps(log, iteration, iteration)
        with log.paused():  # an evaluation
            joules[0] += 1e6
    log.close()
    assert [(record.step.energy_joules, record.step.power_watts) for record in writer.lines] == [
        (600.0, 300.0),
        (900.0, 450.0),  # the first line did not reset
        (2100.0, 1050.0),
    ]
    assert " | energy per GPU (J/iter/GPU): 2100.0 | power per GPU (W/GPU): 1050.0 | " in format_line(writer.lines[-1])
    training = read_metrics(tmp_path / "metrics.jsonl").training
    assert [line.get("energy per GPU (J/iter/GPU)") for line in training] == [600.0, 900.0, None, 2100.0]
    assert [point[1:] for point in scalars if point[0] == "power-per-gpu"] == [(300.0, 1), (450.0, 2), (1050.0, 4)]


def test_an_interval_of_one_never_averages_two_iterations(tmp_path):
    writer = Lines()
    log = make_log(tmp_path / "metrics.jsonl", writer, log_interval=1)
    log.start(0)
    take_steps(log, 1, 3)
    assert [record.losses["lm loss"] for record in writer.lines] == [1.0, 2.0, 3.0]


def test_a_save_between_two_lines_loses_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = make_log(path, Lines(), log_interval=100)
    log.start(0)
    take_steps(log, 1, 5)
    with log.paused():
        log.event("save", 5)
    take_steps(log, 6, 7)
    # Killed here; the next process resumes from the checkpoint of iteration 5.
    writer = Lines()
    resumed = TrainingLog(
        StepMetrics("cpu"),
        [JsonlLog(path, 5), writer],
        train_iters=10,
        log_interval=10,
        now=lambda: datetime(2026, 1, 2),
    )
    resumed.start(5)
    take_steps(resumed, 6, 10)
    resumed.validation(ValidationRecord(10, {"lm loss": 1.0}))
    resumed.close()
    history = read_metrics(path)
    assert history.series("lm loss")[0] == list(range(1, 11))
    assert [record.step.iteration for record in writer.lines] == [6, 10]
    assert history.validation_series("lm loss") == ([10], [1.0])


def test_pauses_are_no_training_time(tmp_path):
    writer = Lines()
    log = make_log(tmp_path / "metrics.jsonl", writer, log_interval=2)
    time = [0.0]
    log._since_line._now = log._since_flush._now = lambda: time[0]
    log.start(0)
    time[0] = 1.0
    take_steps(log, 1, 1)
    with log.paused():
        time[0] = 100.0
    time[0] = 102.0
    take_steps(log, 2, 2)
    assert [record.speed.seconds_per_iteration for record in writer.lines] == [1.0, 1.5]
    training = read_metrics(tmp_path / "metrics.jsonl").training
    assert [line["ms per iteration"] for line in training] == [1000.0, 2000.0]
    assert [line["tokens per second"] for line in training] == [128.0, 64.0]


def test_what_is_not_finite_is_printed_logged_and_returned(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = make_log(path, Lines(), log_interval=3)
    log.start(0)
    (found,) = take_steps(log, 1, 3, loss=lambda i: math.nan if i == 2 else 1.0, sample_ids=[[5, 6]])
    assert (found.iteration, found.sample_ids) == (2, (5, 6))
    assert "non-finite: rank 0, iteration 2: lm loss is nan in micro-batch 0, samples [5, 6]" in capsys.readouterr().err
    log.close()
    history = read_metrics(path)
    assert [(event["event"], event["iteration"]) for event in history.events] == [("non-finite", 2)]
    assert history.training[1]["non_finite"] == {"lm loss": "nan"}
