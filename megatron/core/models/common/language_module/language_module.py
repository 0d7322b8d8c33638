"""Base class of language models: their process groups, and the record of a call's tokens."""

import dataclasses

import torch
from torch import Tensor

from megatron.core.backends import choose_backend
from megatron.core.communication.collectives import group_size
from megatron.core.context_parallel import sequence_part
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import MicroBatch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding, query_scale
from megatron.core.ops.dropout.dropout import dropout_tokens
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.tokens import RngPosition, Tokens, position_ids
from megatron.core.transformer.layer_inputs import InferenceContext, LayerInputs, drops, sequence_slice
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """A language model, or its part on one pipeline stage."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        self.pg_collection = groups_or_default(pg_collection)
        self.backend = choose_backend(config)
        self.sequence_parallel = config.sequence_parallel and group_size(self.pg_collection.tp) > 1

    rotary_pos_emb: RotaryEmbedding | None
    """Rotary positions of the layers; None: the model has none. Every model sets it."""
    rotary_pos_emb_local: RotaryEmbedding | None
    """Rotary positions of layers with a window, if these have other frequencies."""

    def layer_inputs(
        self,
        tokens: Tokens,
        device: torch.device,
        micro_batch: MicroBatch,
        attention_mask: Tensor | None = None,
        context: InferenceContext | None = None,
    ) -> LayerInputs:
        """Returns the inputs of the layers except the hidden states."""
        positions = position_ids(tokens, device)
        drops_any = self.training and drops(self.config)
        dropout = dropout_tokens(tokens, device, self.backend.dropout.keep_rows) if drops_any else None
        return LayerInputs(
            tokens,
            rotation=self.rotary_pos_emb(positions, tokens) if self.rotary_pos_emb is not None else None,
            local_rotation=self.rotary_pos_emb_local(positions) if self.rotary_pos_emb_local is not None else None,
            query_scale=query_scale(self.config, positions),
            attention_mask=attention_mask,
            dropout=dropout,
            hidden_dropout=sequence_slice(dropout, self.pg_collection.tp) if self.sequence_parallel else dropout,
            inference_context=context,
            auxiliary_scale=micro_batch.auxiliary_scale,
            turn=micro_batch.turn,
        )

    def describe_tokens(
        self,
        tokens: Tokens | None,
        input_ids: Tensor | None,
        hidden: Tensor | None,
        position_ids: Tensor | None,
        packed: PackedSeqParams | None,
        max_positions: int | None,
        rng_position: RngPosition | None = None,
    ) -> Tokens:
        """Returns one record that describes the tokens of a forward. If `tokens` is None, it is made from the shapes of
        `input_ids` [b, s] or hidden states [s, b, h]. `rng_position` replaces `Tokens.random` if that is None.

        Raises UserError if the number of tokens is not divisible by the number of sequence parallel ranks, and for
        positions beyond `max_positions` if the host knows the positions.
        """
        if tokens is None:
            tokens = self._tokens_of(input_ids, hidden)
        if packed is not None:
            tokens = dataclasses.replace(tokens, cu_seqlens=packed.cu_seqlens_q, max_seqlen=packed.max_seqlen_q)
        if position_ids is not None:
            tokens = dataclasses.replace(tokens, positions=position_ids)
        if tokens.random is None:
            tokens = dataclasses.replace(tokens, random=rng_position)
        length = tokens.first_position + tokens.row_length if tokens.cu_seqlens is None else tokens.max_seqlen
        if max_positions is not None and tokens.positions is None and length is not None and length > max_positions:
            raise UserError(
                f"{length} tokens in a row, but the model has learned positions for {max_positions} "
                "(max_position_embeddings)"
            )
        if self.sequence_parallel:
            part_size(tokens.seq_length, self.pg_collection.tp, "sequence_parallel: tokens in a row")
        return tokens

    def _check_context(self, context: InferenceContext | None) -> None:
        """Raises UserError if this model cannot decode with the context."""
        if context is not None and self.sequence_parallel:
            raise UserError("sequence_parallel does not go with an inference_context: one token has no parts; unset it")
        if context is not None and self.rotary_pos_emb is not None:
            self.rotary_pos_emb.check_cache(context.max_sequence_length)

    def _tokens_of(self, input_ids: Tensor | None, hidden: Tensor | None) -> Tokens:
        if input_ids is not None:
            b, s = input_ids.shape
        else:
            assert hidden is not None, "a stage needs input_ids, decoder_input, or tokens and set_input_tensor"
            s, b = hidden.shape[:2]
            s *= group_size(self.pg_collection.tp) if self.sequence_parallel else 1
        return Tokens(s, b, sequence_part(self.pg_collection))
