"""The printed lines, character by character."""

import math
import re
from dataclasses import replace
from datetime import datetime

from megatron.training.log.console_line import (
    format_line,
    format_short_line,
    format_short_validation,
    format_task,
    format_validation,
    perplexity,
)
from megatron.training.log.memory import MemoryReport
from megatron.training.log.records import LogRecord, Speed, StepRecord, TaskRecord, ValidationRecord

RECORD = LogRecord(
    time=datetime(2026, 1, 2, 3, 4, 5, 678),
    step=StepRecord(
        100, {}, consumed_samples=1600, global_batch_size=16, learning_rate=1.5e-4, loss_scale=1.0, grad_norm=2.34567
    ),
    train_iters=500000,
    losses={"lm loss": 9.8765432},
    speed=Speed(0.123456),
)


def with_step(record, **values):
    return replace(record, step=replace(record.step, **values))


def test_plain_line():
    assert format_line(RECORD) == (
        " [2026-01-02 03:04:05.000678] iteration      100/  500000 | consumed samples:         1600 | "
        "elapsed time per iteration (ms): 123.5 | learning rate: 1.500000E-04 | global batch size:    16 | "
        "lm loss: 9.876543E+00 | loss scale: 1.0 | grad norm: 2.346 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_line_with_every_part():
    record = replace(
        RECORD,
        skipped_samples=32,
        speed=Speed(0.123456, tflops_per_device=401.23),
        shows_throughput=True,
        losses={"lm loss": 1.0, "sop loss": 0.5},
        skipped_iterations=3,
        nan_iterations=12,
    )
    step = {"energy_joules": 512.34, "power_watts": 700.0, "decoupled_learning_rate": 2e-4, "loss_scale": 65536.0}
    assert format_line(with_step(record, **step, num_zeros=17, params_norm=88.8888)) == (
        " [2026-01-02 03:04:05.000678] iteration      100/  500000 | consumed samples:         1600 | "
        "skipped samples:           32 | elapsed time per iteration (ms): 123.5 | "
        "throughput per GPU (TFLOP/s/GPU): 401.2 | energy per GPU (J/iter/GPU): 512.3 | power per GPU (W/GPU): 700.0 | "
        "learning rate: 1.500000E-04 | decoupled learning rate: 2.000000E-04 | global batch size:    16 | "
        "lm loss: 1.000000E+00 | sop loss: 5.000000E-01 | "
        "loss scale: 65536.0 | grad norm: 2.346 | num zeros: 17 | params norm: 88.889 | "
        "number of skipped iterations:   3 | number of nan iterations:  12 |"
    )


def test_a_loss_that_is_not_positive_is_left_out():
    for loss in (0.0, -1.0, math.nan):
        line = format_line(replace(RECORD, losses={"lm loss": loss}))
        assert "lm loss" not in line
        assert " | global batch size:    16 | loss scale: 1.0 | " in line


def test_common_scripts_find_the_values():
    found = re.search(r"iteration\s+(\d+)/\s*(\d+) \|.*lm loss: ([\d.E+-]+) \|", format_line(RECORD))
    assert found is not None
    assert found.groups() == ("100", "500000", "9.876543E+00")


def test_scores_of_a_task():
    record = TaskRecord(10, "capitals", {"acc": (0.5, 0.0987), "perplexity": (1234.5678, None)}, 26)
    expected = " task capitals at iteration 10 | acc: 0.5 ± 0.099 | perplexity: 1234.57 | documents: 26 |"
    assert format_task(record) == expected


def test_validation_block():
    block = format_validation(ValidationRecord(iteration=10, losses={"lm loss": 2.0}))
    text = " validation loss at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert block.split("\n") == ["-" * (len(text) + 1), text, "-" * (len(text) + 1)]


def test_validation_block_at_the_end_of_a_run():
    record = ValidationRecord(iteration=10, losses={"lm loss": 30.0}, where="iteration 10 on test set")
    assert " validation loss at iteration 10 on test set | lm loss value: 3.000000E+01 | " in format_validation(record)
    assert f"lm loss PPL: {math.exp(20):.6E} | " in format_validation(record)


def test_perplexity_of_nan_is_nan():
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == math.exp(20)


def test_short_line():
    """--log-style short"""
    memory = MemoryReport(0, 3 << 30, device_peak_allocated=62 << 30)
    speed = Speed(0.1, tokens_per_second=1234567.8, mfu=0.4123)
    record = with_step(replace(RECORD, speed=speed), memory=memory, seconds_left=93784.0)
    assert format_short_line(record) == (
        "step    100/500000 | lm loss 9.8765 | grad norm 2.346 | 1.23M tokens/s | MFU 41.2% | "
        "62.0 GiB | 1 d 2:03:04 left"
    )
    assert "grad norm 2.346 | lr 1.500e-04 | 62.0 GiB" in format_short_line(replace(record, speed=Speed(0.1)))
    plain = with_step(replace(RECORD, losses={}), memory=MemoryReport(0, 3 << 30), grad_norm=None, learning_rate=None)
    assert format_short_line(plain) == "step    100/500000 | 3.0 GiB"
    timed = format_short_line(replace(plain, times="times (ms):")).splitlines()
    assert timed == ["step    100/500000 | 3.0 GiB", "times (ms):"]


def test_a_short_line_fits():
    losses = {"lm loss": 9.8765432, **{f"mtp_{number} loss": 1.0 for number in range(20)}}
    speed = Speed(0.1, tokens_per_second=123456789.0, mfu=0.4123)
    record = replace(RECORD, losses=losses, speed=speed, skipped_iterations=3)
    record = with_step(record, memory=MemoryReport(0, 3 << 40), seconds_left=1e7)
    line = format_short_line(record)
    assert 100 < len(line) <= 120 and line.endswith("115 d 17:46:40 left")
    assert "lm loss 9.8765 |" in line and "skipped 3, NaN 0" in line
    huge = replace(record, losses={"lm loss": 1.5e38}, train_iters=10**9, speed=Speed(0.1, 9.9e13, mfu=0.4123))
    line = format_short_line(with_step(huge, grad_norm=3e37, iteration=10**9))
    assert "lm loss 1.50e+38 | skipped" in line and len(line) <= 120 and line.endswith("115 d 17:46:40 left")
    shorter = format_short_line(with_step(replace(record, skipped_iterations=0), seconds_left=60.0))
    assert "lm loss 9.8765 | mtp_0 loss 1.0000 | 123.46M" in shorter and 100 < len(shorter) <= 120


def test_short_validation():
    record = ValidationRecord(20, {"lm loss": 2.0})
    assert format_short_validation(record) == "validation at step 20 | lm loss 2.0000, PPL 7.39"
