"""LayerNorm and RMSNorm by Transformer Engine, with the signatures of `ops.norm`."""

from typing import Any, TypeGuard

from torch import Tensor, nn

from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.transformer_engine.engine import Engine


class EngineNorms:
    """The norms of a backend. Functions of another backend compute what Transformer Engine does not: norms without
    weight or bias, inputs of another type than the weight, and weights that are not parameters."""

    def __init__(self, engine: Engine, layer_norm: Any = layer_norm, rms_norm: Any = rms_norm) -> None:
        self.engine = engine
        self._other_layer_norm, self._other_rms_norm = layer_norm, rms_norm

    def layer_norm(
        self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, zero_centered: bool = False
    ) -> Tensor:
        """Returns `ops.norm.layer_norm` of the arguments."""
        if not self._takes(weight, inputs) or not isinstance(bias, nn.Parameter):
            other: Tensor = self._other_layer_norm(inputs, weight, bias, epsilon, zero_centered)
            return other
        result: Tensor = self._module("LayerNorm", weight, bias, epsilon, zero_centered)(inputs)
        return result

    def rms_norm(self, inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool = False) -> Tensor:
        """Returns `ops.norm.rms_norm` of the arguments."""
        if not self._takes(weight, inputs):
            other: Tensor = self._other_rms_norm(inputs, weight, epsilon, zero_centered)
            return other
        result: Tensor = self._module("RMSNorm", weight, None, epsilon, zero_centered)(inputs)
        return result

    def _takes(self, weight: Tensor | None, inputs: Tensor) -> TypeGuard[nn.Parameter]:
        return isinstance(weight, nn.Parameter) and self.engine.takes(inputs, weight)

    def _module(self, kind: str, weight: Tensor, bias: Tensor | None, epsilon: float, zero_centered: bool) -> Any:
        """Returns Transformer Engine's module for a weight, which keeps it."""
        key = kind, epsilon, zero_centered
        kept = getattr(weight, "engine_norm", None)
        if kept is not None and kept[0] == key:
            return kept[1]
        module = getattr(self.engine.pytorch, kind)(
            weight.shape[0], eps=epsilon, dtype=weight.dtype, device="meta", zero_centered_gamma=zero_centered
        )
        module.weight = weight
        if bias is not None:
            module.bias = bias
        weight.engine_norm = key, module  # type: ignore[attr-defined]
        return module
