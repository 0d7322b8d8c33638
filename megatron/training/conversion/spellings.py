"""Settings that different flags express alike.

An export reads its config.json back and compares the result with the run, flag by flag. Where the run used other flags
for the same function, the read-back fields get the run's spelling first, so that only real differences are reported.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.layer_patterns import has_experts, is_windowed
from megatron.training.config.flag_table import flag_table

Values = Mapping[str, Any]

_DENSE_BIASES = ("attention_output_bias", "mlp_bias")
_EXPERT_BIASES = ("moe_router_bias", "moe_expert_mlp_bias")


def bias_places(values: Values) -> dict[str, bool]:
    """Returns which linear layers have a bias, by field name."""
    default = values["add_bias_linear"]
    fields = [*_DENSE_BIASES, *(_EXPERT_BIASES if values["num_moe_experts"] is not None else ())]
    places = {field: bool(default if values[field] is None else values[field]) for field in fields}
    return places | {"add_qkv_bias": bool(values["add_qkv_bias"] or default)}


def router_weights_sum_to_one(values: Values) -> bool:
    """Whether the weights of a token's experts sum to one: the softmax is over the chosen experts, or its values are
    divided by their sum."""
    return not values["moe_router_pre_softmax"] or bool(values["moe_router_norm_topk_prob"])


def rope_scaling_of(values: Values) -> tuple[str, float] | None:
    """Returns the kind and factor of the rotary scaling, whichever flags say it; None without scaling.

    --use-rope-scaling is --rope-scaling-type llama3, and --rotary-seq-len-interpolation-factor is linear scaling.
    """
    if values["use_rope_scaling"]:
        return "llama3", float(values["rope_scaling_factor"])
    if values["rope_scaling_type"] is not None:
        return values["rope_scaling_type"], float(values["rope_scaling_factor"])
    divisor = values["rotary_seq_len_interpolation_factor"]
    return None if divisor is None else ("linear", float(divisor))


def num_tokentypes(values: Values) -> int:
    """Returns the number of segments that BERT's embedding tells apart: 2 with the binary head if no flag says it."""
    given = values["bert_num_tokentypes"]
    return (2 if values["bert_binary_head"] else 0) if given is None else int(given)


def has_t5_head_bias(values: Values) -> bool:
    """Whether T5's output layer has a bias; one with a weight of its own has none."""
    return bool(values["t5_head_bias"]) and not values["untie_embeddings_and_output_weights"]


def _key_value_heads(values: Values) -> Any:
    return values["num_query_groups"] if values["group_query_attention"] else values["num_attention_heads"]


def _router_weights(values: Values) -> Any:
    if values["moe_router_score_function"] != "softmax":
        return values["moe_router_pre_softmax"], values["moe_router_norm_topk_prob"]
    return router_weights_sum_to_one(values)


def _rope_scaling(values: Values) -> Any:
    both = values["rope_scaling_type"] is not None or values["use_rope_scaling"]
    return rope_scaling_of(values), values["rotary_seq_len_interpolation_factor"] if both else None


def _windowed_layers(values: Values) -> Any:
    return values["window_size"], _layers(values, is_windowed)


def _expert_layers(values: Values) -> Any:
    return _layers(values, has_experts)


def _layers(values: Values, holds: Callable[[Any, int], bool]) -> list[bool]:
    config = SimpleNamespace(**values)
    return [holds(config, layer) for layer in range(1, values["num_layers"] + 1)]


_SPELLINGS: tuple[tuple[tuple[str, ...], Callable[[Values], Any]], ...] = (
    (("group_query_attention", "num_query_groups"), _key_value_heads),
    (("add_bias_linear", "add_qkv_bias", *_DENSE_BIASES, *_EXPERT_BIASES), bias_places),
    (("window_size", "window_attn_skip_freq"), _windowed_layers),
    (("moe_layer_freq",), _expert_layers),
    (("moe_router_pre_softmax", "moe_router_norm_topk_prob"), _router_weights),
    (
        ("use_rope_scaling", "rope_scaling_type", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
        _rope_scaling,
    ),
    (("bert_num_tokentypes",), num_tokentypes),
    (("t5_head_bias",), has_t5_head_bias),
)
"""Fields that say one thing together, and the function that computes what they say."""


def in_spelling_of(values: Values, fields: Values) -> dict[str, Any]:
    """Returns `fields`, with the run's `values` of those fields that say the same in another way.

    Fields that are not given have their defaults. `values` are all values of the run.
    """
    read_back = {name: flag.default for name, flag in flag_table().items()} | dict(fields)
    spelled = dict(fields)
    for names, meaning in _SPELLINGS:
        if meaning(read_back) == meaning(values):
            spelled |= {name: values[name] for name in names if values[name] != read_back[name]}
    if not spelled.get("group_query_attention"):
        spelled.pop("num_query_groups", None)  # without groups, a run derives it from the number of heads
    return spelled
