"""Recipes in which blocks of a matrix have scales of their own, and the scaling that a recipe's name stands for."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.formats import BLOCK
from megatron.core.ops.fp8.grouped import QuantizedGroupsPair, Segments
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.microscaling import MX_BLOCK, quantize_mx, quantize_segments
from megatron.core.ops.fp8.nvfp4 import NV_BLOCK, largest_of_layouts, quantize_nvfp4
from megatron.core.ops.fp8.quantize import QuantizedPair
from megatron.core.ops.fp8.recipes import (
    DelayedScaling,
    Fp8Settings,
    LinearSplit,
    Role,
    Scaling,
    TensorwiseScaling,
    dividing_groups,
    largest_over,
)
from megatron.core.utils.warn import warn_on_first_rank


class BlockwiseScaling(Scaling):
    """A scale for each 1 x 128 block of inputs and gradients and each 128 x 128 block of weights (DeepSeek-AI 2024,
    arXiv:2412.19437)."""

    weight_block = (BLOCK, BLOCK)

    def quantize(
        self,
        matrix: Tensor,
        role: Role,
        segments: Segments | None = None,
        *,
        rows: bool,
        columns: bool,
        records: bool,
    ) -> QuantizedPair | QuantizedGroupsPair:
        """Casts each block by the scale of its own largest value."""
        wanted = {"square": role is Role.WEIGHTS, "rows": rows, "columns": columns}
        dtype, margin = self.settings.dtype(role), self.settings.margin
        if segments is None:
            return self.kernels.quantize_blocks(matrix, dtype, margin, **wanted)
        return self.kernels.grouped.quantize_blocks(matrix, dtype, segments, margin, **wanted)


class MxScaling(Scaling):
    """A power of two for each 1 x 32 block; see `microscaling`."""

    weight_block = None
    block = MX_BLOCK

    def quantize(
        self,
        matrix: Tensor,
        role: Role,
        segments: Segments | None = None,
        *,
        rows: bool,
        columns: bool,
        records: bool,
    ) -> QuantizedPair | QuantizedGroupsPair:
        """Casts each block by the scale of its own largest value."""
        settings = self.settings
        cast = partial(quantize_mx, dtype=settings.dtype(role), margin=settings.margin, rows=rows, columns=columns)
        if segments is None:
            return cast(matrix)
        return quantize_segments(matrix, segments, lambda part, number: cast(part))


class Nvfp4Scaling(Scaling):
    """A scale for each 1 x 16 block, 16 x 16 of weights, and one for a tensor or a segment; see `nvfp4`."""

    weight_block = None
    block = NV_BLOCK

    def quantize(
        self,
        matrix: Tensor,
        role: Role,
        segments: Segments | None = None,
        *,
        rows: bool,
        columns: bool,
        records: bool,
    ) -> QuantizedPair | QuantizedGroupsPair:
        """Casts each block by the scales of its own largest value and that of the whole matrix, or of each segment's
        expert and micro-batch, over the ranks that divide it."""
        is_weight, groups = role is Role.WEIGHTS, dividing_groups(self.split, role)
        find = partial(largest_of_layouts, is_weight=is_weight, columns=columns)
        cast = partial(quantize_nvfp4, is_weight=is_weight, rows=rows, columns=columns)
        if segments is None:
            return cast(matrix, largest_over(find(matrix), groups))
        amax = torch.zeros(segments.number, 2, dtype=torch.float32, device=matrix.device)
        for number, part, _ in segments.ranges():
            amax[number] = find(matrix[part])
        amax = largest_over(amax, groups)
        if not is_weight:
            amax = self.micro_batches.largest(amax)
        return quantize_segments(matrix, segments, lambda part, number: cast(part, amax[number]))


_EMULATED = {"mxfp8": "--fp8-recipe mxfp8", "nvfp4": "--fp4-format e2m1"}
"""Recipes that only plain torch computes here, and the flags that ask for them."""
_BLACKWELL = (10, 0)
"""Compute capability of the first GPUs with units for these recipes."""


def is_emulated(recipe: str) -> bool:
    """Returns whether a recipe has no kernels, so that plain torch quantises and multiplies."""
    return recipe in _EMULATED


def build_scaling(
    settings: Fp8Settings, split: LinearSplit, device: torch.device, micro_batches: MicroBatches | None = None
) -> Scaling:
    """Returns the scaling of a linear layer's matrices that the recipe asks for; state is on `device`.
    `micro_batches`: those of a layer of experts. Raises UserError for a recipe that this GPU has no units for."""
    if is_emulated(settings.recipe) and device.type == "cuda":
        _check_gpu(settings.recipe, torch.cuda.get_device_capability(device))
    if settings.recipe == "delayed":
        return DelayedScaling(settings, split, device, micro_batches)
    kinds: dict[str, Callable[..., Scaling]] = {
        "tensorwise": TensorwiseScaling,
        "blockwise": BlockwiseScaling,
        "mxfp8": MxScaling,
        "nvfp4": Nvfp4Scaling,
    }
    return kinds[settings.recipe](settings, split, micro_batches)


def _check_gpu(recipe: str, capability: tuple[int, int]) -> None:
    if capability < _BLACKWELL:
        raise UserError(
            f"{_EMULATED[recipe]} needs a Blackwell GPU, and this one has compute capability {capability[0]}."
            f"{capability[1]}: --fp8-format e4m3 with --fp8-recipe blockwise or tensorwise works on Hopper"
        )
    warn_on_first_rank(f"{_EMULATED[recipe]} is emulated in plain torch on this GPU, which is slow")
