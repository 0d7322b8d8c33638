"""A norm and the following linear layer as one module, for layer specs that name Megatron-LM's fused class."""

from typing import Any

from torch import Tensor

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class NormedColumnParallelLinear(ColumnParallelLinear):
    """A ColumnParallelLinear of the normed input. Megatron-LM's name for it is TELayerNormColumnParallelLinear.

    The config sets the kind of norm. Its parameters are `layer_norm_weight` and `layer_norm_bias`. A layer whose
    `linear_qkv` or `linear_fc1` has this class has no separate norm before it.
    """

    config: TransformerConfig

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        """`more` are keywords of ColumnParallelLinear."""
        super().__init__(input_size, output_size, config=config, **more)
        norm = WrappedTorchNorm(config, input_size, config.layernorm_epsilon, backend=self.backend)
        self.register_parameter("layer_norm_weight", norm.weight)
        self.register_parameter("layer_norm_bias", norm.bias)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `ColumnParallelLinear.forward` of the normed input [..., input_size]."""
        config, backend = self.config, self.backend
        settings = (config.layernorm_epsilon, config.layernorm_zero_centered_gamma)
        if config.normalization == "RMSNorm":
            normed = backend.norms.rms_norm(input_, self.layer_norm_weight, *settings)
        else:
            normed = backend.norms.layer_norm(input_, self.layer_norm_weight, self.layer_norm_bias, *settings)
        return super().forward(normed.to(config.params_dtype), weight, runtime_gather_output)
