"""Where the app's default differs from the library's.

A bare `TransformerConfig()` is for library users, a run without flags for those of the app; Megatron-LM gives the two
different defaults in these places.
"""

from typing import Any

APP_DEFAULTS: dict[str, Any] = {
    # sizes that a run must state
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "num_query_groups": 1,  # only looked at with --group-query-attention
    # fusions: on
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "bias_dropout_fusion": True,
    "persist_layer_norm": True,
    "apply_rope_fusion": True,
    "overlap_p2p_comm": True,
    "align_param_gather": True,
    # attention and positions
    "attention_softmax_in_fp32": False,
    "cp_comm_type": ["p2p"],
    "cuda_graph_scope": [],
    "rope_type": None,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rotary_scaling_factor": 1.0,
    # optimizer
    "min_lr": 0.0,
    "muon_momentum": 0.9,
    "optimizer_offload_fraction": 1.0,
}
