"""StarCoder 2: LayerNorm, biases everywhere, and an MLP without a gate."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.falcon import AllBiases
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import EqualDropouts, UngatedActivation
from megatron.conversion.hub_defaults import DECODER_DEFAULTS
from megatron.conversion.rope import RotaryPositions

STARCODER2_FAMILY = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    decoder.AROUND
    | decoder.NORM_BIASES
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.OUTPUT_BIAS
    | decoder.ungated("c_fc", "c_proj"),
    (
        *decoder.SIZES,
        rules.Copied("norm_epsilon", "layernorm_epsilon"),
        rules.Copied("intermediate_size", "ffn_hidden_size"),
        UngatedActivation("hidden_act"),
        layer_rules.AttentionHeads(),
        layer_rules.SlidingWindows(),
        RotaryPositions(),
        AllBiases("use_bias"),
        EqualDropouts("embedding_dropout", "residual_dropout"),
        rules.Implied({"normalization": "LayerNorm"}),
    ),
    defaults={key: value for key, value in DECODER_DEFAULTS.items() if key not in ("rms_norm_eps", "attention_bias")}
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.018042,
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "use_bias": True,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
    },
)
