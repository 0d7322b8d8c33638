"""The QKV projection of a layer with fewer query groups than tensor parallel ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend
from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.initializers import Constant
from megatron.core.parameters import Box
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.storage import new_parameter, with_columns
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedKeyValueLinear(nn.Module):
    """A column parallel `linear_qkv` for fewer query groups than ranks: each rank has `num_attention_heads` / ranks
    query heads of one group, and several ranks share a group.

    The canonical weight is [groups, heads of a group + 2, d, h]. A rank holds `weight`, the rows of its own query
    heads, and `key_value_weight`, the key and value rows of all groups. The latter is equal on all ranks; its gradient
    on a rank comes from the rank's own heads. So each rank holds one box of each. Biases are split in the same way.
    With `attention_output_gate` a group has the same number of gate heads after its queries, and `gate_weight` is a
    third box.
    """

    def __init__(self, config: TransformerConfig, bias: bool, tp_group: Group, backend: Backend) -> None:
        super().__init__()
        groups, d = config.num_query_groups, config.kv_channels
        assert groups is not None and d is not None
        self.tp_group, self.backend, self.groups = tp_group, backend, groups
        self.sequence_parallel = config.sequence_parallel
        heads, ranks_of_group = config.num_attention_heads // groups, group_size(tp_group) // groups
        own_heads = heads // ranks_of_group
        self.group, place = divmod(group_rank(tp_group), ranks_of_group)
        """Index of the group whose keys and values this rank uses."""
        gates = heads if config.attention_output_gate else 0
        rows = (groups, heads + gates + 2, d)
        own = Box((self.group, place * own_heads, 0), (1, own_heads, d))
        gate = Box((self.group, heads + place * own_heads, 0), (1, own_heads, d))
        shared = Box((0, heads + gates, 0), (groups, 2, d))
        cut: dict[str, Any] = {"sharded_axes": frozenset({"tp"})}
        copied: dict[str, Any] = {"partial_gradient_axes": frozenset({"tp"})}
        self.weight = _weight(config, rows, own, **cut)
        self.key_value_weight = _weight(config, rows, shared, part_of=".weight", **copied)
        self.gate_weight = _weight(config, rows, gate, part_of=".weight", **cut) if gates else None
        self.bias = _bias(config, rows, own, **cut) if bias else None
        self.gate_bias = _bias(config, rows, gate, part_of=".bias", **cut) if bias and gates else None
        self.key_value_bias = _bias(config, rows, shared, part_of=".bias", **copied) if bias else None

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Returns ([..., (heads here + 2) * d], None) for [..., h]: query heads, gates if there are any, then the key
        and value head of their group."""
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        own = [self.backend.matrices.linear(input_, self.weight, self.bias)]
        if self.gate_weight is not None:
            own.append(self.backend.matrices.linear(input_, self.gate_weight, self.gate_bias))
        key_value = self.backend.matrices.linear(input_, self.key_value_weight, self.key_value_bias)
        of_group = key_value.unflatten(-1, (self.groups, -1))[..., self.group, :]  # [..., 2 * d]
        return torch.cat([*own, of_group], -1), None


def _weight(config: TransformerConfig, rows: tuple[int, ...], box: Box, **facts: object) -> nn.Parameter:
    assert config.init_method is not None
    h = config.hidden_size
    facts = {"separate_heads": separate_heads(config), **facts}
    shape, init = (box.numel, h), config.init_method
    return new_parameter(config, shape, init, global_shape=(*rows, h), box=with_columns(box, h), **facts)


def separate_heads(config: TransformerConfig) -> tuple[int, ...]:
    """Returns the numbers of query, gate (with `attention_output_gate`), key and value heads of a query group."""
    assert config.num_query_groups is not None
    heads = config.num_attention_heads // config.num_query_groups
    return (heads, heads, 1, 1) if config.attention_output_gate else (heads, 1, 1)


def _bias(config: TransformerConfig, rows: tuple[int, ...], box: Box, **facts: object) -> nn.Parameter:
    return new_parameter(config, (box.numel,), Constant(0.0), global_shape=rows, box=box, **facts)
