"""ERNIE 4.5: a decoder like Llama that rotates pairs of neighbouring channels."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.falcon import AllBiases
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS

_NOT_IN_CLASS = ("attention_bias", "attention_dropout")

ERNIE_FAMILY = Family(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.MLP,
    (
        *(rule for rule in decoder.DECODER if rule.reads != ("attention_dropout",)),
        AllBiases("use_bias"),
        rules.Implied({"rotary_interleaved": True, "attention_dropout": 0.0}),
    ),
    defaults={key: value for key, value in DECODER_DEFAULTS.items() if key not in _NOT_IN_CLASS}
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
)
