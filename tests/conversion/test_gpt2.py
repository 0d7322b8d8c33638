"""GPT-2: settings, names of older files, and what is refused."""

from typing import Any

import pytest

from megatron.conversion.families import family_of
from megatron.core.exceptions import UserError

GPT2 = family_of("GPT2LMHeadModel")


def test_gpt2_of_the_hub() -> None:
    """The first file has no prefix, and masks beside the weights."""
    fields = GPT2.fields_of({"n_ctx": 1024, "n_embd": 768, "n_head": 12, "task_specific_params": {}})
    assert (fields["kv_channels"], fields["ffn_hidden_size"], fields["hidden_dropout"]) == (64, 3072, 0.1)
    assert GPT2.fields_of({"hidden_size": 96, "num_attention_heads": 12})["kv_channels"] == 8
    assert GPT2.current_name("h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
    assert GPT2.current_name("transformer.h.0.ln_1.bias") == "transformer.h.0.ln_1.bias"
    assert GPT2.is_constant(GPT2.current_name("h.11.attn.bias"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"embd_pdrop": 0.2}, "embd_pdrop is 0.2, but resid_pdrop is 0.1; only equal ones are supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False is "),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'; gelu_new, gelu_pytorch_tanh, gelu, "),
    ],
)
def test_what_is_unsupported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        GPT2.fields_of(change)
    assert str(refusal.value).startswith(f"config.json: {said}")
