"""BERT's summary of a sequence: a transform of its first token."""

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class Pooler(MegatronModule):
    """Computes tanh(x W^T + b) for the first token x of each row. All tensor parallel ranks compute the same result."""

    def __init__(self, hidden_size: int, config: TransformerConfig, tp_group: Group = None) -> None:
        super().__init__(config)
        assert config.init_method is not None
        self.tp_group = tp_group
        self.dense = ReplicatedLinear(
            hidden_size, hidden_size, config=config, init_method=config.init_method, input_is_whole=True
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns [b, h] for hidden states [s, b, h]; under sequence parallelism, this rank's part of them."""
        first = hidden_states[:1]
        if self.config.sequence_parallel:
            # Rank 0 holds the first tokens. Every rank computes the whole gradient, so none is summed.
            first = gather_from_sequence_parallel_region(first, tensor_parallel_output_grad=False, group=self.tp_group)
        pooled, _ = self.dense(first[0])
        return torch.tanh(pooled)
