"""Reads config.json: checks the types of its values, and completes it with the defaults of transformers."""

import math
from collections.abc import Mapping

from megatron.conversion.hub_defaults import ALIASES, HUB_DEFAULTS, SIZES, Json
from megatron.core.exceptions import UserError

_TYPES: dict[str, type] = {
    "num_key_value_heads": int,
    "num_decoder_layers": int,
    "head_dim": int,
    "sliding_window": int,
    "layer_types": list,
    "layers_block_type": list,
    "time_step_limit": list,
    "mamba_d_head": object,
    "moe_latent_size": int,
    "mlp_only_layers": list,
    "mlp_layer_types": list,
    "q_lora_rank": int,
    "n_group": int,
    "topk_group": int,
    "topk_method": str,
    "final_logit_softcapping": float,
    "attn_logit_softcapping": float,
    "use_bidirectional_attention": bool,
    "num_ln_in_parallel_attn": int,
    "num_kv_heads": int,
    "n_inner": int,
    "ffn_hidden_size": int,
    "rope_parameters": dict,
    "rope_scaling": dict,
}
"""Types of the keys for which transformers accepts null too. Other keys have the type of their default."""

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    object: "a number or a word",
}


def with_defaults(config: Json, model_type: str, more: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """Returns the keys of config.json, and those that it lacks with the values that transformers gives them.
    `more` are values for a `model_type` that the table does not have.

    A key under its second name gets its first name. Raises UserError naming each key whose value has another type than
    transformers expects, and each key whose two names have different values.
    """
    defaults, found, problems = {**HUB_DEFAULTS.get(model_type, {}), **(more or {})}, dict(config), []
    for alias, key in ALIASES.get(model_type, {}).items():
        value = found.pop(alias, None)
        if value is not None and found.setdefault(key, value) != value:
            problems.append(f"{key} is {found[key]!r}, but {alias} is {value!r}; they are the same setting")
    for key, value in found.items():
        expected = _TYPES.get(key, type(defaults[key]) if key in defaults else int if key in SIZES else type(None))
        if expected is type(None) or (value is None and key in _TYPES):
            continue
        if not _is_of_type(value, expected):
            problems.append(f"{key} is {value!r}, but must be {_NAMES[expected]}")
    if problems:
        raise UserError("\n".join(problems))
    return defaults | found


def _is_of_type(value: Json, expected: type) -> bool:
    if isinstance(value, bool):
        return expected is bool
    if expected is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, expected)
