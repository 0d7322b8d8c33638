"""Self-attention: projections, norms of queries and keys, rotary positions, attention, output projection."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.rope import Rotation
from megatron.core.ops.split_columns import split_columns
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.cross_attention import CrossAttention as CrossAttention  # Megatron-LM has it here
from megatron.core.transformer.cross_attention import CrossAttentionSubmodules as CrossAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_call import attend_as_script
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads, takes_inputs
from megatron.core.transformer.layer_patterns import has_rope, is_windowed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.query_key_norms import NORMS_OF_HEADS, L2Norm
from megatron.core.transformer.shared_key_values import SharedKeyValueLinear, separate_heads
from megatron.core.transformer.spec_utils import Spec, build_module, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class SelfAttentionSubmodules:
    """Specs of self-attention's parts."""

    linear_qkv: Spec
    core_attention: Spec
    linear_proj: Spec
    q_layernorm: Spec | None = None
    k_layernorm: Spec | None = None


class SelfAttention(MegatronModule):
    """Multi-head self-attention; grouped (Ainslie et al. 2023) with `num_query_groups`.

    The rows of `linear_qkv` are, for each group: its query heads, with `attention_output_gate` the same number of gate
    heads, one key head, one value head. The sigmoids of the gates multiply the output of attention. `qk_layernorm`
    norms queries and keys before rotary positions, each head separately or all heads together (`qk_norm_scope`);
    `qk_l2_norm` norms them after rotary positions. Tensor parallel ranks divide the heads: a rank has whole groups, or
    a part of one group if there are fewer groups than ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        self.backend = backend or choose_backend(config)
        groups = groups_or_default(pg_collection)
        assert config.num_query_groups is not None and config.kv_channels is not None
        self.has_rope = has_rope(config, layer_number)
        self.is_windowed = is_windowed(config, layer_number)
        self.head_size = config.kv_channels
        self.num_heads = part_size(config.num_attention_heads, groups.tp, "num_attention_heads")
        self.num_groups = groups_of_rank(config.num_query_groups, groups.tp)
        self.linear_qkv = self._build_qkv(submodules.linear_qkv, groups.tp)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
            offer={"backend": self.backend},
        )
        width = config.num_attention_heads * config.kv_channels
        self.linear_proj = build_output_projection(submodules.linear_proj, config, width, groups.tp, self.backend)
        if config.qk_layernorm and submodules.q_layernorm in (None, IdentityOp):
            raise UserError("qk_layernorm is set, but the layer spec has no norm of queries; give it qk_layernorm=True")
        self.q_layernorm = self._build_norm(submodules.q_layernorm, config.num_attention_heads, groups.tp)
        self.k_layernorm = self._build_norm(submodules.k_layernorm, config.num_query_groups, groups.tp)

    norms_after_rope = False

    def _build_norm(self, spec: Spec | None, heads: int, tp_group: Group) -> nn.Module | None:
        """Builds the norm of queries or of keys, which have `heads` heads over the whole model."""
        config = self.config
        if spec is None or get_module(spec) is IdentityOp:
            return None
        kind = get_module(spec)
        scope = next((scope for scope, norm in NORMS_OF_HEADS.items() if kind is norm), "head")
        if config.qk_layernorm and scope != config.qk_norm_scope:
            raise UserError(
                f"qk_norm_scope is {config.qk_norm_scope}, but the layer spec has {kind.__name__} as norm of queries "
                f"and keys; give it qk_norm_scope={config.qk_norm_scope!r}"
            )
        self.norms_after_rope = kind is L2Norm
        if kind is L2Norm:
            eps = config.qk_l2_norm_epsilon
            return build_module(spec, config, config.kv_channels, eps) if self.has_rope else None
        assert config.kv_channels is not None
        size = config.kv_channels * (1 if scope == "head" else heads)
        keywords = {"config": config, "hidden_size": size, "eps": config.layernorm_epsilon}
        norm: nn.Module = build_module(spec, **keywords, offer={"tp_group": tp_group, "backend": self.backend})
        if group_size(tp_group) > 1 and scope == "head":  # each rank norms its own heads
            add_partial_gradient_axis("tp", norm)
        return norm

    def _build_qkv(self, spec: Spec, tp_group: Group) -> nn.Module:
        config = self.config
        bias = config.add_bias_linear or config.add_qkv_bias
        assert config.num_query_groups is not None and config.kv_channels is not None
        if config.num_query_groups < group_size(tp_group):
            if get_module(spec) is not ColumnParallelLinear:
                raise UserError(
                    f"num_query_groups {config.num_query_groups} is less than the {group_size(tp_group)} tensor "
                    "parallel ranks; that works with ColumnParallelLinear as linear_qkv of the layer spec, not with "
                    f"{getattr(get_module(spec), '__name__', spec)}"
                )
            return SharedKeyValueLinear(config, bias, tp_group, self.backend)
        heads = separate_heads(config)
        rows = (config.num_query_groups, sum(heads), config.kv_channels)
        shared: dict[str, Any] = {"tp_group": tp_group, "backend": self.backend, "separate_heads": heads}
        return build_heads_projection(spec, config, config.hidden_size, rows, bias=bias, name="qkv", **shared)

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], bias of the output projection that the caller adds) for hidden states [t, h]. Under
        sequence parallelism both hold this rank's tokens; attention is computed for this rank's heads of all tokens."""
        rotation = ((self.is_windowed and inputs.local_rotation) or inputs.rotation) if self.has_rope else None
        at_once = rotation if self.rotates_normed_heads else None
        query, key, value, gate = self._project(hidden_states, inputs, at_once)
        if rotation is not None and at_once is None:
            query = self.backend.attention.apply_rope(query, rotation)
            key = self.backend.attention.apply_rope(key, rotation)
        if self.norms_after_rope:
            query, key = self._normed(query, key)
        query = query.flatten(2, 3)
        if inputs.query_scale is not None and not self.has_rope:
            query = (query * inputs.query_scale).to(query.dtype)
        optional: dict[str, Any] = {} if inputs.attention_bias is None else {"attention_bias": inputs.attention_bias}
        if inputs.inference_context is not None:
            cached = inputs.inference_context.extend(self.layer_number, key, value)
            key, value, optional["query_positions"] = cached.key, cached.value, cached.query_positions
        mask = inputs.attention_mask
        if takes_inputs(self.core_attention):
            context = self.core_attention(query, key, value, mask, inputs=inputs, **optional)
        else:
            core, kind = self.core_attention, self.attn_mask_type
            context = attend_as_script(core, query, key, value, mask, inputs, kind, inputs.attention_bias)
        if gate is not None:
            context = self.backend.attention.gate_output(context, gate)
        return self.linear_proj(context.flatten(0, 1))

    def get_query_key_value_tensors(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's heads for hidden states [t, h]: query [s, b, a, d], key and value [s, b, g, d]. Under
        sequence parallelism the hidden states are this rank's part."""
        query, key, value, _ = self._project(hidden_states, inputs)
        return query.flatten(2, 3), key, value

    @property
    def rotates_normed_heads(self) -> bool:
        """Whether queries and keys can be normed and rotated in one operation."""
        norms = self.q_layernorm, self.k_layernorm
        both = all(isinstance(norm, WrappedTorchNorm) and norm.can_rotate for norm in norms)
        return both and not self.norms_after_rope

    def _project(
        self, hidden_states: Tensor, inputs: LayerInputs, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns query [s, b, g, a / g, d], key, value, and the gates [s, b, g, a / g * d] of attention's output, if
        there are any: views of the projection, unless a norm or clamp changes them. `rotation`: of normed heads."""
        qkv, _ = self.linear_qkv(hidden_states)
        a, g, d, clip = self.num_heads, self.num_groups, self.head_size, self.config.clip_qkv
        per_group, has_gate = a // g, self.config.attention_output_gate
        widths = [per_group * d, per_group * d if has_gate else 0, d, d]
        query, gate, key, value = split_columns(as_heads(qkv, inputs.tokens, g), widths)
        query = query.unflatten(-1, (per_group, d))
        if clip is not None:
            query, key, value = (heads.clamp(-clip, clip) for heads in (query, key, value))
        if rotation is not None:
            query = self.q_layernorm.rotated(query, rotation)  # type: ignore[union-attr, operator]
            key = self.k_layernorm.rotated(key, rotation)  # type: ignore[union-attr, operator]
        elif not self.norms_after_rope:
            query, key = self._normed(query, key)
        return query, key, value, gate if has_gate else None

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (
            query if self.q_layernorm is None else self.q_layernorm(query),
            key if self.k_layernorm is None else self.k_layernorm(key),
        )


def groups_of_rank(num_query_groups: int, tp_group: Group) -> int:
    """Returns the number of query groups whose keys and values a tensor parallel rank holds. Raises UserError if the
    groups cannot be divided."""
    ranks = group_size(tp_group)
    if num_query_groups % ranks and ranks % num_query_groups:
        nearest = min(
            (n for n in range(1, num_query_groups + ranks) if ranks % n == 0 or n % ranks == 0),
            key=lambda n: abs(n - num_query_groups),
        )
        raise UserError(
            f"num_query_groups {num_query_groups} and {ranks} tensor parallel ranks: one has to divide the other; "
            f"the nearest num_query_groups that works is {nearest}"
        )
    return max(1, num_query_groups // ranks)
