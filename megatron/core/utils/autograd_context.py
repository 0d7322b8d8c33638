"""The type of `ctx` in functions of torch.autograd."""

from typing import Any, Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """What torch.autograd.Function passes to forward and backward. forward may set further attributes for backward."""

    needs_input_grad: tuple[bool, ...]
    """For each argument of forward: whether backward has to return its gradient."""

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors, or None, that forward has saved."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for backward."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Says that these outputs have no gradient."""

    def mark_dirty(self, *inputs: Tensor) -> None:
        """Says that forward has changed these inputs in place."""

    def set_materialize_grads(self, value: bool) -> None:
        """False: backward gets None, not zeros, for an output without a gradient."""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
