"""Norms of queries and keys that `torch_norm` does not have: without weights, and over all heads of a token."""

from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.initializers import Constant
from megatron.core.ops.norm_over_ranks import rms_norm_over_ranks
from megatron.core.tensor_parallel.storage import new_parameter, split_box
from megatron.core.transformer.transformer_config import TransformerConfig


class L2Norm(nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) over the last dimension: a norm without weights."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, backend: Backend | None = None
    ) -> None:
        super().__init__()
        self.eps, self.backend = eps, backend or choose_backend(config)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed tensor [..., hidden_size], in the input's type."""
        return self.backend.norms.rms_norm(x, None, self.eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm of all heads of a token together (OLMo 2), with the heads divided among tensor parallel ranks.

    `weight` has one entry per channel of each head; a rank has the entries of its own heads. If there are fewer key
    heads than ranks, several ranks use the same head: each rank then has the weights of all key heads, and its gradient
    comes from its own heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        tp_group: Group = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise UserError(
                f"qk_norm_scope full is an RMSNorm; it does not go with normalization {config.normalization}"
            )
        self.tp_group = tp_group_or_default(tp_group)
        self.backend = backend or choose_backend(config)
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        assert config.kv_channels is not None
        heads, ranks, rank = hidden_size // config.kv_channels, group_size(self.tp_group), group_rank(self.tp_group)
        one = Constant(0.0 if self.zero_centered else 1.0)
        self.first = 0
        """Index in `weight` of this rank's first channel."""
        facts: dict[str, Any]
        if heads % ranks == 0:
            box = split_box((hidden_size,), 0, self.tp_group)
            facts = {"box": box, "sharded_axes": frozenset({"tp"})}
            self.weight = new_parameter(config, box.shape, one, global_shape=(hidden_size,), **facts)
        else:
            self.first = rank * heads // ranks * config.kv_channels
            facts = {"partial_gradient_axes": frozenset({"tp"})}
            self.weight = new_parameter(config, (hidden_size,), one, **facts)

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's heads [s, b, ..., d], normed, in the weight's type."""
        flat = x.flatten(2)
        if group_size(self.tp_group) == 1:
            return self.backend.norms.rms_norm(flat, self.weight, self.eps, self.zero_centered).view(x.shape)
        normed = rms_norm_over_ranks(flat, self.weight, self.eps, self.zero_centered, self.tp_group, self.first)
        return normed.view(x.shape)
