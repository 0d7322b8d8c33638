"""A transformer layer: attention, cross attention if there is an encoder, and MLP, each added to the residual
stream."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.core.backends import Backend, backend_of_layer, choose_backend
from megatron.core.exceptions import UserError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_call import LayerArguments, inputs_of_arguments
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_patterns import described_layer, with_sizes_of
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import Spec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.keywords import Keywords


@dataclass
class TransformerLayerSubmodules:
    """Specs of a layer's parts. By default each part is left out."""

    input_layernorm: Spec = IdentityOp
    self_attention: Spec = IdentityOp
    post_attention_layernorm: Spec = IdentityOp
    self_attn_bda: Spec = IdentityFuncOp
    pre_cross_attn_layernorm: Spec = IdentityOp
    cross_attention: Spec = IdentityOp
    cross_attn_bda: Spec = IdentityFuncOp
    pre_mlp_layernorm: Spec = IdentityOp
    mlp: Spec = IdentityOp
    post_mlp_layernorm: Spec = IdentityOp
    mlp_bda: Spec = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class TransformerLayer(MegatronModule):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both outputs before they are added. In a
    decoder with an encoder, x + cross_attention(norm(x), encoder's output) comes between the two.

    The config's `norm_placement` can move the norms after attention and MLP, x + norm(attention(x)), move them after
    the sum with the residual, norm(x + attention(x)), or add norms. It can also compute both branches in parallel, x +
    attention(norm(x)) + mlp(norm(x)). Both outputs are multiplied by `residual_multiplier`. With
    `apply_residual_connection_post_layernorm` they are added to the normed hidden states instead of x.

    `self_attention` may be another token mixer. A spec without it, or without an MLP, makes a layer of one branch. In a
    heterogeneous model `config` has the layer's own sizes.
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
        config = with_sizes_of(config, described_layer(config, layer_number))
        super().__init__(config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        self.pg_collection = groups = groups_or_default(pg_collection)
        self.backend = backend_of_layer(backend or choose_backend(config), config, layer_number, groups)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        offer = {"backend": self.backend}
        has_input_norm = config.first_input_norm or layer_number > 1
        self.input_layernorm = build_module(
            submodules.input_layernorm if has_input_norm else IdentityOp, **norm, offer=offer
        )
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups, offer=offer
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.has_cross_attention = submodules.cross_attention is not IdentityOp
        self.pre_cross_attn_layernorm = build_module(submodules.pre_cross_attn_layernorm, **norm, offer=offer)
        arguments = {"config": config, "layer_number": layer_number, "pg_collection": groups}
        self.cross_attention = build_module(
            submodules.cross_attention, **(arguments if self.has_cross_attention else {}), offer=offer
        )
        self.cross_attn_bda = build_module(submodules.cross_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm, offer=offer)
        self.post_attention_layernorm = build_module(submodules.post_attention_layernorm, **norm, offer=offer)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, **norm, offer=offer)
        self.norms = (
            self.input_layernorm,
            self.post_attention_layernorm,
            self.pre_cross_attn_layernorm,
            self.pre_mlp_layernorm,
            self.post_mlp_layernorm,
        )
        offer_to_mlp = {**offer, "tp_group": groups.tp, "pg_collection": groups, "layer_number": layer_number}
        self.mlp = build_module(submodules.mlp, config=config, offer=offer_to_mlp)
        kind: Any = type(self.mlp)
        self.mlp_takes_residual = "residual" in Keywords.of_forward(kind).names
        self.mlp_bda = build_module(submodules.mlp_bda)
        if config.sequence_parallel:  # each rank norms its own tokens, also with a user's norm
            add_partial_gradient_axis("tp", *self.norms)
        _check_placement(config.norm_placement, submodules)
        self.norms_sum = config.norm_placement == "post_residual"
        self.is_parallel = config.norm_placement.startswith("parallel")

    @property
    def canonical_index(self) -> int:
        """The layer's number over the whole model, from 0, as in the names of its parameters."""
        return self.layer_number - 1

    @property
    def has_token_mixer(self) -> bool:
        """Whether the layer has attention or another token mixer."""
        return not isinstance(self.self_attention, IdentityOp)

    @property
    def has_channel_mixer(self) -> bool:
        """Whether the layer has an MLP or experts."""
        return not isinstance(self.mlp, IdentityOp)

    def forward(self, hidden_states: Tensor, inputs: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Returns the hidden states [t, h] after this layer, for `LayerInputs`.

        Without `LayerInputs` it takes hidden states [s, b, h] and Megatron-LM's arguments (`LayerArguments`, the first
        is `attention_mask`), and returns the pair (hidden states [s, b, h], the given `context`). Under sequence
        parallelism the hidden states are this rank's [s / ranks, b, h].
        """
        if isinstance(inputs, LayerInputs):
            return self.add_branches(hidden_states, inputs)
        positional = () if inputs is None and not arguments else (inputs, *arguments)
        given = LayerArguments(*positional, **keywords)
        inputs = inputs_of_arguments(self, hidden_states, given, self.config, self.pg_collection)
        return self.add_branches(hidden_states.flatten(0, 1), inputs).view_as(hidden_states), given.context

    def add_branches(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns x [t, h] with the outputs of attention, cross attention and MLP added."""
        if self.is_parallel:
            return self.add_attention_and_mlp(hidden_states, inputs)
        if self.has_token_mixer:
            hidden_states = self.add_attention(hidden_states, inputs)
        if self.has_cross_attention:
            hidden_states = self.add_cross_attention(hidden_states, inputs)
        return self.add_mlp(hidden_states, inputs) if self.has_channel_mixer else hidden_states

    def add_attention(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns x + dropout(attention(norm(x)))."""
        normed, residual = self._norm(self.input_layernorm, hidden_states)
        attended = self._branch(self.self_attention(normed, inputs), self.post_attention_layernorm)
        added = self._add(self.self_attn_bda, attended, residual, inputs, "self_attention")
        return self.post_attention_layernorm(added) if self.norms_sum else added

    def add_cross_attention(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns x + dropout(cross_attention(norm(x), encoder's output))."""
        normed, residual = self._norm(self.pre_cross_attn_layernorm, hidden_states)
        attended = self._branch(self.cross_attention(normed, inputs), None)
        return self._add(self.cross_attn_bda, attended, residual, inputs, "cross_attention")

    def add_mlp(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns x + dropout(mlp(norm(x)))."""
        normed, residual = self._norm(self.pre_mlp_layernorm, hidden_states)
        added = self._add_mlp_output(normed, residual, inputs)
        return self.post_mlp_layernorm(added) if self.norms_sum else added

    def add_attention_and_mlp(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns x + dropout(attention(norm(x))) + dropout(mlp(norm(x)))."""
        normed, residual = self._norm(self.input_layernorm, hidden_states)
        attended = self._branch(self.self_attention(normed, inputs), self.post_attention_layernorm)
        residual = self._add(self.self_attn_bda, attended, residual, inputs, "self_attention")
        if self.config.norm_placement == "parallel_two_norms":
            normed = self.pre_mlp_layernorm(hidden_states)
        return self._add_mlp_output(normed, residual, inputs)

    def _add_mlp_output(self, normed: Tensor, residual: Tensor, inputs: LayerInputs) -> Tensor:
        if self._mlp_adds_residual:
            added: Tensor = self.mlp(normed, inputs, residual)[0]
            return added
        transformed = self._branch(self._mlp(normed, inputs), self.post_mlp_layernorm)
        return self._add(self.mlp_bda, transformed, residual, inputs, "mlp")

    @property
    def _mlp_adds_residual(self) -> bool:
        """Whether the layer of experts adds the residual itself, in the kernel that adds the shared experts. Then
        nothing may come between its output and the sum; hooks of scripts need the output by itself."""
        is_next = self.mlp_bda is get_bias_dropout_add and self.config.residual_multiplier == 1.0
        is_next &= self.norms_sum or isinstance(self.post_mlp_layernorm, IdentityOp)
        drops = self.training and self.hidden_dropout > 0.0
        return self.mlp_takes_residual and is_next and not drops and not self.mlp._forward_hooks

    def _norm(self, norm: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of a branch and the residual to which the branch's output is added."""
        if self.config.apply_residual_connection_post_layernorm:
            normed = norm(hidden_states)
            return normed, normed
        if getattr(norm, "returns_residual", False):
            return norm(hidden_states, with_residual=True)
        return norm(hidden_states), hidden_states

    def _mlp(self, normed: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        reads_inputs = getattr(self.mlp, "reads_layer_inputs", False)  # True for a layer of experts
        return self.mlp(normed, inputs) if reads_inputs else self.mlp(normed)

    def _branch(self, output_and_bias: tuple[Tensor, Tensor | None], norm: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the output of attention or MLP after the norm and the multiplier that the config asks for."""
        multiplier = self.config.residual_multiplier
        norm = None if self.norms_sum else norm
        if (norm is None or isinstance(norm, IdentityOp)) and multiplier == 1.0:
            return output_and_bias
        output, bias = output_and_bias
        output = output if bias is None else output + bias
        output = output if norm is None else norm(output)
        return output if multiplier == 1.0 else output * multiplier, None

    def _add(
        self,
        bias_dropout_add: Any,
        output_and_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
        inputs: LayerInputs,
        site: str,
    ) -> Tensor:
        if bias_dropout_add is not get_bias_dropout_add:  # a user's function, which draws its own masks
            add = bias_dropout_add(self.training, self.config.bias_dropout_fusion)
            return add(output_and_bias, residual, self.hidden_dropout)
        position = inputs.hidden_dropout_position(self.layer_number, site) if self.training else None
        return self.backend.dropout.bias_dropout_add(*output_and_bias, residual, self.hidden_dropout, position)


def _check_placement(placement: str, submodules: TransformerLayerSubmodules) -> None:
    """Raises UserError if a layer's spec lacks norms of the config's `norm_placement`, or has other norms."""
    if submodules.cross_attention is not IdentityOp and placement != "pre":
        raise UserError(f"norm_placement is {placement}: a layer with cross attention needs pre")
    before, behind = [], []
    if submodules.self_attention is not IdentityOp:
        before.append(submodules.input_layernorm)
        behind.append(submodules.post_attention_layernorm)
    if submodules.mlp is not IdentityOp:
        before.append(submodules.pre_mlp_layernorm)
        behind.append(submodules.post_mlp_layernorm)
    if placement.startswith("parallel") and len(before) != 2:
        raise UserError(f"norm_placement is {placement}: a layer without attention or MLP needs pre")
    unwanted = {"post": before, "post_residual": before, "parallel": before[1:]}.get(placement, [])
    wanted = behind if placement in ("post", "post_residual", "sandwich") else []
    if IdentityOp in wanted or any(spec is not IdentityOp for spec in unwanted):
        raise UserError(
            f"norm_placement is {placement}, but the layer spec places norms otherwise; give it "
            f"norm_placement={placement!r}"
        )
