"""Positions of tokens as a bias of attention scores, which depends on the distance between query and key (T5)."""

from typing import Any

from torch import Tensor

from megatron.core.backends import choose_backend
from megatron.core.communication.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.ops.relative_position import relative_position_bias
from megatron.core.tensor_parallel.storage import new_parameter, split_box
from megatron.core.tokens import Tokens
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class HeadBiases(MegatronModule):
    """A table with one number per bucket and head, [buckets, heads]. Tensor parallel ranks divide the heads."""

    backward_reads_weights = False

    def __init__(self, config: TransformerConfig, num_buckets: int, tp_group: Group, **facts: Any) -> None:
        super().__init__(config)
        assert config.init_method is not None
        shape = (num_buckets, config.num_attention_heads)
        box = split_box(shape, 1, tp_group)
        facts |= {"sharded_axes": frozenset({"tp"}), "is_table": True}
        self.weight = new_parameter(config, box.shape, config.init_method, global_shape=shape, box=box, **facts)


class RelativePositionEmbedding(MegatronModule):
    """The bias that all self-attention layers of a stack share (Raffel et al. 2020).

    `relative_attention_num_buckets` and `relative_attention_max_distance` are arguments of `relative_position_buckets`.
    Our own keyword `facts` has further fields of the weight's descriptor, such as the group of pipeline stages with a
    copy. Raises UserError for impossible values of the two numbers.
    """

    backward_reads_weights = False

    def __init__(
        self,
        config: TransformerConfig,
        bidirectional: bool,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        tp_group: Group = None,
        **facts: Any,
    ) -> None:
        super().__init__(config)
        buckets, distance = relative_attention_num_buckets, relative_attention_max_distance
        one_side = buckets // 2 if bidirectional else buckets
        if one_side < 2 or buckets % 2:
            raise UserError(f"relative_attention_num_buckets {buckets}: must be even and at least 4")
        if distance <= one_side // 2:
            raise UserError(
                f"relative_attention_max_distance {distance}: the {one_side // 2} nearest distances have a bucket "
                f"each; it must be larger than {one_side // 2}"
            )
        self.bidirectional, self.max_distance = bidirectional, distance
        self.backend = choose_backend(config)
        group = tp_group_or_default(tp_group)
        self.relative_attention_bias = HeadBiases(config, buckets, group, **facts)

    def forward(self, tokens: Tokens) -> Tensor:
        """Returns the bias of attention among these tokens for this rank's heads: [1, heads, s, s]; the keys are the
        tokens from position 0 of the row."""
        return relative_position_bias(
            self.relative_attention_bias.weight,
            tokens.seq_length,
            tokens.first_position + tokens.seq_length,
            bidirectional=self.bidirectional,
            max_distance=self.max_distance,
            first_query=tokens.first_position,
            lookup=self.backend.matrices.embedding,
        )
