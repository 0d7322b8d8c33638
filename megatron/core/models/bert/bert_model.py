"""BERT: embedding, a stack of bidirectional transformer layers, and two heads (Devlin et al. 2018): one predicts masked
tokens, the binary head whether two segments are in order."""

from typing import Literal

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import MicroBatch
from megatron.core.models.bert.bert_lm_head import BertLMHead
from megatron.core.models.bert.pooler import Pooler
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import Positions, choose_rotary_embeddings
from megatron.core.models.common.language_model_head import Vocabulary, build_head
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ops.precision import widened
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.tokens import Tokens, position_ids
from megatron.core.transformer.layer_inputs import InferenceContext, LayerInputs, key_padding_mask
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class BertModel(LanguageModule):
    """A bidirectional encoder with BERT's heads, or its part on one pipeline stage.

    `num_tokentypes` is the number of token types (segments) of the embedding, or 0. With `add_binary_head` a second
    output predicts whether the segments of a row are in order. The output layer has a bias even if it shares the
    embedding's weight. `head_activation` (gelu, gelu_tanh, relu) and `head_bias` describe the dense layer before it.
    `vocab_size`, `parallel_output`, `fp16_lm_cross_entropy` and our other keywords have the same meaning as in
    `GPTModel`.

    With `return_embeddings` the last stage returns one embedding per row, [b, h], instead of predictions: the mean of
    the hidden states of its tokens without the first token, [CLS], and the last one, [SEP], in float32 at least.

    Raises UserError for what is not implemented: context parallelism, multi-token prediction.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rotary_base: float = 10000,
        vocab_padding_multiple: int | None = None,
        head_activation: str = "gelu",
        head_bias: bool = True,
    ) -> None:
        super().__init__(config, pg_collection)
        if position_embedding_type not in ("learned_absolute", "rope", "none"):
            known = "learned_absolute, rope and none work"
            raise UserError(f"position_embedding_type {position_embedding_type}: not for BERT; {known}")
        self._check()
        tp_group = self.pg_collection.tp
        vocabulary = Vocabulary.of(vocab_size, vocab_padding_multiple)
        self.vocab_size = vocabulary.size
        self.max_sequence_length, self.num_tokentypes = max_sequence_length, num_tokentypes
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = shares = share_embeddings_and_output_weights
        self.position_embedding_type, self.add_binary_head = position_embedding_type, add_binary_head
        self.return_embeddings = return_embeddings
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                self.vocab_size,
                max_sequence_length,
                position_embedding_type,
                num_tokentypes,
                tp_group=tp_group,
                vocab_padding_multiple=vocabulary.padding_multiple,
                tied=shares and not post_process,
            )
        self.rotary_pos_emb, self.rotary_pos_emb_local = choose_rotary_embeddings(
            config, Positions(position_embedding_type, rotary_percent, rotary_base, seq_len_interpolation_factor)
        )
        self.encoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        if post_process:
            self.lm_head = BertLMHead(config.hidden_size, config, activation=head_activation, bias=head_bias)
            self.output_layer = build_head(
                config,
                vocabulary,
                tp_group,
                bias=True,
                gather_output=not parallel_output,
                shares=shares,
                borrowed=self.embedding.word_embeddings.weight if shares and pre_process else None,
            )
        if post_process and add_binary_head:
            assert config.init_method is not None
            self.pooler = Pooler(config.hidden_size, config, tp_group)
            self.binary_head = ReplicatedLinear(
                config.hidden_size, 2, config=config, init_method=config.init_method, input_is_whole=True
            )
        name_parameters(self)
        if config.perform_initialization:
            initialize_parameters(self, config.seed)

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        inference_params: InferenceContext | None = None,
        *,
        tokens: Tokens | None = None,
        micro_batch: MicroBatch | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Returns a pair: logits [b, s, vocab_size], or this rank's part of them (see `parallel_output`), or with
        `lm_labels` [b, s] the loss of each token [b, s], in float32 at least; and the logits [b, 2] of the binary head,
        or None without one. A stage that is not the last returns hidden states [s, b, h]. With `return_embeddings`: see
        the class.

        - `input_ids` and `tokentype_ids` [b, s].
        - `attention_mask` [b, s] is 0 or False for padding; None: there is no padding.
        - `lm_labels` may have any value at positions whose loss is not used, also -1.
        - `tokens` and `micro_batch` have the same meaning as in `GPTModel.forward`.

        A stage that is not the first gets its hidden states by `set_input_tensor`, and its tokens from `tokens` or the
        shapes of the other arguments.
        """
        if inference_context is not None or inference_params is not None:
            raise UserError(
                "a BertModel does not decode: every token attends to all others; leave inference_context out"
            )
        micro_batch, received = micro_batch or MicroBatch(), self.encoder.input_tensor
        learned = self.max_sequence_length if self.position_embedding_type == "learned_absolute" else None
        ids = input_ids if received is None else None
        tokens = self.describe_tokens(tokens, ids, received, None, None, learned, micro_batch.rng_position)
        source = received if received is not None else input_ids
        assert source is not None, "a stage needs input_ids or set_input_tensor"
        mask = None if attention_mask is None else self.bert_extended_attention_mask(attention_mask)
        inputs = self.layer_inputs(tokens, source.device, micro_batch, mask)

        hidden = received if received is not None else self._embed(input_ids, tokentype_ids, inputs)  # [s, b, h]
        hidden = self.encoder(hidden, inputs=inputs)
        if not self.post_process:
            return hidden
        if self.return_embeddings:
            if self.sequence_parallel:
                # Every rank computes the whole gradient, so none is summed.
                group = self.pg_collection.tp
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
            return mean_without_ends(hidden, attention_mask)
        in_order = self.binary_head(self.pooler(hidden))[0] if self.add_binary_head else None  # [b, 2]
        return self._predict(self.lm_head(hidden), lm_labels), in_order

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Sets the hidden states [s, b, h] received from the previous stage, for the next forward."""
        self.encoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def bert_extended_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """Returns the mask that attention takes, bool [b, 1, 1, s] with True for padding, for a mask [b, s] that is 0
        there."""
        return key_padding_mask(attention_mask)

    def bert_position_ids(self, token_ids: Tensor) -> Tensor:
        """Returns the positions 0, 1, ... of tokens [b, s], int64 [b, s]."""
        return torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the weight that embedding and head share; None if this stage has neither."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def _check(self) -> None:
        """Raises UserError for settings that this model does not have."""
        if self.pg_collection.size("cp") > 1:
            raise UserError(
                f"not yet: context_parallel_size {self.pg_collection.size('cp')} with BERT, whose tokens attend to "
                "both sides and whose rows are padded; use 1, and tensor or pipeline parallelism"
            )
        if self.config.mtp_num_layers:
            raise UserError(f"mtp_num_layers {self.config.mtp_num_layers}: BERT predicts masked tokens only; unset it")

    def _embed(self, input_ids: Tensor | None, tokentype_ids: Tensor | None, inputs: LayerInputs) -> Tensor:
        assert input_ids is not None
        place = inputs.hidden_dropout_position(0, "embedding")
        hidden: Tensor = self.embedding(
            input_ids,
            position_ids(inputs.tokens, input_ids.device),
            place,
            tokentype_ids if self.num_tokentypes else None,
        )
        return hidden

    def _predict(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """Returns the logits of tokens [b, s, vocabulary], or with labels the loss of each token [b, s]."""
        if labels is None:
            return self.output_layer(hidden)[0].transpose(0, 1).contiguous()
        return self.output_layer(hidden, labels=labels.clamp(min=0).t())[0].t().contiguous()


def mean_without_ends(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Returns the mean [b, h] of each row's hidden states [s, b, h], in float32 at least, without its first and last
    token; 0 for a row of two tokens. `attention_mask` [b, s] is 0 for padding at a row's end; None: no padding."""
    s, b, _ = hidden.shape
    place = torch.arange(s, device=hidden.device).view(s, 1)
    length = attention_mask.sum(1) if attention_mask is not None else place.new_full((b,), s)
    inner = ((place > 0) & (place < length - 1)).unsqueeze(2)  # [s, b, 1]
    return (widened(hidden) * inner).sum(0) / inner.sum(0).clamp(min=1)
