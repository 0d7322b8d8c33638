"""Parameters whose memory is freed: reading one raises an error that names it, instead of crashing the process.

Most operations accept a tensor whose storage has no memory; they then end the process or return garbage. So a parameter
without memory temporarily changes its class to `FreedParameter`, which allows only to read its shape, type and similar
attributes. Autograd is not affected: tensors that it saved for backward are the same objects.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from megatron.core.parameters import info_of
from megatron.core.utils.torch_private import DisableTorchFunctionSubclass

_HARMLESS = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "names", "grad", "grad_fn", "requires_grad", "requires_grad_"),
        *("size", "numel", "nelement", "dim", "stride", "element_size", "data_ptr", "untyped_storage"),
        *("is_cuda", "is_leaf", "is_sparse", "is_meta", "is_floating_point", "is_complex", "is_contiguous"),
        *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "__hash__", "__len__"),
    )
)
"""Attributes and functions that do not read the values of a parameter."""


_SHARDED = (
    "sharded parameters have values only while the module that holds them runs, forward or backward. A module that "
    "reads a parameter of another must list it in its attribute `borrowed_parameters`"
)


class FreedParameter(nn.Parameter):
    """A parameter of a sharded unit while its whole weights are not gathered."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _HARMLESS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        which = next((info_of(a).name for a in _flat(args, kwargs) if isinstance(a, FreedParameter)), "a parameter")
        why = next(vars(a).get("why_freed", _SHARDED) for a in _flat(args, kwargs) if isinstance(a, FreedParameter))
        raise RuntimeError(f"{which} is read ({name}) while its weights are not gathered: {why}")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FreedParameter({info_of(self).name}, shape={tuple(self.shape)})"


def mark_freed(parameter: nn.Parameter, why: str | None = None) -> None:
    """Makes every read of the parameter's values an error, which says why; by default that parameters are sharded."""
    assert type(parameter) is nn.Parameter, type(parameter)
    if why is not None:
        parameter.why_freed = why  # type: ignore[attr-defined]
    parameter.__class__ = FreedParameter


def mark_gathered(parameter: nn.Parameter) -> None:
    """Allows reading the parameter's values again."""
    parameter.__class__ = nn.Parameter


def _flat(args: Sequence[object], kwargs: Mapping[str, object] | None) -> Iterable[object]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
