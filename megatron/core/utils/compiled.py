"""Kernels over numpy arrays that numba compiles at their first call.

Importing numba costs half a second, so it is imported at the first call of a kernel, not with this module. Machine code
is kept between processes in a cache folder next to the source, or in the user's cache folder. If neither is writable,
each process compiles the kernels itself, which takes seconds.
"""

import functools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

AST_LOCK = threading.RLock()
"""Held while a library may run Python's `ast.parse`, which is not thread-safe in Python 3.11: two threads in it can get
"SystemError: AST constructor recursion depth mismatch". The import of numba and `np.load` both run it."""


def compiled(function: Kernel) -> Kernel:
    """Decorator: compiles a kernel with numba (`njit`) at its first call. It runs without Python's global lock.

    A kernel may call other kernels, but only those of its own file: numba compiles again when that file changes, and
    does not notice changes of other files.
    """
    return _CompiledKernel(function)  # type: ignore[return-value]


def compiled_inline(function: Kernel) -> Kernel:
    """Decorator: like `compiled`, but copies a small kernel into the kernels that call it.

    An ordinary call counts a reference for each array argument, which is slow in the innermost loops.
    """
    return _CompiledKernel(function, inline="always")  # type: ignore[return-value]


class _CompiledKernel:
    """A function that is compiled when it, or a kernel that calls it, is called for the first time."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._machine_code: Any = None

    def __call__(self, *arguments: Any) -> Any:
        machine_code = self.machine_code
        try:
            return machine_code(*arguments)
        except OSError as error:  # kernels open no files, so this is the cache folder: full, or read-only by now
            self._warn(error)
            with AST_LOCK:
                self._machine_code = self._build(cache=False)
            return self._machine_code(*arguments)

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined, no-any-return]  # pickled by name, like a function

    @property
    def machine_code(self) -> Any:
        """numba's dispatcher of this kernel."""
        if self._machine_code is None:
            with AST_LOCK:
                if self._machine_code is None:
                    self._machine_code = self._build(cache=True)
        return self._machine_code

    def _build(self, cache: bool) -> object:
        """Passes a copy of the function to numba; in the copy, called kernels are replaced by numba's dispatchers."""
        import numba

        function: Any = self._function
        names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        called = {
            name: kernel.machine_code if cache else kernel._build(cache)
            for name, kernel in names.items()
            if isinstance(kernel, _CompiledKernel)
        }
        scope = {**function.__globals__, **called}
        copy = types.FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__qualname__ = function.__qualname__
        try:
            return numba.njit(nogil=True, cache=cache, **self._options)(copy)
        except RuntimeError as error:  # numba finds no folder that it can write
            if "locator" not in str(error):
                raise
            self._warn(error)
            return numba.njit(nogil=True, **self._options)(copy)

    def _warn(self, error: Exception) -> None:
        warnings.warn(
            f"{self._function.__module__}: machine code cannot be cached, each process compiles it: {error}",
            stacklevel=3,
        )
