"""Embedding of tokens and, if positions are learned, of positions."""

from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core.backends import choose_backend
from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.ops.dropout.dropout import DropoutRngPosition
from megatron.core.ops.precision import widened
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.tokens import position_ids
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class VectorTable(MegatronModule):
    """A table with one vector per position or per token type. Every rank holds the whole table."""

    backward_reads_weights = False

    def __init__(self, config: TransformerConfig, count: int, **facts: Any) -> None:
        super().__init__(config)
        self.backend = choose_backend(config)
        assert config.embedding_init_method is not None
        shape = (count, config.hidden_size)
        self.weight = new_parameter(config, shape, config.embedding_init_method, is_table=True, **facts)

    def forward(self, index: Tensor) -> Tensor:
        """Returns the vectors [..., h] of numbers int64 [...]."""
        return self.backend.matrices.embedding(index, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """Computes word(token) * embedding_multiplier + position(position) + type(token type), then the norm of
    `embedding_norm`, then dropout. `num_tokentypes` is the number of token types; with 0 the sum has no such term.
    Under sequence parallelism with `scatter_to_sequence_parallel` each rank gets its part of the tokens. Our own
    keywords: `vocab_padding_multiple`; `tied` and `positions_tied` say that another pipeline stage has a copy of the
    word table or of the position table."""

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
        self.backend = choose_backend(config)
        self.tp_group = tp_group_or_default(tp_group)
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
        partial = frozenset({"tp"} if self.scatters else ())
        self.position_embeddings: VectorTable | None = None
        if position_embedding_type == "learned_absolute":
            self.position_embeddings = VectorTable(
                config,
                max_sequence_length,
                partial_gradient_axes=partial,
                tied=positions_tied,
                tied_over="pos_embd",
            )
        self.num_tokentypes = num_tokentypes
        self.tokentype_embeddings: VectorTable | None = None
        if num_tokentypes:
            self.tokentype_embeddings = VectorTable(config, num_tokentypes, partial_gradient_axes=partial)
        if config.embedding_norm and config.sequence_parallel and not scatter_to_sequence_parallel:
            raise UserError("embedding_norm with sequence_parallel needs scatter_to_sequence_parallel")
        self.backward_reads_weights = config.embedding_norm
        self.norm = (
            WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon) if config.embedding_norm else None
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        place: DropoutRngPosition | None = None,
        tokentype_ids: Tensor | None = None,
    ) -> Tensor:
        """Returns embeddings [s, b, h] for ids int64 [b, s], positions [b or 1, s] and token types [b, s], or this
        rank's part, [s / ranks, b, h]. `place` is the random position of the returned tokens; without it there is no
        dropout. Raises UserError if token types are given and the model has none, or if it has some and none are
        given."""
        if (tokentype_ids is None) != (self.tokentype_embeddings is None):
            given = "tokentype_ids are missing" if tokentype_ids is None else "tokentype_ids are given"
            raise UserError(f"{given}, but the model was built with num_tokentypes {self.num_tokentypes}")
        hidden = self.word_embeddings(input_ids) if self.scatters else self.word_embeddings(input_ids.t())
        multiplier = self.config.embedding_multiplier
        if multiplier != 1.0:
            hidden = hidden * torch.tensor(multiplier, dtype=hidden.dtype).item()
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(self._own(position_ids.t()))
        if self.tokentype_embeddings is not None and tokentype_ids is not None:
            hidden = hidden + self.tokentype_embeddings(self._own(tokentype_ids.t()))
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.config.fp32_residual_connection:
            hidden = widened(hidden)
        if not self.training:
            return hidden
        flat = hidden.flatten(0, 1)  # [t, h]
        add = self.backend.dropout.bias_dropout_add
        return add(flat, None, None, self.config.hidden_dropout, place).view(hidden.shape)

    def embed(
        self, ids: Tensor, inputs: LayerInputs, *, positions: Tensor | None = None, layer_number: int = 0
    ) -> Tensor:
        """Returns the hidden states [s, b, h] that layers read, for ids [b, s] and positions [b or 1, s] (None: those
        of `inputs.tokens`); under sequence parallelism this rank's part. Dropout masks are those of the layer with
        this number."""
        if positions is None and self.position_embeddings is not None:
            positions = position_ids(inputs.tokens, ids.device)
        if self.scatters or not self.config.sequence_parallel or group_size(self.tp_group) == 1:
            return self(ids, positions, inputs.hidden_dropout_position(layer_number, "embedding"))
        whole = self(ids, positions, inputs.dropout_position(layer_number, "embedding"))
        return scatter_to_sequence_parallel_region(whole, self.tp_group)

    def _own(self, ids: Tensor) -> Tensor:
        """Returns this rank's part of ids [s, b or 1]."""
        return ids.chunk(group_size(self.tp_group))[group_rank(self.tp_group)] if self.scatters else ids
