"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): queries, keys and values computed from latents of
low rank."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.rope import Rotation
from megatron.core.ops.rope_frequencies import yarn_magnitude
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads
from megatron.core.transformer.layer_patterns import has_rope
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import Spec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig


@dataclass
class MLASelfAttentionSubmodules:
    """Specs of the parts. Queries use `linear_q_proj`, or with `q_lora_rank` the other two query projections. The down
    projections return whole latents on every tensor parallel rank."""

    linear_q_proj: Spec | None = None
    linear_q_down_proj: Spec | None = None
    linear_q_up_proj: Spec | None = None
    linear_kv_down_proj: Spec | None = None
    linear_kv_up_proj: Spec | None = None
    core_attention: Spec | None = None
    linear_proj: Spec | None = None
    q_layernorm: Spec | None = None
    kv_layernorm: Spec | None = None


class Latents(NamedTuple):
    """The latents of some tokens, from which queries, keys and values are computed."""

    query: Tensor
    """Normed latent of the queries, or the hidden states if queries have no latent. Under sequence parallelism it
    covers only this rank's tokens."""
    key_value: Tensor
    """Normed latent of keys and values, of the same tokens: [t, kv_lora_rank]."""
    shared_key: Tensor
    """The rotary part of the keys, which all heads share, rotated: [s, b, 1, qk_pos_emb_head_dim]. It covers all
    tokens, and its gradient is summed over tensor parallel ranks."""


