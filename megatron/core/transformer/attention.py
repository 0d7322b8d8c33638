"""Self-attention: projections, norms of queries and keys, rotary positions, attention, output projection. Cross
attention: queries from one sequence, keys and values from another."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.rope import Rotation
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.core_attention import attend
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads
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
        optional = {} if inputs.attention_bias is None else {"attention_bias": inputs.attention_bias}
        if inputs.inference_context is None:
            mask = inputs.attention_mask
            context = attend(self.core_attention, query, key, value, mask, inputs, self.attn_mask_type, **optional)
        else:
            cached = inputs.inference_context.extend(self.layer_number, key, value)
            context = attend(
                self.core_attention,
                query,
                cached.key,
                cached.value,
                inputs.attention_mask,
                inputs,
                self.attn_mask_type,
                query_positions=cached.query_positions,
                **optional,
            )
        if gate is not None:
            context = context * gate.sigmoid()
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
        """Returns query [s, b, g, a / g, d], key, value, and the gate [s, b, a * d] of attention's output, if there is
        one. They are views of the projection unless a norm or clamp changes them. `rotation`: of normed heads."""
        qkv, _ = self.linear_qkv(hidden_states)
        a, g, d, clip = self.num_heads, self.num_groups, self.head_size, self.config.clip_qkv
        has_gate = self.config.attention_output_gate
        sizes = [a // g, a // g if has_gate else 0, 1, 1]
        heads = as_heads(qkv, inputs.tokens, g).unflatten(-1, (sum(sizes), d))
        query, gates, key, value = heads.split(sizes, -2)
        key, value = key.squeeze(-2), value.squeeze(-2)
        gate = gates.flatten(2) if has_gate else None
        if clip is not None:
            query, key, value = (heads.clamp(-clip, clip) for heads in (query, key, value))
        if rotation is not None:
            query = self.q_layernorm.rotated(query, rotation)  # type: ignore[union-attr, operator]
            key = self.k_layernorm.rotated(key, rotation)  # type: ignore[union-attr, operator]
        elif not self.norms_after_rope:
            query, key = self._normed(query, key)
        return query, key, value, gate

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (
            query if self.q_layernorm is None else self.q_layernorm(query),
            key if self.k_layernorm is None else self.k_layernorm(key),
        )


@dataclass
class CrossAttentionSubmodules:
    """Specs of cross attention's parts."""

    linear_q: Spec
    linear_kv: Spec
    core_attention: Spec
    linear_proj: Spec


class CrossAttention(MegatronModule):
    """Multi-head attention of the decoder's tokens to the encoder's (Vaswani et al. 2017): queries are projections of
    the hidden states, keys and values of `LayerInputs.encoder`.

    The rows of `linear_kv` are, for each head: the key head, the value head. There are no rotary positions and no norms
    of queries and keys. Tensor parallel ranks divide the heads. Raises UserError for grouped queries, which no
    published model has here, and for an output gate.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        if config.num_query_groups != config.num_attention_heads:
            raise UserError(
                f"num_query_groups {config.num_query_groups}: cross attention has no grouped queries; set it to "
                f"num_attention_heads, {config.num_attention_heads}"
            )
        if config.attention_output_gate:
            raise UserError("attention_output_gate: cross attention has no gate; unset it")
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        self.backend = backend or choose_backend(config)
        groups = groups_or_default(pg_collection)
        heads, head_size = config.num_attention_heads, config.kv_channels
        assert head_size is not None
        self.num_heads = part_size(heads, groups.tp, "num_attention_heads")
        bias = config.add_bias_linear or config.add_qkv_bias
        shared: dict[str, Any] = {"bias": bias, "tp_group": groups.tp, "backend": self.backend}
        q, kv = submodules.linear_q, submodules.linear_kv
        self.linear_q = build_heads_projection(q, config, config.hidden_size, (heads, head_size), name="q", **shared)
        # All layers read the same states, whose gradient is summed once over the ranks: see `encoder_states_of`.
        self.linear_kv = build_heads_projection(
            kv, config, config.hidden_size, (heads, 2, head_size), name="kv", input_is_whole=True, **shared
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="cross",
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
            offer={"backend": self.backend},
        )
        width = heads * head_size
        self.linear_proj = build_output_projection(submodules.linear_proj, config, width, groups.tp, self.backend)

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], bias of the output projection that the caller adds) for the decoder's hidden states
        [t, h]. Under sequence parallelism both hold this rank's tokens."""
        encoder = inputs.encoder
        assert encoder is not None, "cross attention needs LayerInputs.encoder"
        query, key, value = self._project(hidden_states, inputs)
        mask = encoder.attention_mask
        context = attend(self.core_attention, query, key, value, mask, inputs, self.attn_mask_type)  # [s, b, a * d]
        return self.linear_proj(context.flatten(0, 1))

    def _project(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value. An inference context keeps keys and values for all tokens of the decoder."""
        cache, states = inputs.inference_context, inputs.encoder
        assert states is not None
        if cache is not None:
            key, value = (cache.recall(self.layer_number, f"cross {part}", moves=False) for part in ("key", "value"))
            if key is not None and value is not None:
                return self._query(hidden_states, inputs), key, value
        query, key, value = self.get_query_key_value_tensors(hidden_states, states.hidden_states, inputs)
        if cache is not None:
            cache.remember(self.layer_number, "cross key", key)
            cache.remember(self.layer_number, "cross value", value)
        return query, key, value

    def _query(self, hidden_states: Tensor, inputs: LayerInputs) -> Tensor:
        query, clip = as_heads(self.linear_q(hidden_states)[0], inputs.tokens, self.num_heads), self.config.clip_qkv
        return query if clip is None else query.clamp(-clip, clip)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's heads: query [s, b, a, d] of the decoder's tokens, key and value [s, b, a, d] of the
        encoder's."""
        assert inputs.encoder is not None
        query = self._query(hidden_states, inputs)
        heads = as_heads(self.linear_kv(key_value_states)[0], inputs.encoder.tokens, self.num_heads)  # [s, b, a, 2 * d]
        key, value = heads.chunk(2, dim=-1)
        if self.config.clip_qkv is not None:
            clip = self.config.clip_qkv
            key, value = key.clamp(-clip, clip), value.clamp(-clip, clip)
        return query, key, value


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
