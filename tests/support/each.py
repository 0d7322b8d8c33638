"""One test for many values that would fail for the same reasons, such as all flags: a test costs two milliseconds in
each worker, and there are a thousand flags."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(values: Iterable[Any], name: Callable[[Any], str] = str) -> Callable[[Callable[..., None]], Any]:
    """Decorates a check whose first argument is a value; others are fixtures. The test that results checks all values
    and fails with a line for each one that fails, which begins with its name."""

    every = list(values)
    assert every, "a test of no value cannot fail"

    def decorate(check: Callable[..., None]) -> Any:
        def test(**fixtures: Any) -> None:
            failed: dict[str, Exception] = {}
            for value in every:
                try:
                    check(value, **fixtures)
                except Exception as error:
                    failed[name(value)] = error
            if failed:
                lines = "\n".join(f"{which}: {type(error).__name__}: {error}" for which, error in failed.items())
                raise AssertionError(lines) from next(iter(failed.values()))

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.place_as = check  # type: ignore[attr-defined]  # where pytest says that the test is
        parameters = [*inspect.signature(check).parameters.values()][1:]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate
