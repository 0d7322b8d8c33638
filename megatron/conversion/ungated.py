"""Decoders like Llama whose MLP has no gate: Arcee, Nemotron-4 and Minitron (norm weights stored minus one, half of
each head rotated), and StarCoder 2 (LayerNorm, biases everywhere)."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import EqualDropouts, UngatedActivation
from megatron.conversion.hub_defaults import DECODER_DEFAULTS
from megatron.conversion.rope import RotaryPositions

ARCEE_FAMILY = Family(
    "ArceeForCausalLM",
    "arcee",
    decoder.AROUND | decoder.BIASED_ATTENTION | decoder.ungated("up_proj", "down_proj"),
    (
        *decoder.SIZES,
        decoder.EPSILON,
        layer_rules.AttentionHeads(),
        RotaryPositions(),
        layer_rules.ATTENTION_BIASES,
        layer_rules.MLP_BIASES,
        rules.Copied("intermediate_size", "ffn_hidden_size"),
        UngatedActivation("hidden_act"),
    ),
    defaults=DECODER_DEFAULTS
    | {
        "hidden_act": "relu2",
        "head_dim": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
)

NEMOTRON_FAMILY = Family(
    "NemotronForCausalLM",
    "nemotron",
    decoder.AROUND | decoder.NORM_BIASES | decoder.BIASED_ATTENTION | decoder.ungated("up_proj", "down_proj"),
    (
        *decoder.SIZES,
        *rules.copied(norm_eps="layernorm_epsilon", intermediate_size="ffn_hidden_size"),
        UngatedActivation("hidden_act"),
        layer_rules.AttentionHeads(),
        layer_rules.ATTENTION_BIASES,
        layer_rules.MLP_BIASES,
        RotaryPositions(rotated_part=0.5),
        rules.Implied({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}),
    ),
    defaults={key: value for key, value in DECODER_DEFAULTS.items() if key != "rms_norm_eps"}
    | {
        "hidden_act": "relu2",
        "head_dim": None,
        "initializer_range": 0.0134,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "mlp_bias": False,
    },
)

STARCODER2_FAMILY = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    decoder.AROUND | decoder.NORM_BIASES | decoder.BIASED_ATTENTION | decoder.ungated("c_fc", "c_proj"),
    (
        *decoder.SIZES,
        *rules.copied(norm_epsilon="layernorm_epsilon", intermediate_size="ffn_hidden_size"),
        UngatedActivation("hidden_act"),
        layer_rules.AttentionHeads(),
        layer_rules.SlidingWindows(),
        RotaryPositions(),
        layer_rules.Biases("use_bias"),
        EqualDropouts("embedding_dropout", "residual_dropout"),
        rules.Implied({"normalization": "LayerNorm"}),
    ),
    defaults={key: value for key, value in DECODER_DEFAULTS.items() if key not in ("rms_norm_eps", "attention_bias")}
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.018042,
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
