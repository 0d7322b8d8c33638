"""How a program ends early: with one line after Ctrl-C, from its first import on, and with the message of a mistake.
Ctrl-C gives exit code 130, a mistake 2. Importing torch takes seconds, so nothing here imports it.

An entry script calls `exit_quietly` before its other imports, if it is the program (`__name__ == "__main__"`). A tool
then hands its main function to `run_main`; `pretrain` watches signals itself.
"""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, ParamSpec

Arguments = ParamSpec("Arguments")

EXIT_CODE = 128 + signal.SIGINT
"""130, as shells report the end by Ctrl-C."""


def exit_quietly() -> None:
    """Makes SIGINT end the process at once with one line, which only the first of several ranks prints. Nothing is
    cleaned up, so call it before any work begins. A handler that the caller has set stays."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Calls the main function of a tool and exits with its code. Ctrl-C raises KeyboardInterrupt in it, and SIGTERM
    SystemExit, so that it can remove unfinished files. Ctrl-C then ends the program with one line."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if on_main_thread else None
    try:
        code = main()
    except KeyboardInterrupt:
        _say()
        code = EXIT_CODE
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, before)
    sys.exit(code)


def tells_mistakes(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Makes the main function of a tool print a UserError, each line behind "error: ", and return 2."""

    @functools.wraps(main)
    def telling(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        from megatron.core.exceptions import UserError

        try:
            return main(*args, **kwargs)
        except UserError as error:
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            return 2

    return telling


def warn(message: str) -> None:
    """Prints a warning of a tool."""
    print(f"warning: {message}", file=sys.stderr)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _exit(number: int, frame: FrameType | None) -> None:
    _say()
    os._exit(EXIT_CODE)


def _say() -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
