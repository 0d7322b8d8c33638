"""T5: an encoder that reads a text, and a decoder that writes one and attends to the encoder's output (Raffel et al.
2020, "Exploring the limits of transfer learning with a unified text-to-text transformer")."""

import copy
import dataclasses
from typing import Literal

import torch
from torch import Tensor

from megatron.core.communication.collectives import group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import MicroBatch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import Positions, choose_rotary_embeddings
from megatron.core.models.common.language_model_head import Vocabulary
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.T5.t5_head import T5LMHead
from megatron.core.models.T5.t5_stage import part_of_stage
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import EncoderStates, InferenceContext, LayerInputs, encoder_states_of
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules, block_submodules
from megatron.core.transformer.transformer_config import TransformerConfig


class T5Model(LanguageModule):
    """An encoder-decoder language model, or the part of one on a pipeline stage.

    `config` describes the decoder, `encoder_config` (default: `config`) the encoder; they may differ in `num_layers`
    only. Both stacks share one embedding. With `position_embedding_type` relative, the self-attention layers of each
    stack share a bias; rope and learned_absolute work as in GPTModel. If the head shares the embedding's weight, it has
    a bias, unless our own keyword `head_bias` is False. Without the bias, and with `logit_scale` 1 / sqrt(hidden size),
    it is the head of T5 (Raffel et al. 2020). `vocab_size`, `parallel_output` and our keyword `vocab_padding_multiple`
    have the same meaning as in GPTModel; `fp16_lm_cross_entropy` has no effect.

    With several pipeline stages, `config.num_encoder_layers` is the number of the encoder's layers, and
    `stage_map(config)` gives the layers of each stage: the first stages have the encoder, the others the decoder.
    `pre_process` is true on the first stage of each stack, which has the embedding, and `post_process` on the last
    stage, which has the head. Each copy of the embedding, of a tied head's weight and of a stack's bias has the same
    canonical name and initial values, and their gradients are summed.

    Raises UserError for settings that T5's layers do not support.
    """

    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig | None = None,
        transformer_encoder_layer_spec: ModuleSpec | TransformerBlockSubmodules | None = None,
        transformer_decoder_layer_spec: ModuleSpec | TransformerBlockSubmodules | None = None,
        vocab_size: int | None = None,
        max_sequence_length: int | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        add_encoder: bool = True,
        add_decoder: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rotary_base: float = 10000,
        vocab_padding_multiple: int | None = None,
        head_bias: bool = True,
    ) -> None:
        super().__init__(config, pg_collection)
        if encoder_config is None:
            encoder_config = _config_of_encoder(config, transformer_encoder_layer_spec)
        specs = (transformer_encoder_layer_spec, transformer_decoder_layer_spec)
        if None in specs or vocab_size is None or max_sequence_length is None:
            raise UserError(
                "T5Model needs transformer_encoder_layer_spec, transformer_decoder_layer_spec, vocab_size and "
                "max_sequence_length"
            )
        assert transformer_encoder_layer_spec is not None and transformer_decoder_layer_spec is not None
        _check(config, encoder_config, position_embedding_type)
        groups = self.pg_collection
        part = part_of_stage(config, encoder_config, groups, add_encoder, add_decoder)
        cut = groups.size("pp") > 1
        vocabulary = Vocabulary.of(vocab_size, vocab_padding_multiple)
        self.vocab_size = vocabulary.size
        self.max_sequence_length = max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.add_encoder, self.add_decoder = part.encoder is not None, part.decoder is not None
        self.states_in = part.states_in
        self.input_tensor: Tensor | None = None
        self.share_embeddings_and_output_weights = shares = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                self.vocab_size,
                max_sequence_length,
                "learned_absolute" if position_embedding_type == "learned_absolute" else "none",
                tp_group=groups.tp,
                vocab_padding_multiple=vocabulary.padding_multiple,
                tied=cut,
                positions_tied=cut,
            )
        self.rotary_pos_emb, self.rotary_pos_emb_local = choose_rotary_embeddings(
            config, Positions(position_embedding_type, rotary_percent, rotary_base, seq_len_interpolation_factor)
        )
        relative = position_embedding_type == "relative"
        buckets = relative_attention_num_buckets, relative_attention_max_distance
        self.encoder: TransformerBlock | None = None
        self.encoder_relative_pos_emb: RelativePositionEmbedding | None = None
        if part.encoder is not None:
            spec, ends = transformer_encoder_layer_spec, part.encoder_ends
            self.encoder = _stack(encoder_config, spec, part.encoder, groups, relative, ends)
            if relative:
                self.encoder_relative_pos_emb = _relative_bias(config, "encoder", buckets, groups)
        self.decoder: TransformerBlock | None = None
        self.decoder_relative_pos_emb: RelativePositionEmbedding | None = None
        if part.decoder is not None:
            self.decoder = _stack(config, transformer_decoder_layer_spec, part.decoder, groups, relative, post_process)
            if relative:
                self.decoder_relative_pos_emb = _relative_bias(config, "decoder", buckets, groups)
        if post_process and part.decoder is not None:
            self.lm_head = T5LMHead(
                config,
                parallel_output,
                self.vocab_size,
                shares,
                self.embedding.word_embeddings.weight if shares and pre_process else None,
                has_bias=head_bias,
                tp_group=groups.tp,
                vocab_padding_multiple=vocabulary.padding_multiple,
            )
        name_parameters(self)
        if config.perform_initialization:
            initialize_parameters(self, config.seed)

    def forward(
        self,
        encoder_input_ids: Tensor,
        decoder_input_ids: Tensor,
        encoder_attn_mask: Tensor | None = None,
        decoder_attn_mask: Tensor | None = None,
        encoder_decoder_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        lm_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        output_encoder_hidden_only: bool = False,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_params: InferenceContext | None = None,
        *,
        micro_batch: MicroBatch | None = None,
    ) -> Tensor:
        """Returns logits [b, s of the decoder, vocab_size], or this rank's part of them (see `parallel_output`); with
        `lm_labels` [b, s] the loss of each token [b, s], in float32 at least. A stage before the last returns hidden
        states for the next one: the encoder's [s, b, h], or the decoder's followed by the encoder's output, [s of both,
        b, h].

        - `encoder_input_ids`, `decoder_input_ids`: int64 [b, s], of different lengths.
        - `encoder_attn_mask`, `decoder_attn_mask`, `encoder_decoder_attn_mask`: masks of the encoder's self-attention,
          the decoder's self-attention and cross attention (bool, broadcast to [b, heads, queries, keys], or [b,
          queries, keys], or [b, keys]; True hides a key). The decoder also has its causal mask. The mask of cross
          attention may be a pair: the padding of queries and that of keys.
        - `encoder_hidden_states` [s, b, h]: the encoder's output; the encoder then does not run.
        - `output_encoder_hidden_only`: returns the encoder's output [s, b, h].
        - Every stage reads the ids, at least for their shapes, and gets its hidden states by `set_input_tensor`.
        - `micro_batch` describes the micro-batch in this step; the schedules of `pipeline_parallel` add it to the call.
        - `inference_context`: the decoder's tokens continue the tokens in the context, which has the same number of
          tokens for each row. Needs `encoder_hidden_states`. Cross attention computes its keys and values in the first
          call.

        Under sequence parallelism hidden states are this rank's [s / ranks, b, h].
        """
        context = inference_context or inference_params
        self._check_context(context)
        if packed_seq_params is not None:
            raise UserError("packed_seq_params: T5 reads whole rows; leave it out")
        micro_batch = micro_batch or MicroBatch()
        read = self._layer_inputs(encoder_input_ids, _four_dims(encoder_attn_mask), micro_batch, "encoder.")
        written = self._layer_inputs(decoder_input_ids, _four_dims(decoder_attn_mask), micro_batch, "", context)
        received, encoded = self._take_received(written.tokens)
        if encoder_hidden_states is not None:
            encoded = encoder_hidden_states
        if encoded is None:
            if self.encoder is None:
                raise UserError("a T5Model without encoder (add_encoder False) needs encoder_hidden_states")
            encoded = self._run(self.encoder, self.encoder_relative_pos_emb, encoder_input_ids, received, read)
        if output_encoder_hidden_only or self.decoder is None:
            return encoded
        mask = _four_dims(encoder_decoder_attn_mask)
        written = dataclasses.replace(written, encoder=self._encoder_states(encoded, mask, read))
        hidden = self._run(self.decoder, self.decoder_relative_pos_emb, decoder_input_ids, received, written)
        return self.lm_head(hidden, lm_labels) if self.post_process else torch.cat([hidden, encoded])

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Sets the hidden states received from the previous stage, for the next forward."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the weight that embedding and head share; None if this stage has neither."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.lm_head.output_layer.weight if self.post_process else None

    def _take_received(self, written: Tokens) -> tuple[Tensor | None, Tensor | None]:
        """Returns the tensors that the previous stage sent: hidden states of this stage's stack, and the encoder's
        output. A tensor that it did not send is None. `written` describes the decoder's tokens."""
        received, self.input_tensor = self.input_tensor, None
        if received is None or self.decoder is None:
            return received, None
        length = written.seq_length // (group_size(self.pg_collection.tp) if self.sequence_parallel else 1)
        hidden, encoded = received.tensor_split([length * self.states_in.decoder])
        return (hidden if self.states_in.decoder else None), encoded

    def _run(
        self,
        stack: TransformerBlock,
        positions: RelativePositionEmbedding | None,
        ids: Tensor,
        received: Tensor | None,
        inputs: LayerInputs,
    ) -> Tensor:
        """Returns hidden states [s, b, h] after the layers of a stack. The bias of all its layers is computed once."""
        if positions is not None:
            inputs = dataclasses.replace(inputs, attention_bias=positions(inputs.tokens))
        hidden: Tensor = stack(self.embedding.embed(ids, inputs) if received is None else received, inputs=inputs)
        return hidden

    def _layer_inputs(
        self,
        ids: Tensor,
        mask: Tensor | None,
        micro_batch: MicroBatch,
        stack: str,
        context: InferenceContext | None = None,
    ) -> LayerInputs:
        """Returns the inputs of a stack's layers except the hidden states. Relative positions are in the stack's
        bias."""
        learned = self.max_sequence_length if self.position_embedding_type == "learned_absolute" else None
        tokens = self._tokens_of(ids, None)
        if context is not None:
            tokens = context.start(tokens, ids.device)
            mask = context.mask_of_call(mask)
            tokens = dataclasses.replace(tokens, positions=None, first_position=context.extent - ids.shape[1])
        tokens = self.describe_tokens(tokens, ids, None, None, None, learned, micro_batch.rng_position)
        inputs = self.layer_inputs(tokens, ids.device, micro_batch, mask, context)
        return dataclasses.replace(inputs, stack=stack)

    def _encoder_states(self, hidden: Tensor, mask: Tensor | None, inputs: LayerInputs) -> EncoderStates:
        """Returns the inputs of cross attention: all tokens of the encoder's output, gathered once for all layers."""
        group, parallel = self.pg_collection.tp, self.sequence_parallel
        hidden = hidden.to(self.config.params_dtype)  # a stage may have sent it beside wider states
        return encoder_states_of(
            hidden, inputs.tokens, group, sequence_parallel=parallel, attention_mask=mask, dropout=inputs.dropout
        )


