"""Grouped linear layer of experts: y = x W_e^T, where rows of group (expert) e use weight W_e.

Rows are sorted by group; a group may be empty. As in `ops.linear`, the weight's gradient goes to its main gradient if
it has one, which may defer the product.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.linear import product
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext


@dataclass(frozen=True)
class RowGroups:
    """Number of rows of each group: the first `counts[0]` rows belong to group 0, the next `counts[1]` to group 1,
    ..."""

    counts: Tensor
    """int64 [groups], on the rows' device."""
    sizes: Sequence[int] | None = None
    """The counts on the host; None: not read from the device yet."""
    by_source: Tensor | None = None
    """int64 [groups, sources]: number of rows of each group from each source, the rank whose tokens they are. Rows of a
    group are sorted by source. None: there is one source."""
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that operations have computed from the counts, by name, so that the products of a layer share them."""

    @classmethod
    def of_sources(cls, counts: Tensor, sizes: Sequence[int] | None = None) -> "RowGroups":
        """Returns the groups of rows that are sorted by source within a group; `counts` is int64 [..., groups]."""
        by_source = counts.flatten(0, -2).t()  # [groups, sources]
        return cls(by_source.sum(1), sizes, by_source)

    @functools.cached_property
    def host_sizes(self) -> Sequence[int]:
        """Returns `counts` on the host. Waits for the device if they are not there yet."""
        return self.counts.tolist() if self.sizes is None else self.sizes

    @property
    def bounds(self) -> "Bounds":
        """Where the rows of each group begin and end, two int32 [groups]. Does not wait for the device."""
        if "bounds" not in self.derived:
            ends = self.counts.cumsum(0)
            self.derived["bounds"] = torch.stack([ends - self.counts, ends]).to(torch.int32)
        begins, ends = self.derived["bounds"]
        return begins, ends

    def of_rows(self, rows: int) -> Tensor:
        """Returns the group of each row, int64 [rows]. Does not wait for the device."""
        numbers = torch.arange(self.counts.shape[0], device=self.counts.device)
        return torch.repeat_interleave(numbers, self.counts, output_size=rows)

    def split(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields index and rows of each group that is not empty."""
        for number, part in enumerate(rows.split(list(self.host_sizes))):
            if part.shape[0]:
                yield number, part


Bounds = tuple[Tensor, Tensor]
"""Where rows begin and end in each group: two int32 [groups]."""

_WIDTH_MULTIPLE = 8
"""torch's grouped product needs rows of a multiple of 16 bytes, which are this many 16-bit elements."""


def is_one_product(dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch's grouped product can compute rows of this type and these widths. On a GPU it needs no counts on
    the host."""
    return dtype is torch.bfloat16 and not any(width % _WIDTH_MULTIPLE for width in widths)


# ---------------------------------------------------------------------------------------------------------------------
# The two products


def grouped_product(rows: Tensor, weight: Tensor, groups: RowGroups, transposed: bool) -> Tensor:
    """Returns the rows [n, in] of each group e times W_e: [n, out]. `weight` is [groups, in, out], or [groups, out, in]
    with `transposed`."""
    width = weight.shape[1 if transposed else 2]
    output = rows.new_empty(rows.shape[0], width)
    for (number, part), (_, target) in zip(groups.split(rows), groups.split(output), strict=True):
        matrix = weight[number].t() if transposed else weight[number]
        target.copy_(product(part, matrix))
    return output


def accumulate_grouped_product(
    total: Tensor, left: Tensor, right: Tensor, groups: RowGroups, factor: float = 1.0, replaces: bool = False
) -> None:
    """Computes total[e] += factor * left_e^T @ right_e over the rows of each group, accumulated in the type of `total`
    ([n, out], [n, in] into [groups, out, in]). With `replaces` the total before does not count, and it may be NaN."""
    if replaces:
        total.zero_()
    for (number, rows), (_, columns) in zip(groups.split(left), groups.split(right), strict=True):
        total[number].addmm_(rows.t().to(total.dtype), columns.to(total.dtype), alpha=factor)


@dataclass(frozen=True)
class GroupedProducts:
    """Implementations of the two functions above."""

    rows: Callable[[Tensor, Tensor, RowGroups, bool], Tensor] = grouped_product
    weights: Callable[..., None] = accumulate_grouped_product


PLAIN_PRODUCTS = GroupedProducts()
"""A loop over the groups, for any device and type."""


@dataclass(frozen=True)
class AccumulateGroups:
    """Adds the products of groups to a weight's gradient, or writes them over it: `parameters.AccumulateProduct`."""

    products: GroupedProducts
    groups: RowGroups
    can_replace: ClassVar = True

    def __call__(
        self, total: Tensor, left: Tensor, right: Tensor, /, *, factor: float = 1.0, replaces: bool = False
    ) -> None:
        """Computes `accumulate_grouped_product`."""
        self.products.weights(total, left, right, self.groups, factor, replaces)


# ---------------------------------------------------------------------------------------------------------------------


def grouped_linear(
    inputs: Tensor, weight: Tensor, groups: RowGroups, products: GroupedProducts = PLAIN_PRODUCTS
) -> Tensor:
    """Returns inputs [n, in] times the transposed weight of each row's group [groups, out, in]: [n, out], in the type
    of the inputs."""
    return _GroupedLinear.apply(inputs, weight, groups, products)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, weight: Tensor, groups: RowGroups, products: GroupedProducts
    ) -> Tensor:
        # Keeps the parameter, not a saved tensor: full sharding frees its storage and gathers it again before backward.
        ctx.weight, ctx.groups, ctx.products = weight, groups, products
        output = products.rows(inputs, weight, groups, True)
        ctx.save_for_backward(inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, *_ = ctx.needs_input_grad
        output_gradient = output_gradient.contiguous()
        inputs_gradient = weight_gradient = None
        if needs_inputs:
            inputs_gradient = ctx.products.rows(output_gradient, weight.detach(), ctx.groups, False)
        if needs_weight:
            accumulate = AccumulateGroups(ctx.products, ctx.groups)
            weight_gradient = add_grouped_product(weight, output_gradient, inputs.detach(), accumulate)
        return inputs_gradient, weight_gradient, None, None


def add_grouped_product(weight: Tensor, left: Tensor, right: Tensor, accumulate: Callable[..., None]) -> Tensor | None:
    """Adds a product to the weight's main gradient, by `accumulate(total, left, right)`. Returns the gradient of a
    weight without a main gradient, accumulated in float32 at least and rounded once."""
    main_grad = main_grad_accumulator(weight)
    if main_grad is not None:
        main_grad.add_grouped_product(left, right, accumulate)
        return None
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format)
    accumulate(total, left, right)
    return total.to(weight.dtype)


def grouped_bias(bias: Tensor, groups: RowGroups, rows: int, products: GroupedProducts = PLAIN_PRODUCTS) -> Tensor:
    """Returns the bias of each row's group: [groups, out] -> [rows, out]. The gradient is summed in a fixed order, in
    float32 at least."""
    return _GroupedBias.apply(bias, groups, rows, products)


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, bias: Tensor, groups: RowGroups, rows: int, products: GroupedProducts) -> Tensor:
        ctx.groups, ctx.products, ctx.number = groups, products, bias.shape[0]
        return bias.index_select(0, groups.of_rows(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # A product with ones, because torch's index_add sums rows in no fixed order on a GPU.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.number, gradient.shape[1], 1, dtype=wide)
        ctx.products.weights(total, gradient.contiguous(), gradient.new_ones(gradient.shape[0], 1), ctx.groups)
        return total[..., 0].to(gradient.dtype), None, None, None
