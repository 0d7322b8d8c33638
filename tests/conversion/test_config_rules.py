"""Rules: keys of config.json to fields and back."""

from typing import Any

import pytest

from megatron.conversion.config_rules import (
    Copied,
    Fixed,
    Implied,
    Inverse,
    Rule,
    TiedEmbeddings,
    Unused,
    Written,
)
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

CASES: list[tuple[Rule, dict[str, Any], dict[str, Any]]] = [
    (Copied("hidden_size", "hidden_size"), {"hidden_size": 64}, {"hidden_size": 64}),
    (Fixed("hidden_act", "silu"), {"hidden_act": "silu"}, {}),
    (Fixed("hidden_act", "silu"), {}, {}),
    (Unused(("torch_dtype",)), {"torch_dtype": "float16"}, {}),
    (Inverse("logits_scaling", "logit_scale"), {"logits_scaling": 4.0}, {"logit_scale": 0.25}),
    (Implied({"swiglu": True}), {}, {"swiglu": True}),
    (Written({"is_decoder": True}), {}, {}),
    (TiedEmbeddings(), {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
]


@pytest.mark.parametrize(("rule", "config", "fields"), CASES)
def test_fields_and_back(rule: Rule, config: dict[str, Any], fields: dict[str, Any]) -> None:
    """The keys that a rule writes for the fields that it read give these fields again."""
    assert rule.fields(config) == fields
    derived = {"num_layers": config.get("num_hidden_layers", 1), "num_moe_experts": 4}
    derived["num_query_groups"] = fields.get("num_attention_heads")
    values = {name: flag.default for name, flag in flag_table().items()} | derived | fields
    assert rule.fields(config | rule.keys(values)) == fields


@pytest.mark.parametrize(
    ("rule", "config", "said"),
    [
        (Fixed("hidden_act", "silu"), {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        (
            Inverse("logits_scaling", "logit_scale"),
            {"logits_scaling": 0},
            "logits_scaling is 0; it must be larger than 0",
        ),
    ],
)
def test_what_is_unsupported_is_named_by_its_key(rule: Rule, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        rule.fields(config)
    assert str(refusal.value) == said


def test_a_key_with_two_names_is_written_under_both_and_may_say_that_a_field_is_not_set() -> None:
    rule = Copied("num_local_experts", "num_moe_experts", also="num_experts", unset=0)
    assert rule.keys({"num_moe_experts": None}) == {"num_local_experts": 0, "num_experts": 0}
    assert rule.keys({"num_moe_experts": 4}) == {"num_local_experts": 4, "num_experts": 4}


def test_keys_without_a_field_are_written_as_the_rule_says() -> None:
    assert Written({"is_decoder": True}).keys({}) == {"is_decoder": True}
    assert Fixed("hidden_act", "silu", write=False).keys({}) == {} == Unused(("torch_dtype",)).keys({})
