"""Shared experts, which process every token."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.backends import Backend
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """All shared experts of a layer as one MLP, split over the dense tensor parallel ranks. With `gate` its output is
    multiplied by sigmoid(x w), where w is `gate_weight` [1, h] (as in Qwen2-MoE)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        groups = groups_or_default(pg_collection)
        width = config.moe_shared_expert_intermediate_size
        super().__init__(config, submodules, ffn_hidden_size=width, tp_group=groups.tp, backend=backend)
        self.register_parameter("gate_weight", None)
        if config.moe_shared_expert_gate if gate is None else gate:
            assert config.init_method is not None
            # Under sequence parallelism every rank computes the gate for its own tokens only.
            partial = frozenset({"tp"} if config.sequence_parallel else ())
            shape = (1, config.hidden_size)
            self.gate_weight = new_parameter(config, shape, config.init_method, partial_gradient_axes=partial)

    def forward(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> Tensor:  # type: ignore[override]
        """Returns the output [t, h] for hidden states [t, h]; under sequence parallelism both are this rank's
        tokens."""
        output = self.second_half(self.first_half(hidden_states))
        if self.gate_weight is None:
            return output
        return output * torch.sigmoid(self.backend.matrices.linear(hidden_states, self.gate_weight))

    def first_half(self, hidden_states: Tensor) -> Tensor:
        """Computes everything up to the activation."""
        product, bias = self.linear_fc1(hidden_states)
        return self.activate(product, bias)

    def second_half(self, activated: Tensor) -> Tensor:
        """Computes the rest up to the gate, from the result of `first_half`."""
        output, bias = self.linear_fc2(activated)
        return output if bias is None else output + bias
