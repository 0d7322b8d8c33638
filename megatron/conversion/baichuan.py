"""Baichuan 2, which has no class in transformers. 7B has rotary positions, 13B has ALiBi; the head norms its weight."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.decoder import HUB
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json

_ROWS_OF_BAICHUAN_1 = 64000
_POSITIONS, _LENGTH = "max_position_embeddings", "model_max_length"


@dataclass(frozen=True)
class BaichuanPositions(rules.Rule):
    """Rotary positions if there is `max_position_embeddings`, otherwise ALiBi, with `model_max_length` tokens."""

    reads = (_POSITIONS, _LENGTH)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns kind and number of positions."""
        rotated = config.get(_POSITIONS)
        if rotated is None:
            return {_POSITIONS: config[_LENGTH], "position_embedding_type": "none", "alibi": True}
        return {_POSITIONS: rotated, "position_embedding_type": "rope"}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the number, with ALiBi under one name alone."""
        length = values[_POSITIONS]
        return {_LENGTH: length} | ({} if values["alibi"] else {_POSITIONS: length})


@dataclass(frozen=True)
class NormedHead(rules.Rule):
    """The output layer's rows have length 1 in the product, except in Baichuan 1, which has another vocabulary."""

    reads = ("vocab_size",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns whether they have."""
        return {"normalize_output_weight": config["vocab_size"] != _ROWS_OF_BAICHUAN_1}


BAICHUAN_FAMILY = Family(
    "BaichuanForCausalLM",
    "baichuan",
    decoder.AROUND
    | decoder.MLP
    | decoder.weights({"self_attention.linear_proj": "self_attn.o_proj"})
    | decoder.joint_qkv(f"{HUB}.self_attn.W_pack", "weight"),
    (
        *rules.copied("hidden_size", num_hidden_layers="num_layers", initializer_range="init_method_std"),
        rules.TiedEmbeddings(),
        *decoder.SWIGLU,
        decoder.EPSILON,
        rules.Copied("num_attention_heads", "num_attention_heads"),
        BaichuanPositions(),
        NormedHead(),
        rules.Implied({"normalization": "RMSNorm", "add_bias_linear": False}),
        rules.Implied({"hidden_dropout": 0.0, "attention_dropout": 0.0}),
        rules.Unused(("gradient_checkpointing", "_from_model_config", "tokenizer_class", "z_loss_weight")),
    ),
)
