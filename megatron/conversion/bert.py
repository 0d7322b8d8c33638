"""BERT in transformers: the first BERT, with norms after each residual, and MegatronBert, with norms before attention
and MLP; each with both heads, or with the head of masked tokens alone."""

from dataclasses import dataclass
from typing import Any

from megatron.conversion import config_rules as rules
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import UngatedActivation
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import num_tokentypes
from megatron.conversion.tensor_mapping import KEYS, QUERIES, VALUES, HubTensorPattern
from megatron.core.exceptions import UserError

_Mapping = dict[str, tuple[HubTensorPattern, ...]]

_OURS, _HUB = "encoder.layers.{layer}", "bert.encoder.layer.{layer}"
_WORDS = "bert.embeddings.word_embeddings.weight"


def _linear(ours: str, hub: str) -> _Mapping:
    """Returns a weight and a bias that have the same rows on both sides."""
    return {f"{ours}.{kind}": (HubTensorPattern(f"{hub}.{kind}"),) for kind in ("weight", "bias")}


_QKV: _Mapping = {
    f"{_OURS}.self_attention.linear_qkv.{kind}": tuple(
        HubTensorPattern(f"{_HUB}.attention.self.{name}.{kind}", part)
        for name, part in (("query", QUERIES), ("key", KEYS), ("value", VALUES))
    )
    for kind in ("weight", "bias")
}
_COMMON: _Mapping = {
    "embedding.word_embeddings.weight": (HubTensorPattern(_WORDS),),
    "embedding.position_embeddings.weight": (HubTensorPattern("bert.embeddings.position_embeddings.weight"),),
    "embedding.tokentype_embeddings.weight": (HubTensorPattern("bert.embeddings.token_type_embeddings.weight"),),
    **_QKV,
    **_linear(f"{_OURS}.self_attention.linear_proj", f"{_HUB}.attention.output.dense"),
    **_linear(f"{_OURS}.mlp.linear_fc1", f"{_HUB}.intermediate.dense"),
    **_linear(f"{_OURS}.mlp.linear_fc2", f"{_HUB}.output.dense"),
    **_linear("lm_head.dense", "cls.predictions.transform.dense"),
    **_linear("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    "output_layer.bias": (HubTensorPattern("cls.predictions.bias"),),
}
_OWN_OUTPUT_LAYER = _linear("output_layer", "cls.predictions.decoder")
_NORMS_AFTER: _Mapping = {
    **_linear("embedding.norm", "bert.embeddings.LayerNorm"),
    **_linear(f"{_OURS}.post_attention_layernorm", f"{_HUB}.attention.output.LayerNorm"),
    **_linear(f"{_OURS}.post_mlp_layernorm", f"{_HUB}.output.LayerNorm"),
}
_NORMS_BEFORE: _Mapping = {
    **_linear(f"{_OURS}.input_layernorm", f"{_HUB}.attention.ln"),
    **_linear(f"{_OURS}.pre_mlp_layernorm", f"{_HUB}.ln"),
    **_linear("encoder.final_layernorm", "bert.encoder.ln"),
}
_BINARY_HEAD: _Mapping = {
    **_linear("pooler.dense", "bert.pooler.dense"),
    **_linear("binary_head", "cls.seq_relationship"),
}


@dataclass(frozen=True)
class TokenTypes(rules.Rule):
    """Number of segments that the embedding distinguishes."""

    reads = ("type_vocab_size",)

    def fields(self, config: Json) -> dict[str, Any]:
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

    def fields(self, config: Json) -> dict[str, Any]:
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
    rules.Copied("num_hidden_layers", "num_layers"),
    rules.Copied("hidden_size", "hidden_size"),
    rules.Copied("intermediate_size", "ffn_hidden_size"),
    rules.Copied("num_attention_heads", "num_attention_heads"),
    rules.Copied("max_position_embeddings", "max_position_embeddings"),
    rules.Copied("layer_norm_eps", "layernorm_epsilon"),
    rules.Copied("hidden_dropout_prob", "hidden_dropout"),
    rules.Copied("attention_probs_dropout_prob", "attention_dropout"),
    rules.Copied("initializer_range", "init_method_std"),
    TokenTypes(),
    BertActivation("hidden_act"),
    rules.TiedEmbeddings(),
    rules.Fixed("position_embedding_type", "absolute", write=False),
    rules.Fixed("is_decoder", False),
    rules.Fixed("add_cross_attention", False),
    rules.Unused(("classifier_dropout", "gradient_checkpointing", "chunk_size_feed_forward")),
)
_AFTER = rules.Implied({"norm_placement": "post_residual", "embedding_norm": True})
_BIAS_OF_TIED = r"cls\.predictions\.bias"
"""An output layer with a weight of its own has its bias too; transformers writes this one and does not read it."""
_POSITIONS = r"bert\.embeddings\.position_ids"
_OTHER_HEAD = r"bert\.pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"


def _family(architecture: str, model_type: str, norms: _Mapping, *own: rules.Rule) -> Family:
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
