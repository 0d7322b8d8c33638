"""Absent keys of config.json have the values that the installed transformers gives them."""

import dataclasses
import json
from typing import Any

import pytest
import transformers
from conversion.oracles import MODELS, architecture_of, config_class_of, settings_of, sizes_of
from support.each import for_each

from megatron.conversion.config_json import with_defaults
from megatron.conversion.config_rules import Unused
from megatron.conversion.families import FAMILIES, family_of
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import SIZES
from megatron.core.exceptions import UserError

NOT_IN_A_CLASS = {"rope_theta", "rope_scaling"}
"""Keys that are no fields of the config classes."""

WITHOUT_DEFAULT = {"use_mrope", "head_dim", "layer_types", "max_window_layers", "position_embedding_type"} | {
    "dense_act_fn",
    "is_gated_act",
    "scale_decoder_outputs",
    "moe_layer_freq",
    "num_mtp_layers",
    "scoring_func",
    "topk_method",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "attention_bias",
    "apply_residual_connection_post_layernorm",
    "full_attention_interval",
    "hybrid_override_pattern",
    "num_hidden_layers",
    "use_sliding_window",
    "rotary_pct",
    "rotary_dim",
    "qk_norm_type",
    "use_routing_bias",
    "use_qk_norm",
    "rotary_emb_base",
    "hidden_activation",
    "num_key_value_heads",
    "global_rope_theta",
    "local_rope_theta",
    "global_attn_every_n_layers",
}
"""Keys that a family reads and that its config class does not have."""

WITH_CLASS = [family for family in FAMILIES if family.model_type not in ("baichuan", "chatglm", "nemotron-nas")]
"""Families that transformers has; test_remote_code.py and test_decilm.py test the others."""


def config_class(family: Family) -> Any:
    return type(transformers.AutoConfig.for_model(family.model_type))


@for_each(WITH_CLASS, lambda family: family.model_type)
def test_the_table_is_that_of_transformers(family: Family) -> None:
    found = {field.name: field.default for field in dataclasses.fields(config_class(family))}
    for key, value in family.all_defaults.items():
        if key not in NOT_IN_A_CLASS | ({"tie_word_embeddings"} if family.model_family == "t5" else set()):
            assert found[key] == value and type(found[key]) is type(value), key
    if "rope_theta" in family.all_defaults:
        theta = config_class(family).default_theta
        theta = theta["global"] if isinstance(theta, dict) else theta
        assert theta == family.all_defaults["rope_theta"]
    assert config_class(family).model_type == family.model_type


@for_each(WITH_CLASS, lambda family: family.model_type)
def test_the_table_has_every_key_that_the_family_reads(family: Family) -> None:
    read = {key for rule in family.rules if not isinstance(rule, Unused) for key in rule.reads}
    without_default = read - family.all_defaults.keys() - SIZES
    fields = {field.name for field in dataclasses.fields(config_class(family))}
    assert without_default <= WITHOUT_DEFAULT and not without_default & fields


@for_each(MODELS)
def test_a_key_that_is_left_out_means_what_transformers_reads(name: str) -> None:
    """Each key of a model alone is left out; our fields are those of the config that transformers completes. A size
    is named instead."""
    kind = MODELS[name][0]
    family = family_of(architecture_of(kind))
    whole = sizes_of(family) | {key: value for key, value in settings_of(name).items() if key != "attn_implementation"}
    for absent in [*whole, None]:
        config = {key: value for key, value in whole.items() if key != absent}
        try:
            completed = json.loads(config_class_of(kind)(**config).to_json_string())
        except Exception:  # of several kinds: the others no longer fit the default of the one that is absent
            of_heads = ("num_attention_heads", "num_heads", "head_dim", "expand", "mamba_n_heads", "mamba_expand")
            assert absent in ("num_hidden_layers", "hidden_size", "layer_types", *of_heads), absent
            continue
        found = outcome(family, config)
        if isinstance(found, str) and "is missing" in found:
            assert found == f"config.json: {absent} is missing; it must be an integer" and absent in SIZES
        else:
            assert found == outcome(family, completed), absent


def outcome(family: Family, config: dict[str, Any]) -> Any:
    """The fields, or why there are none."""
    try:
        return family.fields_of(config)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("mistral", "sliding_window", 4096),
        ("qwen2", "sliding_window", 4096),
        ("qwen2", "num_key_value_heads", 32),
    ],
)
def test_known_defaults(model_type: str, key: str, value: int) -> None:
    assert with_defaults({}, model_type)[key] == value
