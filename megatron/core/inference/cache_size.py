"""How much memory a cache of text generation takes, and how many tokens fit."""

from dataclasses import dataclass

import torch

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext, RowPart


@dataclass(frozen=True)
class CacheSize:
    """Memory of the keys, values and states of a model, on the rank that has most."""

    bytes_per_token: int
    bytes_per_slot: int
    """States of recurrent layers of one text."""

    def pages_within(self, memory: int, page_size: int, num_slots: int, max_sequence_length: int) -> int:
        """Returns how many pages fit into `memory` bytes beside the states, but no more than all slots can use at once.
        Page 0, which belongs to no text, is among them."""
        useful = num_slots * -(-max_sequence_length // page_size) + 1
        if not self.bytes_per_token:
            return useful
        left = memory - num_slots * self.bytes_per_slot
        return min(useful, max(0, left) // (self.bytes_per_token * page_size))

    def memory(self, num_pages: int, page_size: int, num_slots: int) -> int:
        """Returns the bytes of a cache."""
        return num_pages * page_size * self.bytes_per_token + num_slots * self.bytes_per_slot


def measure_cache(forward: LayoutForward, world: Group) -> CacheSize:
    """Finds the sizes by a forward pass of one token. Collective."""
    context = PagedInferenceContext(2, 1, 1, 1)
    tokens, positions = context.begin([RowPart(0, 0, (0,), (1,))], forward.device)
    forward(tokens, positions, context, padding=context.padding)
    found = torch.tensor([context.bytes_per_token, context.bytes_per_slot])
    all_reduce(found, world, torch.distributed.ReduceOp.MAX)
    return CacheSize(*found.tolist())
