"""The models of the parity tests: small ones that differ in everything that a layout could get wrong."""

import json

from parity.models import Model
from torch import nn

from megatron.core.ops.activation import gelu_erf, gelu_tanh, quick_gelu, squared_relu

_LLAMA = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
}
_DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.15}

DENSE = [
    Model("llama-gqa", settings={**_LLAMA, "num_query_groups": 2}, masked_step=1, rows=2),
    Model("gpt2", tied=True, positions="learned_absolute", settings=_DROPOUT, rows=2),
    Model(
        "qknorm",
        tied=True,
        settings={"qk_layernorm": True, "num_query_groups": 4, "hidden_dropout": 0.2, "normalization": "RMSNorm"},
        vocabulary=64,
        rows=2,
    ),
    Model(
        "mqa",
        settings={"num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True, "attention_dropout": 0.2},
        rows=2,
    ),
    Model(
        "packed",
        settings={**_LLAMA, "num_query_groups": 4, "qk_layernorm": True, **_DROPOUT},
        packed=True,
        told_positions=False,
        rows=2,
    ),
    Model(
        "packed-learned",
        tied=True,
        positions="learned_absolute",
        settings={"window_size": (5, 0), "window_attn_skip_freq": 2},
        packed=True,
    ),
    Model(
        "window-sink",
        tied=True,
        settings={**_LLAMA, "window_size": (6, 0), "window_attn_skip_freq": 3, "softmax_type": "learnable"},
        vocabulary=97,
    ),
]
"""Tied and untied embeddings, GQA, MQA, query and key norms, learned and rotary positions, dropout, packed documents,
windows, sinks, odd vocabulary sizes, with and without biases."""

MODEL_OPTIONS = [
    Model(
        "nemotron",
        settings={"layernorm_zero_centered_gamma": True, "activation_func": squared_relu, "num_query_groups": 4}
        | {"rope_scaling_type": "dynamic", "rope_scaling_original_length": 6}
        | {"apply_residual_connection_post_layernorm": True, "fp32_residual_connection": True, "hidden_dropout": 0.2},
        options={"seq_len_interpolation_factor": 2.0},
        packed=True,
        told_positions=False,
        rows=2,
    ),
    Model(
        "gpt-oss",
        settings={**_LLAMA, "num_query_groups": 2, "softmax_type": "learnable", "add_qkv_bias": True}
        | {"window_size": (5, 0), "window_attn_skip_freq": 2, "activation_func": quick_gelu}
        | {"activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0, "rope_scaling_type": "yarn"}
        | {"rope_scaling_original_length": 8, "rope_scaling_truncate": False},
        options={"rope_scaling_factor": 4.0, "rotary_base": 100},
        rows=2,
    ),
    Model(
        "phi3",
        settings={**_LLAMA, "window_size": (9, 0), "rope_scaling_type": "longrope", "rope_scaling_original_length": 6}
        | {"rope_scaling_short_factor": [1.5], "rope_scaling_long_factor": [3.0], "softmax_type": "off-by-one"},
        options={"rope_scaling_factor": 4.0, "rotary_percent": 0.5},
        packed=True,
        rows=2,
    ),
    Model(
        "gemma",
        tied=True,
        settings={**_LLAMA, "num_query_groups": 4, "qk_layernorm": True, "layernorm_zero_centered_gamma": True}
        | {"norm_placement": "sandwich", "embedding_multiplier": 5.5, "activation_func": gelu_tanh}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "softmax_scale": 0.4}
        | {"window_size": (4, 0), "window_attn_skip_freq": 3, "rotary_base_local": 50.0, "rope_scaling_type": "linear"},
        options={"rope_scaling_factor": 4.0},
        vocabulary=64,
        rows=2,
    ),
    Model(
        "olmo",
        tied=True,
        settings={**_LLAMA, "num_query_groups": 2, "norm_placement": "post", "qk_layernorm": True}
        | {"qk_norm_scope": "full", "window_size": (7, 0), "window_attn_skip_freq": 4, "hidden_dropout": 0.2},
        rows=2,
    ),
    Model(
        "cohere",
        tied=True,
        settings={"norm_placement": "parallel", "norm_bias": False, "add_bias_linear": False, "logit_scale": 0.4}
        | {"gated_linear_unit": True, "activation_func": nn.functional.silu, "rotary_interleaved": True}
        | {"no_rope_freq": 4, "window_size": (5, 0), "window_attn_skip_freq": 4, "num_query_groups": 4}
        | {"qk_layernorm": True, "qk_norm_scope": "per_head", "normalize_output_weight": True},
        packed=True,
        rows=2,
    ),
    Model(
        "granite",
        settings={"norm_affine": False, "attention_output_bias": False, "mlp_bias": True, "residual_multiplier": 0.4}
        | {"clip_qkv": 0.8, "embedding_multiplier": 3.0, "logit_scale": 0.6, "softmax_scale": 0.5}
        | {"attention_dropout": 0.15, "normalize_output_weight": True},
        rows=2,
    ),
    Model(
        "llama4",
        settings={**_LLAMA, "num_query_groups": 4, "qk_l2_norm": True, "no_rope_freq": 4, "rotary_interleaved": True}
        | {"attention_chunk_size": 6, "attention_chunk_skip_freq": 4, "nope_temperature_scale": 0.5}
        | {"nope_temperature_floor": 4, "rope_scaling_type": "llama3", "rope_scaling_original_length": 8},
        packed=True,
        rows=2,
    ),
    Model(
        "falcon",
        tied=True,
        positions="none",
        settings={"alibi": True, "num_query_groups": 1, "norm_placement": "parallel_two_norms"}
        | {"attention_dropout": 0.15, "attn_logit_softcapping": 2.0},
        packed=True,
        told_positions=False,
        rows=2,
    ),
    Model(
        "qwen3-next",
        settings={**_LLAMA, "num_query_groups": 2, "attention_output_gate": True, "qk_layernorm": True}
        | {"layernorm_zero_centered_gamma": True, "hidden_dropout": 0.2},
        options={"rotary_percent": 0.5},
        rows=2,
    ),
]
"""Model options of single parts of a layer: scales, caps, norms and their places, positions and windows by layer."""

_EXPERTS = {**_LLAMA, "num_moe_experts": 8, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall"}

EXPERTS = [
    Model(
        "moe-aux",
        tied=True,
        settings={**_EXPERTS, "num_query_groups": 2, "moe_router_topk": 2, "moe_grouped_gemm": True}
        | {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.02},
        rows=2,
    ),
    Model(
        "moe-seq",
        tied=True,
        positions="learned_absolute",
        settings={"num_moe_experts": 8, "moe_router_topk": 3, "moe_layer_freq": [1, 0, 1, 1], "hidden_dropout": 0.2}
        | {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.2, 0.05]}
        | {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
        rows=2,
    ),
    Model(
        "moe-bias",
        settings={**_EXPERTS, "moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_grouped_gemm": True}
        | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
        | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01, "moe_layer_freq": [0, 1, 1, 1]}
        | {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True, "moe_aux_loss_coeff": 0.0}
        | {"moe_token_dispatcher_type": "flex"},
        starved=(2, 3),
        rows=2,
    ),
    Model(
        "moe-capacity",
        settings={"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "normalization": "RMSNorm"}
        | {"moe_expert_capacity_factor": 0.75, "moe_aux_loss_coeff": 0.1, "moe_input_jitter_eps": 0.1}
        | {"moe_token_dispatcher_type": "alltoall", "attention_dropout": 0.15},
        packed=True,
        rows=2,
    ),
    Model(
        "moe-padded",
        settings={**_EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_z_loss_coeff": 0.05}
        | {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
        | {"moe_token_drop_policy": "position", "moe_apply_probs_on_input": True, "moe_latent_size": 16}
        | {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True}
        | {"moe_token_dispatcher_type": "flex"},
    ),
    Model(
        "moe-sinkhorn",
        tied=True,
        settings={**_EXPERTS, "moe_router_topk": 2, "moe_router_load_balancing_type": "sinkhorn"}
        | {"moe_grouped_gemm": True, "moe_layer_freq": 2, "moe_z_loss_coeff": 0.02, "num_query_groups": 4},
        vocabulary=64,
        rows=2,
    ),
    Model(
        "moe-forced",
        settings={**_EXPERTS, "moe_router_topk": 2, "moe_router_force_load_balancing": True}
        | {"moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.1, "qk_layernorm": True}
        | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_token_dispatcher_type": "allgather"},
        packed=True,
        told_positions=False,
        rows=2,
    ),
]
"""All kinds of routers with their losses and biases, shared experts, capacity with dropped and with padded tokens, all
dispatchers, experts computed in a loop and as one grouped product, experts without tokens."""

_LATENT = {
    **_LLAMA,
    "multi_latent_attention": True,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}

LATENT = [
    Model(
        "mla-yarn",
        settings={**_LATENT, "q_lora_rank": 10, "qk_layernorm": True, "attention_dropout": 0.15, "rope_type": "yarn"}
        | {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8, "mscale_all_dim": 1.0},
        rows=2,
    ),
    Model(
        "mla-packed",
        tied=True,
        settings={**_LATENT, "q_lora_rank": None, "rope_type": "rope", "hidden_dropout": 0.2},
        packed=True,
        rows=2,
        vocabulary=64,
    ),
]
"""Latent attention: queries with and without a latent, YaRN and plain rotary positions, with and without norms."""

PREDICTING = [
    Model(
        "mtp-packed",
        tied=True,
        settings={**_LLAMA, "num_query_groups": 4, "mtp_num_layers": 2, "hidden_dropout": 0.2},
        packed=True,
        rows=2,
    ),
    Model(
        "mtp-repeated",
        tied=True,
        settings={**_LLAMA, "num_query_groups": 4, "mtp_num_layers": 2, "hidden_dropout": 0.2}
        | {"mtp_use_repeated_layer": True, "mtp_detach_heads": True},
        rows=2,
    ),
    Model(
        "mtp-learned",
        positions="learned_absolute",
        settings={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5},
        rows=2,
    ),
    Model(
        "deepseek",
        settings={**_LATENT, **_EXPERTS, "q_lora_rank": 10, "qk_layernorm": True, "rope_type": "yarn"}
        | {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8, "mtp_num_layers": 1}
        | {"moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_grouped_gemm": True}
        | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
        | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01, "moe_layer_freq": [0, 1, 1, 1]}
        | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
        | {"moe_shared_expert_intermediate_size": 16},
        rows=2,
    ),
]
"""Multi-token prediction: one and two further tokens, packed documents, one layer for both depths which alone is
trained by their losses, with latent attention and experts."""

_DELTA = {
    **_LLAMA,
    "experimental_attention_variant": "gated_delta_net",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,  # division by the length of a head that is almost zero amplifies rounding
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}

MIXERS = [
    Model("delta", settings={**_DELTA, "linear_attention_freq": 2, "hidden_dropout": 0.2}, rows=2),
    Model(
        "delta-packed",
        tied=True,
        settings={**_DELTA, "linear_attention_freq": [1, 0, 0, 1], "layernorm_zero_centered_gamma": True},
        packed=True,
        rows=2,
    ),
    Model(
        "dsa",
        settings={**_LATENT, "q_lora_rank": 10, "qk_layernorm": True, "attention_dropout": 0.15}
        | {"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6, "dsa_indexer_head_dim": 6}
        | {"dsa_indexer_topk": 3, "dsa_indexer_loss_coeff": 0.5},
        rows=2,
    ),
    Model(
        "dsa-packed",
        settings={**_LATENT, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4}
        | {"dsa_indexer_head_dim": 6, "dsa_indexer_topk": 3, "dsa_indexer_loss_coeff": 0.5}
        | {"dsa_indexer_use_sparse_loss": True},
        packed=True,
        rows=2,
    ),
]
"""Other token mixers beside attention: gated delta nets and sparse attention with an indexer, of rows and of packed
documents; the indexer's loss over all keys and over the chosen ones."""

BERT = [
    Model(
        "bert",
        kind="bert",
        tied=True,
        positions="learned_absolute",
        settings={**_DROPOUT, "first_input_norm": False},
        options={"num_tokentypes": 2, "head_activation": "relu", "head_bias": False},
        losses=("default",),
        rows=2,
    ),
    Model(
        "bert-post",
        kind="bert",
        positions="rope",
        settings={"norm_placement": "post_residual", "embedding_norm": True, "hidden_dropout": 0.2}
        | {"window_size": (5, 5), "window_attn_skip_freq": 2, "rotary_base_local": 50.0}
        | {"normalize_output_weight": True, "gated_linear_unit": True, "activation_func": gelu_erf},
        options={"num_tokentypes": 0, "add_binary_head": False},
        rows=2,
        vocabulary=64,
    ),
]
"""Padded rows seen from both sides: two heads and one, token types and none, learned and rotary positions, norms before
and after each residual."""

T5 = [
    Model(
        "t5",
        kind="t5",
        tied=True,
        positions="relative",
        settings={**_LLAMA, **_DROPOUT, "num_encoder_layers": 4, "softmax_scale": 1.0, "logit_scale": 0.2}
        | {"activation_func": nn.functional.relu, "gated_linear_unit": False},
        options={"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
        rows=2,
    ),
    Model(
        "t5-learned",
        kind="t5",
        positions="learned_absolute",
        settings={"num_encoder_layers": 4, "attention_dropout": 0.15},
        rows=2,
        vocabulary=64,
    ),
    Model("t5-rope", kind="t5", settings={**_LLAMA, "num_encoder_layers": 4}, rows=2),
]
"""An encoder of padded rows and a decoder: relative, learned and rotary positions, tied and not, biases and none."""

HYBRIDS = [
    Model(
        "nemotron-h",
        positions="none",
        settings={"hybrid_layer_pattern": "M*-G", "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 5}
        | {"mamba_head_dim": 8, "mamba_num_groups": 4, "mamba_state_dim": 3}
        | {"normalization": "RMSNorm", "add_bias_linear": False, "activation_func": squared_relu}
        | {"num_query_groups": 2, "hidden_dropout": 0.2},
        packed=True,
        rows=2,
    ),
    Model(
        "hybrid-moe",
        settings={**_EXPERTS, "hybrid_layer_pattern": "ME*E/*E", "mtp_num_layers": 1, "moe_grouped_gemm": True}
        | {"mamba_head_dim": 8, "mamba_num_groups": 4, "mamba_state_dim": 3, "moe_router_topk": 2}
        | {"moe_aux_loss_coeff": 0.1, "hidden_dropout": 0.2},
        rows=2,
    ),
]
"""Layers of one branch: Mamba-2, attention, MLP, gated delta net, experts; a depth of prediction. Packed documents,
whose states begin anew."""

_BLOCKS = [
    {"attention": {"num_query_groups": 1}, "ffn": {"intermediate_size": 24}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 40}},
]

HETEROGENEOUS = [
    Model(
        "nemotron-nas",
        settings={"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": _BLOCKS})}
        | {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": nn.functional.silu, **_DROPOUT},
        rows=2,
    ),
]
"""Layers of different sizes, one without attention and MLP, one with linear layers in their places."""

MODELS = [*DENSE, *MODEL_OPTIONS, *LATENT, *EXPERTS, *PREDICTING, *MIXERS, *HYBRIDS, *HETEROGENEOUS, *BERT, *T5]
