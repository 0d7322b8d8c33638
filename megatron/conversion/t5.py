"""T5 in transformers: the first T5 (ReLU, a tied output layer with scaled logits), T5 1.1 (gated GELU, an output layer
with a weight of its own) and mT5 (the same, or tied without scaled logits)."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.tensor_mapping import ALL, GATE, KEYS, QUERIES, UP, VALUES, HubTensorPattern, TensorMapping
from megatron.core.exceptions import UserError


def _stack(name: str, mlp: int, is_gated: bool) -> decoder.Mapping:
    """Tensors of the encoder or the decoder. `mlp` is the number of the MLP in a block of transformers."""
    ours, hub = f"{name}.layers.{{layer}}", f"{name}.block.{{layer}}.layer"
    attention, dense = f"{hub}.0.SelfAttention", f"{hub}.{mlp}.DenseReluDense"
    gate_and_up = (HubTensorPattern(f"{dense}.wi_0.weight", GATE), HubTensorPattern(f"{dense}.wi_1.weight", UP))
    table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias"
    names = {
        f"{name}_relative_pos_emb.relative_attention_bias": table,
        f"{name}.final_layernorm": f"{name}.final_layer_norm",
        f"{ours}.input_layernorm": f"{hub}.0.layer_norm",
        f"{ours}.self_attention.linear_proj": f"{attention}.o",
        f"{ours}.pre_mlp_layernorm": f"{hub}.{mlp}.layer_norm",
        f"{ours}.mlp.linear_fc1": f"{dense}.wi",
        f"{ours}.mlp.linear_fc2": f"{dense}.wo",
    }
    parts = (("q", QUERIES), ("k", KEYS), ("v", VALUES))
    qkv = tuple(HubTensorPattern(f"{attention}.{part}.weight", rows) for part, rows in parts)
    joint = {f"{ours}.self_attention.linear_qkv.weight": qkv}
    return _weights(names) | joint | ({f"{ours}.mlp.linear_fc1.weight": gate_and_up} if is_gated else {})


def _weights(names: dict[str, str]) -> decoder.Mapping:
    return decoder.one_to_one({f"{ours}.weight": f"{hub}.weight" for ours, hub in names.items()})


_CROSS, _HUB = "decoder.layers.{layer}.cross_attention", "decoder.block.{layer}.layer.1"
_AROUND_STACKS = _weights(
    {
        "embedding.word_embeddings": "shared",
        "lm_head.output_layer": "lm_head",
        "decoder.layers.{layer}.pre_cross_attn_layernorm": f"{_HUB}.layer_norm",
        f"{_CROSS}.linear_q": f"{_HUB}.EncDecAttention.q",
        f"{_CROSS}.linear_proj": f"{_HUB}.EncDecAttention.o",
    }
) | {
    f"{_CROSS}.linear_kv.weight": (
        HubTensorPattern(f"{_HUB}.EncDecAttention.k.weight", (ALL, slice(0, 1))),
        HubTensorPattern(f"{_HUB}.EncDecAttention.v.weight", (ALL, slice(1, 2))),
    )
}
"""Embedding, output layer and cross attention."""


def _tensors(values: rules.Values) -> TensorMapping:
    is_gated = values["geglu"] or values["swiglu"]
    return _AROUND_STACKS | _stack("encoder", 1, is_gated) | _stack("decoder", 2, is_gated)


@dataclass(frozen=True)
class Layers(rules.Rule):
    """Layers of the encoder and of the decoder; null or absent, the decoder has as many as the encoder."""

    reads = ("num_layers", "num_decoder_layers")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns both numbers."""
        below, above = (config[key] for key in self.reads)
        return {"encoder_num_layers": below, "num_layers": below if above is None else above}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        return {"num_layers": values["encoder_num_layers"], "num_decoder_layers": values["num_layers"]}


