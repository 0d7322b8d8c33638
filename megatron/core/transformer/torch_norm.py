"""The norm of the local spec: LayerNorm or RMSNorm in plain torch."""

from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.initializers import Constant
from megatron.core.ops.rope import Rotation
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.transformer.transformer_config import TransformerConfig


class WrappedTorchNorm(nn.Module):
    """LayerNorm or RMSNorm (`config.normalization`) over the last dimension. With `layernorm_zero_centered_gamma` the
    weight is stored minus one. Parameters: `weight` if `norm_affine`, and for LayerNorm `bias` if `norm_bias`."""

    returns_residual = True
    """Whether forward has the parameter `with_residual`. A layer calls other norms without it."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        *,
        backend: Backend | None = None,
        zero_centered: bool | None = None,
    ) -> None:
        """`zero_centered` overrides the config's `layernorm_zero_centered_gamma`."""
        super().__init__()
        self.backend = backend or choose_backend(config)
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        self.normalization, self.output_type = config.normalization, config.params_dtype
        # Under sequence parallelism every rank sees its own tokens only.
        facts: dict[str, Any] = {"partial_gradient_axes": frozenset({"tp"} if config.sequence_parallel else ())}
        one = Constant(0.0 if self.zero_centered else 1.0)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if config.norm_affine:
            self.weight = new_parameter(config, (hidden_size,), one, **facts)
        if config.normalization == "LayerNorm" and config.norm_affine and config.norm_bias:
            self.bias = new_parameter(config, (hidden_size,), Constant(0.0), **facts)

    @property
    def can_rotate(self) -> bool:
        """Whether `rotated` computes norm and rotation as one operation."""
        return self._is_plain and self.backend.attention.normed_rope is not None

    @property
    def can_gate(self) -> bool:
        """Whether `gated` computes norm and gate as one operation."""
        return self._is_plain and not self.zero_centered

    @property
    def _is_plain(self) -> bool:
        """Whether this is RMSNorm with a weight. Hooks of scripts need the norm by itself."""
        has_hooks = bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks)
        is_plain = type(self) is WrappedTorchNorm and self.normalization == "RMSNorm" and self.weight is not None
        return is_plain and not has_hooks

    def rotated(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """Returns the normed heads [s, b, ..., d], rotated. Only if `can_rotate`."""
        assert self.backend.attention.normed_rope is not None
        return self.backend.attention.normed_rope(heads, self.weight, self.eps, self.zero_centered, rotation)

    def gated(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Returns the normed heads [s, b, g, n, d] times the SiLU of their gates, in the gates' type. Only if
        `can_gate`."""
        return self.backend.recurrence.gated_rms_norm(heads, gate, self.weight, self.eps, False)

    def forward(self, x: Tensor, with_residual: bool = False) -> Any:
        """Returns the normed tensor [..., hidden_size], in the type of the model's weights. `with_residual`: returns
        (normed tensor, x), so that the norm's backward adds the gradients of both."""
        backend, parameters = self.backend, [self.weight]
        if self.normalization == "RMSNorm":
            norm = backend.norms.rms_norm_with_residual if with_residual else backend.norms.rms_norm
        else:
            norm = backend.norms.layer_norm_with_residual if with_residual else backend.norms.layer_norm
            parameters.append(self.bias)
        result: Any = norm(x, *parameters, self.eps, self.zero_centered)
        if self.weight is not None:
            return result
        return (result[0].to(self.output_type), result[1]) if with_residual else result.to(self.output_type)
