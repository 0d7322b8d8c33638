"""Norms of queries and keys that `torch_norm` does not have: without weights, with weights for each head, and over all
heads of a token."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.initializers import Constant
from megatron.core.ops.norm_over_ranks import rms_norm_over_ranks
from megatron.core.ops.precision import widened
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


class HeadWeights(nn.Module):
    """The weights of a norm with one entry per channel of each head, with the heads divided among tensor parallel
    ranks: a rank has the entries of its own heads.

    If there are fewer key heads than ranks, several ranks use the same head: each rank then has the weights of all key
    heads, and its gradient comes from its own heads.
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
        """`hidden_size` is the number of channels of all heads of the model."""
        super().__init__()
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


class AllHeadsNorm(HeadWeights):
    """RMSNorm of all heads of a token together (OLMo 2)."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        if config.normalization != "RMSNorm":
            raise UserError(
                f"qk_norm_scope full is an RMSNorm; it does not go with normalization {config.normalization}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's heads [s, b, ..., d], normed, in the weight's type."""
        flat = x.flatten(2)
        if group_size(self.tp_group) == 1:
            return self.backend.norms.rms_norm(flat, self.weight, self.eps, self.zero_centered).view(x.shape)
        normed = rms_norm_over_ranks(flat, self.weight, self.eps, self.zero_centered, self.tp_group, self.first)
        return normed.view(x.shape)


class PerHeadNorm(HeadWeights):
    """RMSNorm, or LayerNorm without a bias, of each head by itself, with weights of its own (Command R+)."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        self.normalization = config.normalization

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's heads [s, b, ..., d], normed, in the weight's type."""
        heads, last = widened(x), x.shape[-1:]
        if self.normalization == "RMSNorm":
            normed = rms_norm(heads, last, eps=self.eps)
        else:
            normed = layer_norm(heads, last, eps=self.eps)
        weight = widened(self.weight[self.first : self.first + x[0, 0].numel()]).view(x.shape[2:])
        return (normed * (weight + 1.0 if self.zero_centered else weight)).to(self.weight.dtype)


NORMS_OF_HEADS: Mapping[str, type[HeadWeights]] = {"full": AllHeadsNorm, "per_head": PerHeadNorm}
"""Norms with weights for each head, by `qk_norm_scope`."""
