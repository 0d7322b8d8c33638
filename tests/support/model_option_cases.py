"""Models of `transformers` that together use every kind of model option, with the equivalent settings of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from support.model_option_weights import (
    EXPERTS,
    FALCON,
    HEAD_NORMS,
    NEOX,
    PHI3,
    POST,
    SANDWICH,
    Source,
    delta_net,
    llama,
    oss_experts,
    qwen_experts,
    with_gate,
)

from megatron.core.ops.activation import gelu_tanh, quick_gelu

LAYERS, VOCABULARY = 4, 61
COMMON = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 40, "num_query_groups": 2, "kv_channels": 8}
RMS = {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu}
THEIRS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


THEIR_LAYERS = {"GPTNeoX": "gpt_neox.layers", "Falcon": "transformer.h"}
"""Path of the layers, for models of `transformers` that do not have them in model.layers."""


@dataclass(frozen=True)
class Case:
    """One model of `transformers` and our equivalent settings."""

    kind: str
    """Name of the architecture in `transformers`: `{kind}Config` and `{kind}ForCausalLM`."""
    theirs: Mapping[str, Any] = field(default_factory=dict)
    """Fields of their config, in addition to THEIRS."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Fields of our TransformerConfig, in addition to COMMON."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of our GPTModel."""
    weights: Mapping[str, Source] = field(default_factory=lambda: llama(2))


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
WINDOWED = {"window_size": (5, 0), "window_attn_skip_freq": 4}
"""Equivalent settings: in the first three of four layers a query sees six keys."""
GEMMA = {**RMS, "layernorm_zero_centered_gamma": True, "activation_func": gelu_tanh}
TIED = {"share_embeddings_and_output_weights": True}
ROOT = torch.tensor(32.0).sqrt().item()
"""Square root of the hidden size, rounded to float32 like the buffer of `transformers`."""
OLD_FALCON = {"new_decoder_architecture": False, "multi_query": True}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.5, 2.5, 4.0, 7.5]

CASES = {
    # rotary frequencies
    "rope linear": Case(
        "Llama", rope("linear", factor=3.0), {"rope_scaling_type": "linear", **RMS}, {"rope_scaling_factor": 3.0}
    ),
    "rope dynamic": Case(
        "Llama",
        rope("dynamic", factor=2.5) | {"max_position_embeddings": 16},
        {"rope_scaling_type": "dynamic", "rope_scaling_original_length": 16, **RMS},
        {"rope_scaling_factor": 2.5},
    ),
    "rope llama3": Case(
        "Llama",
        rope("llama3", factor=5.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=32),
        {
            "rope_scaling_type": "llama3",
            "rope_scaling_original_length": 32,
            "rope_scaling_low_freq_factor": 1.5,
            "rope_scaling_high_freq_factor": 3.0,
            **RMS,
        },
        {"rope_scaling_factor": 5.0},
    ),
    "rope yarn": Case(
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=24.0, beta_slow=0.7),
        {
            "rope_scaling_type": "yarn",
            "rope_scaling_original_length": 512,
            "rope_scaling_beta_fast": 24.0,
            "rope_scaling_beta_slow": 0.7,
            **RMS,
        },
        {"rope_scaling_factor": 4.0},
    ),
    "rope yarn untruncated": Case(
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=512, truncate=False, attention_factor=1.2),
        {
            "rope_scaling_type": "yarn",
            "rope_scaling_original_length": 512,
            "rope_scaling_truncate": False,
            "rope_scaling_attention_factor": 1.2,
            **RMS,
        },
        {"rope_scaling_factor": 4.0},
    ),
    **{
        f"Phi-3 longrope {name}": Case(
            "Phi3",
            {"original_max_position_embeddings": length}
            | rope("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=length),
            {
                "rope_scaling_type": "longrope",
                "rope_scaling_original_length": length,
                "rope_scaling_short_factor": SHORT,
                "rope_scaling_long_factor": LONG,
                **RMS,
            },
            {"rope_scaling_factor": 64 / length},
            PHI3,
        )
        for name, length in (("of short rows", 32), ("of long rows", 16))
    },
    # norms, biases, factors
    "Gemma": Case(
        "Gemma",
        {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {**GEMMA, "embedding_multiplier": ROOT},
        TIED,
    ),
    "GLM-4": Case(
        "Glm4",
        {"attention_bias": True} | rope("default", partial_rotary_factor=0.5),
        {**RMS, "norm_placement": "sandwich", "rotary_interleaved": True, "add_qkv_bias": True},
        {"rotary_percent": 0.5},
        llama(
            2,
            **{
                "post_attention_layernorm": "post_self_attn_layernorm",
                "pre_mlp_layernorm": "post_attention_layernorm",
                "post_mlp_layernorm": "post_mlp_layernorm",
                "mlp.linear_fc1": "mlp.gate_up_proj",
            },
        ),
    ),
    "Granite": Case(
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.6,
            "attention_bias": True,
            "mlp_bias": False,
        },
        {
            **RMS,
            "softmax_scale": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logit_scale": 1 / 1.6,
            "add_qkv_bias": True,
            "attention_output_bias": True,
        },
    ),
    "Granite, a bias in the MLP alone": Case(
        "Granite", {"mlp_bias": True}, {**RMS, "mlp_bias": True, "softmax_scale": 1.0}
    ),
    "Cohere2": Case(
        "Cohere2",
        {"logit_scale": 0.3, "layer_types": WINDOWS, "sliding_window": 6, "layer_norm_eps": 1e-5},
        {
            **RMS,
            "normalization": "LayerNorm",
            "norm_bias": False,
            "norm_placement": "parallel",
            "logit_scale": 0.3,
            "rotary_interleaved": True,
            "no_rope_freq": 4,
            **WINDOWED,
        },
    ),
    "GPT-NeoX": Case(
        "GPTNeoX",
        rope("default", partial_rotary_factor=0.5),
        {"norm_placement": "parallel_two_norms", "num_query_groups": 4},
        {"rotary_percent": 0.5},
        NEOX,
    ),
    "StarCoder2": Case(
        "Starcoder2",
        {"sliding_window": 6, "norm_epsilon": 1e-5},
        {"activation_func": gelu_tanh, "window_size": (5, 0)},
        weights=llama(2, **{"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}),
    ),
    "OLMo": Case(
        "Olmo",
        {"clip_qkv": 0.8},
        {**RMS, "normalization": "LayerNorm", "norm_affine": False, "clip_qkv": 0.8},
    ),
    # attention
    "Gemma 2": Case(
        "Gemma2",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 12,
            "layer_types": WINDOWS,
            "sliding_window": 6,
        },
        {
            **GEMMA,
            "embedding_multiplier": ROOT,
            "norm_placement": "sandwich",
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "softmax_scale": 12**-0.5,
            **WINDOWED,
        },
        TIED,
        llama(2, **SANDWICH),
    ),
    "Gemma 3": Case(
        "Gemma3",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 12,
            "layer_types": WINDOWS,
            "sliding_window": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
            },
        },
        {
            **GEMMA,
            "embedding_multiplier": ROOT,
            "norm_placement": "sandwich",
            "qk_layernorm": True,
            "softmax_scale": 12**-0.5,
            "rotary_base_local": 1000.0,
            "rope_scaling_type": "linear",
            **WINDOWED,
        },
        {"rotary_base": 50000, "rope_scaling_factor": 8.0, **TIED},
        llama(2, **SANDWICH, **HEAD_NORMS),
    ),
    "OLMo 2": Case(
        "Olmo2",
        {},
        {**RMS, "norm_placement": "post", "qk_layernorm": True, "qk_norm_scope": "full"},
        weights=llama(2, **POST, **HEAD_NORMS),
    ),
    "OLMo 3": Case(
        "Olmo3",
        {
            "layer_types": WINDOWS,
            "sliding_window": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.1,
                },
            },
        },
        {
            **RMS,
            "norm_placement": "post",
            "qk_layernorm": True,
            "qk_norm_scope": "full",
            "rope_scaling_type": "yarn",
            "rope_scaling_original_length": 16,
            "rope_scaling_attention_factor": 1.1,
            "rotary_base_local": 10000.0,
            **WINDOWED,
        },
        {"rope_scaling_factor": 4.0},
        llama(2, **POST, **HEAD_NORMS),
    ),
    "Qwen3-Next": Case(
        "Qwen3Next",
        {
            "mlp_only_layers": [1],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        }
        | rope("default", partial_rotary_factor=0.5),
        {
            **RMS,
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_layer_freq": [1, 0, 1, 1],
            "moe_shared_expert_intermediate_size": 20,
            "moe_shared_expert_gate": True,
        },
        {"rotary_percent": 0.5},
        llama(2, **{"self_attention.linear_qkv": with_gate}, **HEAD_NORMS, **delta_net(2), **qwen_experts()),
    ),
    "GPT-OSS": Case(
        "GptOss",
        {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.3,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 6,
        }
        | rope("yarn", factor=4.0, original_max_position_embeddings=512, truncate=False),
        {
            **RMS,
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 0.3,
            "glu_linear_offset": 1.0,
            "add_qkv_bias": True,
            "attention_output_bias": True,
            "softmax_type": "learnable",
            "window_size": (5, 0),
            "window_attn_skip_freq": 2,
            "rope_scaling_type": "yarn",
            "rope_scaling_original_length": 512,
            "rope_scaling_truncate": False,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_router_bias": True,
            "moe_expert_mlp_bias": True,
        },
        {"rope_scaling_factor": 4.0},
        llama(2, **{"self_attention.core_attention": "self_attn.sinks", "mlp.router": "mlp.router"}, **oss_experts()),
    ),
    "Falcon with ALiBi": Case(
        "Falcon",
        # Their eager attention adds the slopes twice.
        {**OLD_FALCON, "attn_implementation": "sdpa", "alibi": True, "parallel_attn": False, "bias": True},
        {"alibi": True, "alibi_factor": 8**-0.5, "num_query_groups": 1, "ffn_hidden_size": 128},
        {"position_embedding_type": "none"},
        FALCON,
    ),
    "Falcon side by side": Case(
        "Falcon",
        {**OLD_FALCON, "alibi": False, "parallel_attn": True, "bias": False},
        {"add_bias_linear": False, "norm_placement": "parallel", "num_query_groups": 1, "ffn_hidden_size": 128},
        {},
        FALCON,
    ),
    "Llama 4, its dense layers": Case(
        "Llama4",
        {
            "moe_layers": [],
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 7,
            "floor_scale": 5,
            "attn_scale": 0.4,
            "rms_norm_eps": 1e-6,
        }
        | rope("llama3", factor=5.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=32),
        {
            **RMS,
            "layernorm_epsilon": 1e-6,
            "rotary_interleaved": True,
            "no_rope_freq": 4,
            "qk_l2_norm": True,
            "attention_chunk_size": 7,
            "attention_chunk_skip_freq": 4,
            "nope_temperature_scale": 0.4,
            "nope_temperature_floor": 5,
            "rope_scaling_type": "llama3",
            "rope_scaling_original_length": 32,
            "rope_scaling_low_freq_factor": 1.5,
            "rope_scaling_high_freq_factor": 3.0,
        },
        {"rope_scaling_factor": 5.0},
        llama(
            2,
            **{
                "mlp.linear_fc1": lambda get: torch.cat([get("feed_forward.gate_proj"), get("feed_forward.up_proj")]),
                "mlp.linear_fc2": "feed_forward.down_proj",
            },
        ),
    ),
}  # fmt: skip
