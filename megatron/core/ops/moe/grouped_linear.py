"""Grouped linear layer of experts: y = x W_e^T, where rows of group (expert) e use weight W_e.

Rows are sorted by group; a group may be empty. As in `ops.linear`, the weight's gradient goes to its main gradient if
it has one, which may defer the product.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.linear import product
from megatron.core.parameters import main_grad_accumulator


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

    @property
    def knows_sources(self) -> bool:
        """Whether `bounds_by_source` can be read."""
        return self.by_source is not None or "bounds by source" in self.derived

    @property
    def bounds_by_source(self) -> "Bounds":
        """Where the rows of each source begin and end in each group, two int32 [sources, groups]. Does not wait for the
        device."""
        if "bounds by source" not in self.derived:
            assert self.by_source is not None
            ends = self.by_source.flatten().cumsum(0).view(self.by_source.shape)
            both = torch.stack([ends - self.by_source, ends]).transpose(1, 2)
            self.derived["bounds by source"] = both.to(torch.int32).contiguous()
        begins, ends = self.derived["bounds by source"]
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
"""Where rows begin and end in each group: two int32 [groups], or [parts, groups] for several parts of the rows. Both
ascend over the groups."""


@dataclass(frozen=True)
class PartSteps:
    """An order in which a product computes parts of its rows, and what happens behind each."""

    order: Sequence[int]
    bounds: Bounds
    """Those of all parts, [parts, groups]. Every row is in one part of the order."""
    after: Callable[[int, Tensor], None]
    """Called with a part and the outputs when the outputs of the part's rows are computed."""


@dataclass(frozen=True)
class ArrivingRows:
    """Rows that are not all there, in a memory with room for more rows than there probably are: the host does not know
    their number. A product of the first part begins before the host waits for it."""

    room: Tensor
    """[m, in], with the values of the first part if there is room for them."""
    first: int
    bounds: Bounds
    """Those of all parts, [parts, groups]."""
    settle: Callable[[], tuple[int, Sequence[int]]]
    """Returns the number of rows and the other parts in their order. The host may wait."""
    grown: Callable[[int], Tensor]
    """Returns a new memory for this number of rows, with the values of the first part."""
    before: Callable[[int, Tensor], None]
    """Called with another part and the rows before the product reads the part's rows and the weights of their
    groups."""
    give_back: Callable[[Tensor], Tensor]
    """Takes the gradient of the rows in backward. Returns the gradient of the placeholder from which they come."""


_WIDTH_MULTIPLE = 8
"""torch's grouped product needs rows of a multiple of 16 bytes, which are this many 16-bit elements."""


