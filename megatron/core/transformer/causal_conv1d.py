"""The convolution over the last few tokens that linear attention and state space layers have before their state."""

import math

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group
from megatron.core.initializers import Constant, Uniform
from megatron.core.tensor_parallel.storage import new_parameter, split_box, with_columns
from megatron.core.transformer.transformer_config import TransformerConfig


class CausalConv1d(nn.Module):
    """Convolves each channel with the `kernel_size` last tokens: a depthwise, causal convolution.

    `channels` are the dimensions of the canonical channels; tensor parallel ranks divide the first. Parameters:
    `weight` [*channels, kernel_size], whose last column multiplies the token itself, and with `bias` a `bias`
    [*channels]. Weights are drawn uniformly within 1 / sqrt(kernel_size), as torch's Conv1d draws them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        channels: tuple[int, ...],
        kernel_size: int,
        *,
        bias: bool = False,
        tp_group: Group = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend or choose_backend(config)
        box, bound = split_box(channels, 0, tp_group), 1.0 / math.sqrt(kernel_size)
        self.weight = new_parameter(
            config,
            (box.numel, kernel_size),
            Uniform(-bound, bound),
            global_shape=(*channels, kernel_size),
            box=with_columns(box, kernel_size),
            sharded_axes=frozenset({"tp"}),
            is_depthwise=True,
        )
        self.register_parameter("bias", None)
        if bias:
            facts = {"global_shape": channels, "box": box, "sharded_axes": frozenset({"tp"})}
            self.bias = new_parameter(config, (box.numel,), Constant(0.0), **facts)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor, document: Tensor | None = None) -> Tensor:
        """Returns [s, b, c] for this rank's channels [s, b, c] of whole rows. `document` [s] is the number of each
        token's packed document; a token reads no other document."""
        return self.backend.recurrence.causal_conv(inputs, self.weight, self.bias, document)
