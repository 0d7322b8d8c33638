"""Ends a process of a run with an error: prints the message once for all ranks, sets the exit code, and writes
torchrun's summary.

When a rank fails, torchrun prints a traceback of its own after everything that the rank printed. Its last lines, "Root
Cause", come from a file that the failed rank writes (TORCHELASTIC_ERROR_FILE). We write our sentence there, so it comes
last.
"""

import atexit
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from megatron.core.exceptions import UserError
from megatron.training.config.messages import message_of
from megatron.training.config.resolution import ConfigurationError

_HEAD_START_OF_FIRST_RANK = 5.0
"""Seconds that the first rank, which reads the same command line, has to print the error and exit."""


def exit_with_problems(error: UserError) -> NoReturn:
    """Prints each problem of a command line, once for all ranks, and exits with code 2."""
    if os.environ.get("RANK", "0") == "0":
        problems = error.problems if isinstance(error, ConfigurationError) else [message_of(error)]
        text = "\n".join(f"error: {problem}" for problem in problems)
        print(text, file=sys.stderr, flush=True)
        write_launcher_error_file(text)
    delay_errors_on_other_ranks()
    raise SystemExit(2)


def exit_with_error_of_rank(error: UserError) -> NoReturn:
    """Prints an error that occurred on this rank during the run, and exits with code 2. Names the rank if there are
    several."""
    rank = os.environ.get("RANK")
    message = message_of(error)
    text = f"error: {message}" if rank is None else f"error on rank {rank}: {message}"
    print(text, file=sys.stderr, flush=True)
    write_launcher_error_file(text)
    raise SystemExit(2) from None


def delay_errors_on_other_ranks() -> None:
    """Waits on every rank but the first, so that the first rank prints a mistake that all ranks find.

    The first rank prints the error and exits; the launcher then ends the other ranks while they wait here, so that the
    log has the message once. A rank that is alone with its error prints it after the wait.
    """
    if os.environ.get("RANK", "0") != "0":
        with contextlib.suppress(ValueError):  # only the main thread may set signal handlers
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_HEAD_START_OF_FIRST_RANK)


def write_launcher_error_file(text: str) -> None:
    """Gives torchrun the text that its summary shows as the cause of this rank's failure. No effect without torchrun.

    The format is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, whose own method would write a
    traceback in place of the text. A file that exists is kept: the first failure of a rank is the cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or Path(path).exists():
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[0], "extraInfo": details}
    with contextlib.suppress(OSError):  # the error was printed already, and is the one to report
        Path(path).write_text(json.dumps({"message": message}))


def end_process_at_exit(error: BaseException) -> None:
    """Makes this process end without shutting the interpreter down when it exits. Call it after a failure in a run of
    several ranks.

    If another rank does not finish a communication, one of torch's threads keeps running. This thread may need Python's
    lock, to free a tensor, while the interpreter shuts down. Python then ends the thread inside C++ code, and the
    process aborts with "terminate called without an active exception". To avoid this, the process runs its exit
    functions, flushes its output and ends at once. The exit code is that of the error, even if a script catches the
    error.
    """
    code = 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)

    def end() -> None:
        atexit.unregister(end)
        end_process(code)

    atexit.register(end)


def end_process(code: int) -> None:
    """Runs the remaining exit functions, flushes the output and ends the process with this exit code. For functions
    that `atexit` calls; the caller unregisters itself first."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by its reader, or by the program
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def explains_lack_of_host_memory() -> Iterator[None]:
    """Turns torch's error for a tensor that this machine has no memory for into a UserError."""
    try:
        yield
    except RuntimeError as error:
        asked = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if asked is None:
            raise
        raise UserError(
            "the memory of this machine cannot hold this rank's part of the model: one tensor takes "
            f"{int(asked[1]) / 1e9:,.1f} GB; --dry-run prints how much each rank would need"
        ) from error
