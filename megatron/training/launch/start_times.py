"""Clock readings at the start of a run, and Megatron-LM's hook for a restart within the process."""

import time
from collections.abc import Callable


class _Started:
    """Times of a start as the script gave them, in seconds since the epoch."""

    program: float | None = None
    main: float | None = None


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None) -> None:
    """Keeps `time.time()` of the first line of a script and of its main part. `pretrain` reports how long the start
    took."""
    _Started.program = program_start if program_start is not None else _Started.program
    _Started.main = main_entry if main_entry is not None else _Started.main


def startup_line() -> str | None:
    """Returns the seconds since the program and its main part began, as a line; None if the script did not say when.
    Forgets the readings, which are those of one run."""
    now, found = time.time(), {"the program": _Started.program, "its main part": _Started.main}
    _Started.program = _Started.main = None
    parts = [f"{now - begun:.1f} s since {what} began" for what, begun in found.items() if begun is not None]
    return f"ready to train: {', '.join(parts)}" if parts else None


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., object]) -> tuple[Callable[..., object], None]:
    """Returns `pretrain` itself, and None for its argument `store`. The flag --inprocess-restart is refused when the
    command line is read: a launcher that restarts the processes continues from the newest checkpoint."""
    return pretrain, None
