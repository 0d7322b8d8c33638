"""A mixture-of-experts layer, which replaces an MLP (Shazeer et al. 2017; Lepikhin et al. 2020)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.moe.operations import ExpertOps
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.allgather_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.moe.alltoall_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.dispatch import DispatchCombine, TokenDispatcher
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.flex_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.moe.micro_batch_share import whole_rows
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec, Spec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}
"""The token dispatchers by `moe_token_dispatcher_type`. All compute the same result."""
_PARTS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


@dataclass
class MoESubmodules:
    """Specs of a layer's parts; None: the default, or no such part if the config has none."""

    experts: Spec | None = None
    shared_experts: Spec | None = None
    router: Spec | None = None
    """A `Router`; default: TopKRouter."""


class MoELayer(MegatronModule):
    """Computes sum_k w_k expert_k(x) + shared_experts(x). The router chooses the k experts of a token and their weights
    w_k.

    Tokens are sent to the ranks of their experts, and the results are sent back. With `moe_shared_expert_overlap` the
    shared experts are computed during these exchanges, in forward and backward. With `moe_latent_size` tokens have that
    width when they are sent and in the experts.
    """

    reads_layer_inputs = True

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        submodules = submodules or MoESubmodules()
        self.pg_collection = groups = groups_or_default(pg_collection)
        backend = backend or choose_backend(config)
        offer = {"backend": backend}
        self.ops = backend.experts
        self.router = build_module(
            submodules.router or TopKRouter, config, groups, offer={**offer, "layer_number": layer_number}
        )
        self.token_dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](config, groups, backend)
        count = self.token_dispatcher.num_local_experts
        experts = submodules.experts or SequentialMLP
        if backend.fp8 is not None and experts in (SequentialMLP, ModuleSpec(SequentialMLP, submodules=_PARTS)):
            experts = GroupedMLP  # has the same parameters and computes the same function
        self.experts = build_module(experts, count, config, pg_collection=groups, offer=offer)
        if not getattr(self.experts, "reads_sizes", True):
            self.token_dispatcher.leave_sizes_on_device()
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if config.moe_latent_size:
            self._add_latent_projections(config, config.moe_latent_size, backend)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            spec = submodules.shared_experts or ModuleSpec(module=SharedExpertMLP, submodules=_PARTS)
            self.shared_experts = build_module(spec, config=config, pg_collection=groups, offer=offer)

    def _add_latent_projections(self, config: TransformerConfig, width: int, backend: Backend) -> None:
        assert config.init_method is not None and config.output_layer_init_method is not None
        common: dict[str, Any] = {"config": config, "bias": config.add_bias_linear, "backend": backend}
        common["tp_group"] = self.pg_collection.tp
        self.fc1_latent_proj = ReplicatedLinear(config.hidden_size, width, init_method=config.init_method, **common)
        self.fc2_latent_proj = ReplicatedLinear(
            width, config.hidden_size, init_method=config.output_layer_init_method, **common
        )

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the layer's number, counted over the whole model from 1."""
        self.router.set_layer_number(layer_number)

    def forward(
        self, hidden_states: Tensor, inputs: LayerInputs | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Returns (output, None) for this rank's tokens, [t, h] or [s, b, h]; the output has the same shape. With a
        `residual` of this shape it returns their sum.

        Without `inputs` the tokens are whole rows of [s, b, h], and auxiliary losses have the scale 1.
        """
        self._refuse_shared_tokens()
        hidden = hidden_states.view(-1, hidden_states.shape[-1])  # [t, h]
        inputs = inputs or LayerInputs(self._whole_rows(hidden_states))
        shared = _Shared(self.shared_experts, self.config, self.ops)
        read = self.ops.read_input(hidden, shared.gate_weight)
        routing = self.router.route(read.for_router, inputs)
        exchange = self.token_dispatcher.plan(routing, inputs.turn)
        sent = read.for_dispatch if self.fc1_latent_proj is None else self.fc1_latent_proj(read.for_dispatch)[0]
        exchange.start_dispatch(sent)
        shared.during_dispatch(read.for_shared)
        exchange.start_combine(self._results_of(exchange))
        shared.during_combine()
        output = exchange.finish_combine()
        if self.fc2_latent_proj is not None:
            latent_output, bias = self.fc2_latent_proj(output)
            output = latent_output if bias is None else latent_output + bias
        residual = None if residual is None else residual.view(hidden.shape)
        return shared.added_to(output, read.gate_logits, residual).view(hidden_states.shape), None

    def _results_of(self, exchange: DispatchCombine) -> Tensor:
        """Runs the experts. The rows are freed before the results are sent."""
        received = exchange.finish_dispatch()
        results: Tensor = self.experts(received.rows, received.weights, received.groups)
        return results

    def _whole_rows(self, hidden_states: Tensor) -> Tokens:
        s, b = hidden_states.shape[:2] if hidden_states.dim() == 3 else (hidden_states.shape[0], 1)
        return whole_rows(s, b, self.pg_collection, self.config.sequence_parallel)

    def _refuse_shared_tokens(self) -> None:
        if self.training and torch.is_grad_enabled() and not self.config.sequence_parallel:
            ranks = self.pg_collection.size("tp")
            if ranks > 1:
                raise UserError(
                    f"experts are trained over {ranks} tensor parallel ranks with sequence_parallel only: without it "
                    "every rank would send the same tokens; set sequence_parallel"
                )


class _Shared:
    """The shared experts of one micro-batch: computed in two halves during the exchanges, or after them."""

    def __init__(self, experts: nn.Module | None, config: TransformerConfig, ops: ExpertOps) -> None:
        self.experts, self.ops = experts, ops
        self.overlaps = config.moe_shared_expert_overlap and experts is not None
        # Recomputed shared experts run as one: nothing between the halves is kept for backward.
        recomputed = config.recompute_granularity == "selective" and "shared_experts" in (
            config.recompute_modules or ()
        )
        self.halves = experts if isinstance(experts, SharedExpertMLP) and not recomputed else None
        self.gate_weight = None if self.halves is None else self.halves.gate_weight
        """The weight of a gate that the layer computes; None: no gate, or the experts compute it."""
        self.hidden: Tensor
        self.output: Tensor | None = None

    def during_dispatch(self, hidden: Tensor) -> None:
        self.hidden = hidden
        if self.overlaps:
            self.output = self._whole() if self.halves is None else self.halves.first_half(hidden)

    def during_combine(self) -> None:
        if self.overlaps and self.halves is not None:
            assert self.output is not None
            self.output = self.halves.second_half(self.output)

    def added_to(self, output: Tensor, gate_logits: Tensor | None, residual: Tensor | None) -> Tensor:
        if self.experts is None:
            return self.ops.add_shared(output, None, None, residual)
        if not self.overlaps:
            halves = self.halves
            self.output = self._whole() if halves is None else halves.second_half(halves.first_half(self.hidden))
        return self.ops.add_shared(output, self.output, gate_logits, residual)

    def _whole(self) -> Tensor:
        assert self.experts is not None
        output: Tensor = self.experts(self.hidden)
        return output
