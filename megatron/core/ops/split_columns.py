"""Splits the columns of a projection into parts of any widths, whose gradients come together in one packed tensor.

A part is a view of the packed tensor. The gradient of the part can be the same view of the packed gradient: backward of
the operation that reads the part asks `new_gradient_of` for memory, and its kernel writes there, with strides. Then
nothing is left to join. A gradient that lies elsewhere is copied.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.utils.autograd_context import AutogradContext


def split_columns(packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns views [s, b, g, width] of [s, b, g, columns], one for each of `widths`, which add up to the columns."""
    return _SplitColumns.apply(packed, tuple(widths))


def new_gradient_of(inputs: Tensor) -> Callable[[], Tensor]:
    """Returns the function with which one backward allocates the gradient of an operation's inputs.

    Call it in forward, where autograd's graph is known. For a part of `split_columns`, or a view of one, the memory is
    the part's place in the packed gradient, with the strides of the part; in other cases it is contiguous. The last
    dimension always is."""
    node = inputs.grad_fn
    if node is not None and node.next_functions and not hasattr(node, "packed_gradient"):  # of a view of a part
        node = node.next_functions[0][0]
    packed = getattr(node, "packed_gradient", None)
    if packed is None or not packed.has_part(inputs):
        return partial(torch.empty, inputs.shape, dtype=inputs.dtype, device=inputs.device)
    return partial(packed.new_part, inputs.shape, inputs.stride(), inputs.storage_offset() - packed.offset)


class _PackedGradient:
    """The gradient of a packed tensor, allocated when the first part of it is computed."""

    def __init__(self, packed: Tensor) -> None:
        self.shape, self.dtype, self.device = packed.shape, packed.dtype, packed.device
        self.is_contiguous = packed.is_contiguous()
        self.storage, self.offset = packed.untyped_storage().data_ptr(), int(packed.storage_offset())
        self._memory: Tensor | None = None
        self._given: set[int] = set()
        """Offsets of the parts that have memory."""

    def has_part(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the packed tensor with contiguous rows, which kernels write. Then its gradient
        can be the same view of this one."""
        same_storage = tensor.untyped_storage().data_ptr() == self.storage
        return self.is_contiguous and same_storage and tensor.stride(-1) == 1

    def new_part(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Returns a view of the memory. A part that has memory already, in a backward that did not end here, gets
        other memory: its first gradient may still be in use."""
        if self._memory is None or offset in self._given:
            self._memory = self._empty()
            self._given = set()
        self._given.add(offset)
        return self._memory.as_strided(shape, stride, offset)

    def take(self) -> Tensor:
        """Returns the memory with what the parts have written. The next backward gets other memory."""
        memory = self._empty() if self._memory is None else self._memory
        self._memory, self._given = None, set()
        return memory

    def _empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, packed: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.widths, ctx.packed_gradient = widths, _PackedGradient(packed)
        return packed.split(list(widths), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> tuple[Tensor, None]:
        packed: Tensor = ctx.packed_gradient.take()
        for part, gradient in zip(packed.split(list(ctx.widths), -1), gradients, strict=True):
            if gradient is None:
                part.zero_()
            elif not _is_at(gradient, part):
                part.copy_(gradient)
        return packed, None


def _is_at(gradient: Tensor, part: Tensor) -> bool:
    """Whether a gradient is the part of the packed gradient. The strides of dimensions of size 1 do not count."""
    strides = zip(part.shape, part.stride(), gradient.stride(), strict=True)
    return gradient.data_ptr() == part.data_ptr() and all(size == 1 or own == other for size, own, other in strides)
