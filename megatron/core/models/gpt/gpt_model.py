"""GPT: embedding, a stack of transformer layers, a head over the vocabulary (Radford et al. 2019)."""

from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_model_head import LanguageModelHead
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ops.dropout import DropoutTokens, dropout_tokens
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tokens import Tokens, position_ids
from megatron.core.transformer.layer_inputs import InferenceContext, LayerInputs, sequence_slice
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules, drops
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(LanguageModule):
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
        super().__init__(config, pg_collection)
        if position_embedding_type not in ("learned_absolute", "rope", "none"):
            raise UserError(
                f"not yet: position_embedding_type {position_embedding_type}; learned_absolute, rope, none work"
            )
        if mtp_block_spec is not None:
            raise UserError("not yet: mtp_block_spec")
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
        context = inference_context or inference_params
        if context is not None and self.sequence_parallel:
            raise UserError("sequence_parallel does not go with an inference_context: one token has no parts; unset it")
        given = decoder_input if decoder_input is not None else self.decoder.input_tensor
        ids = input_ids if decoder_input is None else None
        learned = self.max_sequence_length if self.position_embedding_type == "learned_absolute" else None
        tokens = self.describe_tokens(tokens, ids, given, position_ids, packed_seq_params, learned)
        hidden, inputs = self._embed(input_ids, given, tokens, attention_mask, context)
        hidden = self.decoder(hidden, inputs=inputs)  # [s, b, h]
        if not self.post_process:
            return hidden
        if context is not None:
            hidden, runtime_gather_output = context.select_last(hidden), True
        weight = next(iter(self.output_layer.borrowed_parameters), None)
        labels = None if labels is None else labels.t()  # [s, b]
        result, _ = self.output_layer(hidden, weight, runtime_gather_output, labels=labels)
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
        given: Tensor | None,
        tokens: Tokens,
        attention_mask: Tensor | None,
        context: InferenceContext | None,
    ) -> tuple[Tensor, LayerInputs]:
        """The hidden states that enter the stack, and what goes through it beside them."""
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

    def _dropout(self, tokens: Tokens, device: torch.device) -> DropoutTokens | None:
        if not (self.training and drops(self.config)):
            return None
        return dropout_tokens(tokens, device, self.backend.keep_rows)
