"""The head and its loss as one operation, so that a backend may run them in chunks of tokens."""

from collections.abc import Callable

from torch import Tensor

from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.linear import linear


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocab_size: int,
    loss: Callable[..., Tensor] = cross_entropy,
) -> Tensor:
    """Loss of each token: [t, h], head [columns, h] (+ [columns]) and int64 [t] -> [t], in the wider of float32 and
    the type of `hidden`. Columns from `vocab_size` on are padding. The gradient takes the place of the logits. `loss`
    is `cross_entropy` or a faster implementation of it."""
    return loss(linear(hidden, weight, bias), labels, vocab_size, overwrite_logits=True)
