"""Seed-OSS: a decoder like Llama with biases of queries, keys and values."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family

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
)
