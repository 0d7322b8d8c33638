"""The head of T5: logits over the vocabulary, or the loss of each token."""

from torch import Tensor, nn

from megatron.core.communication.collectives import Group
from megatron.core.models.common.language_model_head import LanguageModelHead
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class T5LMHead(MegatronModule):
    """Computes hidden W^T + bias. With `share_embeddings_and_output_weights`, W is the embedding's weight (`borrowed`),
    or a copy of it on a pipeline stage without the embedding, and there is a bias unless our own keyword `has_bias` is
    False. Otherwise the head has its own weight and no bias."""

    def __init__(
        self,
        config: TransformerConfig,
        parallel_output: bool,
        vocab_size: int,
        share_embeddings_and_output_weights: bool = False,
        borrowed: nn.Parameter | None = None,
        *,
        has_bias: bool = True,
        tp_group: Group = None,
        vocab_padding_multiple: int | None = None,
    ) -> None:
        super().__init__(config)
        shares = share_embeddings_and_output_weights
        is_copied = shares and borrowed is None
        copy = {"tied": True, "part_of": "embedding.word_embeddings.weight"} if is_copied else {}
        self.output_layer = LanguageModelHead(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.embedding_init_method if is_copied or config.use_mup else config.init_method,
            bias=shares and has_bias,
            gather_output=not parallel_output,
            skip_weight_param_allocation=borrowed is not None,
            tp_group=tp_group,
            vocab_padding_multiple=vocab_padding_multiple,
            **copy,
        )
        if borrowed is not None:
            self.output_layer.borrowed_parameters = (borrowed,)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns logits [b, s, vocabulary] for hidden states [s, b, h]; with labels [b, s] the loss of each token [b,
        s]."""
        weight = next(iter(self.output_layer.borrowed_parameters), None)
        if labels is not None:
            return self.output_layer(hidden, weight, labels=labels.t())[0].t().contiguous()
        return self.output_layer(hidden, weight)[0].transpose(0, 1).contiguous()
