"""The base class of routers."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import group_rank, group_size
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import Initializer
from megatron.core.ops.moe.routing import best
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.moe.upcycling import EqualRows
from megatron.core.transformer.transformer_config import TransformerConfig

_WIDTHS = {"fp32": torch.float32, "fp64": torch.float64}


class Router(MegatronModule):
    """Base class of routers: `weight` [experts, h], and `bias` [experts] with `moe_router_bias`.

    A user's own router overrides `routing`, and `gating` if its logits are not a product with `weight`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        layer_number: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None and config.init_method is not None
        self.groups = groups_or_default(pg_collection)
        self.backend = backend or choose_backend(config)
        self.num_experts, self.topk = config.num_moe_experts, config.moe_router_topk
        # Under sequence parallelism every rank routes its own tokens only.
        facts: dict[str, Any] = {"partial_gradient_axes": frozenset({"tp"} if config.sequence_parallel else ())}
        init: Initializer = config.init_method
        if config.moe_use_upcycling and config.moe_upcycling_granularity > 1:
            init = EqualRows(init, config.moe_upcycling_granularity)
        self.weight = new_parameter(config, (self.num_experts, config.hidden_size), init, **facts)
        self.register_parameter("bias", None)
        if config.add_bias_linear if config.moe_router_bias is None else config.moe_router_bias:
            self.bias = new_parameter(config, (self.num_experts,), init, **facts)
        self.layer_number = layer_number or 0

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the layer's number, counted over the whole model from 1."""
        self.layer_number = layer_number

    def gating(self, input: Tensor) -> Tensor:
        """Returns the logits [.., experts] of hidden states [.., h], in `moe_router_dtype`."""
        if self.config.moe_router_dtype is None:
            return self.backend.matrices.linear(input, self.weight, self.bias)
        wide = torch.promote_types(_WIDTHS[self.config.moe_router_dtype], input.dtype)
        dtype = torch.promote_types(wide, self.weight.dtype)
        return self.backend.experts.router_logits(input, self.weight, self.bias, dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights [t, experts] and a bool map [t, experts] with at most `topk` experts per token, for the
        logits [s, b, experts] of this rank's tokens. The weight of an expert that a token is not sent to is 0. A token
        whose `padding_mask` [s, b] is True should get no expert. Subclasses override this method."""
        raise NotImplementedError(f"{type(self).__name__} has no method routing(logits)")

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights and map (see `routing`) of hidden states [s, b, h]."""
        if padding_mask is None:
            return self.routing(self.gating(input))
        return self.routing(self.gating(input), padding_mask)

    def route(self, hidden: Tensor, inputs: LayerInputs) -> Routing:
        """Returns the routing of this rank's tokens [t, h] by the method `routing`."""
        rows = hidden.view(-1, inputs.tokens.batch_size, hidden.shape[1])
        if inputs.padding_mask is None:
            weights, chosen = self(rows)
        else:
            parts = self.groups.tp if self.config.sequence_parallel else None
            own = inputs.padding_mask.t().chunk(group_size(parts))[group_rank(parts)]
            weights, chosen = self(rows, own)
        experts = best(chosen.to(torch.int8), self.topk)  # those of the map come first
        return Routing(experts, weights.gather(1, experts), chosen.gather(1, experts))
