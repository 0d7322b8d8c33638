"""y = x W_e^T for rows that lie by group e, each group with a weight of its own: the products of experts.

Rows of one group are neighbours, in the order of the groups; a group may have none. As of a plain linear
(`ops.linear`), the weight's gradient goes to its main_grad if it has one, which may put it off.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.linear import product
from megatron.core.parameters import main_grad_accumulator


@dataclass(frozen=True)
class RowGroups:
    """How many rows each group has: first come the `counts[0]` rows of group 0, then those of group 1, and so on."""

    counts: Tensor
    """int64 [groups], on the rows' device."""
    sizes: Sequence[int] | None = None
    """The same on the host; None: nobody has asked the device yet."""

    @functools.cached_property
    def host_sizes(self) -> Sequence[int]:
        """`counts` on the host, which waits for the device unless they are there."""
        return self.counts.tolist() if self.sizes is None else self.sizes

    @functools.cached_property
    def ends(self) -> Tensor:
        """Where each group's rows end, int32 [groups]. Does not wait for the device."""
        return self.counts.cumsum(0).to(torch.int32)

    def of_rows(self, rows: int) -> Tensor:
        """The group of each of the `rows` rows there are, int64 [rows]. Does not wait for the device."""
        numbers = torch.arange(self.counts.shape[0], device=self.counts.device)
        return torch.repeat_interleave(numbers, self.counts, output_size=rows)

    def split(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Number and rows of each group that has any."""
        for number, part in enumerate(rows.split(list(self.host_sizes))):
            if part.shape[0]:
                yield number, part


_WIDTH_MULTIPLE = 8
"""Elements of 16 bits in the 16 bytes that torch's grouped product wants rows to be multiples of."""


def is_one_product(dtype: torch.dtype, *widths: int) -> bool:
    """Torch's grouped product takes rows of this type and of these widths; on a GPU nobody asks then how many rows a
    group has."""
    return dtype is torch.bfloat16 and not any(width % _WIDTH_MULTIPLE for width in widths)


# ---------------------------------------------------------------------------------------------------------------------
# The three products


def grouped_product(rows: Tensor, weight: Tensor, groups: RowGroups, transposed: bool) -> Tensor:
    """Rows [n, in] of group e times W_e of `weight`: [groups, in, out], or with `transposed` [groups, out, in], of
    which the transpose is taken. [n, out]."""
    width = weight.shape[1 if transposed else 2]
    output = rows.new_empty(rows.shape[0], width)
    for (number, part), (_, target) in zip(groups.split(rows), groups.split(output), strict=True):
        matrix = weight[number].t() if transposed else weight[number]
        target.copy_(product(part, matrix))
    return output


def accumulate_grouped_product(total: Tensor, left: Tensor, right: Tensor, groups: RowGroups) -> None:
    """total[e] += left_e^T @ right_e over the rows of each group, accumulated in the type of `total` ([n, out], [n, in]
    into [groups, out, in])."""
    for (number, rows), (_, columns) in zip(groups.split(left), groups.split(right), strict=True):
        total[number].addmm_(rows.t().to(total.dtype), columns.to(total.dtype))


@dataclass(frozen=True)
class GroupedProducts:
    """Implementations of the two functions above."""

    rows: Callable[[Tensor, Tensor, RowGroups, bool], Tensor] = grouped_product
    weights: Callable[[Tensor, Tensor, Tensor, RowGroups], None] = accumulate_grouped_product


PLAIN_PRODUCTS = GroupedProducts()
"""A loop over groups, on any device and in any type."""


# ---------------------------------------------------------------------------------------------------------------------


def grouped_linear(
    inputs: Tensor, weight: Tensor, groups: RowGroups, products: GroupedProducts = PLAIN_PRODUCTS
) -> Tensor:
    """[n, in] x [groups, out, in] -> [n, out], in the type of the inputs."""
    return _GroupedLinear.apply(inputs, weight, groups, products)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, groups: RowGroups, products: GroupedProducts) -> Tensor:
        ctx.save_for_backward(inputs)
        # The parameter, not a saved tensor: under full sharding its storage goes away and comes back before backward.
        ctx.weight, ctx.groups, ctx.products = weight, groups, products
        return products.rows(inputs, weight, groups, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, *_ = ctx.needs_input_grad
        output_gradient = output_gradient.contiguous()
        inputs_gradient = weight_gradient = None
        if needs_inputs:
            inputs_gradient = ctx.products.rows(output_gradient, weight.detach(), ctx.groups, False)
        if needs_weight:
            accumulate = functools.partial(ctx.products.weights, groups=ctx.groups)
            main_grad = main_grad_accumulator(weight)
            if main_grad is None:
                # In float32 at least, and rounded once.
                total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                accumulate(total, output_gradient, inputs.detach())
                weight_gradient = total.to(weight.dtype)
            else:
                main_grad.add_grouped_product(output_gradient, inputs, accumulate)
        return inputs_gradient, weight_gradient, None, None


def grouped_bias(bias: Tensor, groups: RowGroups, rows: int, products: GroupedProducts = PLAIN_PRODUCTS) -> Tensor:
    """[groups, out] -> [rows, out]: each row's group's. The gradient is summed in a fixed order, in float32 at
    least."""
    return _GroupedBias.apply(bias, groups, rows, products)


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, groups: RowGroups, rows: int, products: GroupedProducts) -> Tensor:
        ctx.groups, ctx.products, ctx.number = groups, products, bias.shape[0]
        return bias.index_select(0, groups.of_rows(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # A product with ones: torch would add rows up in whatever order they come.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.number, gradient.shape[1], 1, dtype=wide)
        ctx.products.weights(total, gradient.contiguous(), gradient.new_ones(gradient.shape[0], 1), ctx.groups)
        return total[..., 0].to(gradient.dtype), None, None, None
