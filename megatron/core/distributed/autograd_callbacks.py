"""When a backward pass ends. Torch tells it to those who ask while it runs; the names are its own engine's."""

from collections.abc import Callable

import torch


def in_backward() -> bool:
    """This thread computes a node of a backward pass, or what such a node computes again."""
    return torch._C._current_graph_task_id() != -1


class BackwardEndCallback:
    """Calls a function once at the end of every backward pass in which `expect` was called."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._expected_of: int | None = None

    def expect(self) -> None:
        """From inside a backward pass: call when it ends. Outside of one, nothing will be called."""
        number = torch._C._current_graph_task_id()
        if number not in (-1, self._expected_of):
            self._expected_of = number
            torch.autograd.Variable._execution_engine.queue_callback(self._function)  # type: ignore[attr-defined]
