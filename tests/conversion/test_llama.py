"""Llama and its relatives: Granite's factors."""

import pytest

from megatron.conversion.families import family_of
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

GRANITE = family_of("GraniteForCausalLM")


def test_factors_of_granite() -> None:
    published = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
    fields = GRANITE.fields_of(published | {"residual_multiplier": 0.22})
    assert (fields["softmax_scale"], fields["logit_scale"], fields["residual_multiplier"]) == (0.015625, 0.125, 0.22)
    keys = GRANITE.config_of({name: flag.default for name, flag in flag_table().items()} | fields)
    assert published.items() <= keys.items()
    with pytest.raises(UserError, match="logits_scaling is 0; it must be larger than 0"):
        GRANITE.fields_of({"logits_scaling": 0})
