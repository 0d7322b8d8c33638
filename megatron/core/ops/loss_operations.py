"""The losses of tokens, as a record."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.head_loss import head_loss
from megatron.core.ops.records import Ops, on_gpus, operation


@dataclass(frozen=True)
class LossOps(Ops):
    """Cross entropy, of logits and of hidden states."""

    cross_entropy: Callable[..., Tensor] = operation(cross_entropy, "losses")
    head_loss: Callable[..., Tensor] = operation(head_loss, "losses")

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops.cross_entropy_triton import cross_entropy_triton

        return on_gpus(
            cls(),
            cross_entropy=cross_entropy_triton,
            head_loss=functools.partial(head_loss, loss=cross_entropy_triton),
        )