class MLASelfAttention(MegatronModule):
    """Attention whose keys and values are linear functions of a latent with `kv_lora_rank` channels per token.

    A query or key head has `qk_head_dim` channels without positions and `qk_pos_emb_head_dim` channels with rotary
    positions (neighbouring pairs are rotated); the rotary channels of the keys are the same in all heads. A value head
    has `v_head_dim` channels. Scores are scaled by `softmax_scale`, default m^2 / sqrt(width of a query head), where m
    is YaRN's magnitude for `mscale_all_dim`.

    Tensor parallel ranks divide the heads. Down projections are replicated: under sequence parallelism each rank
    computes the latents of its own tokens, and the latents are gathered.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        self.config: MLATransformerConfig = config
        self.layer_number = layer_number
        self.backend = backend or choose_backend(config)
        groups = groups_or_default(pg_collection)
        self.tp_group = groups.tp
        self.has_rope = has_rope(config, layer_number)
        heads, position_width = config.num_attention_heads, config.qk_pos_emb_head_dim
        query_width = config.qk_head_dim + position_width
        self.num_heads = part_size(heads, groups.tp, "num_attention_heads")
        if config.q_lora_rank is None:
            self.linear_q_proj = self._shared_out(submodules.linear_q_proj, config.hidden_size, query_width, "q_proj")
        else:
            self.linear_q_down_proj = self._whole(submodules.linear_q_down_proj, config.q_lora_rank)
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank, "q_layernorm")
            self.linear_q_up_proj = self._shared_out(
                submodules.linear_q_up_proj, config.q_lora_rank, query_width, "q_up_proj"
            )
        self.linear_kv_down_proj = self._whole(submodules.linear_kv_down_proj, config.kv_lora_rank + position_width)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank, "kv_layernorm")
        self.linear_kv_up_proj = self._shared_out(
            submodules.linear_kv_up_proj, config.kv_lora_rank, config.qk_head_dim + config.v_head_dim, "kv_up_proj"
        )
        self.core_attention = build_module(
            _given(submodules.core_attention, "core_attention"),
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=score_scale(config),
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
            offer={"backend": self.backend, "k_channels": query_width, "v_channels": config.v_head_dim},
        )
        output = _given(submodules.linear_proj, "linear_proj")
        self.linear_proj = build_output_projection(output, config, heads * config.v_head_dim, groups.tp, self.backend)

    def _shared_out(self, spec: Spec | None, input_size: int, head_width: int, name: str) -> nn.Module:
        """Builds a projection to all heads; each tensor parallel rank computes its own heads."""
        rows = (self.config.num_attention_heads, head_width)
        return build_heads_projection(
            _given(spec, f"linear_{name}"),
            self.config,
            input_size,
            rows,
            bias=False,
            name=name,
            tp_group=self.tp_group,
            backend=self.backend,
        )

    def _whole(self, spec: Spec | None, output_size: int) -> nn.Module:
        """Builds a down projection. If its class divides rows among ranks, the result is gathered."""
        return build_module(
            _given(spec, "a down projection"),
            self.config.hidden_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            offer={"tp_group": self.tp_group, "backend": self.backend, "gather_output": True},
        )

    def _norm(self, spec: Spec | None, width: int, name: str) -> nn.Module | None:
        if spec in (None, IdentityOp):
            if self.config.qk_layernorm:
                raise UserError(f"qk_layernorm is set, but the layer spec has no {name}; give it qk_layernorm=True")
            return None
        own = self.config.latent_layernorm_epsilon
        eps = self.config.layernorm_epsilon if own is None else own
        keywords = {"config": self.config, "hidden_size": width, "eps": eps}
        norm: nn.Module = build_module(spec, **keywords, offer={"backend": self.backend})
        if self.config.sequence_parallel:  # each rank norms its own tokens, also with a user's norm
            add_partial_gradient_axis("tp", norm)
        return norm

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], bias of the output projection that the caller adds) for hidden states [t, h]. Under
        sequence parallelism both hold this rank's tokens; attention is computed for this rank's heads of all tokens."""
        mask, context = inputs.attention_mask, inputs.inference_context
        if context is None:
            heads = self.get_query_key_value_tensors(hidden_states, inputs)
            return self.linear_proj(self.core_attention(*heads, mask, inputs=inputs).flatten(0, 1))
        latents = self.compress(hidden_states, inputs)
        query = self.query_heads(latents.query, inputs)
        if self.config.cache_mla_latents:
            latent = as_heads(latents.key_value, inputs.tokens, 1)
            seen = context.extend(self.layer_number, latent, latents.shared_key)
            key, value = self.key_value_heads(seen.key.flatten(0, 2), seen.value)
        else:
            seen = context.extend(self.layer_number, *self.key_value_heads(latents.key_value, latents.shared_key))
            key, value = seen.key, seen.value
        attended = self.core_attention(query, key, value, mask, inputs=inputs, query_positions=seen.query_positions)
        return self.linear_proj(attended.flatten(0, 1))

    def get_query_key_value_tensors(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's heads for hidden states [t, h]: query and key [s, b, a, d], value [s, b, a, v_head_dim].
        Under sequence parallelism the hidden states are this rank's part."""
        return self.expand(*self.compress(hidden_states, inputs), inputs)

    def compress(self, hidden_states: Tensor, inputs: LayerInputs) -> Latents:
        """Returns the latents of tokens [t, h], or under sequence parallelism of this rank's part of them."""
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self._own_tokens(self.linear_q_down_proj(hidden_states)[0], hidden_states)
            query = query if self.q_layernorm is None else self.q_layernorm(query)
        both = self._own_tokens(self.linear_kv_down_proj(hidden_states)[0], hidden_states)
        latent, shared_key = both.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        latent = latent if self.kv_layernorm is None else self.kv_layernorm(latent)
        if self.config.sequence_parallel:
            shared_key = gather_from_sequence_parallel_region(shared_key.contiguous(), group=self.tp_group)
        else:
            shared_key = copy_to_tensor_model_parallel_region(shared_key.contiguous(), self.tp_group)
        shared_key = as_heads(shared_key, inputs.tokens, 1)
        rotation = self._rotation(inputs)
        if rotation is not None:
            shared_key = self.backend.attention.apply_rope(shared_key, rotation)
        return Latents(query, latent, shared_key)

    def expand(
        self, query: Tensor, key_value: Tensor, shared_key: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value for the result of `compress`; see `get_query_key_value_tensors`. Recomputation
        of `mla_up_proj` repeats this function."""
        return self.query_heads(query, inputs), *self.key_value_heads(key_value, shared_key)

    def query_heads(self, latent: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns rotated queries [s, b, a, d] for `Latents.query`."""
        project = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query = as_heads(project(latent)[0], inputs.tokens, self.num_heads)
        rotation = self._rotation(inputs)
        if rotation is None:
            return query
        return self.backend.attention.apply_rope(query, dataclasses.replace(rotation, first=self.config.qk_head_dim))

    def key_value_heads(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns key [s, b, a, d] and value [s, b, a, v_head_dim] for latents [t, kv_lora_rank], or this rank's part
        of them, and the shared keys [s, b, 1, n] of all tokens."""
        both = self.linear_kv_up_proj(latent)[0].view(*shared_key.shape[:2], self.num_heads, -1)
        key, value = both.split([self.config.qk_head_dim, self.config.v_head_dim], -1)
        return torch.cat([key, shared_key.expand(-1, -1, self.num_heads, -1)], -1), value

    def _rotation(self, inputs: LayerInputs) -> Rotation | None:
        return inputs.rotation if self.has_rope else None

    def _own_tokens(self, latent: Tensor, hidden_states: Tensor) -> Tensor:
        """Returns this rank's part of a latent that a column parallel class computed for all tokens."""
        if latent.shape[0] == hidden_states.shape[0]:
            return latent
        return scatter_to_sequence_parallel_region(latent, self.tp_group)


def score_scale(config: MLATransformerConfig) -> float:
    """Returns the factor of the scores: `softmax_scale`, or the default that follows from the widths and YaRN's
    magnitude."""
    if config.softmax_scale is not None:
        return config.softmax_scale
    magnitude = yarn_magnitude(config.rotary_scaling_factor, config.mscale_all_dim)
    return magnitude**2 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)


def _given(spec: Spec | None, name: str) -> Spec:
    if spec is None:
        raise UserError(f"the layer spec has no {name}, which this multi-latent attention needs")
    return spec
