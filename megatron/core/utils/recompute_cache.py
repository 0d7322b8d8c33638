"""What happens once in a function that is computed twice: in forward, and in backward again to have its intermediate
results back.

Counting, reading a running sum, asking other ranks: the second pass must not do these again, or must be given what the
first one found. `run_once_under_recompute` says so at the place where it matters, and costs nothing elsewhere.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


def run_once_under_recompute(compute: Callable[[], T]) -> T:
    """What `compute` gives; in the second pass of a function, what it gave in the first. Both passes come by here in
    the same order. Small things only: they are kept until backward."""
    memory = _memory.get()
    return compute() if memory is None else memory.value(compute)


class RecomputeCache:
    """What the passes of one call of a function found out once, in the order of asking."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._asked = 0

    def passes(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """The launch_environment of the first pass and of the second, as torch's checkpoint takes them."""
        return self._during(), self._during()

    def value(self, compute: Callable[[], T]) -> T:
        """The next one: recorded if it is known, else computed."""
        number, self._asked = self._asked, self._asked + 1
        if number == len(self._values):
            self._values.append(None)
            with _remembering(None):  # what is asked for inside is a part of this
                self._values[number] = compute()
        return self._values[number]

    @contextlib.contextmanager
    def _during(self) -> Iterator[None]:
        self._asked = 0
        with _remembering(self):
            yield


_memory: ContextVar[RecomputeCache | None] = ContextVar("memory of the function that is computed twice", default=None)


@contextlib.contextmanager
def _remembering(memory: RecomputeCache | None) -> Iterator[None]:
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)