@dataclass(frozen=True)
class T5Activation(rules.Rule):
    """ReLU, or a gated MLP with GELU's tanh approximation or SiLU."""

    reads = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the switch of the activation. Raises UserError for other activations."""
        word = config["feed_forward_proj"]
        if word not in _ACTIVATIONS:
            raise UserError(f"feed_forward_proj is {word!r}; {', '.join(_ACTIVATIONS)} are supported")
        field, function = _ACTIVATIONS[word]
        for key, value in (("dense_act_fn", function), ("is_gated_act", field != "relu")):
            if config.get(key, value) != value:
                raise UserError(f"{key} is {config[key]!r}; with feed_forward_proj {word} only {value!r} is supported")
        return {field: True}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the word of the activation."""
        return {"feed_forward_proj": next((word for word, (field, _) in _ACTIVATIONS.items() if values[field]), "relu")}


_ACTIVATIONS = {
    "relu": ("relu", "relu"),
    "gated-gelu": ("geglu", "gelu_new"),
    "gated-silu": ("swiglu", "silu"),
}
"""By the word in config.json: our switch, and the name of the function."""


@dataclass(frozen=True)
class OutputLayer(rules.Rule):
    """A tied output layer, whose logits are multiplied by 1 / sqrt(d_model), or one with a weight of its own.

    transformers 5 writes `tie_word_embeddings` true for both, and `scale_decoder_outputs` tells them apart.
    """

    reads = ("tie_word_embeddings", "scale_decoder_outputs")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns ties, scale, and that there is no bias."""
        if config["tie_word_embeddings"] and config.get("scale_decoder_outputs", True):
            tied = {"untie_embeddings_and_output_weights": False, "t5_head_bias": False}
            return tied | {"logit_scale": config["d_model"] ** -0.5}
        if config.get("scale_decoder_outputs"):
            raise UserError("scale_decoder_outputs is True; without tie_word_embeddings only False is supported")
        return {"untie_embeddings_and_output_weights": True}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns whether the weights are tied."""
        return rules.TiedEmbeddings().keys(values)


@dataclass(frozen=True)
class UnscaledOutputLayer(rules.TiedEmbeddings):
    """An output layer of mT5, whose logits are never multiplied. transformers 5 writes `tie_word_embeddings` true for
    all, and the published files have false and a weight of their own."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns whether the weights are tied, and that there is no bias."""
        return super().fields(config) | ({"t5_head_bias": False} if config["tie_word_embeddings"] else {})


_RULES: tuple[rules.Rule, ...] = (
    Layers(),
    T5Activation(),
    rules.Copied("d_model", "hidden_size"),
    rules.Copied("d_kv", "kv_channels"),
    rules.Copied("d_ff", "ffn_hidden_size"),
    rules.Copied("num_heads", "num_attention_heads"),
    rules.Copied("relative_attention_num_buckets", "relative_attention_num_buckets"),
    rules.Copied("relative_attention_max_distance", "relative_attention_max_distance"),
    rules.Copied("dropout_rate", "hidden_dropout"),
    rules.Copied("dropout_rate", "attention_dropout"),
    rules.Copied("layer_norm_epsilon", "layernorm_epsilon"),
    rules.Implied({"position_embedding_type": "relative", "normalization": "RMSNorm", "add_bias_linear": False}),
    rules.Implied({"softmax_scale": 1.0}),
    rules.Fixed("is_encoder_decoder", True),
    rules.Fixed("is_decoder", False, write=False),
    rules.Unused(("initializer_factor", "n_positions", "classifier_dropout", "decoder_start_token_id", "output_past")),
    rules.Unused(("task_specific_params",)),
)


def _family(architecture: str, model_type: str, output: rules.Rule) -> Family:
    return Family(
        architecture,
        model_type,
        _tensors,
        (*_RULES, output),
        constants=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        model_family="t5",
        copies={
            f"{name}.weight": "shared.weight" for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens")
        },
    )


T5_FAMILIES = (
    _family("T5ForConditionalGeneration", "t5", OutputLayer()),
    _family("MT5ForConditionalGeneration", "mt5", UnscaledOutputLayer()),
)
