"""Cross attention: queries from one sequence, keys and values from another."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.storage import part_size
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_call import attend_as_script
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads, takes_inputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import Spec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


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
        core, kind = self.core_attention, self.attn_mask_type
        if takes_inputs(core):
            context = core(query, key, value, mask, inputs=inputs)  # [s, b, a * d]
        else:
            context = attend_as_script(core, query, key, value, mask, inputs, kind)
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
