"""Forgetting what backward needs, and computing it again when it does (Chen et al. 2016, arXiv:1604.06174).

The numbers are those of a run that keeps everything, to the bit: what is computed again is a function of what was kept
(masks of dropout are functions of their place), and draws from torch's generators, which a user's own module may make,
are repeated. Objects here stand in place of a function; they copy with the model that they are a part of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.collectives import Group, gather_rows, group_rank, group_size


@dataclass(frozen=True)
class Recomputed:
    """A function that keeps its arguments for backward, and none of its intermediate results.

    Of tensors among the positional arguments, which are equal on all ranks of `spread_over`, each of these keeps its
    part; backward gathers the whole. So all of the group call it alike.
    """

    function: Callable[..., Any]
    spread_over: Group = None

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs, **keywords)
        if group_size(self.spread_over) == 1:
            return checkpoint(self.function, *inputs, use_reentrant=False, **keywords)
        # The arguments are saved as tensors of a graph are, under these hooks; what is inside, under torch's own.
        with saved_tensors_hooks(self._keep, self._give):
            return checkpoint(self.function, *inputs, use_reentrant=False, **keywords)

    def _keep(self, tensor: Tensor) -> "_Share":
        group = self.spread_over
        length = -(-tensor.numel() // group_size(group))  # rounded up: the last shares may be short
        share = tensor.new_zeros(length)
        mine = tensor.detach().reshape(-1)[group_rank(group) * length :][:length]
        share[: mine.numel()] = mine
        return _Share(share, tensor.shape)

    def _give(self, kept: "_Share") -> Tensor:
        return gather_rows(kept.flat, self.spread_over)[: kept.shape.numel()].view(kept.shape)


@dataclass(frozen=True)
class _Share:
    """One rank's part of a tensor."""

    flat: Tensor
    shape: torch.Size


class ForgottenOutput:
    """A function whose result nobody keeps: who saves it for backward saves how to compute it again.

    For a cheap function before an expensive one, such as a norm before a product: the product's input is the norm's
    result, which is as large as the norm's input and which the norm's input, kept anyway, gives again. Where the
    result is used (the product) is the other function, `within`; it calls the first one through `compute`.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], within: Callable[..., Tensor]) -> None:
        self.function, self.within = function, within
        self._made: tuple[Tensor, Tensor] | None = None
        """Argument and result of the last call of `compute` inside the call of `within` that is under way."""

    def compute(self, inputs: Tensor) -> Tensor:
        """The first function: it stands where the function stood."""
        output = self.function(inputs)
        self._made = (inputs, output)
        return output

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        """The other function."""
        self._made = None
        try:
            if not torch.is_grad_enabled():
                return self.within(*inputs, **keywords)
            with saved_tensors_hooks(self._keep, self._give):
                return self.within(*inputs, **keywords)
        finally:
            self._made = None

    def _keep(self, tensor: Tensor) -> "Tensor | _Recipe":
        if self._made is not None:
            inputs, output = self._made
            if _same_memory(tensor, output):
                return _Recipe(inputs.detach(), tensor.shape)
        return tensor

    def _give(self, kept: "Tensor | _Recipe") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return self.function(kept.inputs).view(kept.shape)


@dataclass(frozen=True)
class _Recipe:
    """What a forgotten result is computed from."""

    inputs: Tensor
    shape: torch.Size


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Two living tensors have the same elements in the same order; their shapes may differ."""
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    return (a.data_ptr(), a.numel(), a.dtype) == (b.data_ptr(), b.numel(), b.dtype)
