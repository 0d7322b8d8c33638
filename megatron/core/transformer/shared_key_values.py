"""The QKV projection of a layer with fewer query groups than tensor parallel ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.ops.linear import linear
from megatron.core.parameters import Box, Constant
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.storage import new_parameter, with_columns
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedKeyValueLinear(nn.Module):
    """As a column parallel `linear_qkv` whose ranks each have one group of `num_attention_heads` / ranks query heads.

    The canonical weight is [groups, heads of a group + 2, d, h], and several ranks share a group. A rank holds the rows
    of its own query heads, `weight`; and the key and value rows of all groups, `key_value_weight`, the same on every
    rank, with the gradient that comes through its own heads. So each rank has one box of either. Biases likewise.
    """

    def __init__(self, config: TransformerConfig, bias: bool, tp_group: Group) -> None:
        super().__init__()
        groups, d, h = config.num_query_groups, config.kv_channels, config.hidden_size
        assert groups is not None and d is not None
        self.tp_group, self.groups, self.head_size = tp_group, groups, d
        self.sequence_parallel = config.sequence_parallel
        heads, ranks_of_group = config.num_attention_heads // groups, group_size(tp_group) // groups
        own_heads = heads // ranks_of_group
        self.group, place = divmod(group_rank(tp_group), ranks_of_group)
        """Number of the group whose keys and values this rank needs."""
        own = Box((self.group, place * own_heads, 0), (1, own_heads, d))
        shared = Box((0, heads, 0), (groups, 2, d))
        shape = (groups, heads + 2, d)
        self.register_parameter("bias", None)
        self.register_parameter("key_value_bias", None)
        for prefix, box, facts in (
            ("", own, {"sharded_axes": frozenset({"tp"})}),
            ("key_value_", shared, {"partial_gradient_axes": frozenset({"tp"})}),
        ):
            weight = new_parameter(
                config,
                (box.numel, h),
                config.init_method,
                global_shape=(*shape, h),
                box=with_columns(box, h),
                **_named(prefix, "weight", facts),
            )
            self.register_parameter(prefix + "weight", weight)
            if bias:
                zero = Constant(0.0)
                added = new_parameter(
                    config, (box.numel,), zero, global_shape=shape, box=box, **_named(prefix, "bias", facts)
                )
                self.register_parameter(prefix + "bias", added)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[..., h] -> ([..., (heads here + 2) * d], None): query heads, then the key and value head of their group."""
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        query = linear(input_, self.weight, self.bias)
        key_value = linear(input_, self.key_value_weight, self.key_value_bias)
        key_value = key_value.unflatten(-1, (self.groups, -1))[..., self.group, :]  # [..., 2 * d]
        return torch.cat([query, key_value], -1), None


def _named(prefix: str, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a parameter that goes by a sibling's canonical name if it has a prefix."""
    return facts | ({"part_of": "." + name} if prefix else {})
