"""Scales of the rows and weights of experts: the recipes of `recipes`, for segments of rows.

| recipe | a scale depends on |
|---|---|
| tensorwise | the rows of one expert of a micro-batch; the weight of one expert |
| delayed | the tensors of all experts of a layer in earlier global batches; in the first step as tensorwise |
| blockwise | a block of 128 elements of the rows that a rank sends to an expert; 128 x 128 weights on a rank |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.ops.fp8.formats import BLOCK
from megatron.core.ops.fp8.grouped import QuantizedGroupsPair, Segments, pair_of_segments
from megatron.core.ops.fp8.quantize import noted_largest_of_rows
from megatron.core.ops.fp8.recipes import (
    DelayedScaling,
    Fp8Settings,
    LinearSplit,
    Role,
    Scaling,
    dividing_groups,
    largest_over,
)


@dataclass(frozen=True)
class MicroBatches:
    """Which segments and ranks have rows of the same micro-batch."""

    of_sources: Sequence[int] = (0,)
    """The micro-batch of each source."""
    group: Group = None
    """Ranks that share this rank's micro-batch, if some of them send their rows to other copies of the experts; else
    None."""
    slots: tuple[int, int] = (0, 1)
    """With a group: the index of this rank's part of the layer's experts, and the number of distinct parts."""

    def largest(self, amax: Tensor) -> Tensor:
        """Returns the largest values of [segments, ...] over all segments of the same expert and micro-batch."""
        sources = len(self.of_sources)
        if self.group is None and len(set(self.of_sources)) == sources:
            return amax
        by_source = amax.unflatten(0, (-1, sources)).clone()  # [experts, sources, ...]
        for micro_batch in set(self.of_sources):
            index = [source for source, own in enumerate(self.of_sources) if own == micro_batch]
            largest = by_source[:, index].amax(1)
            if self.group is not None:
                largest = self._over_ranks(largest)
            by_source[:, index] = largest[:, None]
        return by_source.flatten(0, 1)

    def _over_ranks(self, amax: Tensor) -> Tensor:
        slot, number = self.slots
        all_slots = amax.new_zeros(number, *amax.shape)
        all_slots[slot] = amax
        return all_reduce(all_slots, self.group, dist.ReduceOp.MAX)[slot]


class GroupScaling(Scaling):
    """Quantises the matrices of one grouped linear layer."""

    def __init__(self, settings: Fp8Settings, split: LinearSplit, micro_batches: MicroBatches) -> None:
        super().__init__(settings, split)
        self.micro_batches = micro_batches

    def quantize_groups(
        self, matrix: Tensor, segments: Segments, role: Role, *, rows: bool, columns: bool, records: bool
    ) -> QuantizedGroupsPair:
        """Returns a matrix of segments in fp8; see `Scaling.quantize`. Weights are [groups * out, in]."""
        raise NotImplementedError


class TensorwiseGroupScaling(GroupScaling):
    """One scale for each segment, from the largest value of its expert and micro-batch."""

    weight_block = (0, 0)

    def weight_groups(self) -> Sequence[Group]:
        """Returns the groups that divide the weight."""
        return dividing_groups(self.split, Role.WEIGHTS)

    def quantize_groups(
        self, matrix: Tensor, segments: Segments, role: Role, *, rows: bool, columns: bool, records: bool
    ) -> QuantizedGroupsPair:
        """Casts by the scale of each segment's largest value, over the ranks that divide it."""
        of_rows = noted_largest_of_rows(matrix)
        amax = self.settings.kernels.grouped.largest(matrix if of_rows is None else of_rows[:, None], segments)
        amax = largest_over(amax, dividing_groups(self.split, role))
        if role is not Role.WEIGHTS:
            amax = self.micro_batches.largest(amax)
        dtype, margin = self.settings.dtype(role), self.settings.margin
        quantize = self.settings.kernels.grouped.quantize_by_largest
        return quantize(matrix, dtype, segments, margin, amax, rows=rows, columns=columns)


class DelayedGroupScaling(DelayedScaling):
    """One scale for the tensors of all experts, from their largest values in earlier steps."""

    def __init__(
        self, settings: Fp8Settings, split: LinearSplit, micro_batches: MicroBatches, device: torch.device
    ) -> None:
        super().__init__(settings, split, device)
        self._first_groups = TensorwiseGroupScaling(settings, split, micro_batches)

    def quantize_groups(
        self, matrix: Tensor, segments: Segments, role: Role, *, rows: bool, columns: bool, records: bool
    ) -> QuantizedGroupsPair:
        """Casts by the scale of earlier steps, and keeps the largest value for later ones."""
        seen = self.seen_of(role) if records or role is Role.WEIGHTS else None
        scale = self.scale_of(role)
        if scale is None:
            if seen is not None:
                seen.copy_(torch.maximum(seen, self.kernels.largest_value(matrix)))
            return self._first_groups.quantize_groups(
                matrix, segments, role, rows=rows, columns=columns, records=records
            )
        scales = scale if rows else None, scale if columns else None
        cast, dtype = self.settings.kernels.grouped.cast, self.settings.dtype(role)
        return pair_of_segments(*cast(matrix, dtype, segments, *scales, seen), self.factor_of(role))


class BlockwiseGroupScaling(GroupScaling):
    """A scale for each 1 x 128 block of rows and columns, and for each 128 x 128 block of weights."""

    weight_block = (BLOCK, BLOCK)

    def quantize_groups(
        self, matrix: Tensor, segments: Segments, role: Role, *, rows: bool, columns: bool, records: bool
    ) -> QuantizedGroupsPair:
        """Casts each block by the scale of its own largest value."""
        return self.settings.kernels.grouped.quantize_blocks(
            matrix,
            self.settings.dtype(role),
            segments,
            self.settings.margin,
            square=role is Role.WEIGHTS,
            rows=rows,
            columns=columns,
        )


AnyGroupScaling = GroupScaling | DelayedGroupScaling


def build_group_scaling(
    settings: Fp8Settings, split: LinearSplit, micro_batches: MicroBatches, device: torch.device
) -> AnyGroupScaling:
    """Returns the scaling of a grouped linear layer that the recipe asks for; state is on `device`."""
    if settings.recipe == "delayed":
        return DelayedGroupScaling(settings, split, micro_batches, device)
    kinds: dict[str, type[GroupScaling]] = {
        "tensorwise": TensorwiseGroupScaling,
        "blockwise": BlockwiseGroupScaling,
    }
    return kinds[settings.recipe](settings, split, micro_batches)
