"""Low-rank adapters beside frozen linear layers: LoRA (Hu et al. 2021, arXiv:2106.09685) and DoRA (Liu et al. 2024,
arXiv:2402.09353).

    LoRA:  y = W x + s B A x                      A [r, in], B [out, r]; W is frozen
    DoRA:  y = m (W x + s B A x) / |W + s B A|    m [out]; | | is the norm of each row, whose gradient is left out

A layer computes this where it called its function `linear`, so what is around the layer stays the same: norms, biases,
and sums over tensor parallel ranks. Those ranks divide A and B as the layer divides W:

- by rows (column parallel): every rank has A and its rows of B. Under sequence parallelism A x is computed for a rank's
  own tokens, and its r numbers per token are gathered instead of the layer's inputs;
- by columns (row parallel): every rank has its columns of A, and B. The layer's own sum over ranks adds the parts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_gather, all_reduce, group_size
from megatron.core.ops.dropout.dropout import DropoutRngPosition
from megatron.core.ops.linear import linear
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.utils.recompute_cache import run_once_under_recompute


@dataclass(frozen=True)
class RowPart:
    """The rows of a layer that an adapter changes: a range of one dimension of the layer's canonical rows."""

    name: str
    axis: int = 0
    start: int = 0
    stop: int | None = None
    """None: all rows."""


WHOLE = RowPart("whole")


class LowRank(nn.Module):
    """The parameters of one adapter, for a part of a layer's rows."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    position: DropoutRngPosition | None
    """Position of dropout masks in the run, of the tokens that now pass the layer; None: nothing is dropped."""

    def __init__(
        self,
        part: RowPart,
        lora_a: nn.Parameter,
        lora_b: nn.Parameter,
        magnitude: nn.Parameter | None,
        *,
        scale: float,
        dropout: float,
        first_column: int,
    ) -> None:
        """`first_column`: index of this rank's first input channel in the whole layer."""
        super().__init__()
        self.part, self.scale, self.dropout, self.first_column = part, scale, dropout, first_column
        self.register_parameter("lora_a", lora_a)
        self.register_parameter("lora_b", lora_b)
        self.register_parameter("magnitude", magnitude)
        self.position = None

    def dropped(self, inputs: Tensor) -> Tensor:
        """Returns dropout of the inputs [t, in]."""
        if not (self.training and self.dropout):
            return inputs
        position = run_once_under_recompute((self, "dropout of adapters"), lambda: self.position)
        if position is None:
            return inputs
        rows, (tokens, draw) = inputs.reshape(-1, inputs.shape[-1]), (position.tokens, position.draw(self.dropout))
        index = tokens.index
        first = torch.full_like(index, self.first_column)
        kept = tokens.keep(draw, index, index >> 32, first, rows.shape[1])
        return (rows * kept * draw.scale).to(inputs.dtype).view_as(inputs)

    def product(self, inputs: Tensor, group: Group, gathers: bool) -> Tensor:
        """Returns s B A x for inputs [t, in]: [t, rows]."""
        low = linear(self.dropped(inputs), self.lora_a)
        return linear(low * self.scale, self.lora_b, None, group, gathers=gathers)

    def direction_factor(self, rows: Tensor, columns_group: Group) -> Tensor:
        """Returns m / |W + s B A| for these rows of W [rows, in]: [rows]. The ranks of `columns_group` divide the
        columns."""
        with torch.no_grad():
            wide = torch.promote_types(rows.dtype, torch.float32)
            adapted = torch.addmm(rows.to(wide), self.lora_b.to(wide), self.lora_a.to(wide), alpha=self.scale)
            norm = all_reduce(adapted.square_().sum(1), columns_group).sqrt()
        assert self.magnitude is not None
        return self.magnitude.to(wide) / norm


