"""Tiny models of the families beside Llama's, at odd settings: class in transformers, fields of its config."""

from typing import Any

_YARN = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_NO_WINDOWS = {"layer_types": ["full_attention"] * 3, "sliding_window": 6}
_DIVISORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.5, 4.0, 7.5]}

_MAMBA = {"n_groups": 2, "conv_kernel": 3, "chunk_size": 4, "vocab_size": 99, "hidden_size": 64}
_HYBRID = {
    **_MAMBA,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
_QWEN3_NEXT = {
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

_PARTLY = {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5}
_SHARED_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_ALIBI = {"alibi": True, "attn_implementation": "sdpa"}  # their eager attention adds the slopes twice

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "arcee, exact gelu": ("Arcee", {"hidden_act": "gelu", "rope_parameters": _YARN}),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "mamba_n_groups": 2,
            "mamba_expand": 1,
            "mamba_chunk_size": 4,
            "rms_norm_eps": 1e-4,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.05, float("inf")],
            "pad_token_id": 0,
        },
    ),
    "bamba, tied": (
        "Bamba",
        {
            "attn_layer_indices": [0, 2],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.3, "attention_bias": True, "layer_norm_eps": 1e-4}),
    "cohere with norms of heads": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere 2": (
        "Cohere2",
        {"logit_scale": 0.3, "sliding_window": 6, "head_dim": 12, "num_hidden_layers": 5, "layer_types": None},
    ),
    "cohere 2 of other layers": (
        "Cohere2",
        {
            "sliding_window": 6,
            "head_dim": 16,
            "layer_types": _WINDOWS,
            "tie_word_embeddings": False,
            "logit_scale": 0.5,
        },
    ),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True, "head_dim": 12, "tie_word_embeddings": False}),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 5,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "use_bias": True,
            "rms_norm_eps": 1e-4,
        },
    ),
    "ernie 4.5 moe without shared experts": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 0}
        | {"tie_word_embeddings": False},
    ),
    "exaone 4": ("Exaone4", {"sliding_window": 6, "num_hidden_layers": 5, "layer_types": None, "head_dim": 16}),
    "exaone 4 without windows": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 16},
    ),
    "gemma": ("Gemma", {"head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-4}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0, "rope_parameters": _PARTLY}),
    "glm 4": ("Glm4", {"head_dim": 16, "pad_token_id": 0, "attention_bias": False, "rope_parameters": _PARTLY}),
    "glm 4.5": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
            "rope_parameters": _PARTLY,
        },
    ),
    "glm 4.5 air": (
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "granite moe": (
        "GraniteMoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.7,
            "attention_bias": True,
        },
    ),
    "llama 4": (
        "Llama4",
        {
            "head_dim": 12,
            "num_hidden_layers": 5,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.3,
            "rms_norm_eps": 1e-2,
            "attention_bias": True,
        },
    ),
    "llama 4 of other layers": (
        "Llama4",
        {
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "moe_layers": [0, 1, 2],
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            "attention_chunk_size": 5,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.5,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "minimax m2": (
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": _PARTLY},
    ),
    "ministral": ("Ministral", {"sliding_window": 6, "layer_types": _WINDOWS, "head_dim": 12}),
    "ministral, published layers": ("Ministral", {"sliding_window": 6, "layer_types": None, "head_dim": 16}),
    "qwen 3.5": (
        "Qwen3_5",
        {
            **{key: value for key, value in _QWEN3_NEXT.items() if key.startswith("linear")},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": _PARTLY,
        },
    ),
    "gpt bigcode": ("GPTBigCode", {"layer_norm_epsilon": 1e-4, "n_inner": 72}),
    "gpt bigcode without shared keys": (
        "GPTBigCode",
        {"multi_query": False, "num_key_value_heads": 4, "scale_attn_weights": False, "activation_function": "gelu"},
    ),
    "gpt neox": ("GPTNeoX", {"rope_parameters": _PARTLY, "layer_norm_eps": 1e-4}),
    "gpt neox, one after the other": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "nemotron": ("Nemotron", {"head_dim": 16, "rope_parameters": _PARTLY, "attention_bias": True, "mlp_bias": True}),
    "olmo": ("Olmo", {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "olmoe, weights as they are": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    "qwen 2 moe": ("Qwen2Moe", _SHARED_EXPERT | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen 2 moe without biases": (
        "Qwen2Moe",
        _SHARED_EXPERT | {"qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen 2 moe with windows": (
        "Qwen2Moe",
        _SHARED_EXPERT | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "seed oss": ("SeedOss", {"head_dim": 12, "attention_dropout": 0.0, "mlp_bias": True}),
    "seed oss, the other bias": (
        "SeedOss",
        {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "attention_dropout": 0.0},
    ),
    "smollm 3": ("SmolLM3", {"num_hidden_layers": 5, "attention_bias": True, "pad_token_id": 0}),
    "smollm 3 of other layers": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 1], "mlp_bias": True, "tie_word_embeddings": False, "pad_token_id": 0},
    ),
    "starcoder 2": ("Starcoder2", {"sliding_window": 6, "norm_epsilon": 1e-4}),
    "starcoder 2 without biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt-oss": (
        "GptOss",
        _EXPERTS
        | {
            "swiglu_limit": 0.4,
            "sliding_window": 6,
            "rope_parameters": _YARN | {"truncate": False, "beta_fast": 24.0},
            "layer_types": _WINDOWS[1:] + _WINDOWS[:1],
        },
    ),
    "gpt-oss, the published positions, without biases of attention": (
        "GptOss",
        _EXPERTS | {"attention_bias": False, "sliding_window": 6},
    ),
    "deepseek v2": (
        "DeepseekV2",
        _DEEPSEEK
        | {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": _YARN | {"mscale": 0.8, "mscale_all_dim": 0.6},
        },
    ),
    "deepseek v2 lite": ("DeepseekV2", _DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 3, "rms_norm_eps": 1e-6}),
    "deepseek v3": (
        "DeepseekV3",
        _DEEPSEEK
        | {
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 20.0},
        },
    ),
    "deepseek v3 without groups": (
        "DeepseekV3",
        _DEEPSEEK
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_parameters": _YARN | {"mscale": 0.5},
        },
    ),
    "deepseek v3.2": (
        "DeepseekV32",
        _DEEPSEEK
        | {
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "index_n_heads": 26,  # so many that no two scores are 0: their choice among equal scores has no rule
            "index_head_dim": 14,
            "index_topk": 5,
            "rope_parameters": _YARN | {"mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 20.0},
        },
    ),
    "gemma 2": (
        "Gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
        },
    ),
    "gemma 3": (
        "Gemma3",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "layer_types": _WINDOWS,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
            },
        },
    ),
    # transformers accepts the cap of Gemma 3's scores and does not apply it.
    "gemma 3 with a cap of scores": ("Gemma3", {"sliding_window": 6, "attn_logit_softcapping": 1.5, "head_dim": 16}),
    "gemma 2 without windows": ("Gemma2", _NO_WINDOWS | {"head_dim": 16}),
    "gemma 3 without windows": ("Gemma3", _NO_WINDOWS | {"head_dim": 16}),
    "olmo 3 without windows": ("Olmo3", _NO_WINDOWS),
    "gpt-oss without windows": (
        "GptOss",
        _NO_WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "gemma 3, published positions": ("Gemma3", {"sliding_window": 6, "num_hidden_layers": 6, "head_dim": 16}),
    "olmo 2": ("Olmo2", {"attention_bias": True, "rms_norm_eps": 1e-4}),
    "olmo 3": (
        "Olmo3",
        {
            "sliding_window": 6,
            "layer_types": _WINDOWS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
                "full_attention": _YARN | {"attention_factor": 1.1},
            },
        },
    ),
    "olmo 3, published positions": ("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt 2": ("GPT2", {"layer_norm_epsilon": 1e-4, "n_inner": 72}),
    "gpt 2, exact gelu, plain scores": (
        "GPT2",
        {"activation_function": "gelu", "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "phi": ("Phi", {"layer_norm_eps": 1e-4, "rope_parameters": _PARTLY}),
    "phi with norms of heads, tied": (
        "Phi",
        {"qk_layernorm": True, "tie_word_embeddings": True, "hidden_act": "gelu", "num_key_value_heads": 4},
    ),
    "phi 3": ("Phi3", {"sliding_window": 7}),
    "phi 4 mini": (
        "Phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **_DIVISORS},
        },
    ),
    "qwen 3 next": (
        "Qwen3Next",
        _QWEN3_NEXT
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen 3 next, published layers": (
        "Qwen3Next",
        _QWEN3_NEXT | {"num_hidden_layers": 4, "norm_topk_prob": False, "head_dim": 16, "rms_norm_eps": 1e-5},
    ),
    "mamba 2": (
        "Mamba2",
        _MAMBA
        | {"num_heads": 8, "head_dim": 8, "expand": 1, "state_size": 5, "num_hidden_layers": 2}
        | {"time_step_limit": [0.05, float("inf")], "tie_word_embeddings": True, "residual_in_fp32": False},
    ),
    "nemotron h": (
        "NemotronH",
        _HYBRID
        | {
            "hybrid_override_pattern": "M*-ME",
            "time_step_min": 0.05,
            "layer_norm_epsilon": 1e-4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
        },
    ),
    "nemotron h without experts": ("NemotronH", _HYBRID | {"hybrid_override_pattern": "M-*", "mlp_bias": True}),
    "nemotron h, tied": ("NemotronH", _HYBRID | {"hybrid_override_pattern": "M*-", "tie_word_embeddings": True}),
    "falcon": ("Falcon", {"bias": True}),
    "falcon, attention before the mlp": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 72},
    ),
    "falcon with alibi": ("Falcon", _ALIBI | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon with alibi, six heads": ("Falcon", _ALIBI | {"num_attention_heads": 6, "hidden_size": 48}),
    "falcon, two norms": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, one norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "activation": "gelu_new"},
    ),
}
