"""Loops compiled by numba at their first call, kept on disk between runs where some place is writable."""

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop over arrays (`numba.njit`) when it is first called, so that importing it does not import numba.

    The machine code is cached beside the module, or in the user's cache folder; where neither can be written (a
    read-only installation without a home), it is compiled anew in each process, which takes seconds. A change of the
    file makes it void; a change of another file does not, so a compiled function calls only those of its own file.
    """
    return _CompiledLoop(function)  # type: ignore[return-value]


def compiled_inline(function: F) -> F:
    """Like `compiled`, for a small function that is copied into the loops that call it, before types are known.

    Arrays passed to an ordinary compiled function cost a reference count each time, which shows in the hottest loops.
    """
    return _CompiledLoop(function, inline="always")  # type: ignore[return-value]


class _CompiledLoop:
    """A function that is handed to numba when it, or a loop that calls it, is called first."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *arguments: Any) -> Any:
        return self.machine_code(*arguments)

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined, no-any-return]  # pickled by name, as functions are

    @functools.cached_property
    def machine_code(self) -> Any:
        """numba's function. Loops that this one calls are replaced by theirs, because numba knows no other kind."""
        function: Any = self._function
        names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        called = {name: loop.machine_code for name, loop in names.items() if isinstance(loop, _CompiledLoop)}
        copy = types.FunctionType(
            function.__code__, {**function.__globals__, **called}, function.__name__, function.__defaults__
        )
        copy.__qualname__ = function.__qualname__
        return _compile(copy, **self._options)


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    import numba  # costs a fifth of a second, which a mistyped flag need not wait for

    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        warnings.warn(f"compiled loops of {function.__module__} cannot be cached: {error}", stacklevel=3)
        return numba.njit(**options)(function)
