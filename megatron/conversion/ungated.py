"""Decoders like Llama whose MLP has no gate: Arcee, Nemotron-4 and Minitron (norm weights stored minus one, half of
each head rotated), and StarCoder 2 (LayerNorm, biases everywhere)."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import EqualDropouts, UngatedActivation
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
)
