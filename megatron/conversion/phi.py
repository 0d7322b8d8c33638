"""Phi-1, Phi-1.5 and Phi-2: attention beside the MLP, behind one norm, and biases everywhere, the output layer too."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one, with_biases
from megatron.conversion.family import EMBEDDING, Family
from megatron.conversion.gpt2 import UngatedActivation
from megatron.conversion.rope import RotaryPositions

PHI_FAMILY = Family(
    "PhiForCausalLM",
    "phi",
    one_to_one({"embedding.word_embeddings.weight": EMBEDDING})
    | with_biases(
        {
            "decoder.final_layernorm": "model.final_layernorm",
            "output_layer": "lm_head",
            f"{OURS}.input_layernorm": f"{HUB}.input_layernorm",
            f"{OURS}.self_attention.linear_proj": f"{HUB}.self_attn.dense",
            f"{OURS}.self_attention.q_layernorm": f"{HUB}.self_attn.q_layernorm",
            f"{OURS}.self_attention.k_layernorm": f"{HUB}.self_attn.k_layernorm",
        }
    )
    | decoder.QKV_WEIGHT
    | decoder.QKV_BIAS
    | decoder.ungated("fc1", "fc2"),
    (
        *decoder.CORE,
        *rules.copied("attention_dropout", "qk_layernorm", intermediate_size="ffn_hidden_size"),
        *rules.copied(resid_pdrop="hidden_dropout", layer_norm_eps="layernorm_epsilon"),
        UngatedActivation("hidden_act"),
        layer_rules.AttentionHeads(),
        RotaryPositions(rotated_part=0.5),
        rules.Implied({"normalization": "LayerNorm", "norm_placement": "parallel"}),
        rules.Implied({"add_bias_linear": True, "output_layer_bias": True}),
        rules.Unused(("embd_pdrop",)),
    ),
)
