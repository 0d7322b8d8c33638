"""The token dispatchers by `moe_token_dispatcher_type`. All compute the same result."""

from megatron.core.transformer.moe.flex_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    TokenDispatcher,
)

DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}
