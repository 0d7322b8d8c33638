"""The token dispatchers, under the name from which Megatron-LM's scripts import them."""

from megatron.core.transformer.moe.allgather_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.moe.alltoall_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.dispatch import TokenDispatcher
from megatron.core.transformer.moe.flex_dispatcher import MoEFlexTokenDispatcher

__all__ = [
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
    "TokenDispatcher",
]
