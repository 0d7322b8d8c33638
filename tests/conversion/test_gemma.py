"""Gemma 2 and 3: published settings."""

import pytest

from megatron.conversion.families import family_of
from megatron.conversion.spellings import in_spelling_of
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

GEMMA2, GEMMA3 = family_of("Gemma2ForCausalLM"), family_of("Gemma3ForCausalLM")


SIZES = {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42}


def test_factors_follow_from_the_sizes() -> None:
    fields = GEMMA2.fields_of({**SIZES, "query_pre_attn_scalar": 256})
    assert fields["softmax_scale"] == 0.0625
    assert fields["embedding_multiplier"] == pytest.approx(59.866518, rel=1e-7)
    assert (fields["attn_logit_softcapping"], fields["final_logit_softcapping"]) == (50.0, 30.0)


def test_a_rounded_factor_is_the_same_factor() -> None:
    """A run gives the square root as a decimal number."""
    fields = GEMMA2.fields_of(SIZES)
    defaults = {name: flag.default for name, flag in flag_table().items()}
    for given, is_equal in ((59.866518, True), (59.8, False)):
        run = {**defaults, **fields, "embedding_multiplier": given}
        assert (in_spelling_of(run, fields)["embedding_multiplier"] == given) is is_equal


def test_gemma_3_has_other_positions_in_layers_with_a_window() -> None:
    fields = GEMMA3.fields_of({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": None})
    assert (fields["rotary_base"], fields["rotary_base_local"]) == (1000000, 10000.0)
    assert (fields["rope_scaling_type"], fields["rope_scaling_factor"]) == ("linear", 8.0)
    assert fields["final_logit_softcapping"] is None and fields["qk_layernorm"]


def test_attention_to_both_sides_is_refused() -> None:
    with pytest.raises(UserError, match="use_bidirectional_attention is True; only False is supported"):
        GEMMA3.fields_of({"use_bidirectional_attention": True})
