"""What a terminal and a file get to see."""

import io
import re
from datetime import datetime

from rich.console import Console

from megatron.training.log.console_line import format_duration, format_line, format_short_line
from megatron.training.log.display import SHORT, BarDisplay, PlainDisplay, make_display
from megatron.training.log.records import Event, LogRecord, Speed, StepRecord, ValidationRecord

SPEED = Speed(seconds_per_iteration=0.1, tokens_per_second=12345.0, tflops_per_device=400.0, mfu=0.404)


def line(iteration):
    return LogRecord(
        time=datetime(2026, 1, 2, 3, 4, 5),
        step=StepRecord(iteration, {}, tokens=64 * iteration, global_batch_size=8, learning_rate=1e-3, grad_norm=1.0),
        train_iters=100,
        losses={"lm loss": 2.5},
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
    assert type(make_display(100, console=console)) is PlainDisplay


def test_a_terminal_gets_whole_lines_above_a_bar():
    console = terminal()
    display = make_display(100, console=console)
    assert isinstance(display, BarDisplay)
    run(display)
    text = console.file.getvalue()
    # 80 columns are fewer than the line has; it must still come in one piece to be searched for.
    assert format_line(line(10)) in text
    assert format_line(line(20)) in text
    shown = without_codes(text)
    assert " validation loss at iteration 20 | lm loss value: 2.750000E+00 | " in shown
    assert "20 of 100 iterations" in shown.splitlines()[-1]


def test_redraws_between_lines_are_limited():
    console = terminal()
    display = BarDisplay(1000, console=console, refreshes_per_second=0.001)
    written = len(console.file.getvalue())
    for iteration in range(1, 200):
        display.progress(iteration)
    assert len(console.file.getvalue()) == written
    display.close()


def test_durations():
    assert format_duration(5) == "0:00:05"
    assert format_duration(3661.4) == "1:01:01"
    assert format_duration(90000) == "1 d 1:00:00"


def test_the_short_style():
    file = io.StringIO()
    run(make_display(100, console=Console(file=file), style=SHORT))
    assert file.getvalue().splitlines() == [
        format_short_line(line(10)),
        format_short_line(line(20)),
        "validation at step 20 | lm loss 2.7500, PPL 15.64",
    ]
