"""The transform before BERT's output layer."""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn.functional import relu

from megatron.core.ops.activation import gelu_erf, gelu_tanh
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": gelu_erf, "gelu_tanh": gelu_tanh, "relu": relu}


class BertLMHead(MegatronModule):
    """Computes norm(f(x W^T + b)), the transform of masked language modelling (Devlin et al. 2018), where `activation`
    names f. Under sequence parallelism each rank transforms its own tokens."""

    def __init__(
        self, hidden_size: int, config: TransformerConfig, *, activation: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__(config)
        assert config.init_method is not None
        self.activation = _ACTIVATIONS[activation]
        self.dense = ReplicatedLinear(
            hidden_size, hidden_size, config=config, init_method=config.init_method, bias=bias
        )
        self.layer_norm = WrappedTorchNorm(config, hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the transformed hidden states [s, b, h]."""
        dense, _ = self.dense(hidden_states)
        transformed: Tensor = self.layer_norm(self.activation(dense))
        return transformed
