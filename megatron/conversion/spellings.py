"""Settings that different flags express alike.

An export reads its config.json back and compares the result with the run, flag by flag. Where the run used other flags
for the same function, the read-back fields get the run's spelling first, so that only real differences are reported.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS, DescribedLayer, described_layers
from megatron.core.transformer.config.hybrid import mamba_heads
from megatron.core.transformer.layer_patterns import (
    has_experts,
    has_rope,
    hybrid_letters,
    is_chunked,
    is_windowed,
    layer_parts,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.flag_table import flag_table
from megatron.training.config.model import ACTIVATIONS

Values = Mapping[str, Any]

_DENSE_BIASES = ("attention_output_bias", "mlp_bias")
_EXPERT_BIASES = ("moe_router_bias", "moe_expert_mlp_bias")


def run_of(values: Values) -> TransformerConfig:
    """Returns an object with the values of a run as attributes, as functions of a config want them."""
    return cast(TransformerConfig, SimpleNamespace(**values))


def bias_places(values: Values) -> dict[str, bool]:
    """Returns which linear layers have a bias, by field name."""
    default = values["add_bias_linear"]
    mixers = {layer_parts(run_of(values), layer + 1) for layer in range(values["num_layers"])}
    has_mlp = bool(values["moe_shared_expert_intermediate_size"]) or any(of.channel_mixer == "mlp" for of in mixers)
    fields = ["attention_output_bias", *(("mlp_bias",) if has_mlp else ())]
    fields += _EXPERT_BIASES if values["num_moe_experts"] is not None else ()
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
    """Returns the number of segments that BERT's embedding distinguishes. Without a flag: 2 with the binary head."""
    given = values["bert_num_tokentypes"]
    return (2 if values["bert_binary_head"] else 0) if given is None else int(given)


def has_t5_head_bias(values: Values) -> bool:
    """Whether T5's output layer has a bias; one with a weight of its own has none."""
    return bool(values["t5_head_bias"]) and not values["untie_embeddings_and_output_weights"]


def _router_weights(values: Values) -> object:
    if values["moe_router_score_function"] != "softmax":
        given = values["moe_router_norm_topk_prob"]
        return values["moe_router_pre_softmax"], values["moe_router_topk"] > 1 if given is None else given
    return router_weights_sum_to_one(values)


def _rope_scaling(values: Values) -> object:
    both = values["rope_scaling_type"] is not None or values["use_rope_scaling"]
    return rope_scaling_of(values), values["rotary_seq_len_interpolation_factor"] if both else None


def _mlp_widths(values: Values) -> object:
    kinds = _kinds_of_layers(values)
    of_expert = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
    return values["ffn_hidden_size"] if "mlp" in kinds else None, of_expert if "moe" in kinds else None


def _kinds_of_layers(values: Values) -> set[str | None]:
    """Returns the names of all branches that some layer has."""
    config = run_of(values)
    return {part for layer in range(values["num_layers"]) for part in layer_parts(config, layer + 1)}


def _of_attention(values: Values) -> object:
    """Returns the sizes of attention; None if no layer has it."""
    if _kinds_of_layers(values).isdisjoint(("attention", "dsa")):
        return None
    heads = values["num_attention_heads"]
    return heads, values["num_query_groups"] if values["group_query_attention"] else heads, values["kv_channels"]


def _activation(values: Values) -> object:
    """Returns the switches of activations; None if no layer has an MLP or experts."""
    has_any = not _kinds_of_layers(values).isdisjoint(("mlp", "moe"))
    return tuple(bool(values[name]) for name in ACTIVATIONS) if has_any else None


def _mamba(values: Values) -> object:
    """Returns the sizes of Mamba-2 layers; None if there are none."""
    if "mamba" not in _kinds_of_layers(values):
        return None
    return mamba_heads(run_of(values)), *(values[name] for name in _OF_MAMBA)


_OF_MAMBA = ("mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_conv_kernel_dim", "mamba_min_time_step")


def _delta_nets(values: Values) -> object:
    config = run_of(values)
    return [layer_parts(config, layer + 1).token_mixer for layer in range(values["num_layers"])]


def _router_groups(values: Values) -> object:
    groups, chosen = values["moe_router_num_groups"], values["moe_router_group_topk"]
    if groups is None or chosen is None:
        return None
    return groups, chosen, values["moe_router_group_score_topk"] or values["moe_router_topk"] // chosen


def score_scale(values: Values) -> float | None:
    """Returns the factor of the attention scores; None for the default of latent attention."""
    if values["softmax_scale"] is not None:
        return float(values["softmax_scale"])
    width = values["kv_channels"]
    return None if values["multi_latent_attention"] or not width else float(width) ** -0.5


def _rounded(number: float | None) -> str | None:
    """Returns six digits: more are lost where a factor is the inverse or the square root of what config.json has."""
    return None if number is None else f"{number:.6g}"


def _base_of_windowed_layers(values: Values) -> object:
    """Returns the base of layers with a window; None if there are none, or if they are scaled like the others."""
    if not any(_layers(values, is_windowed)):
        return None
    own = values["rotary_base_local"]
    is_like_others = own is None and rope_scaling_of(values) is not None
    return None if is_like_others else float(values["rotary_base"] if own is None else own)


_OF_YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
)


