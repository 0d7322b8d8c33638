"""What a terminal and a file get to see."""

import io
import math
import re
from datetime import datetime

from rich.console import Console

from megatron.training.log.console_line import format_duration, format_line, format_short_line
from megatron.training.log.display import SHORT, LiveDisplay, PlainDisplay, make_display, sparkline
from megatron.training.log.records import Event, LogRecord, Speed, StepRecord, ValidationRecord

SPEED = Speed(seconds_per_iteration=0.1, tokens_per_second=12345.0, tflops_per_device=400.0, mfu=0.404)


def line(iteration):
    return LogRecord(
        time=datetime(2026, 1, 2, 3, 4, 5),
        iteration=iteration,
        train_iters=100,
        consumed_samples=8 * iteration,
        global_batch_size=8,
        elapsed_ms_per_iteration=100.0,
        learning_rate=1e-3,
        losses={"lm loss": 2.5},
        grad_norm=1.0,
        tokens=64 * iteration,
        speed=SPEED,
    )


def run(display):
    for iteration in (10, 20):
        display.progress(iteration)
        display.steps([StepRecord(iteration, {"lm loss": 2.5}, applied=iteration != 20)], SPEED)
        display.line(line(iteration))
    display.validation(ValidationRecord(20, {"lm loss": 2.75}))
    display.event(Event("save", 20))
    display.close()


def terminal(width=80):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, _environ={"TERM": "xterm-256color"})


def without_codes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_file_gets_megatron_lms_lines_and_nothing_else():
    console = Console(file=io.StringIO())
    run(make_display(100, console=console))
    text = console.file.getvalue()
    assert text.startswith(format_line(line(10)) + "\n" + format_line(line(20)) + "\n----")
    assert text.count("\n") == 5
    assert "\x1b" not in text


def test_a_dumb_terminal_gets_plain_lines():
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display(100, console=console), PlainDisplay)


def test_a_terminal_gets_whole_lines_above_a_panel():
    console = terminal()
    display = make_display(100, console=console)
    assert isinstance(display, LiveDisplay)
    run(display)
    text = console.file.getvalue()
    # 80 columns are fewer than the line has; it must still come in one piece to be searched for.
    assert format_line(line(10)) in text
    assert format_line(line(20)) in text
    shown = without_codes(text)
    assert " validation loss at iteration 20 | lm loss value: 2.750000E+00 | " in shown
    panel = shown[shown.rindex("╭") :]
    for fact in (
        "20 of 100 iterations",
        "2.5000",
        "1.000e-03",
        "12,345 tokens/s",
        "400.0 TFLOP/s",
        "MFU 40.4%",
        "0:00:08",
        "lm loss 2.7500 at iteration 20",
        "iteration 20",
        "1 updates",
    ):
        assert fact in panel, fact


def test_redraws_between_lines_are_limited():
    console = terminal()
    display = LiveDisplay(1000, console=console, refreshes_per_second=0.001)
    written = len(console.file.getvalue())
    for iteration in range(1, 200):
        display.progress(iteration)
    assert len(console.file.getvalue()) == written
    display.close()


def test_sparkline():
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([0.0, math.nan, 7.0], 10) == "▁×█"
    assert sparkline([math.inf], 10) == "×"
    assert len(sparkline(range(100), 10)) == 10


def test_durations():
    assert format_duration(5) == "0:00:05"
    assert format_duration(3661.4) == "1:01:01"
    assert format_duration(90000) == "1 d 1:00:00"


def test_the_short_style_has_a_bar_on_a_terminal_and_lines_in_a_file():
    console = terminal(120)
    run(make_display(100, console=console, style=SHORT))
    shown = without_codes(console.file.getvalue())
    assert format_short_line(line(20)) in shown and "20 of 100 iterations" in shown
    assert "training" not in shown and max(map(len, shown.splitlines())) <= 120
    file = io.StringIO()
    run(make_display(100, console=Console(file=file), style=SHORT))
    assert file.getvalue().splitlines() == [
        format_short_line(line(10)),
        format_short_line(line(20)),
        "validation at step 20 | lm loss 2.7500, PPL 15.64",
    ]
