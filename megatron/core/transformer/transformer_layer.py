"""A transformer layer: a short list of named phases."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.exceptions import UserError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.process_groups_config import ProcessGroupCollection, default_collection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import Spec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """Specs of a layer's parts. The default of each is a place left empty."""

    input_layernorm: Spec = IdentityOp
    self_attention: Spec = IdentityOp
    self_attn_bda: Spec = IdentityFuncOp
    pre_cross_attn_layernorm: Spec = IdentityOp
    cross_attention: Spec = IdentityOp
    cross_attn_bda: Spec = IdentityFuncOp
    pre_mlp_layernorm: Spec = IdentityOp
    mlp: Spec = IdentityOp
    mlp_bda: Spec = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """A part of a layer that a runner may run by itself, and that may be wrapped by itself (recomputed, captured)."""

    name: str
    forward: Callable[[Tensor, LayerInputs], Tensor]
    """Hidden states [t, h] to hidden states [t, h]; a pure function of its arguments and parameters."""
    modules: tuple[nn.Module, ...]
    """Whose parameters it uses."""


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both before they are added.

    With `apply_residual_connection_post_layernorm` what is added to is the normed state.
    """

    layer_type = LayerType.decoder

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        self.backend = backend or choose_backend(config, layer_number)
        groups = pg_collection or default_collection()
        if submodules.cross_attention is not IdentityOp:
            raise UserError("not yet: a layer with cross attention")
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        offer = {"backend": self.backend}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm, offer=offer)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups, offer=offer
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm, offer=offer)
        self.mlp = build_module(submodules.mlp, config=config, offer={**offer, "tp_group": groups.tp})
        self.mlp_bda = build_module(submodules.mlp_bda)
        if config.sequence_parallel:  # each rank norms its own tokens, whosever class does it
            add_partial_gradient_axis("tp", self.input_layernorm, self.pre_mlp_layernorm)
        self.phases: list[Phase] = [
            Phase("attention", self.attention_phase, (self.input_layernorm, self.self_attention)),
            Phase("mlp", self.mlp_phase, (self.pre_mlp_layernorm, self.mlp)),
        ]

    @property
    def canonical_index(self) -> int:
        """The layer's number over the whole model, from 0: it stands in its parameters' names."""
        return self.layer_number - 1

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """[t, h] -> [t, h]: the phases, one after the other."""
        for phase in self.phases:
            hidden_states = phase.forward(hidden_states, inputs)
        return hidden_states

    def attention_phase(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """x + dropout(attention(norm(x)))."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(normed, inputs)
        return self._add(self.self_attn_bda, attended, self._residual(hidden_states, normed), inputs, "self_attention")

    def mlp_phase(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """x + dropout(mlp(norm(x)))."""
        normed = self.pre_mlp_layernorm(hidden_states)
        transformed = self.mlp(normed)
        return self._add(self.mlp_bda, transformed, self._residual(hidden_states, normed), inputs, "mlp")

    def _residual(self, hidden_states: Tensor, normed: Tensor) -> Tensor:
        return normed if self.config.apply_residual_connection_post_layernorm else hidden_states

    def _add(
        self,
        bias_dropout_add: Any,
        output_and_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
        inputs: LayerInputs,
        site: str,
    ) -> Tensor:
        if bias_dropout_add is not get_bias_dropout_add:  # a user's own, with masks of its own
            add = bias_dropout_add(self.training, self.config.bias_dropout_fusion)
            return add(output_and_bias, residual, self.hidden_dropout)
        place = inputs.hidden_dropout_place(self.layer_number, site) if self.training else None
        return self.backend.bias_dropout_add(*output_and_bias, residual, self.hidden_dropout, place)
