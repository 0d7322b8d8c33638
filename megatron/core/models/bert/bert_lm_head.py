"""The transform before BERT's output layer."""

from torch import Tensor
from torch.nn.functional import gelu

from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class BertLMHead(MegatronModule):
    """Computes norm(gelu(x W^T + b)) with exact GELU, the transform of masked language modelling (Devlin et al. 2018).
    Under sequence parallelism each rank transforms its own tokens."""

    def __init__(self, hidden_size: int, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.init_method is not None
        self.dense = ReplicatedLinear(hidden_size, hidden_size, config=config, init_method=config.init_method)
        self.layer_norm = WrappedTorchNorm(config, hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the transformed hidden states [s, b, h]."""
        dense, _ = self.dense(hidden_states)
        transformed: Tensor = self.layer_norm(gelu(dense))
        return transformed