def _yarn_of_latent_attention(values: Values) -> object:
    has_yarn = values["multi_latent_attention"] and values["rope_type"] == "yarn"
    return tuple(values[name] for name in _OF_YARN) if has_yarn else None


def _epsilon_of_latents(values: Values) -> object:
    if not values["multi_latent_attention"]:
        return None
    own = values["latent_layernorm_epsilon"]
    return values["layernorm_epsilon"] if own is None else own


def gelu_kind(values: Values) -> str | None:
    """Returns `tanh` or `exact` for an MLP with GELU, None for another activation."""
    if any(values[name] for name in ACTIVATIONS if name != "openai_gelu"):
        return None
    return "tanh" if values["openai_gelu"] or (values["bias_gelu_fusion"] and values["add_bias_linear"]) else "exact"


_OF_HYBRIDS = ("hybrid_layer_pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio", "num_layers")


def _layers(values: Values, holds: Callable[[Any, int], bool]) -> list[bool]:
    config = run_of(values)
    return [holds(config, layer) for layer in range(1, values["num_layers"] + 1)]


def sized_layers(values: Values) -> list[DescribedLayer] | None:
    """Returns the description of each layer of a heterogeneous model, with the sizes that come from other fields;
    None for other models."""
    described = described_layers(run_of(values))
    if described is None:
        return None
    heads = values["num_attention_heads"]
    groups = values["num_query_groups"] if values["group_query_attention"] and values["num_query_groups"] else heads
    width = values["ffn_hidden_size"] or 4 * values["hidden_size"]
    return [
        layer._replace(
            num_query_groups=(layer.num_query_groups or groups) if layer.attention == "attention" else None,
            ffn_hidden_size=(layer.ffn_hidden_size or width) if layer.mlp == "mlp" else None,
        )
        for layer in described
    ]


def _layers_of_described(values: Values) -> object:
    """Returns what descriptions of layers say, or an object that equals no other for a model without them."""
    layers = sized_layers(values)
    return object() if layers is None else layers


_OF_DESCRIBED = ("num_query_groups", "group_query_attention", "ffn_hidden_size")
"""Fields that descriptions of layers replace."""

_SPELLINGS: tuple[tuple[tuple[str, ...], Callable[[Values], object]], ...] = (
    (_OF_HYBRIDS, lambda values: hybrid_letters(run_of(values))),
    (("num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels"), _of_attention),
    ((*ACTIVATIONS,), _activation),
    (("mamba_num_heads", *_OF_MAMBA), _mamba),
    (("linear_attention_freq",), _delta_nets),
    (("add_bias_linear", "add_qkv_bias", *_DENSE_BIASES, *_EXPERT_BIASES), bias_places),
    (("window_size", "window_attn_skip_freq"), lambda values: (values["window_size"], _layers(values, is_windowed))),
    (
        ("attention_chunk_size", "attention_chunk_skip_freq"),
        lambda values: (values["attention_chunk_size"], _layers(values, is_chunked)),
    ),
    (("no_rope_freq",), lambda values: _layers(values, has_rope)),
    (("moe_layer_freq",), lambda values: _layers(values, has_experts)),
    (("moe_router_pre_softmax", "moe_router_norm_topk_prob"), _router_weights),
    (
        ("use_rope_scaling", "rope_scaling_type", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
        _rope_scaling,
    ),
    (("bert_num_tokentypes",), num_tokentypes),
    (("t5_head_bias",), has_t5_head_bias),
    (("ffn_hidden_size", "moe_ffn_hidden_size"), _mlp_widths),
    (("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"), _router_groups),
    (("moe_router_topk_scaling_factor",), lambda values: values["moe_router_topk_scaling_factor"] or 1.0),
    (("alibi_factor",), lambda values: _rounded(values["alibi_factor"])),
    (("softmax_scale",), lambda values: _rounded(score_scale(values))),
    (("embedding_multiplier",), lambda values: _rounded(values["embedding_multiplier"])),
    (("logit_scale",), lambda values: _rounded(values["logit_scale"])),
    (("rotary_base_local",), _base_of_windowed_layers),
    (_OF_YARN, _yarn_of_latent_attention),
    (("latent_layernorm_epsilon",), _epsilon_of_latents),
    (("openai_gelu", "bias_gelu_fusion"), gelu_kind),
    ((*HETEROGENEOUS, *_OF_DESCRIBED), _layers_of_described),
)
"""Fields that say one thing together, and the function that computes what they say."""


def changes_nothing(name: str, values: Values) -> bool:
    """Whether a run with these values computes the same without the flag of the field `name`."""
    plain = {**values, name: flag_table()[name].default}
    return any(name in names and meaning(plain) == meaning(values) for names, meaning in _SPELLINGS)


def in_spelling_of(values: Values, fields: Values) -> dict[str, object]:
    """Returns `fields`, with the run's `values` of those fields that say the same in another way.

    Fields that are not given have their defaults. `values` are all values of the run.
    """
    read_back = {name: flag.default for name, flag in flag_table().items()} | dict(fields)
    spelled = dict(fields)
    for names, meaning in _SPELLINGS:
        if meaning(read_back) == meaning(values):
            spelled |= {name: values[name] for name in names if name in values and values[name] != read_back[name]}
    if not spelled.get("group_query_attention"):
        spelled.pop("num_query_groups", None)  # without groups, a run derives it from the number of heads
    return spelled
