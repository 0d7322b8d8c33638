"""Runs a Python program in a forked process as `python WORDS` would: arguments, environment, files, exit code."""

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

OURS = frozenset({"megatron", "parity", "pretrain_gpt", "support", "tests"})
"""Top-level modules of this repository that the server of processes has imported."""


def become(words: Sequence[str], folder: str, environment: Mapping[str, str], files: Sequence[int]) -> int:
    """Runs a program and returns its exit code, negative for a signal. Call `leave` with it.

    Args:
        words: what follows `python`: a script, `-m` and a module, `-c` and code, or `-` for code on standard input.
        folder: the working directory.
        environment: all variables.
        files: descriptors of standard input, output and error.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    words = list(words)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED")) or words[0] == "-u"
    if words[0] == "-u":
        words.pop(0)
    _open_streams(unbuffered)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [_first_path(words), *paths, *_installed()]
    return _exit_code(words)


def forget_ours() -> None:
    """Lets this repository's modules be imported anew, from where sys.path finds them."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path_importer_cache.clear()


def leave(code: int) -> None:
    """Ends the process as the interpreter does at the end of a program, without taking modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), write_through=unbuffered)
    errors = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(errors, errors="backslashreplace", line_buffering=True, write_through=unbuffered)


def _exit_code(words: Sequence[str]) -> int:
    try:
        _execute(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _execute(words: Sequence[str]) -> None:
    first, *rest = words
    if first == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    program = types.ModuleType("__main__")
    if first == "-c":
        name, code = "<string>", rest.pop(0)
    elif first == "-":
        name, code = "<stdin>", sys.stdin.read()
    else:
        name, code = first, Path(first).read_text(encoding="utf-8")
        program.__file__ = first
    sys.argv = [first, *rest]
    sys.modules["__main__"] = program
    exec(compile(code, name, "exec"), program.__dict__)


def _first_path(words: Sequence[str]) -> str:
    if words[0] == "-m":
        return os.getcwd()
    return "" if words[0] in ("-c", "-") else str(Path(words[0]).resolve().parent)


def _installed() -> list[str]:
    """The standard library and installed packages, out of sys.path."""
    return [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
