"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174): discards results in forward, computes them again in
backward.

Results are bit-equal to those of a run that keeps all activations. Dropout masks are functions of the token's position,
the state of torch's generators (which a user's module may use) is restored, and effects that must not happen twice use
`run_once_under_recompute`. Each class wraps a function and is called in its place. A copy of the model copies the
wrappers. Kept tensors pass through `keep_saved`, so that they can be offloaded.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.communication.collectives import Group, gather_rows, group_rank, group_size
from megatron.core.utils.offloaded import keep_saved, restore_saved
from megatron.core.utils.recompute_cache import RecomputeCache, run_once_under_recompute
from megatron.core.utils.torch_private import import_compiler


@dataclass(frozen=True)
class Recomputed:
    """Wraps a function so that it keeps only its arguments for backward, which computes the function again.

    With a group `spread_over`, whose ranks have equal arguments, each rank keeps one part of every positional tensor,
    and backward gathers the parts. All ranks of the group must then make the same calls.
    """

    function: Callable[..., Any]
    spread_over: Group = None

    def __post_init__(self) -> None:
        # Torch would import it in the first call, and an error inside that import keeps the frames of all callers, with
        # a micro-batch's tensors, until garbage is collected.
        import_compiler()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Calls the function, and keeps its arguments so that backward can call it again."""
        if not torch.is_grad_enabled():
            return self.function(*inputs, **keywords)
        # Inside another recomputed function this code runs twice; the second pass uses the cached values of the first.
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        key = (getattr(self.function, "__self__", None), "recomputed " + name)
        keywords["context_fn"] = run_once_under_recompute(key, RecomputeCache).passes
        if group_size(self.spread_over) == 1:
            return checkpoint(self.function, *inputs, use_reentrant=False, **keywords)
        # These hooks apply to the arguments; torch's own hooks apply to tensors inside the function.
        with saved_tensors_hooks(self._keep, self._give):
            return checkpoint(self.function, *inputs, use_reentrant=False, **keywords)

    def _keep(self, tensor: Tensor) -> "_Share":
        group = self.spread_over
        length = -(-tensor.numel() // group_size(group))  # rounded up: the last shares may be short
        share = tensor.new_zeros(length)
        mine = tensor.detach().reshape(-1)[group_rank(group) * length :][:length]
        share[: mine.numel()] = mine
        return _Share(keep_saved(share), tensor.shape)

    def _give(self, kept: "_Share") -> Tensor:
        return gather_rows(restore_saved(kept.flat), self.spread_over)[: kept.shape.numel()].view(kept.shape)


@dataclass(frozen=True)
class _Share:
    """One rank's part of a tensor."""

    flat: Any
    shape: torch.Size


class DiscardedResults:
    """Discards results of cheap functions that an expensive function, `within`, would save for backward.

    Example: a matrix product saves its input, which is the result of a norm. The norm's own input is kept anyway, so
    backward can compute the norm again. If `within` saves a result or a view of one, it saves the arguments of the
    cheap function instead, and backward computes all results of this call again. Call `compute` in place of a cheap
    function, before `within` or inside it, and the object in place of `within`.
    """

    def __init__(self, within: Callable[..., Any]) -> None:
        self.within = within
        self._made: list[_Again] = []
        """Each `compute` since the last call of `within` has ended."""

    def discard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a replacement for a cheap function, which calls it through `compute`."""
        return functools.partial(self.compute, function)

    def compute(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Calls a cheap function and remembers its arguments. It returns a tensor or several. With options it may
        return more than without; only the first tensor, which is equal to the result without options, is discarded."""
        results = function(*inputs, **options)
        if torch.is_grad_enabled():
            several = isinstance(results, tuple)
            discarded = (results[:1] if options else results) if several else (results,)
            self._made.append(_Again(function, inputs, discarded))
        return results

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Calls `within`, which saves arguments of cheap functions instead of their results."""
        try:
            if not torch.is_grad_enabled():
                return self.within(*inputs, **keywords)
            with saved_tensors_hooks(self._keep, _give):
                return self.within(*inputs, **keywords)
        finally:
            for made in self._made:
                made.results = ()
            self._made = []

    def _keep(self, tensor: Tensor) -> object:
        views = (made.view_of(tensor) for made in self._made)
        return next((view for view in views if view is not None), None) or keep_saved(tensor)


class _Again:
    """One call of a function whose results are discarded and computed again in backward."""

    def __init__(self, function: Callable[..., Any], inputs: Any, results: tuple[Tensor, ...]) -> None:
        self.function, self.results = function, results
        self.inputs = tuple(keep_saved(value.detach()) if isinstance(value, Tensor) else value for value in inputs)
        self._wanted = self._given = 0
        self._computed: tuple[Tensor, ...] = ()

    def view_of(self, tensor: Tensor) -> "_View | None":
        """Returns what autograd saves for a tensor that is a view of a result; None for others."""
        place = tensor.untyped_storage().data_ptr()
        for number, result in enumerate(self.results):
            if place and result.untyped_storage().data_ptr() == place and result.dtype is tensor.dtype:
                self._wanted += 1
                offset = int(tensor.storage_offset() - result.storage_offset())
                return _View(self, number, tensor.shape, tensor.stride(), offset)
        return None

    def view(self, view: "_View") -> Tensor:
        """Returns a view of a result. The first call computes all results; they are freed after the last saved view."""
        if not self._computed:
            with torch.no_grad():
                results = self.function(*map(restore_saved, self.inputs))
            self._computed = results if isinstance(results, tuple) else (results,)
        result = self._computed[view.number]
        self._given += 1
        if self._given == self._wanted:
            self._given, self._computed = 0, ()
        return result.as_strided(view.shape, view.stride, result.storage_offset() + view.offset)


@dataclass(frozen=True)
class _View:
    """Describes a view of one result of a call."""

    call: _Again
    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Storage offset of the view relative to the result, in elements."""


def _give(kept: Any) -> Tensor:
    return kept.call.view(kept) if isinstance(kept, _View) else restore_saved(kept)
