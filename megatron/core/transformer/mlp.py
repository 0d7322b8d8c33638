"""The MLP of a layer: two linear layers with an activation between them; and one linear layer that replaces an MLP."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.activation import Activation, choose_activation
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import Spec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MLPSubmodules:
    """Specs of an MLP's parts."""

    linear_fc1: Spec | None = None
    activation_func: Spec | None = None
    linear_fc2: Spec | None = None


class MLP(MegatronModule):
    """Computes fc2(activation(fc1(x))). With a gated activation fc1 is twice as wide, and the activation reads its two
    halves. Tensor parallel ranks divide the inner channels."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Group = None,
        *,
        bias: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`is_expert`: the MLP returns this rank's part of a sum and does not communicate. `bias`: whether both linear
        layers have a bias; None: the config decides."""
        super().__init__(config)
        self.backend = backend = backend or choose_backend(config)
        assert submodules.linear_fc1 is not None and submodules.linear_fc2 is not None
        ffn = ffn_hidden_size or config.ffn_hidden_size
        assert ffn is not None
        input_size = input_size or config.hidden_size
        has_bias = next(given for given in (bias, config.mlp_bias, config.add_bias_linear) if given is not None)
        offer: dict[str, Any] = {"tp_group": tp_group, "backend": backend}
        if config.gated_linear_unit:  # canonical: gate, then up; a rank has a part of each
            offer |= {"canonical_shape": (2, ffn), "split_dim": 1}
        elif config.activation_func_clamp_value is not None or config.glu_linear_offset:
            raise UserError("activation_func_clamp_value and glu_linear_offset need a gated MLP (gated_linear_unit)")
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            input_size,
            ffn * 2 if config.gated_linear_unit else ffn,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=has_bias,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_comm_buffer_name="fc1",
            offer=offer,
        )
        if submodules.activation_func is not None:
            self.activation_func = build_module(submodules.activation_func, config=config)
        else:
            self.activation_func = activation_of(config)
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            ffn,
            input_size if is_expert else config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=has_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_comm_buffer_name="fc2",
            offer={"tp_group": tp_group, "backend": backend},
        )

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (output [..., h], bias that the caller adds) for [..., h]. `per_token_scale` [...] multiplies the
        activation. Under sequence parallelism both hold this rank's tokens."""
        product, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activate(product, bias, per_token_scale))

    def activate(self, product: Tensor, bias: Tensor | None, per_token_scale: Tensor | None = None) -> Tensor:
        """Returns the activation of the first linear layer's output, the input of the second."""
        return self.backend.experts.weighted_activation(product, bias, per_token_scale, self.activation_func)


class LinearBranch(ReplicatedLinear):
    """One linear layer that replaces attention or an MLP (`replace_with_linear` of a heterogeneous model). Its weight
    [h, h] is initialized like that of an output projection; each tensor parallel rank holds all of it."""

    recomputed_part = None

    def __init__(
        self,
        config: TransformerConfig,
        bias: bool,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        tp_group: Group = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        assert config.output_layer_init_method is not None
        super().__init__(
            config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=bias,
            skip_bias_add=True,
            tp_group=tp_group if pg_collection is None else pg_collection.tp,
            backend=backend,
        )

    def forward(self, hidden_states: Tensor, inputs: Any = None) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], bias that the caller adds) for hidden states [t, h]. `inputs` has no effect."""
        return super().forward(hidden_states)


def activation_of(config: TransformerConfig) -> Activation:
    """Returns the activation that a config describes."""
    return choose_activation(
        config.activation_func,
        gated=config.gated_linear_unit,
        bias_fused=config.bias_activation_fusion,
        clamp=config.activation_func_clamp_value,
        up_offset=config.glu_linear_offset,
    )
