"""Which rows of experts share their largest value."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce


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
