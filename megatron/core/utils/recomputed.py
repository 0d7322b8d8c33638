"""Forgetting what backward needs, and computing it again when it does (Chen et al. 2016, arXiv:1604.06174).

The numbers are those of a run that keeps everything, to the bit: what is computed again is a function of what was kept
(masks of dropout are functions of their place), draws from torch's generators, which a user's own module may make, are
repeated, and what must not happen twice is said by `once`. Objects here stand in place of a function; they copy with
the model that they are a part of.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.collectives import Group, gather_rows, group_rank, group_size
from megatron.core.utils.recompute_cache import RecomputeCache, run_once_under_recompute


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
        # Within another recomputed function, both of whose passes come here, the values of its first pass hold.
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        key = (getattr(self.function, "__self__", None), "recomputed " + name)
        keywords["context_fn"] = run_once_under_recompute(key, RecomputeCache).passes
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
    """Functions whose results nobody keeps: who saves one for backward saves how to compute it again.

    For a cheap function before an expensive one, such as a norm before a product: the product's input is the norm's
    result, which is as large as the norm's input and which the norm's input, kept anyway, gives again. Where results
    are used (the product) is another function, `within`; it calls the cheap ones through `compute`.
    """

    def __init__(self, within: Callable[..., Tensor]) -> None:
        self.within = within
        self._made: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = []
        """Functions, their arguments and results, inside the call of `within` that is under way."""

    def forget(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """What is to stand where a cheap function stood."""
        return functools.partial(self.compute, function)

    def compute(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """A cheap function's result."""
        output = function(inputs)
        self._made.append((function, inputs, output))
        return output

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        """The other function."""
        self._made = []
        try:
            if not torch.is_grad_enabled():
                return self.within(*inputs, **keywords)
            with saved_tensors_hooks(self._keep, self._give):
                return self.within(*inputs, **keywords)
        finally:
            self._made = []

    def _keep(self, tensor: Tensor) -> "Tensor | _Recipe":
        for function, inputs, output in self._made:
            if _same_memory(tensor, output):
                return _Recipe(function, inputs.detach(), tensor.shape)
        return tensor

    def _give(self, kept: "Tensor | _Recipe") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept.function(kept.inputs).view(kept.shape)


class ForgottenResults:
    """A function of whose several results nobody keeps any: where `within`, a function that is called with them next,
    saves one of them, or a view of it, for backward, it saves how to compute all of them again.

    For a cheap function whose results are much larger than its arguments, such as the projection of latents to heads.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], within: Callable[..., Tensor]) -> None:
        self.function, self.within = function, within
        self._made: _Again | None = None
        """Of the last call of `compute`, until `within` has returned."""

    def compute(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The first function: it stands where the function stood."""
        results = self.function(*inputs)
        if torch.is_grad_enabled():
            self._made = _Again(self.function, inputs, results)
        return results

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        """The other function."""
        made, self._made = self._made, None
        if made is None:
            return self.within(*inputs, **keywords)
        try:
            with saved_tensors_hooks(made.keep, _give):
                return self.within(*inputs, **keywords)
        finally:
            made.results = ()


class _Again:
    """One call of a function whose results are forgotten."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Any, results: tuple[Tensor, ...]) -> None:
        self.function, self.results = function, results
        self.inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
        self._wanted = self._given = 0
        self._computed: tuple[Tensor, ...] = ()

    def keep(self, tensor: Tensor) -> "Tensor | _View":
        """What is saved in a tensor's place."""
        place = tensor.untyped_storage().data_ptr()
        for number, result in enumerate(self.results):
            if place and result.untyped_storage().data_ptr() == place and result.dtype is tensor.dtype:
                self._wanted += 1
                offset = int(tensor.storage_offset() - result.storage_offset())
                return _View(self, number, tensor.shape, tensor.stride(), offset)
        return tensor

    def view(self, view: "_View") -> Tensor:
        """Compute the results again, if they are not there: they stay until every view of them was asked for."""
        if not self._computed:
            with torch.no_grad():
                self._computed = self.function(*self.inputs)
        result = self._computed[view.number]
        self._given += 1
        if self._given == self._wanted:
            self._given, self._computed = 0, ()
        return result.as_strided(view.shape, view.stride, result.storage_offset() + view.offset)


@dataclass(frozen=True)
class _View:
    """A view of one of the results of a call."""

    call: _Again
    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements of memory between the result's first and the view's."""


def _give(kept: "Tensor | _View") -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.call.view(kept)


@dataclass(frozen=True)
class _Recipe:
    """What a forgotten result is computed from."""

    function: Callable[[Tensor], Tensor]
    inputs: Tensor
    shape: torch.Size


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Two living tensors have the same elements in the same order; their shapes may differ."""
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    return (a.data_ptr(), a.numel(), a.dtype) == (b.data_ptr(), b.numel(), b.dtype)
