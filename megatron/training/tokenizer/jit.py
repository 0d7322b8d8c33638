"""Loops compiled by numba, kept on disk between runs where some place is writable."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop over arrays on first use (`numba.njit`).

    The machine code is cached beside the module, or in the user's cache folder; where neither can be written (a
    read-only installation without a home), it is compiled anew in each process, which takes seconds. A change of the
    file makes it void; a change of another file does not, so a compiled function calls only those of its own file.
    """
    return _compile(function)


def compiled_inline(function: F) -> F:
    """As `compiled`, for a small function that is copied into the loops that call it, before types are known.

    Arrays passed to an ordinary compiled function cost a reference count each time, which shows in the hottest loops.
    """
    return _compile(function, inline="always")


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        warnings.warn(f"compiled loops of {function.__module__} cannot be cached: {error}", stacklevel=3)
        return numba.njit(**options)(function)
