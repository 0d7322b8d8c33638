"""GPT: embedding, a stack of transformer layers, a head over the vocabulary (Radford et al. 2019)."""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core.backends import choose_backend
from megatron.core.collectives import group_size
from megatron.core.context_parallel import sequence_part
from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_model_head import LanguageModelHead
from megatron.core.ops.dropout import DropoutTokens, dropout_tokens
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.process_groups_config import ProcessGroupCollection, default_collection
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.tokens import RandomPlace, Tokens, position_ids
from megatron.core.transformer.layer_inputs import InferenceContext, LayerInputs, sequence_slice
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules, drops
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(MegatronModule):
    """A decoder-only language model, or the part of one that a pipeline stage holds.

    `vocab_size` is the vocabulary, or one that was rounded up and knows, as attribute `unpadded`, what from; the stored
    rows are rounded up to a multiple of `vocab_padding_multiple` (our own keyword; default: the tensor parallel size)
    with rows that stay zero and take no part in any softmax. With `parallel_output` each tensor parallel rank gives its
    part of the logits, else all of them; a loss never needs them gathered. `fp16_lm_cross_entropy` changes nothing: the
    loss is computed in float32 at least. Without `scatter_embedding_sequence_parallel` the embedding, called by itself,
    gives all tokens also under sequence parallelism.

    A chunk with `post_process` alone has a copy of an embedding that its head shares: of one canonical name, started
    from the same values, and one with it when gradients are summed.

    Raises UserError for what is still to come.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal[
            "learned_absolute", "rope", "mrope", "yarn", "relative", "none"
        ] = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        vocab_padding_multiple: int | None = None,
    ) -> None:
        super().__init__(config)
        if position_embedding_type not in ("learned_absolute", "rope", "none"):
            raise UserError(
                f"not yet: position_embedding_type {position_embedding_type}; learned_absolute, rope, none work"
            )
        if mtp_block_spec is not None:
            raise UserError("not yet: mtp_block_spec")
        self.pg_collection = pg_collection or default_collection()
        self.backend = choose_backend(config)
        self.sequence_parallel = config.sequence_parallel and group_size(self.pg_collection.tp) > 1
        self.vocab_size: int = getattr(vocab_size, "unpadded", vocab_size)
        if self.vocab_size != vocab_size and vocab_padding_multiple is None:
            vocab_padding_multiple = int(vocab_size)
        self.max_sequence_length = max_sequence_length
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        is_copied = share_embeddings_and_output_weights and pre_process != post_process
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                self.vocab_size,
                max_sequence_length,
                position_embedding_type,
                scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                tp_group=self.pg_collection.tp,
                vocab_padding_multiple=vocab_padding_multiple,
                tied=is_copied,
            )
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if position_embedding_type == "rope":
            assert config.kv_channels is not None
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent,
                config.rotary_interleaved,
                seq_len_interpolation_factor,
                rotary_base,
                rope_scaling,
                rope_scaling_factor,
            )
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        if post_process:
            copy = {"tied": True, "part_of": "embedding.word_embeddings.weight"} if is_copied else {}
            self.output_layer = LanguageModelHead(
                config.hidden_size,
                self.vocab_size,
                config=config,
                init_method=config.embedding_init_method if is_copied else config.init_method,
                bias=False,
                gather_output=not parallel_output,
                skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
                vocab_padding_multiple=vocab_padding_multiple,
                **copy,
            )
            if self.output_layer.weight is None:
                self.output_layer.borrowed_parameters = (self.embedding.word_embeddings.weight,)
        self.random_place: RandomPlace | None = None
        name_parameters(self)
        if config.perform_initialization:
            initialize_parameters(self, config.seed)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: InferenceContext | None = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        tokens: Tokens | None = None,
    ) -> Tensor:
        """Logits [b, s, vocab_size], or this rank's part of them (see `parallel_output`); with `labels` [b, s] the loss
        of each token [b, s], in float32 at least.

        `input_ids` [b, s]. `position_ids` [b, s]: None counts from 0 in each row or packed document. `attention_mask`
        (bool, broadcasts to [b, heads, s, s], True hides) comes in addition to the causal rule; None: that alone.
        `decoder_input` [s, b, h] takes the embedding's place. `tokens` says what the tokens are and where they stand in
        the run; without it (or `packed_seq_params`) they are whole rows. With `inference_context` the tokens continue
        those it has seen, and the logits are those of each row's next token, [b, 1, vocab_size]. A stage that is not
        the last gives hidden states [s, b, h], and a later one wants them by `set_input_tensor` and knows its tokens by
        `tokens` or the shapes of the rest. Under sequence parallelism hidden states, `decoder_input` too, are this
        rank's [s / ranks, b, h].
        """
        if extra_block_kwargs:
            raise UserError(f"not yet: extra_block_kwargs {', '.join(extra_block_kwargs)}")
        tokens = self._describe(tokens, input_ids, position_ids, decoder_input, packed_seq_params)
        context = inference_context or inference_params
        hidden, inputs = self._embed(input_ids, decoder_input, tokens, attention_mask, context)
        hidden = self.decoder(hidden, inputs=inputs)  # [s, b, h]
        if not self.post_process:
            return hidden
        if context is not None:
            hidden, runtime_gather_output = context.select_last(hidden), True
        weight = next(iter(self.output_layer.borrowed_parameters), None)
        gather = runtime_gather_output
        result, _ = self.output_layer(hidden, weight, gather, labels=None if labels is None else labels.t())
        return result.transpose(0, 1).contiguous()  # [b, s] or [b, s, vocabulary]

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Hidden states [s, b, h] from the stage before, for the next forward."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight of the head where embedding and head share it; None where this stage has neither."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def _embed(
        self,
        input_ids: Tensor | None,
        decoder_input: Tensor | None,
        tokens: Tokens,
        attention_mask: Tensor | None,
        context: InferenceContext | None,
    ) -> tuple[Tensor, LayerInputs]:
        """The hidden states that enter the stack, and what goes through it beside them."""
        given = decoder_input if decoder_input is not None else self.decoder.input_tensor
        source = given if given is not None else input_ids
        assert source is not None, "a stage needs input_ids, decoder_input, or set_input_tensor"
        positions = position_ids(tokens, source.device)
        dropout = self._dropout(tokens, source.device)
        inputs = LayerInputs(
            tokens,
            rotation=self.rotary_pos_emb(positions) if self.rotary_pos_emb is not None else None,
            attention_mask=attention_mask,
            dropout=dropout,
            hidden_dropout=sequence_slice(dropout, self.pg_collection.tp) if self.sequence_parallel else dropout,
            inference_context=context,
        )
        if given is None:
            given = self._embedded(input_ids, positions, inputs)
        return given, inputs

    def _embedded(self, input_ids: Tensor | None, positions: Tensor, inputs: LayerInputs) -> Tensor:
        if not self.sequence_parallel or self.embedding.scatter_to_sequence_parallel:
            return self.embedding(input_ids, positions, inputs.hidden_dropout_place(0, "embedding"))
        whole = self.embedding(input_ids, positions, inputs.dropout_place(0, "embedding"))
        return scatter_to_sequence_parallel_region(whole, self.pg_collection.tp)

    def set_random_place(self, place: RandomPlace | None) -> None:
        """Where the next micro-batch stands in the run, for callers of `forward` who do not say it in `tokens`."""
        self.random_place = place

    def _dropout(self, tokens: Tokens, device: torch.device) -> DropoutTokens | None:
        if not (self.training and drops(self.config)):
            return None
        return dropout_tokens(tokens, device, self.backend.keep_rows)

    def _describe(
        self,
        tokens: Tokens | None,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        decoder_input: Tensor | None,
        packed: PackedSeqParams | None,
    ) -> Tokens:
        """What the tokens are, in one record."""
        if tokens is None:
            if decoder_input is None and input_ids is not None:
                b, s = input_ids.shape
            else:
                hidden = decoder_input if decoder_input is not None else self.decoder.input_tensor
                assert hidden is not None, "a stage needs input_ids, decoder_input, or tokens and set_input_tensor"
                s, b = hidden.shape[:2]
                s *= group_size(self.pg_collection.tp) if self.sequence_parallel else 1
            tokens = Tokens(s, b, sequence_part(self.pg_collection))
        if packed is not None:
            tokens = dataclasses.replace(tokens, cu_seqlens=packed.cu_seqlens_q, max_seqlen=packed.max_seqlen_q)
        if position_ids is not None:
            tokens = dataclasses.replace(tokens, positions=position_ids)
        if tokens.random is None:
            tokens = dataclasses.replace(tokens, random=self.random_place)
        if self.position_embedding_type == "learned_absolute":
            self._check_length(tokens)
        if self.sequence_parallel:
            part_size(tokens.seq_length, self.pg_collection.tp, "sequence_parallel: tokens in a row")
        return tokens

    def _check_length(self, tokens: Tokens) -> None:
        """Raise UserError for positions beyond the learned ones, as far as the host knows the positions."""
        length = tokens.first_position + tokens.row_length if tokens.cu_seqlens is None else tokens.max_seqlen
        if tokens.positions is None and length is not None and length > self.max_sequence_length:
            raise UserError(
                f"{length} tokens in a row, but the model has learned positions for {self.max_sequence_length} "
                "(max_position_embeddings)"
            )
