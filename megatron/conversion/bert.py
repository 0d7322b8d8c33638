"""BERT in transformers: the first BERT, with norms after each residual, and MegatronBert, with norms before attention
and MLP; each with both heads, or with the head of masked tokens alone."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import UngatedActivation
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import num_tokentypes
from megatron.conversion.tensor_mapping import KEYS, QUERIES, VALUES, HubTensorPattern
from megatron.core.exceptions import UserError

_OURS, _HUB = "encoder.layers.{layer}", "bert.encoder.layer.{layer}"
_WORDS = "bert.embeddings.word_embeddings.weight"
_QKV: decoder.Mapping = {
    f"{_OURS}.self_attention.linear_qkv.{kind}": tuple(
        HubTensorPattern(f"{_HUB}.attention.self.{name}.{kind}", part)
        for name, part in (("query", QUERIES), ("key", KEYS), ("value", VALUES))
    )
    for kind in ("weight", "bias")
}
_COMMON = (
    decoder.one_to_one(
        {
            "embedding.word_embeddings.weight": _WORDS,
            "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
            "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
            "output_layer.bias": "cls.predictions.bias",
        }
    )
    | _QKV
    | decoder.with_biases(
        {
            f"{_OURS}.self_attention.linear_proj": f"{_HUB}.attention.output.dense",
            f"{_OURS}.mlp.linear_fc1": f"{_HUB}.intermediate.dense",
            f"{_OURS}.mlp.linear_fc2": f"{_HUB}.output.dense",
            "lm_head.dense": "cls.predictions.transform.dense",
            "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        }
    )
)
_OWN_OUTPUT_LAYER = decoder.with_biases({"output_layer": "cls.predictions.decoder"})
_NORMS_AFTER = decoder.with_biases(
    {
        "embedding.norm": "bert.embeddings.LayerNorm",
        f"{_OURS}.post_attention_layernorm": f"{_HUB}.attention.output.LayerNorm",
        f"{_OURS}.post_mlp_layernorm": f"{_HUB}.output.LayerNorm",
    }
)
_NORMS_BEFORE = decoder.with_biases(
    {
        f"{_OURS}.input_layernorm": f"{_HUB}.attention.ln",
        f"{_OURS}.pre_mlp_layernorm": f"{_HUB}.ln",
        "encoder.final_layernorm": "bert.encoder.ln",
    }
)
_BINARY_HEAD = decoder.with_biases({"pooler.dense": "bert.pooler.dense", "binary_head": "cls.seq_relationship"})


@dataclass(frozen=True)
class TokenTypes(rules.Rule):
    """Number of segments that the embedding distinguishes."""

    reads = ("type_vocab_size",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the number. Raises UserError for 0, for which transformers has no BERT."""
        number = config["type_vocab_size"]
        if number < 1:
            raise UserError(f"type_vocab_size is {number}; BERT of transformers has at least 1 (--bert-num-tokentypes)")
        return {"bert_num_tokentypes": number}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the number."""
        return {"type_vocab_size": num_tokentypes(values)}


@dataclass(frozen=True)
class BertActivation(UngatedActivation):
    """Activation of the MLP, and of the dense layer before the output layer."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns both. Raises UserError for an activation that the head does not have."""
        fields = super().fields(config)
        switch = next((field for field in _HEAD_ACTIVATIONS if field in fields), None)
        if switch is None:
            known = "gelu, gelu_new, gelu_pytorch_tanh, relu"
            raise UserError(f"{self.key} is {config[self.key]!r}; {known} are supported")
        return fields | {"bert_head_activation": _HEAD_ACTIVATIONS[switch]}


_HEAD_ACTIVATIONS = {"bias_gelu_fusion": "gelu", "openai_gelu": "gelu_tanh", "relu": "relu"}
"""By the switch of the MLP's activation."""

_RULES: tuple[rules.Rule, ...] = (
    *decoder.CORE,
    *rules.copied("num_attention_heads", intermediate_size="ffn_hidden_size", layer_norm_eps="layernorm_epsilon"),
    *rules.copied(hidden_dropout_prob="hidden_dropout", attention_probs_dropout_prob="attention_dropout"),
    TokenTypes(),
    BertActivation("hidden_act"),
    rules.Fixed("position_embedding_type", "absolute", write=False),
    *rules.fixed(is_decoder=False, add_cross_attention=False),
    rules.Unused(("classifier_dropout", "gradient_checkpointing", "chunk_size_feed_forward")),
)
_AFTER = rules.Implied({"norm_placement": "post_residual", "embedding_norm": True})
_BIAS_OF_TIED = r"cls\.predictions\.bias"
"""An output layer with a weight of its own has its bias too; transformers writes this one and does not read it."""
_POSITIONS = r"bert\.embeddings\.position_ids"
_OTHER_HEAD = r"bert\.pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"


def _family(architecture: str, model_type: str, norms: decoder.Mapping, *own: rules.Rule) -> Family:
    has_binary_head = architecture.endswith("PreTraining")
    tensors = _COMMON | norms | (_BINARY_HEAD if has_binary_head else {})
    return Family(
        architecture,
        model_type,
        lambda values: tensors | (_OWN_OUTPUT_LAYER if values["untie_embeddings_and_output_weights"] else {}),
        (*_RULES, *own, rules.Implied({"bert_binary_head": has_binary_head})),
        constants=(_POSITIONS, _BIAS_OF_TIED) if has_binary_head else (_POSITIONS, _BIAS_OF_TIED, _OTHER_HEAD),
        model_family="bert",
        copies={"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
        old_names=((r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
    )


BERT_FAMILIES = (
    _family("BertForPreTraining", "bert", _NORMS_AFTER, _AFTER),
    _family("BertForMaskedLM", "bert", _NORMS_AFTER, _AFTER),
    _family("MegatronBertForPreTraining", "megatron-bert", _NORMS_BEFORE),
    _family("MegatronBertForMaskedLM", "megatron-bert", _NORMS_BEFORE),
)
