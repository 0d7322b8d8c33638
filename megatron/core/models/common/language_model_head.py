"""The head of a language model: logits over the vocabulary, or the loss of each token."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import group_size
from megatron.core.ops.attention.soft_cap import soft_cap
from megatron.core.ops.cross_entropy import vocabulary_part
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class LanguageModelHead(ColumnParallelLinear):
    """Computes hidden W^T with W [vocabulary, h] split by rows over the tensor parallel ranks; see
    `ColumnParallelLinear`. With the config's `logit_scale` s and `final_logit_softcapping` c, the logits become c
    tanh(s logits / c).

    `output_size` is the vocabulary without padding. Softmaxes leave out padding: gathered logits have none, and in a
    rank's part of the logits it is -inf.
    """

    config: TransformerConfig
    borrowed_parameters: tuple[nn.Parameter, ...] = ()
    """Parameters that `forward` gets from another module: the embedding of a tied head."""

    def __init__(self, input_size: int, output_size: int, *, vocab_padding_multiple: int | None, **more: Any) -> None:
        super().__init__(input_size, output_size, vocab_padding_multiple=vocab_padding_multiple or 1, **more)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        trains_weight: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (logits [s, b, vocabulary], None) for hidden states [s, b, h]; with several ranks and without
        gathering, logits [s, b, stored rows]. With `labels` [s, b]: (the loss of each token [s, b] in float32 at least,
        None), the same on every rank. Under sequence parallelism hidden states are this rank's part, [s / ranks, b,
        h]. Without `trains_weight` the weight gets no gradient. The config's `logit_dtype` is the type of the logits,
        and `loss_chunk_size` the number of tokens whose logits exist at a time if there are labels."""
        weight = self.weight if weight is None else weight
        if self.config.logit_scale != 1.0:
            input_ = input_ * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        product: dict[str, Any] = {"gathers": self.sequence_parallel}
        if self.config.logit_dtype is not None:
            product["out_dtype"] = _TYPES[self.config.logit_dtype]
        if not trains_weight:
            product["trains_weight"] = False
        if labels is not None:
            loss = self.backend.losses.head_loss(
                input_.flatten(0, 1),  # [t, h]
                weight,
                self.bias,
                labels.flatten(),
                self.output_size,
                self.gradient_group,
                cap=cap,
                chunk=self.config.loss_chunk_size,
                **product,
            )
            return loss.view(labels.shape), None
        logits = self.backend.matrices.linear(input_, weight, self.bias, self.gradient_group, **product)
        if cap is not None:
            logits = soft_cap(logits, cap)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            logits = gather_from_tensor_model_parallel_region(logits, self.tp_group)
        elif group_size(self.tp_group) > 1:
            return self._without_padding(logits if cap is None else logits.clone()), None
        return logits[..., : self.output_size], None

    def _without_padding(self, logits: Tensor) -> Tensor:
        true = vocabulary_part(logits.shape[-1], self.output_size, self.tp_group).count
        if true < logits.shape[-1]:
            logits[..., true:] = -torch.inf
        return logits
