"""Megatron-LM's functions that mark ranges for profilers."""

import functools
from collections.abc import Callable
from typing import Any

import torch

_messages: list[str] = []


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Begins a named range, which Nsight Systems shows. Without a GPU only the nesting is checked."""
    name = ".".join(part for part in (msg, suffix) if part)
    _messages.append(name)
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(name)


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """Ends the innermost range. Raises ValueError if it has another name, or if there is none."""
    name = ".".join(part for part in (msg, suffix) if part)
    if not _messages or (name and _messages[-1] != name):
        raise ValueError(f"nvtx_range_pop({name!r}): the innermost range is {_messages[-1:]}")
    _messages.pop()
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def nvtx_decorator(message: str | None = None, color: str | None = None) -> Callable[[Any], object]:
    """Returns a decorator that marks each call of a function as a range. `color` has no effect."""

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def marked(*args: object, **kwargs: object) -> Any:
            nvtx_range_push(message or function.__name__)
            try:
                return function(*args, **kwargs)
            finally:
                nvtx_range_pop()

        return marked

    return decorate
