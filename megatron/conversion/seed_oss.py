"""Seed-OSS: a decoder like Llama with biases of queries, keys and values."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS

SEED_OSS_FAMILY = Family(
    "SeedOssForCausalLM",
    "seed_oss",
    decoder.LLAMA,
    (
        *decoder.DECODER,
        layer_rules.Biases("attention_bias", ("add_qkv_bias",)),
        layer_rules.Biases("attention_out_bias", ("attention_output_bias",)),
        layer_rules.MLP_BIASES,
        rules.Unused(("residual_dropout",)),
    ),
    defaults=DECODER_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "mlp_bias": False,
    },
)
