"""Weights whose only whole copy is in fp8: quantisation of flat parts of them, in plain torch.

A rank has the elements [start, stop) of a weight in a wider type, and all ranks gather what each has quantised. So a
scale needs the largest value of elements that several ranks have: `largest_of_blocks` finds that of a part, the caller
takes the largest over ranks, and `cast_blocks` rounds the part. The transposed form of the whole weight has the same
bytes (`transposed_codes`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.fp8.formats import cast
from megatron.core.ops.precision import widened


@dataclass(frozen=True)
class WeightBlocks:
    """The blocks of a weight [groups, height, width], or [height, width], that have one scale each."""

    groups: int
    height: int
    width: int
    block_height: int
    block_width: int

    @classmethod
    def of(cls, shape: torch.Size, block: tuple[int, int]) -> "WeightBlocks":
        """Returns the blocks of a weight of this shape. `block` has the rows and columns of a block, 0 for all."""
        groups, height, width = (1, *shape)[-3:]
        return cls(groups, height, width, block[0] or height, block[1] or width)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of groups, and numbers of blocks along the rows and columns of one. The last blocks may be smaller."""
        return self.groups, -(-self.height // self.block_height), -(-self.width // self.block_width)

    @property
    def number(self) -> int:
        """Number of blocks."""
        groups, down, across = self.shape
        return groups * down * across

    @property
    def has_one_for_each_group(self) -> bool:
        """Whether a block is the whole matrix of a group."""
        return (self.block_height, self.block_width) == (self.height, self.width)

    def of_elements(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Returns the block of each of the elements [start, stop) of the weight, int64."""
        _, down, across = self.shape
        element = torch.arange(start, stop, device=device)
        row, column = element // self.width, element % self.width
        group, row = row // self.height, row % self.height
        return (group * down + row // self.block_height) * across + column // self.block_width


def largest_of_blocks(values: Tensor, start: int, blocks: WeightBlocks, dtype: torch.dtype, largest: Tensor) -> None:
    """Raises `largest`, float32 [blocks], to the largest absolute values of elements of a weight.

    `values` [n] are the elements from `start` on, or numbers that round to them in the weight's type `dtype`.
    """
    # Rounding keeps the order of numbers, so the largest number rounds to the largest element.
    size = values.abs()
    if blocks.number == 1:
        found = size.amax().view(1)
    else:
        index = blocks.of_elements(start, start + values.numel(), values.device)
        found = size.new_zeros(blocks.number).scatter_reduce(0, index, size, "amax")
    largest.copy_(torch.maximum(largest, found.to(dtype).float()))


def cast_blocks(
    values: Tensor, start: int, blocks: WeightBlocks, dtype: torch.dtype, scales: Tensor, out: Tensor
) -> None:
    """Writes the elements of a weight from `start` on, times the scale of their block, to `out`, fp8 [n]. `scales` is
    float32 [blocks], or a scalar for all; for the rest see `largest_of_blocks`."""
    if scales.dim():
        scales = scales[blocks.of_elements(start, start + values.numel(), values.device)]
    out.copy_(cast(widened(values.to(dtype)) * scales, out.dtype))


def transposed_codes(codes: Tensor, multiple: int) -> Tensor:
    """Returns [groups, height, width] of fp8 as [width, groups * padded height]: the transposed matrices side by side,
    each padded with zeros to a multiple of columns."""
    padded = F.pad(codes.view(torch.uint8), (0, 0, 0, -codes.shape[1] % multiple))
    return padded.permute(2, 0, 1).flatten(1).contiguous().view(codes.dtype)


@dataclass(frozen=True)
class WeightKernels:
    """The operations on weights in fp8, with the signatures of these functions."""

    largest_of_blocks: Callable[..., None] = largest_of_blocks
    cast_blocks: Callable[..., None] = cast_blocks
    transposed_codes: Callable[..., Tensor] = transposed_codes
