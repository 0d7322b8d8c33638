"""Ends a process of a run with a user's mistake: the message once for all ranks, exit code 2."""

import contextlib
import os
import signal
import sys
import time
from typing import NoReturn

from megatron.core.exceptions import UserError
from megatron.training.config.resolution import ConfigurationError

_HEAD_START_OF_FIRST_RANK = 5.0
"""Seconds that the first rank, which reads the same command line, has to print the error and exit."""


def exit_with_problems(error: UserError) -> NoReturn:
    """Print each problem, once for all ranks, and exit with code 2."""
    if os.environ.get("RANK", "0") == "0":
        for problem in error.problems if isinstance(error, ConfigurationError) else [str(error)]:
            print(f"error: {problem}", file=sys.stderr, flush=True)
    delay_errors_on_other_ranks()
    raise SystemExit(2)


def delay_errors_on_other_ranks() -> None:
    """Wait on every rank but the first, so that the first rank prints a mistake that all ranks find.

    The first rank prints the error and exits; the launcher then ends the other ranks while they wait here, so that the
    log has the message once. A rank that is alone with its error prints it after the wait.
    """
    if os.environ.get("RANK", "0") != "0":
        with contextlib.suppress(ValueError):  # only the main thread may set signal handlers
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_HEAD_START_OF_FIRST_RANK)
