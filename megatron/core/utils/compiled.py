"""Numba when it is needed, not when it is imported.

Importing numba costs half a second, so a kernel is handed to it at its first call. Machine code is kept between
processes where a folder for it can be written (beside the source, or the user's cache folder); elsewhere each process
compiles for itself.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Decorator: compile `function` with numba at its first call; it then runs without Python's global lock."""
    lock = threading.Lock()
    machine_code: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal machine_code
        with lock:
            if machine_code is None:
                machine_code = _compile(function, cache=True)
        try:
            return machine_code(*args)
        except OSError:  # the cache folder went read-only or full after it was chosen; kernels open no files themselves
            machine_code = _compile(function, cache=False)
            return machine_code(*args)

    return call  # type: ignore[return-value]


def _compile(function: Callable[..., Any], *, cache: bool) -> Callable[..., Any]:
    import numba

    try:
        return numba.njit(nogil=True, cache=cache)(function)
    except RuntimeError:  # no folder for compiled code can be written at all
        return numba.njit(nogil=True)(function)
