"""The head of T5: logits over the vocabulary, or the loss of each token."""

from torch import Tensor, nn

from megatron.core.communication.collectives import Group
from megatron.core.models.common.language_model_head import Vocabulary, build_head
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
        self.output_layer = build_head(
            config,
            Vocabulary(vocab_size, vocab_padding_multiple),
            tp_group,
            bias=shares and has_bias,
            gather_output=not parallel_output,
            shares=shares,
            borrowed=borrowed,
        )

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns logits [b, s, vocabulary] for hidden states [s, b, h]; with labels [b, s] the loss of each token [b,
        s]."""
        if labels is not None:
            return self.output_layer(hidden, labels=labels.t())[0].t().contiguous()
        return self.output_layer(hidden)[0].transpose(0, 1).contiguous()
