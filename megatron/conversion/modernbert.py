"""ModernBERT: an encoder with rotary positions, gated MLPs, and windows in most layers; without token types."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import with_biases
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.layer_types import (
    FULL,
    WINDOWED,
    RotaryPositionsByLayerType,
    WindowsByLayerType,
    kinds_of_layers,
)
from megatron.conversion.tensor_mapping import KEYS, QUERIES, VALUES, HubTensorPattern

_OURS, _HUB = "encoder.layers.{layer}", "model.layers.{layer}"
_WORDS = "model.embeddings.tok_embeddings.weight"


@dataclass(frozen=True)
class LocalAttention(WindowsByLayerType):
    """Windows on both sides of a token, together `local_attention` wide, in the layers that `layer_types` names;
    without it in all but the first of every `global_attn_every_n_layers`."""

    period: int = 3
    reads = ("local_attention", "layer_types", "global_attn_every_n_layers")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns window size and layers; nothing if no layer has a window."""
        kinds, side = config["layer_types"], config["local_attention"] // 2
        if kinds is None:
            period = config.get("global_attn_every_n_layers", self.period)
            kinds = [WINDOWED if layer % period else FULL for layer in range(config["num_hidden_layers"])]
        fields = super().fields({**config, "layer_types": kinds, "sliding_window": side + 1})
        return fields | ({"window_size": (side, side)} if fields else {})

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns width and layers. Other windows than (W, W) are left out."""
        window, kinds = values["window_size"], kinds_of_layers(values)
        if window is None or window[0] != window[1] or window[0] < 0:
            return {"layer_types": [FULL] * values["num_layers"]}
        return {"local_attention": 2 * window[0], "layer_types": kinds}


_HEAD_ACTIVATIONS: Mapping[str, rules.Values] = {
    "gelu": {"bert_head_activation": "gelu"},
    "gelu_pytorch_tanh": {"bert_head_activation": "gelu_tanh"},
    "gelu_new": {"bert_head_activation": "gelu_tanh"},
    "relu": {"bert_head_activation": "relu"},
}
"""Activations of the dense layer before the output layer."""

_NAMES = {
    "embedding.norm": "model.embeddings.norm",
    f"{_OURS}.input_layernorm": f"{_HUB}.attn_norm",
    f"{_OURS}.self_attention.linear_proj": f"{_HUB}.attn.Wo",
    f"{_OURS}.pre_mlp_layernorm": f"{_HUB}.mlp_norm",
    f"{_OURS}.mlp.linear_fc1": f"{_HUB}.mlp.Wi",
    f"{_OURS}.mlp.linear_fc2": f"{_HUB}.mlp.Wo",
    "encoder.final_layernorm": "model.final_norm",
    "lm_head.dense": "head.dense",
    "lm_head.layer_norm": "head.norm",
    "output_layer": "decoder",
}

MODERNBERT_FAMILY = Family(
    "ModernBertForMaskedLM",
    "modernbert",
    with_biases(_NAMES)
    | {"embedding.word_embeddings.weight": (HubTensorPattern(_WORDS),)}
    | {
        f"{_OURS}.self_attention.linear_qkv.{kind}": (
            HubTensorPattern(f"{_HUB}.attn.Wqkv.{kind}", QUERIES, fused=(KEYS, VALUES)),
        )
        for kind in ("weight", "bias")
    },
    (
        *decoder.CORE,
        *rules.copied("num_attention_heads", "norm_bias", intermediate_size="ffn_hidden_size"),
        *rules.copied(norm_eps="layernorm_epsilon", classifier_bias="bert_head_bias"),
        layer_rules.ATTENTION_BIASES,
        layer_rules.MLP_BIASES,
        layer_rules.Words("hidden_activation", layer_rules.GATED_ACTIVATIONS),
        layer_rules.Words("classifier_activation", _HEAD_ACTIVATIONS),
        LocalAttention(),
        RotaryPositionsByLayerType(160000.0, 10000.0, base_key="global_rope_theta", local_key="local_rope_theta"),
        rules.Fixed("rope_scaling", None, write=False),
        rules.Written({"cls_token_id": None, "sep_token_id": None}),  # their defaults may be outside of the vocabulary
        *rules.fixed(decoder_bias=True, attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0),
        rules.Implied({"normalization": "LayerNorm", "embedding_norm": True, "first_input_norm": False}),
        rules.Implied({"bert_binary_head": False, "bert_num_tokentypes": 0}),
        rules.Implied({"hidden_dropout": 0.0, "attention_dropout": 0.0}),
        rules.Unused(("classifier_pooling", "classifier_dropout", "cls_token_id", "sep_token_id")),
        rules.Unused(("sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad", "reference_compile")),
        rules.Unused(("initializer_cutoff_factor", "gradient_checkpointing", "deterministic_flash_attn")),
        rules.Unused(("position_embedding_type", "layer_norm_eps")),  # in old files, and not read
    ),
    model_family="bert",
    copies={"decoder.weight": _WORDS},
)
