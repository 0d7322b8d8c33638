"""Families: a whole config.json to fields and back, and what is refused."""

import pytest

from megatron.conversion.families import FAMILIES, family_of
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import HUB_DEFAULTS
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""config.json of Qwen3-30B-A3B on the hub, which differs from what today's transformers writes."""

QWEN3_MOE, LLAMA = family_of("Qwen3MoeForCausalLM"), family_of("LlamaForCausalLM")


def test_a_config_of_the_hub() -> None:
    fields = QWEN3_MOE.fields_of(QWEN3_30B)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_layer_freq"]) == (128, 8, 1)
    assert QWEN3_MOE.fields_of(QWEN3_30B | {"sliding_window": 4096}) == fields, "the window is switched off"
    with pytest.raises(UserError, match=r"^config.json: use_sliding_window is True; only False is supported$"):
        QWEN3_MOE.fields_of(QWEN3_30B | {"sliding_window": 4096, "use_sliding_window": True})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_defaults_of_a_family_are_supported(family: Family) -> None:
    fields = family.fields_of({"num_experts_per_tok": 6} if family.model_type == "deepseek_v2" else {})
    defaults = HUB_DEFAULTS[family.model_type]
    names = ("num_hidden_layers", "num_layers", "n_layer")
    layers = next((defaults[key] for key in names if key in defaults), len("ME*-"))  # Nemotron-H's default
    assert fields.get("num_layers", len(fields.get("hybrid_layer_pattern", ""))) == layers
    tensors = family.tensors_of({name: flag.default for name, flag in flag_table().items()} | fields)
    assert any("router" in name for name in tensors) == ("num_moe_experts" in fields)
    assert family_of(family.architecture) is family


def test_all_problems_are_in_one_error_with_file_and_key() -> None:
    with pytest.raises(UserError) as refusal:
        LLAMA.fields_of({"strange": 3, "hidden_act": "gelu", "sliding_window": None}, file="m/config.json")
    assert str(refusal.value).splitlines() == [
        "m/config.json: strange is not known for LlamaForCausalLM",
        "m/config.json: hidden_act is 'gelu'; only 'silu' is supported",
    ]
    assert LLAMA.fields_of({"strange": 3}, ignored=["strange"])


def test_a_model_type_of_another_family_is_refused() -> None:
    """transformers builds the model of `model_type` and ignores `architectures`."""
    with pytest.raises(UserError) as refusal:
        LLAMA.fields_of({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, file="m/config.json")
    assert str(refusal.value) == (
        "m/config.json: architectures is LlamaForCausalLM, which has model_type 'llama', but model_type is 'mistral'; "
        "correct the wrong one"
    )
    assert LLAMA.fields_of({"architectures": ["LlamaForCausalLM"]})


def test_constants_of_old_releases_are_no_weights() -> None:
    assert LLAMA.is_constant("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert not LLAMA.is_constant("model.layers.11.self_attn.q_proj.weight")


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"^GPT9 is unknown; these are known: LlamaForCausalLM, .*T5ForConditionalGeneration$"
    ):
        family_of("GPT9")
