"""GPT-2: settings, names of older files, and what is refused."""

from megatron.conversion.families import family_of

GPT2 = family_of("GPT2LMHeadModel")


def test_gpt2_of_the_hub() -> None:
    """The first file has no prefix, and masks beside the weights."""
    fields = GPT2.fields_of({"n_ctx": 1024, "n_embd": 768, "n_head": 12, "task_specific_params": {}})
    assert (fields["kv_channels"], fields["ffn_hidden_size"], fields["hidden_dropout"]) == (64, 3072, 0.1)
    assert GPT2.fields_of({"hidden_size": 96, "num_attention_heads": 12})["kv_channels"] == 8
    assert GPT2.current_name("h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
    assert GPT2.current_name("transformer.h.0.ln_1.bias") == "transformer.h.0.ln_1.bias"
    assert GPT2.is_constant(GPT2.current_name("h.11.attn.bias"))
