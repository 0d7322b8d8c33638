"""Self-attention: projections, norms of queries and keys, rotary positions, attention, output projection."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.collectives import Group, group_size
from megatron.core.exceptions import UserError
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.process_groups_config import ProcessGroupCollection, default_collection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.transformer.dot_product_attention import layer_flags
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.shared_key_values import SharedKeyValueLinear
from megatron.core.transformer.spec_utils import Spec, build_module, get_module
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
    """Multi-head attention of tokens to their own sequence; grouped (Ainslie et al. 2023) with `num_query_groups`.

    The rows of `linear_qkv` are, for each group: its query heads, one key head, one value head. With `qk_layernorm`
    queries and keys are normed a head at a time, before rotary positions. Tensor parallel ranks share the heads; a rank
    has whole groups, or, where there are fewer groups than ranks, a part of one.
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
        self.layer_number = layer_number
        self.backend = backend or choose_backend(config, layer_number)
        groups = pg_collection or default_collection()
        assert config.num_query_groups is not None and config.kv_channels is not None
        self.has_rope = has_rope(config, layer_number)
        self.head_size = config.kv_channels
        self.num_heads = part_size(config.num_attention_heads, groups.tp, "num_attention_heads")
        self.num_groups = groups_of_rank(config.num_query_groups, groups.tp)
        offer = {"tp_group": groups.tp, "backend": self.backend}
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
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * config.kv_channels,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            offer=offer,
        )
        if config.qk_layernorm and submodules.q_layernorm in (None, IdentityOp):
            raise UserError("qk_layernorm is set, but the layer spec has no norm of queries; give it qk_layernorm=True")
        norm = {"config": config, "hidden_size": config.kv_channels, "eps": config.layernorm_epsilon}
        q_norm, k_norm = submodules.q_layernorm, submodules.k_layernorm
        self.q_layernorm = None if q_norm in (None, IdentityOp) else build_module(q_norm, **norm, offer=offer)
        self.k_layernorm = None if k_norm in (None, IdentityOp) else build_module(k_norm, **norm, offer=offer)
        if group_size(groups.tp) > 1:  # each rank norms its own heads
            add_partial_gradient_axis("tp", self.q_layernorm, self.k_layernorm)

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
        rows = (config.num_query_groups, config.num_attention_heads // config.num_query_groups + 2, config.kv_channels)
        return build_module(
            spec,
            config.hidden_size,
            math.prod(rows),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            offer={"tp_group": tp_group, "backend": self.backend, "canonical_shape": rows},
        )

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """[t, h] -> ([t, h], bias of the output projection that is still to be added). Under sequence parallelism both
        are this rank's part of the tokens; in between it has its heads of all of them."""
        query, key, value = self.get_query_key_value_tensors(hidden_states, inputs)
        if inputs.rotation is not None and self.has_rope:
            query = self.backend.apply_rope(query, inputs.rotation)
            key = self.backend.apply_rope(key, inputs.rotation)
        if inputs.inference_context is None:
            context = self.core_attention(query, key, value, inputs.attention_mask, inputs=inputs)  # [s, b, a * d]
        else:
            seen = inputs.inference_context.extend(self.layer_number, key, value)
            context = self.core_attention(
                query, seen.key, seen.value, inputs.attention_mask, inputs=inputs, query_positions=seen.query_positions
            )
        return self.linear_proj(context.flatten(0, 1))

    def get_query_key_value_tensors(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """[t, h], or this rank's part -> query [s, b, a, d], key and value [s, b, g, d], its heads and groups."""
        qkv, _ = self.linear_qkv(hidden_states)
        a, g, d = self.num_heads, self.num_groups, self.head_size
        qkv = as_heads(qkv, inputs.tokens, g).unflatten(-1, (a // g + 2, d))  # [s, b, g, a/g + 2, d]
        query, key, value = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


def groups_of_rank(num_query_groups: int, tp_group: Group) -> int:
    """Query groups that a tensor parallel rank has keys and values of. Raises UserError if they cannot be shared."""
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


def has_rope(config: TransformerConfig, layer_number: int) -> bool:
    """Whether rotary positions hold in a layer (counted from 1), by `no_rope_freq`: not in every N-th, or not where a
    list has a 1."""
    pattern = config.no_rope_freq
    if pattern is None:
        return True
    if isinstance(pattern, int):
        return layer_number % pattern != 0
    return not layer_flags("no_rope_freq", pattern, config)[layer_number - 1]
