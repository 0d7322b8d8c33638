"""Nemotron-4 and Minitron: norm weights stored minus one, squared ReLU without a gate, half of each head rotated."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import UngatedActivation
from megatron.conversion.hub_defaults import DECODER_DEFAULTS
from megatron.conversion.rope import RotaryPositions

NEMOTRON_FAMILY = Family(
    "NemotronForCausalLM",
    "nemotron",
    decoder.AROUND
    | decoder.NORM_BIASES
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.OUTPUT_BIAS
    | decoder.ungated("up_proj", "down_proj"),
    (
        *decoder.SIZES,
        rules.Copied("norm_eps", "layernorm_epsilon"),
        rules.Copied("intermediate_size", "ffn_hidden_size"),
        UngatedActivation("hidden_act"),
        layer_rules.AttentionHeads(),
        layer_rules.LinearBiases(),
        RotaryPositions(rotated_part=0.5),
        rules.Implied({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}),
    ),
    defaults={key: value for key, value in DECODER_DEFAULTS.items() if key != "rms_norm_eps"}
    | {
        "hidden_act": "relu2",
        "head_dim": None,
        "initializer_range": 0.0134,
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "mlp_bias": False,
    },
)