@torch.no_grad()
def first_magnitude(rows: Tensor, columns_group: Group) -> Tensor:
    """Returns the norm of each row of W [rows, in], in float32 at least: [rows]. Ranks that divide the columns gather
    them, so that the result has the same bits in every layout."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if group_size(columns_group) > 1:
        wide = torch.cat(all_gather(wide.contiguous(), columns_group), 1)
    return wide.square().sum(1).sqrt()


class AdaptedLinear:
    """The function `linear` of a layer with adapters.

    Args:
        function: the layer's own function.
        adapters: the adapters by the name of their part; their parts do not overlap and share an axis.
        rows: dimensions of the rows of W on this rank.
        columns_group: ranks that divide the columns of W.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        adapters: nn.ModuleDict,
        rows: tuple[int, ...],
        columns_group: Group = None,
    ) -> None:
        self.function, self.rows, self.columns_group = function, rows, columns_group
        self.adapters = adapters
        self.decode: Callable[[], Tensor] | None = None
        """Returns W if the layer keeps it in another form; None: the layer has it."""

    @property
    def parts(self) -> list[LowRank]:
        """The adapters, in the order of their rows."""
        found = [adapter for adapter in self.adapters.values() if isinstance(adapter, LowRank)]
        return sorted(found, key=lambda adapter: adapter.part.start)

    def __call__(
        self,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        group: Group = None,
        *,
        gathers: bool = False,
    ) -> Tensor:
        """Returns the layer's output with the adapters', as `ops.linear.linear` of the same arguments."""
        parts = self.parts
        turns = any(adapter.magnitude is not None for adapter in parts)
        own_bias = None if turns else bias
        if gathers:
            output = self.function(inputs, weight, own_bias, group, gathers=True)
        else:
            output = self.function(inputs, weight, own_bias, group)

        def changed(rows: Tensor, adapter: LowRank) -> Tensor:
            total = rows + adapter.product(inputs, group, gathers)
            if adapter.magnitude is None:
                return total
            own = self.rows_of(weight, adapter.part)
            return total * adapter.direction_factor(own, self.columns_group).to(total.dtype)

        output = self._changed_rows(output, parts, changed)
        return output + bias if turns and bias is not None else output

    def rows_of(self, weight: Tensor | None, part: RowPart) -> Tensor:
        """Returns the rows of W [out, in] that a part consists of."""
        weight = self.decode() if self.decode is not None else weight
        assert weight is not None
        if part.stop is None:
            return weight
        rows = weight.view(*self.rows, weight.shape[-1])
        return rows.narrow(part.axis, part.start, part.stop - part.start).flatten(0, -2)

    def _changed_rows(
        self, output: Tensor, parts: list[LowRank], change: Callable[[Tensor, LowRank], Tensor]
    ) -> Tensor:
        """Returns the output [..., out] with `change` applied to the channels of each part."""
        if len(parts) == 1 and parts[0].part.stop is None:
            return change(output, parts[0])
        shaped = output.unflatten(-1, self.rows)  # [..., *rows]
        dim = output.dim() - 1 + parts[0].part.axis
        pieces, done = [], 0
        for adapter in parts:
            start, stop = adapter.part.start, adapter.part.stop
            assert stop is not None and start >= done
            own = shaped.narrow(dim, start, stop - start)
            pieces.append(shaped.narrow(dim, done, start - done))
            pieces.append(change(own.flatten(output.dim() - 1), adapter).view_as(own))
            done = stop
        pieces.append(shaped.narrow(dim, done, shaped.shape[dim] - done))
        return torch.cat([piece for piece in pieces if piece.shape[dim]], dim).flatten(output.dim() - 1)


class AdaptedGroupedLinear(AdaptedLinear):
    """The function `linear` of all experts of a rank, with an adapter for each expert."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        adapters: nn.ModuleDict,
        rows: tuple[int, ...],
        plain: Callable[..., Tensor],
    ) -> None:
        """`plain` multiplies rows by the stacked matrices of experts."""
        super().__init__(function, adapters, rows)
        self.plain = plain

    def __call__(self, inputs: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:  # type: ignore[override]
        """Returns the experts' outputs [n, out] with their adapters', for rows [n, in] sorted by expert."""

        def changed(rows: Tensor, adapter: LowRank) -> Tensor:
            low = self.plain(inputs, adapter.lora_a, groups)
            return rows + self.plain(low * adapter.scale, adapter.lora_b, groups)

        return self._changed_rows(self.function(inputs, weight, groups), self.parts, changed)


def part_of_rows(part: RowPart, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimensions of a part's rows."""
    if part.stop is None:
        return rows
    return (*rows[: part.axis], part.stop - part.start, *rows[part.axis + 1 :])


def smaller_side(part: RowPart, rows: tuple[int, ...], columns: int) -> int:
    """Returns the largest rank that a product B A of this shape can have."""
    return min(math.prod(part_of_rows(part, rows)), columns)
