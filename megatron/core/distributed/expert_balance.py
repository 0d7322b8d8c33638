"""The end of a global batch for routers: biases of experts move by what all ranks' tokens chose in it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.process_groups_config import ProcessGroupCollection


def finish_routers(chunks: Iterable[nn.Module], groups: ProcessGroupCollection) -> None:
    """Move the expert biases of all routers of a rank's model chunks, with one reduction for all of them, and let
    routers forget what they have seen of this global batch.

    A router is a module with `move_expert_bias` and `local_tokens_per_expert`; the ranks that hold the same one
    (`tp_dp_cp`) count their own tokens. Counts are whole numbers in float64: their sums are exact.
    """
    routers: list[Any] = [
        module for chunk in chunks for module in chunk.modules() if hasattr(module, "move_expert_bias")
    ]
    for router in routers:
        router.reset_global_aux_loss_tracker()
    biased = [router for router in routers if router.expert_bias is not None]
    if not biased:
        return
    counts = torch.stack([router.take_tokens_per_expert() for router in biased])  # [routers, experts]
    if groups.size("tp_dp_cp") > 1:
        all_reduce(counts, groups.tp_dp_cp)
    for router, count in zip(biased, counts, strict=True):
        router.move_expert_bias(count)
