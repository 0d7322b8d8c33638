"""Seed-OSS: a decoder like Llama with biases of queries, keys and values."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS, Json
from megatron.conversion.spellings import bias_places


@dataclass(frozen=True)
class Biases(rules.Rule):
    """A key for the bias of queries, keys and values, one for that of the output projection, one for the MLP's."""

    reads = ("attention_bias", "attention_out_bias", "mlp_bias")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns a switch for each."""
        qkv, output, mlp = (bool(config[key]) for key in self.reads)
        return {"add_qkv_bias": qkv, "attention_output_bias": output, "mlp_bias": mlp}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all three keys."""
        places = bias_places(values)
        return dict(
            zip(self.reads, (places["add_qkv_bias"], places["attention_output_bias"], places["mlp_bias"]), strict=True)
        )


SEED_OSS_FAMILY = Family(
    "SeedOssForCausalLM",
    "seed_oss",
    decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.MLP,
    (*decoder.DECODER, Biases(), rules.Unused(("residual_dropout",))),
    defaults=DECODER_DEFAULTS
    | {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "mlp_bias": False,
    },
)
