"""Embedding of tokens and, if positions are learned, of positions."""

from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core.backends import choose_backend
from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.ops.dropout.dropout import DropoutRngPosition
from megatron.core.ops.precision import widened
from megatron.core.process_groups_config import default_collection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PositionEmbedding(MegatronModule):
    """A table with one vector per position."""

    backward_reads_weights = False

    def __init__(self, config: TransformerConfig, max_sequence_length: int, **facts: Any) -> None:
        super().__init__(config)
        self.backend = choose_backend(config)
        assert config.embedding_init_method is not None
        shape = (max_sequence_length, config.hidden_size)
        self.weight = new_parameter(config, shape, config.embedding_init_method, **facts)

    def forward(self, positions: Tensor) -> Tensor:
        """Returns the vectors [..., h] of positions int64 [...]."""
        return self.backend.embedding(positions, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """word(token) * embedding_multiplier + position(position), then dropout. Under sequence parallelism with
    `scatter_to_sequence_parallel` each rank gets its part of the tokens. Our own keywords: `vocab_padding_multiple`;
    `tied` and `positions_tied`: another pipeline stage has a copy of the word table, of the position table."""

    backward_reads_weights = False

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
        tied: bool = False,
        positions_tied: bool = False,
    ) -> None:
        super().__init__(config)
        if num_tokentypes:
            raise UserError(f"not yet: num_tokentypes {num_tokentypes}; use 0")
        self.backend = choose_backend(config)
        self.tp_group = tp_group if tp_group is not None else default_collection().tp
        self.scatter_to_sequence_parallel = scatter_to_sequence_parallel
        self.scatters = scatter_to_sequence_parallel and config.sequence_parallel and group_size(self.tp_group) > 1
        assert config.embedding_init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            config=config,
            tp_group=self.tp_group,
            vocab_padding_multiple=vocab_padding_multiple,
            reduce_scatter_embeddings=self.scatters,
            tied=tied,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if position_embedding_type == "learned_absolute":
            partial = frozenset({"tp"} if self.scatters else ())
            self.position_embeddings = PositionEmbedding(
                config,
                max_sequence_length,
                partial_gradient_axes=partial,
                tied=positions_tied,
                tied_over="pos_embd",
            )

    def forward(self, input_ids: Tensor, position_ids: Tensor, place: DropoutRngPosition | None = None) -> Tensor:
        """Returns embeddings [s, b, h] for ids int64 [b, s] and positions [b or 1, s], or this rank's part, [s / ranks,
        b, h]. `place` is the random position of the returned tokens; without it there is no dropout."""
        hidden = self.word_embeddings(input_ids) if self.scatters else self.word_embeddings(input_ids.t())
        multiplier = self.config.embedding_multiplier
        if multiplier != 1.0:
            hidden = hidden * torch.tensor(multiplier, dtype=hidden.dtype).item()
        if self.position_embeddings is not None:
            positions = position_ids.t()  # [s, b or 1]
            if self.scatters:
                positions = positions.chunk(group_size(self.tp_group))[group_rank(self.tp_group)]
            hidden = hidden + self.position_embeddings(positions)
        if self.config.fp32_residual_connection:
            hidden = widened(hidden)
        if not self.training:
            return hidden
        flat = hidden.flatten(0, 1)  # [t, h]
        return self.backend.bias_dropout_add(flat, None, None, self.config.hidden_dropout, place).view(hidden.shape)
