"""GPT: embedding, a stack of transformer layers, a head over the vocabulary (Radford et al. 2019)."""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import MicroBatch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import Positions, choose_rotary_embeddings
from megatron.core.models.common.language_model_head import Vocabulary, build_head
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.common.predictions import ChunkPredictions, check_copies_have_groups
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import InferenceContext, LayerInputs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(LanguageModule):
    """A decoder-only language model, or its part on one pipeline stage.

    `vocab_size` is the vocabulary, or a padded size whose attribute `unpadded` is the true size. Stored rows are padded
    to a multiple of `vocab_padding_multiple` (our own keyword; default: the tensor parallel size). Padding stays zero,
    and softmaxes leave it out. With `parallel_output` each tensor parallel rank returns its part of the logits,
    otherwise all of them; losses are computed without gathering logits. `fp16_lm_cross_entropy` has no effect: the loss
    is computed in float32 at least. Without `scatter_embedding_sequence_parallel` the embedding module returns all
    tokens even under sequence parallelism.

    If the head shares the embedding's weight, a chunk that has `post_process` but not `pre_process` has a copy of it.
    The copy has the same canonical name and initial values, and its gradient is summed with the embedding's. A chunk
    with `mtp_block_spec`, the layers of multi-token prediction (`mtp_num_layers`), has such a copy too. The losses of
    multi-token prediction are attached to the hidden states that the head reads.

    With `multi_latent_attention` there always are rotary positions, and only the config sets them:
    `position_embedding_type` and the rotary keywords of this class have no effect on them.

    Raises UserError for what is not implemented yet.
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
        vocabulary, groups = Vocabulary.of(vocab_size, vocab_padding_multiple), self.pg_collection
        self.vocab_size = vocabulary.size
        self.max_sequence_length = max_sequence_length
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = shares = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.mtp_process = predicts = mtp_block_spec is not None
        if pre_process or predicts:
            positions_tied = not pre_process or (bool(config.mtp_num_layers) and not predicts)
            self.embedding = LanguageModelEmbedding(
                config,
                self.vocab_size,
                max_sequence_length,
                position_embedding_type,
                scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                tp_group=groups.tp,
                vocab_padding_multiple=vocabulary.padding_multiple,
                tied=positions_tied or (shares and not post_process),
                positions_tied=positions_tied,
            )
        self.rotary_pos_emb, self.rotary_pos_emb_local = choose_rotary_embeddings(
            config,
            Positions(
                position_embedding_type,
                rotary_percent,
                rotary_base,
                seq_len_interpolation_factor,
                rope_scaling,
                rope_scaling_factor,
            ),
        )
        has_final_norm = predicts if config.mtp_num_layers else post_process  # it comes before the prediction layers
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=has_final_norm,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.predictions = ChunkPredictions(
            config, groups, mtp_block_spec, vp_stage, layers_before=len(self.decoder.layers), has_head=post_process
        )
        self.mtp, self.prediction_losses = self.predictions.block, self.predictions.losses
        if post_process:
            self.output_layer = build_head(
                config,
                vocabulary,
                groups.tp,
                bias=config.output_layer_bias,
                gather_output=not parallel_output,
                shares=shares,
                borrowed=self.embedding.word_embeddings.weight if shares and (pre_process or predicts) else None,
            )
        name_parameters(self)
        if config.mtp_num_layers:
            check_copies_have_groups(self, groups)
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
        micro_batch: MicroBatch | None = None,
    ) -> Tensor:
        """Returns logits [b, s, vocab_size], or this rank's part of them (see `parallel_output`); with `labels` [b, s]
        the loss of each token [b, s], in float32 at least. A stage that is not the last returns hidden states [s, b,
        h].

        - `input_ids` [b, s].
        - `position_ids` [b, s]: None counts from 0 in each row or packed document.
        - `attention_mask` (bool, broadcasts to [b, heads, s, s], True hides a key) applies in addition to the causal
          mask.
        - `decoder_input` [s, b, h] replaces the embedding's output.
        - `loss_mask` [b, s] masks the labels in losses that the model adds itself: those of multi-token prediction in
          training.
        - `padding_mask` [b, s] (True: padding): routers send no padding to experts, and padding does not count in
          auxiliary losses and capacities. No effect without experts.
        - `tokens` describes the tokens and their position in the run. Without it, and without `packed_seq_params`, the
          tokens are whole rows.
        - `micro_batch` describes the micro-batch in this step; the schedules of `pipeline_parallel` add it to the call.
        - `inference_context`: the tokens continue those in the context. The model predicts only the next token of each
          row: logits are [b, 1, vocab_size]. With Megatron-LM's `InferenceParams` it returns the logits of all tokens.

        A stage that is not the first gets its hidden states by `set_input_tensor`, and its tokens from `tokens` or the
        shapes of the other arguments. Under sequence parallelism hidden states, including `decoder_input`, are this
        rank's [s / ranks, b, h].
        """
        if extra_block_kwargs:
            raise UserError(f"not yet: extra_block_kwargs {', '.join(extra_block_kwargs)}")
        context = inference_context or inference_params
        self._check_context(context)
        given = decoder_input if decoder_input is not None else self.decoder.input_tensor
        ids = input_ids if decoder_input is None else None
        one = given if given is None else given[: given.shape[0] // self.predictions.states_in]
        micro_batch = micro_batch or MicroBatch()
        learned = self.max_sequence_length if self.position_embedding_type == "learned_absolute" else None
        source = given if given is not None else input_ids
        assert source is not None, "a stage needs input_ids, decoder_input, or set_input_tensor"
        if context is not None:
            tokens = context.start(tokens or self._tokens_of(ids, one), source.device)
            attention_mask = context.mask_of_call(attention_mask)
        tokens = self.describe_tokens(
            tokens, ids, one, position_ids, packed_seq_params, learned, micro_batch.rng_position
        )
        inputs = self.layer_inputs(tokens, source.device, micro_batch, attention_mask, context)
        if padding_mask is not None:
            _check_padding_mask(padding_mask, tokens)
            inputs = dataclasses.replace(inputs, padding_mask=padding_mask)

        hidden = given  # [s, b, h]
        if hidden is None:
            assert input_ids is not None
            hidden = self.embedding.embed(input_ids, inputs)
        if self.config.mtp_num_layers:
            hidden = self._decode_and_predict(hidden, (input_ids, labels, loss_mask), inputs)
        else:
            hidden = self.decoder(hidden, inputs=inputs)
        if not self.post_process:
            return hidden
        if context is not None:
            hidden = context.select_last(hidden)
            runtime_gather_output = context.gathers_logits or runtime_gather_output
        if labels is not None:
            return self._losses_of(hidden, labels).t().contiguous()  # [b, s]
        result, _ = self.output_layer(hidden, runtime_gather_output=runtime_gather_output)
        return result.transpose(0, 1).contiguous()  # [b, s, vocabulary]

    def _decode_and_predict(
        self, hidden: Tensor, texts: tuple[Tensor | None, Tensor | None, Tensor | None], inputs: LayerInputs
    ) -> Tensor:
        """Returns the decoder's hidden states [s, b, h] of a model with multi-token prediction: the last stage attaches
        the losses of all depths to them; other stages append the states of the depths. `texts`: ids, labels and mask of
        labels."""
        embedding = self.embedding if self.mtp_process else None
        ahead = self.predictions.look_ahead(embedding, *texts, inputs, training=self.training)
        states = self.predictions.predict(self.decoder(hidden, inputs=inputs), ahead, inputs)
        if self.post_process:
            return self.predictions.attach_losses(states, ahead, self._losses_of, inputs)
        return torch.cat(states) if len(states) > 1 else states[0]

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Sets the hidden states [s, b, h] received from the previous stage, for the next forward."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the weight that embedding and head share; None if this stage has neither."""
        if self.pre_process or self.mtp_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def _losses_of(self, hidden: Tensor, labels: Tensor, **options: bool) -> Tensor:
        """Returns the loss of each token [s, b], for hidden states [s, b, h] and labels [b, s]."""
        losses: Tensor = self.output_layer(hidden, labels=labels.t(), **options)[0]
        return losses


def _check_padding_mask(mask: Tensor, tokens: Tokens) -> None:
    expected = [tokens.batch_size, tokens.seq_length]
    if list(mask.shape) != expected:
        raise UserError(
            f"padding_mask has the shape {list(mask.shape)}; that of this rank's tokens, [b, s], is {expected}"
        )