def is_one_product(dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch's grouped product can compute rows of this type and these widths. On a GPU it needs no counts on
    the host."""
    return dtype is torch.bfloat16 and not any(width % _WIDTH_MULTIPLE for width in widths)


# ---------------------------------------------------------------------------------------------------------------------
# The three products


def grouped_product(rows: Tensor, weight: Tensor, groups: RowGroups, transposed: bool) -> Tensor:
    """Returns the rows [n, in] of each group e times W_e: [n, out]. `weight` is [groups, in, out], or [groups, out, in]
    with `transposed`."""
    width = weight.shape[1 if transposed else 2]
    output = rows.new_empty(rows.shape[0], width)
    for (number, part), (_, target) in zip(groups.split(rows), groups.split(output), strict=True):
        matrix = weight[number].t() if transposed else weight[number]
        target.copy_(product(part, matrix))
    return output


def grouped_product_of_part(output: Tensor, rows: Tensor, weight: Tensor, bounds: Bounds, transposed: bool) -> None:
    """Computes the rows between the bounds of `grouped_product` into `output`. Other rows may have any values; their
    outputs stay as they are. Bounds behind the last row mean the last row."""
    for number, (begin, end) in enumerate(zip(*(edge.tolist() for edge in bounds), strict=True)):
        matrix = weight[number].t() if transposed else weight[number]
        output[begin:end].copy_(product(rows[begin:end], matrix))


def accumulate_grouped_product(
    total: Tensor, left: Tensor, right: Tensor, groups: RowGroups, factor: float = 1.0, overwrite: bool = False
) -> None:
    """Computes total[e] += factor * left_e^T @ right_e over the rows of each group, accumulated in the type of `total`
    ([n, out], [n, in] into [groups, out, in]). With `overwrite` the products replace the old values, which become zero
    for groups without rows."""
    if overwrite:
        total.zero_()
    for (number, rows), (_, columns) in zip(groups.split(left), groups.split(right), strict=True):
        total[number].addmm_(rows.t().to(total.dtype), columns.to(total.dtype), alpha=factor)


@dataclass(frozen=True)
class GroupedProducts:
    """Implementations of the three functions above."""

    rows: Callable[[Tensor, Tensor, RowGroups, bool], Tensor] = grouped_product
    weights: Callable[..., None] = accumulate_grouped_product
    part: Callable[[Tensor, Tensor, Tensor, Bounds, bool], None] = grouped_product_of_part

    def in_steps(self, rows: Tensor, weight: Tensor, transposed: bool, steps: PartSteps) -> Tensor:
        """Returns `rows`, computed part after part."""
        output, (begins, ends) = rows.new_empty(rows.shape[0], weight.shape[1 if transposed else 2]), steps.bounds
        for part in steps.order:
            self.part(output, rows, weight, (begins[part], ends[part]), transposed)
            steps.after(part, output)
        return output

    def of_arriving(self, rows: ArrivingRows, weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        """Returns (rows [n, in], `rows` of them), computed part after part."""

        def part(number: int) -> None:
            self.part(output, room, weight, (begins[number], ends[number]), transposed)

        room, width, (begins, ends) = rows.room, weight.shape[1 if transposed else 2], rows.bounds
        output = room.new_empty(room.shape[0], width)
        part(rows.first)
        count, others = rows.settle()
        if count > room.shape[0]:
            room = rows.grown(count)
            output = room.new_empty(count, width)
            part(rows.first)
        # No views for autograd, which forbids writes into views.
        room, output = room[:count].data, output[:count].data
        for number in others:
            rows.before(number, room)
            part(number)
        return room, output


PLAIN_PRODUCTS = GroupedProducts()
"""A loop over the groups, for any device and type."""


# ---------------------------------------------------------------------------------------------------------------------


def grouped_linear(
    inputs: Tensor,
    weight: Tensor,
    groups: RowGroups,
    products: GroupedProducts = PLAIN_PRODUCTS,
    steps: PartSteps | ArrivingRows | None = None,
) -> Tensor:
    """Returns inputs [n, in] times the transposed weight of each row's group [groups, out, in]: [n, out], in the type
    of the inputs. With `steps` forward computes part after part; backward computes all rows at once. Arriving rows are
    in `steps`; `inputs` is then the placeholder from which they come."""
    return _GroupedLinear.apply(inputs, weight, groups, products, steps)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        groups: RowGroups,
        products: GroupedProducts,
        steps: PartSteps | ArrivingRows | None,
    ) -> Tensor:
        # Keeps the parameter, not a saved tensor: full sharding frees its storage and gathers it again before backward.
        ctx.weight, ctx.groups, ctx.products = weight, groups, products
        ctx.give_back = None
        if isinstance(steps, ArrivingRows):
            ctx.give_back = steps.give_back
            inputs, output = products.of_arriving(steps, weight, True)
        elif steps is not None:
            output = products.in_steps(inputs, weight, True, steps)
        else:
            output = products.rows(inputs, weight, groups, True)
        ctx.save_for_backward(inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, *_ = ctx.needs_input_grad
        output_gradient = output_gradient.contiguous()
        inputs_gradient = weight_gradient = None
        if needs_inputs:
            inputs_gradient = ctx.products.rows(output_gradient, weight.detach(), ctx.groups, False)
            if ctx.give_back is not None:
                inputs_gradient = ctx.give_back(inputs_gradient)
        if needs_weight:
            accumulate = functools.partial(ctx.products.weights, groups=ctx.groups)
            main_grad = main_grad_accumulator(weight)
            if main_grad is None:
                # Accumulated in float32 at least, and rounded once.
                total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                accumulate(total, output_gradient, inputs.detach())
                weight_gradient = total.to(weight.dtype)
            else:
                main_grad.add_grouped_product(output_gradient, inputs, accumulate)
        return inputs_gradient, weight_gradient, None, None, None


def grouped_bias(bias: Tensor, groups: RowGroups, rows: int, products: GroupedProducts = PLAIN_PRODUCTS) -> Tensor:
    """Returns the bias of each row's group: [groups, out] -> [rows, out]. The gradient is summed in a fixed order, in
    float32 at least."""
    return _GroupedBias.apply(bias, groups, rows, products)


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, groups: RowGroups, rows: int, products: GroupedProducts) -> Tensor:
        ctx.groups, ctx.products, ctx.number = groups, products, bias.shape[0]
        return bias.index_select(0, groups.of_rows(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # A product with ones, because torch's index_add sums rows in no fixed order on a GPU.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.number, gradient.shape[1], 1, dtype=wide)
        ctx.products.weights(total, gradient.contiguous(), gradient.new_ones(gradient.shape[0], 1), ctx.groups)
        return total[..., 0].to(gradient.dtype), None, None, None
