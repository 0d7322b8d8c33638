"""The head of a language model: logits over the vocabulary, or the loss of each token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from megatron.core.communication.collectives import Group, group_size
from megatron.core.ops.attention.soft_cap import soft_cap
from megatron.core.ops.cross_entropy import vocabulary_part
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a model, and the multiple to which the stored rows of its tables are padded (None: no further)."""

    size: int
    padding_multiple: int | None

    @classmethod
    def of(cls, vocab_size: int, padding_multiple: int | None) -> "Vocabulary":
        """Returns the vocabulary for a model's arguments. `vocab_size` may be a padded size, whose attribute `unpadded`
        is then the true one."""
        size: int = getattr(vocab_size, "unpadded", vocab_size)
        if size != vocab_size and padding_multiple is None:
            padding_multiple = int(vocab_size)
        return cls(size, padding_multiple)


class LanguageModelHead(ColumnParallelLinear):
    """Computes hidden W^T with W [vocabulary, h] split by rows over the tensor parallel ranks; see
    `ColumnParallelLinear`. With `normalize_output_weight` the rows of W have length 1 in the product, whose
    parameter may have any. With the config's `logit_scale` s and `final_logit_softcapping` c, the logits become c
    tanh(s logits / c).

    `output_size` is the vocabulary without padding. Softmaxes leave out padding: gathered logits have none, and in a
    rank's part of the logits it is -inf.
    """

    config: TransformerConfig
    borrowed_parameters: tuple[nn.Parameter, ...] = ()
    """Parameters of another module that `forward` reads: the weight of a tied head, which is the embedding's."""

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
        if weight is None:
            weight = next(iter(self.borrowed_parameters), self.weight)
        if self.config.normalize_output_weight:
            weight = normalize(weight)
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


def build_head(
    config: TransformerConfig,
    vocabulary: Vocabulary,
    tp_group: Group,
    *,
    bias: bool,
    gather_output: bool,
    shares: bool,
    borrowed: nn.Parameter | None,
) -> LanguageModelHead:
    """Returns the head of a model. With `shares` its weight is the embedding's: `borrowed`, or a copy if the embedding
    is on another pipeline stage (None)."""
    is_copied = shares and borrowed is None
    copy = {"tied": True, "part_of": "embedding.word_embeddings.weight"} if is_copied else {}
    head = LanguageModelHead(
        config.hidden_size,
        vocabulary.size,
        config=config,
        init_method=config.embedding_init_method if is_copied or config.use_mup else config.init_method,
        bias=bias,
        gather_output=gather_output,
        skip_weight_param_allocation=borrowed is not None,
        tp_group=tp_group,
        vocab_padding_multiple=vocabulary.padding_multiple,
        **copy,
    )
    if borrowed is not None:
        head.borrowed_parameters = (borrowed,)
    return head
