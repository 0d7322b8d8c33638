"""Arcee: a decoder like Llama, whose MLP has no gate."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import UngatedActivation
from megatron.conversion.hub_defaults import DECODER_DEFAULTS
from megatron.conversion.layer_rules import AttentionHeads
from megatron.conversion.rope import RotaryPositions

ARCEE_FAMILY = Family(
    "ArceeForCausalLM",
    "arcee",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.OUTPUT_BIAS
    | decoder.ungated("up_proj", "down_proj"),
    (
        *decoder.SIZES,
        decoder.EPSILON,
        AttentionHeads(),
        RotaryPositions(),
        layer_rules.LinearBiases(),
        rules.Copied("intermediate_size", "ffn_hidden_size"),
        UngatedActivation("hidden_act"),
    ),
    defaults=DECODER_DEFAULTS
    | {
        "hidden_act": "relu2",
        "head_dim": None,
        "vocab_size": 32000,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
)
