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


def _read() -> tuple[dict[str, dict[str, Json]], dict[str, dict[str, str]]]:
    defaults: dict[str, dict[str, Json]] = {}
    aliases: dict[str, dict[str, str]] = {}
    for model_type, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
        shared, without = defaults[table.pop("like")] if "like" in table else {}, table.pop("without", "").split()
        nulls = dict.fromkeys(table.pop("none", "").split())
        if "aliases" in table:
            aliases[model_type] = table.pop("aliases")
        own = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        defaults[model_type] = {key: value for key, value in shared.items() if key not in without} | nulls | own
    return defaults, aliases


HUB_DEFAULTS, ALIASES = _read()
"""By `model_type`: values by key; and second names of keys, since releases of transformers write one or the other."""
