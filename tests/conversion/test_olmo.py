"""OLMo 2 and 3: norms after attention and MLP."""

from megatron.conversion.families import family_of


def test_norms() -> None:
    for name in ("Olmo2ForCausalLM", "Olmo3ForCausalLM"):
        family = family_of(name)
        fields = family.fields_of({})
        assert (fields["norm_placement"], fields["qk_norm_scope"], fields["layernorm_epsilon"]) == (
            "post",
            "full",
            1e-5,
        )
        assert not any("input_layernorm" in tensor for tensor in family.tensors_of({}))


def test_only_olmo_3_has_windows() -> None:
    assert "window_size" not in family_of("Olmo2ForCausalLM").fields_of({})
    fields = family_of("Olmo3ForCausalLM").fields_of({})
    assert (fields["window_size"], fields["window_attn_skip_freq"]) == ((4095, 0), [1, 1, 1, 0] * 8)
    assert fields["rotary_base"] == fields["rotary_base_local"] == 500000
