"""Embedding of tokens and, if they are learned, of positions."""

from typing import Literal

from torch import Tensor

from megatron.core.backends import choose_backend
from megatron.core.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.ops.dropout import DropoutPlace
from megatron.core.ops.precision import widened
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PositionEmbedding(MegatronModule):
    """A table of vectors, one a position."""

    def __init__(self, config: TransformerConfig, max_sequence_length: int) -> None:
        super().__init__(config)
        self.backend = choose_backend(config)
        assert config.embedding_init_method is not None
        self.weight = new_parameter(config, (max_sequence_length, config.hidden_size), config.embedding_init_method)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [...] -> [..., h]."""
        return self.backend.embedding(positions, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """word(token) + position(position), then dropout. Our own keyword: `vocab_padding_multiple`."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: Group = None,
        *,
        vocab_padding_multiple: int | None = None,
    ) -> None:
        super().__init__(config)
        if num_tokentypes:
            raise UserError(f"not yet: num_tokentypes {num_tokentypes}; use 0")
        self.backend = choose_backend(config)
        assert config.embedding_init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            config=config,
            tp_group=tp_group,
            vocab_padding_multiple=vocab_padding_multiple,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(config, max_sequence_length)

    def forward(self, input_ids: Tensor, position_ids: Tensor, place: DropoutPlace | None = None) -> Tensor:
        """int64 [b, s] and [b or 1, s] -> [s, b, h]. Nothing is dropped without a `place`."""
        hidden = self.word_embeddings(input_ids.t())  # [s, b, h]
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids.t())
        if self.config.fp32_residual_connection:
            hidden = widened(hidden)
        if not self.training:
            return hidden
        flat = hidden.flatten(0, 1)  # [t, h]
        return self.backend.bias_dropout_add(flat, None, None, self.config.hidden_dropout, place).view(hidden.shape)
