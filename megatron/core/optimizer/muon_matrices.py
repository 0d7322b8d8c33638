"""The parameters that Muon updates, and the matrices in a rank's part of a parameter. Pure functions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parameters import ParameterInfo

MUON = ("muon", "dist_muon")
"""Values of --optimizer."""

MOMENTUM = "momentum_buffer"
"""Name of Muon's moment."""


def takes_muon(parameter: nn.Parameter, info: ParameterInfo, config: OptimizerConfig) -> bool:
    """Whether Muon updates a parameter: matrices inside layers, and those of experts. Embeddings, the head, tables,
    depthwise convolutions, norms and biases are updated by AdamW."""
    if config.optimizer not in MUON or not info.grows_with_width:
        return False
    return parameter.dim() == 2 or info.grid == "expert"


@dataclass(frozen=True)
class Runs:
    """Where the elements of equal matrices are in a flat tensor: `count` runs of `length` neighbouring elements each,
    which begin `stride` elements apart. Each matrix has as many of them."""

    matrices: int
    first: int
    count: int
    length: int
    stride: int


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape in the box of a parameter on this rank: one, or one for each expert here."""

    shape: tuple[int, int, int]
    """[n, rows, columns] on this rank."""
    whole: tuple[int, int]
    """Rows and columns of each matrix on all tensor parallel ranks together."""
    split: int | None
    """The dimension that tensor parallel ranks divide: 1 for rows, 2 for columns; None if each rank has all."""
    heads: slice | None = None
    """The rows along the second canonical dimension, for queries, keys or values of a fused projection."""

    def view(self, flat: Tensor, info: ParameterInfo) -> Tensor:
        """Returns the matrices in the elements of a box: a view of `flat` (any shape, to be reshaped to `shape`)."""
        box = flat.view(info.box.shape)
        return box if self.heads is None else box[:, self.heads]

    def runs(self, info: ParameterInfo) -> Runs:
        """Returns where the matrices are in a box."""
        count, rows, columns = self.shape
        if self.heads is None:
            return Runs(count, 0, count, rows * columns, rows * columns)
        groups, heads, *inside = info.box.shape
        head = math.prod(inside)
        return Runs(count, self.heads.start * head, groups, (self.heads.stop - self.heads.start) * head, heads * head)

    def read(self, flat: Tensor, info: ParameterInfo) -> Tensor:
        """Returns the matrices [n, rows, columns]."""
        return self.view(flat, info).reshape(self.shape)

    def write(self, flat: Tensor, info: ParameterInfo, values: Tensor) -> None:
        """Writes the matrices into the elements of a box."""
        place = self.view(flat, info)
        place.copy_(values.reshape(place.shape))


def matrices_of(info: ParameterInfo, tensor_ranks: int, config: OptimizerConfig) -> Iterator[Matrices]:
    """Yields the matrices in the box of a parameter that `tensor_ranks` ranks divide.

    Rows of a matrix may be in any order: orthogonalisation commutes with permutations of rows. Raises UserError if the
    boxes of the ranks do not make up a whole matrix.
    """
    stacked = int(info.grid == "expert")
    n = info.box.shape[0] if stacked else 1
    whole, part, columns = info.global_shape[stacked:], info.box.shape[stacked:], info.box.shape[-1]
    if not (info.separate_heads and config.muon_split_qkv):
        rows = math.prod(part[:-1])
        split = _split((rows, columns), (math.prod(whole[:-1]), whole[-1]), tensor_ranks, info, config)
        yield Matrices((n, rows, columns), (math.prod(whole[:-1]), whole[-1]), split)
        return
    first, start = 0, info.box.start[1]
    for count in info.separate_heads:
        begin, end = max(first, start), min(first + count, start + part[1])
        if begin < end:
            rows, all_rows = part[0] * (end - begin) * part[2], whole[0] * count * whole[2]
            split = _split((rows, columns), (all_rows, whole[-1]), tensor_ranks, info, config)
            yield Matrices((n, rows, columns), (all_rows, whole[-1]), split, slice(begin - start, end - start))
        first += count


def _split(
    part: tuple[int, int], whole: tuple[int, int], ranks: int, info: ParameterInfo, config: OptimizerConfig
) -> int | None:
    if part == whole:
        return None
    for dim in (0, 1):
        if part[dim] * ranks == whole[dim] and part[1 - dim] == whole[1 - dim]:
            return dim + 1
    if config.muon_tp_mode == "blockwise":
        return 1
    raise UserError(
        f"--muon-tp-mode {config.muon_tp_mode}: {info.name} has queries, keys and values in one matrix, and "
        f"{ranks} tensor parallel ranks share its keys and values: leave out --muon-no-split-qkv, or use blockwise"
    )
