"""Values that transformers gives to keys that config.json does not have.

The values are those of the config classes of transformers 5.23. A test compares them with the installed release. Sizes
(`SIZES`) are absent: every file has them. Only the text parts of multimodal files may leave them out.
"""

import math
from typing import Any

Json = Any

SIZES = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("n_embd", "n_layer", "n_head", "n_positions", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_num_experts", "moe_k"),
        *("state_size", "mamba_n_heads", "mamba_d_state", "index_n_heads", "index_head_dim", "index_topk"),
    )
)
"""Keys with sizes, which are integers. A file without one that its family has no default for is refused."""

_EVERY_FAMILY: dict[str, Json] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
}
_WINDOWS_BY_LAYER: dict[str, Json] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
DECODER_DEFAULTS: dict[str, Json] = _EVERY_FAMILY | {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
}
"""For families whose own file has their other defaults."""
_GEMMA: dict[str, Json] = {
    **{key: value for key, value in _EVERY_FAMILY.items() if key != "hidden_act"},
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_DEEPSEEK: dict[str, Json] = {
    "q_lora_rank": 1536,
    "attention_bias": False,
}
_DEEPSEEK_V3: dict[str, Json] = {
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_QWEN: dict[str, Json] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_MISTRAL: dict[str, Json] = _EVERY_FAMILY | {
    "head_dim": None,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}

_BERT: dict[str, Json] = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
}

HUB_DEFAULTS: dict[str, dict[str, Json]] = {
    "llama": DECODER_DEFAULTS | {"head_dim": None, "mlp_bias": False},
    "granite": DECODER_DEFAULTS
    | {
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "mistral": _MISTRAL
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "sliding_window": 4096},
    "qwen2": _EVERY_FAMILY | _QWEN | _WINDOWS_BY_LAYER,
    "qwen3": _EVERY_FAMILY | _QWEN | _WINDOWS_BY_LAYER | {"head_dim": 128, "attention_bias": False},
    "mixtral": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
    "qwen3_moe": _EVERY_FAMILY
    | _QWEN
    | {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "gpt_oss": _EVERY_FAMILY
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "deepseek_v2": DECODER_DEFAULTS
    | _DEEPSEEK
    | {
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _EVERY_FAMILY
    | _DEEPSEEK
    | _DEEPSEEK_V3
    | {"max_position_embeddings": 4096, "rope_interleave": True, "num_mtp_layers": 1},
    "deepseek_v32": _EVERY_FAMILY
    | _DEEPSEEK
    | _DEEPSEEK_V3
    | {
        "max_position_embeddings": 163840,
        "mlp_layer_types": None,
        "layer_types": None,
        "mlp_bias": False,
    },
    "gemma2": _GEMMA
    | {
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "use_bidirectional_attention": None,
    },
    "gemma3_text": _GEMMA
    | {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
    | {"num_hidden_layers": 26, "num_attention_heads": 8}
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "rope_theta": 1000000.0,
    },
    "olmo2": DECODER_DEFAULTS | {"rms_norm_eps": 1e-5},
    "olmo3": DECODER_DEFAULTS
    | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "phi3": _EVERY_FAMILY
    | {
        "num_key_value_heads": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "falcon": {
        "num_ln_in_parallel_attn": None,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_kv_heads": None,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_parameters": None,
        "rope_scaling": None,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    "qwen3_next": _EVERY_FAMILY
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "layer_types": None,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "mamba2": {
        "head_dim": 64,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.0, math.inf),
        "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "layers_block_type": None,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "sliding_window": None,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "use_bias": False,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "bert": _BERT | {},
    "megatron-bert": _BERT | {},
    "t5": {
        "num_decoder_layers": None,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "is_decoder": False,
    },
}
"""By `model_type`, then by key. `rope_theta` is the config class's `default_theta`."""

ALIASES = {
    "chatglm": {"padded_vocab_size": "vocab_size"},
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    "deepseek_v32": {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    },
    "qwen3_next": {"num_local_experts": "num_experts"},
    "nemotron_h": {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
}
"""Second names of keys, by `model_type`: releases of transformers write one or the other."""
