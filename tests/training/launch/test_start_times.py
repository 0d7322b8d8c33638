"""Clock readings at the start, and the hook of in-process restarts."""

import time

from megatron.training import set_startup_timestamps
from megatron.training.inprocess_restart import maybe_wrap_for_inprocess_restart  # type: ignore[import-not-found]
from megatron.training.launch.start_times import startup_line


def test_the_line_names_what_the_script_said() -> None:
    assert startup_line() is None
    now = time.time()
    set_startup_timestamps(program_start=now - 7, main_entry=now - 2)
    assert startup_line() == "ready to train: 7.0 s since the program began, 2.0 s since its main part began"
    assert startup_line() is None


def test_nothing_is_wrapped() -> None:
    assert maybe_wrap_for_inprocess_restart(len) == (len, None)
