"""ChatGLM 3, whose class is not in transformers: the layers of GLM-4 (see glm.py) under other names."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion.decoder import OURS, joint_qkv, one_to_one, with_biases
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import whole_base

_HUB = "transformer.encoder.layers.{layer}"
_BASE = 10000


@dataclass(frozen=True)
class ChatGlmHeads(rules.Rule):
    """Number of query heads, number of key-value heads, and width of a head."""

    reads = ("num_attention_heads", "kv_channels", "multi_query_attention", "multi_query_group_num")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the three numbers."""
        heads, width, has_groups, groups = (config[key] for key in self.reads)
        grouped = {"group_query_attention": True, "num_query_groups": groups} if has_groups and groups != heads else {}
        return {"num_attention_heads": heads, "kv_channels": width, **grouped}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        heads, width, groups = (values[key] for key in ("num_attention_heads", "kv_channels", "num_query_groups"))
        return dict(zip(self.reads, (heads, width, groups != heads, groups), strict=True))


@dataclass(frozen=True)
class RopeRatio(rules.Rule):
    """Base of the rotary frequencies, as a multiple of 10000."""

    key: str = "rope_ratio"

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the base. Raises UserError unless it is a whole number."""
        return {"position_embedding_type": "rope", "rotary_base": whole_base(_BASE * config[self.key])}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the multiple."""
        return {self.key: values["rotary_base"] / _BASE}


_NORMS_AND_MLP = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}

CHATGLM_FAMILY = Family(
    "ChatGLMModel",
    "chatglm",
    with_biases({f"{OURS}.{ours}": f"{_HUB}.{hub}" for ours, hub in _NORMS_AND_MLP.items()})
    | joint_qkv(f"{_HUB}.self_attention.query_key_value", "weight", "bias")
    | one_to_one(
        {
            "embedding.word_embeddings.weight": "transformer.embedding.word_embeddings.weight",
            "decoder.final_layernorm.weight": "transformer.encoder.final_layernorm.weight",
            "output_layer.weight": "transformer.output_layer.weight",
        }
    ),
    (
        *rules.copied("num_layers", "hidden_size", "ffn_hidden_size", "hidden_dropout", "attention_dropout"),
        *rules.copied("layernorm_epsilon", seq_length="max_position_embeddings"),
        rules.TiedEmbeddings(),
        ChatGlmHeads(),
        rules.Switch("add_qkv_bias", {"add_qkv_bias": True}),
        RopeRatio(),
        rules.Implied({"normalization": "RMSNorm", "add_bias_linear": False, "swiglu": True}),
        rules.Implied({"rotary_interleaved": True, "rotary_percent": 0.5}),
        *rules.fixed(rmsnorm=True, add_bias_linear=False, original_rope=True, post_layer_norm=True),
        rules.Fixed("apply_residual_connection_post_layernorm", False),
        rules.Fixed("interleaved_qkv", False, write=False),
        rules.Fixed("pre_seq_len", None, write=False),
        rules.Fixed("quantization_bit", 0, write=False),
        # How it is computed, and settings of tuned prefixes and classifiers:
        rules.Unused(("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "fp32_residual_connection")),
        rules.Unused(("bias_dropout_fusion", "prefix_projection", "classifier_dropout")),
    ),
    constants=(r"transformer\.rotary_pos_emb\.inv_freq",),
    copies={"transformer.output_layer.weight": "transformer.embedding.word_embeddings.weight"},
)
