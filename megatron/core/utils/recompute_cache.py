"""Values that a recomputed function computes once.

Activation recomputation runs a function in forward and again in backward. Some work must not happen twice: counting
tokens, updating a running sum, communicating with other ranks. `run_once_under_recompute` runs such work in the first
pass and returns the recorded value in the second. Outside a recomputed function it only runs the work.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from typing import Any, TypeVar

T = TypeVar("T")


def run_once_under_recompute(key: Hashable, compute: Callable[[], T]) -> T:
    """Returns `compute()`; in the second pass of a recomputed function, the value of the first pass.

    `key` names the value within the function, such as (module, "token counts"). The order of calls distinguishes calls
    with the same key. Values are kept until backward, so they should be small. Raises RuntimeError if the second pass
    asks for a value that the first pass did not compute.
    """
    cache = _cache.get()
    return compute() if cache is None else cache.value(key, compute)


class RecomputeCache:
    """The values of one call of a recomputed function, by key."""

    def __init__(self) -> None:
        self.is_complete = False
        """Whether the first pass is over; values are then only looked up."""
        self._values: dict[tuple[Hashable, int], Any] = {}
        self._asked: Counter[Hashable] = Counter()
        """How often the pass in progress has asked for each key."""

    def passes(self) -> tuple["_Pass", "_Pass"]:
        """Returns the contexts of the first and the second pass, as `context_fn` of torch's checkpoint does."""
        return _Pass(self), _Pass(self)

    def value(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Returns the value of this key: computed and recorded in the first pass, looked up afterwards."""
        entry = key, self._asked[key]
        self._asked[key] += 1
        if not self.is_complete:
            with _Within(None):  # what `compute` asks for is a part of its value
                self._values[entry] = compute()
        elif entry not in self._values:
            raise RuntimeError(
                f"recomputation took another path than the forward pass: {_describe(key)}, call {entry[1] + 1}, was "
                "not computed there; a recomputed function must do the same in both passes"
            )
        return self._values[entry]

    def begin_pass(self) -> None:
        """Starts counting how often each key is asked for."""
        self._asked.clear()


_cache: ContextVar[RecomputeCache | None] = ContextVar("cache of the recomputed function in progress", default=None)


class _Within:
    """A context in which `run_once_under_recompute` uses a cache, or none."""

    def __init__(self, cache: RecomputeCache | None) -> None:
        self._entered = cache
        self._tokens: list[Token[RecomputeCache | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_cache.set(self._entered))

    def __exit__(self, *exception: object) -> None:
        _cache.reset(self._tokens.pop())


class _Pass(_Within):
    """One pass of a function. The second may be entered again, when backward runs again through a kept graph."""

    def __init__(self, cache: RecomputeCache) -> None:
        super().__init__(cache)
        self._cache = cache

    def __enter__(self) -> None:
        self._cache.begin_pass()
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._cache.is_complete = True


def _describe(key: Hashable) -> str:
    """Returns the key without the contents of modules in it."""
    if isinstance(key, tuple):
        return " of ".join(reversed([_describe(part) for part in key]))
    return key if isinstance(key, str) else type(key).__name__