def _stack(
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    numbers: range,
    groups: ProcessGroupCollection,
    relative: bool,
    ends: bool,
) -> TransformerBlock:
    """Builds the layers with these numbers of the encoder or of the decoder, and with `ends` the norm after them.

    The spec may list the layers of the whole stack or those of the stage. Scripts of releases 0.9 and 0.11 divide by
    the number of stages of both stacks; if all layers in the spec are alike, their number is ignored.
    """
    layers = block_submodules(spec, config.num_layers)
    specs = layers.layer_specs or []
    if len(specs) == config.num_layers:
        layers = dataclasses.replace(layers, layer_specs=[specs[number - 1] for number in numbers])
    elif all(one == specs[0] for one in specs[1:]):
        layers = dataclasses.replace(layers, layer_specs=specs[:1] * len(numbers))
    # A copy for the layers only: their attention adds the bias. `dataclasses.replace` would drop attributes that a
    # script has added to its config, and call the constructor of a script's own config class.
    config = copy.copy(config)
    config.relative_bias = relative
    return TransformerBlock(config, layers, post_process=ends, pg_collection=groups, layer_numbers=numbers)


def _relative_bias(
    config: TransformerConfig, stack: str, buckets: tuple[int, int], groups: ProcessGroupCollection
) -> RelativePositionEmbedding:
    """Builds the bias of the `encoder` or the `decoder`, of which each of its pipeline stages has a copy."""
    stages, is_encoder = f"{stack}_pp", stack == "encoder"
    tied = groups.size("pp") > 1 and groups.size(stages) > 1
    return RelativePositionEmbedding(config, is_encoder, *buckets, groups.tp, tied=tied, tied_over=stages)


