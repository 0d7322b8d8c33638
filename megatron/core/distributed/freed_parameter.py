"""Parameters whose memory was given back: reading one is an error that names it, not a crash.

A tensor whose storage has no memory may be read by most operations, which then end the process or deliver whatever
lies there. So a parameter without memory changes its class for the time being, to one that lets nothing through but
questions about shape and the like. Inside autograd nothing changes: what was saved for backward is the same tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.parameters import info_of

_HARMLESS = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "names", "grad", "grad_fn", "requires_grad", "requires_grad_"),
        *("size", "numel", "nelement", "dim", "stride", "element_size", "data_ptr", "untyped_storage"),
        *("is_cuda", "is_leaf", "is_sparse", "is_meta", "is_floating_point", "is_complex", "is_contiguous"),
        *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "__hash__", "__len__"),
    )
)
"""What may be asked of a parameter without its values."""


class ReleasedParameter(nn.Parameter):
    """A parameter of a sharded unit while its whole weights are not gathered."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        which = next((info_of(a).name for a in _flat(args, kwargs) if isinstance(a, ReleasedParameter)), "a parameter")
        raise RuntimeError(
            f"{which} is read ({name}) while its weights are not gathered: with sharded parameters they are there only "
            "while the module that holds them runs, forward or backward. A module that reads a parameter which is not "
            "below it lists it in its attribute `borrowed_parameters`"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter({info_of(self).name}, shape={tuple(self.shape)})"


def mark_released(parameter: nn.Parameter) -> None:
    """From here on its values cannot be read."""
    assert type(parameter) is nn.Parameter, type(parameter)
    parameter.__class__ = ReleasedParameter


def mark_present(parameter: nn.Parameter) -> None:
    """Its values are there again."""
    parameter.__class__ = nn.Parameter


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterable[Any]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
