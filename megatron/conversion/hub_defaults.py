"""Values that transformers gives to keys that config.json does not have; hub_defaults.toml has them."""

import tomllib
from pathlib import Path
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


def _defaults_by_type() -> dict[str, dict[str, Json]]:
    found: dict[str, dict[str, Json]] = {}
    for model_type, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
        shared, without = found[table.pop("like")] if "like" in table else {}, table.pop("without", "").split()
        nulls = dict.fromkeys(table.pop("none", "").split())
        own = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        found[model_type] = {key: value for key, value in shared.items() if key not in without} | nulls | own
    return found


HUB_DEFAULTS = _defaults_by_type()
"""By `model_type`, then by key."""

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