def _config_of_encoder(
    config: TransformerConfig, spec: ModuleSpec | TransformerBlockSubmodules | None
) -> TransformerConfig:
    """Returns the encoder's config for scripts of releases 0.5 to 0.8, which give one config for both stacks. Its
    number of layers is that of the encoder's spec, or else that of the decoder."""
    listed = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else None
    return dataclasses.replace(config, num_layers=len(listed)) if listed else config


def _four_dims(mask: Tensor | tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Returns a mask [b, queries, keys] as [b, 1, queries, keys], and a padding mask [b, keys] as [b, 1, 1, keys]. From
    a pair (padding of queries, padding of keys) it takes the second, because masked queries have no loss."""
    if isinstance(mask, tuple):
        mask = mask[1]
    if mask is not None and mask.dim() == 2:
        return mask[:, None, None]
    return mask[:, None] if mask is not None and mask.dim() == 3 else mask


def _check(config: TransformerConfig, encoder_config: TransformerConfig, positions: str) -> None:
    """Raises UserError for settings with which T5 cannot be built."""
    if positions not in ("learned_absolute", "rope", "relative"):
        raise UserError(f"position_embedding_type {positions}: T5 has learned_absolute, rope or relative")
    if encoder_config.hidden_size != config.hidden_size:
        raise UserError(
            f"encoder_config.hidden_size {encoder_config.hidden_size} and config.hidden_size {config.hidden_size}: "
            "the decoder attends to the encoder's output, so they must be equal"
        )
    for name in ("num_moe_experts", "multi_latent_attention", "mtp_num_layers"):
        if getattr(config, name):
            raise UserError(f"{name} {getattr(config, name)}: T5's layers have no such part; leave it out")
    if config.context_parallel_size > 1:
        raise UserError(f"context_parallel_size {config.context_parallel_size}: T5 does not split sequences; use 1")
