"""Families: a whole config.json to fields and back, and what is refused."""

from typing import Any

import pytest
from conversion.oracles import sizes_of
from support.each import for_each

from megatron.conversion.families import FAMILIES, family_of
from megatron.conversion.family import Family
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

QWEN3_MOE, GPT2, PHI3 = (family_of(name) for name in ("Qwen3MoeForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"))
OTHERS_OF_GPT2 = {"n_layer": 12, "n_positions": 1024}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def test_a_config_of_the_hub() -> None:
    fields = QWEN3_MOE.fields_of(QWEN3_30B)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_layer_freq"]) == (128, 8, 1)
    assert QWEN3_MOE.fields_of(QWEN3_30B | {"sliding_window": 4096}) == fields, "the window is switched off"
    windowed = QWEN3_30B | {"sliding_window": 4096, "use_sliding_window": True}
    assert QWEN3_MOE.fields_of(windowed)["window_size"] == (4095, 0)
    assert QWEN3_MOE.notes(windowed) == [
        "max_window_layers is 48, which transformers does not apply: all layers have a window"
    ]


@for_each(FAMILIES, lambda family: family.model_type)
def test_the_defaults_of_a_family_are_supported(family: Family) -> None:
    given = {
        "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1.0}}] * 32},
    }
    fields = family.fields_of(sizes_of(family) | given.get(family.model_type, {}))
    defaults = family.all_defaults | sizes_of(family)
    names = ("num_hidden_layers", "num_layers", "n_layer")
    layers = next((defaults[key] for key in names if key in defaults), len("ME*-"))  # Nemotron-H's default
    layers *= 2 if family.model_type == "bamba" else 1  # with an MLP of its own in our pattern
    assert fields.get("num_layers", len(fields.get("hybrid_layer_pattern", ""))) == layers
    tensors = family.tensors_of({name: flag.default for name, flag in flag_table().items()} | fields)
    assert any("router" in name for name in tensors) == ("num_moe_experts" in fields)
    assert family_of(family.architecture) is family


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    said = (
        r"^Llama3ForCausalLM is unknown; docs/extending.md says how to add it; these are known \(the nearest is "
        r"LlamaForCausalLM\): LlamaForCausalLM, .*T5ForConditionalGeneration"
    )
    with pytest.raises(UserError, match=said):
        family_of("Llama3ForCausalLM")
    for name, nearest in (
        ("Qwen2VLForConditionalGeneration", "Qwen2ForCausalLM"),
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("GPT3LMHeadModel", "GPT2LMHeadModel"),
    ):
        with pytest.raises(UserError, match=rf"the nearest is {nearest}\)"):
            family_of(name)
    with pytest.raises(UserError, match=r"^StripedHyenaModelForCausalLM is unsupported: this project has no"):
        family_of("StripedHyenaModelForCausalLM")


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "Bamba",
        {"mamba_d_head": 32},
        "mamba_d_head is 32; with mamba_n_heads 128 it must be mamba_expand * hidden_size / mamba_n_heads (--mamba-num",
    ),
    ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank is None; it must be an integer (--q-lora-rank)"),
    (
        "DeepseekV32",
        {"layer_types": ["full_attention"]},
        "layer_types has 'full_attention'; only 'indexed_attention' is supported",
    ),
    (
        "DeepseekV32",
        {"mlp_layer_types": ["sparse", "moe"]},
        "mlp_layer_types has 'moe'; dense and sparse are supported",
    ),
    ("DeepseekV32", {"index_topk": "all"}, "index_topk is 'all', but must be an integer"),
    (
        "DeepseekV32",
        {"num_experts": 8, "n_routed_experts": 16},
        "n_routed_experts is 16, but num_experts is 8; they are the same",
    ),
    ("Falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; it needs new_decoder_architecture"),
    ("Falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2; without multi_query only 71 is "),
    (
        "Falcon",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn is False; with new_decoder_architecture only True is supported",
    ),
    ("GPT2", {"embd_pdrop": 0.2}, "embd_pdrop is 0.2, but resid_pdrop is 0.1; only equal ones are supported"),
    ("GPT2", {"activation_function": "tanh"}, "activation_function is 'tanh'; gelu_new, gelu_pytorch_tanh, "),
    ("GptOss", {"quantization_config": {}}, "quantization_config is not known for GptOssForCausalLM"),
    ("Llama", {"hidden_act": "relu"}, "hidden_act is 'relu'; silu, swish, gelu, gelu_pytorch_tanh, gelu_new, gelu_ta"),
    ("Llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; only 1 is supported, because the inputs of "),
    ("Llama4", {"layer_types": ["mamba"] * 48}, "layer_types has 'mamba'; chunked_attention and full_attention are "),
    (
        "Llama4",
        {"layer_types": ["chunked_attention"] * 48, "attention_chunk_size": 0},
        "attention_chunk_size is 0; with layers of chunked_attention it must be at least 1",
    ),
    ("Llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0; it must be at least 1"),
    (
        "Mamba2",
        {"expand": 3},
        "head_dim is 64; with num_heads 128 it must be expand * hidden_size / num_heads ",
    ),
    ("Mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is [0.0, 0.1]; a smallest step and no largest one"),
    ("Mamba2", {"use_bias": True}, "use_bias is True; only False is supported"),
    ("NemotronH", {"hybrid_override_pattern": "MD"}, "hybrid_override_pattern has 'D'; M, *, -, E are supported"),
    (
        "NemotronH",
        {"layers_block_type": ["mlp", "rnn"]},
        "layers_block_type has 'rnn'; linear_attention, full_attention, mlp, ",
    ),
    (
        "NemotronH",
        {"layers_block_type": ["mlp"], "hybrid_override_pattern": "M"},
        "hybrid_override_pattern is M, but layers_bl",
    ),
    (
        "NemotronH",
        {"hybrid_override_pattern": "M-", "num_hidden_layers": 3},
        "num_hidden_layers is 3, but hybrid_override_patt",
    ),
    (
        "NemotronH",
        {"mlp_bias": True, "moe_latent_size": 8},
        "mlp_bias is True; with moe_latent_size only False is supported",
    ),
    ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has rope_type 'linear'; default, "),
    ("Phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling has short_factor None, but it must be a list"),
    (
        "Qwen3Next",
        {"layer_types": ["mamba"] * 48},
        "layer_types has 'mamba'; full_attention and linear_attention are supported",
    ),
    ("Qwen3Next", {"full_attention_interval": 0}, "full_attention_interval is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("name", "change", "said"), UNSUPPORTED)
def test_what_a_family_does_not_support_is_named_by_its_key(name: str, change: dict[str, Any], said: str) -> None:
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    family = family_of(f"{name}{head}")
    with pytest.raises(UserError) as refusal:
        family.fields_of(sizes_of(family) | change)
    assert str(refusal.value).startswith(f"config.json: {said}")


def test_sizes_have_no_defaults() -> None:
    """Another size than the file's tensors have would be told tensor by tensor."""
    said = r"^config.json: hidden_size is missing; it must be an integer\nconfig.json: num_experts is missing; it must"
    with pytest.raises(UserError, match=said):
        QWEN3_MOE.fields_of({key: QWEN3_30B[key] for key in QWEN3_30B if key not in ("hidden_size", "num_experts")})
    with pytest.raises(UserError, match=r"^x: vocab_size is missing; it must be an integer$"):
        QWEN3_MOE.vocab_size_of(QWEN3_MOE.complete_config({}), "x")


def test_kimi_k2_is_a_deepseek_v3_of_another_name() -> None:
    deepseek = family_of("DeepseekV3ForCausalLM")
    keys = sizes_of(deepseek) | {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 4}
    assert deepseek.fields_of(keys | {"model_type": "kimi_k2"}) == deepseek.fields_of(keys)
    with pytest.raises(UserError, match="model_type is 'kimi'; correct the wrong one"):
        deepseek.fields_of(keys | {"model_type": "kimi"})


def test_gpt2_of_the_hub() -> None:
    """The first file has no prefix, and masks beside the weights."""
    fields = GPT2.fields_of(sizes_of(GPT2) | {"n_ctx": 1024, "n_embd": 768, "n_head": 12, "task_specific_params": {}})
    assert (fields["kv_channels"], fields["ffn_hidden_size"], fields["hidden_dropout"]) == (64, 3072, 0.1)
    assert GPT2.fields_of(OTHERS_OF_GPT2 | {"hidden_size": 96, "num_attention_heads": 12})["kv_channels"] == 8
    assert GPT2.current_name("h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
    assert GPT2.current_name("transformer.h.0.ln_1.bias") == "transformer.h.0.ln_1.bias"
    assert GPT2.is_constant(GPT2.current_name("h.11.attn.bias"))


def test_phi3_mini_of_128k() -> None:
    fields = PHI3.fields_of(sizes_of(PHI3) | {"max_position_embeddings": 131072, "rope_scaling": LONGROPE})
    assert (fields["rope_scaling_type"], fields["rope_scaling_factor"]) == ("longrope", 32.0)
    assert fields["rope_scaling_original_length"] == 4096
    values = {name: flag.default for name, flag in flag_table().items()} | fields
    assert PHI3.config_of(values)["rope_scaling"] == LONGROPE, "the three keys that every release reads"
    assert (
        PHI3.fields_of(sizes_of(PHI3) | {"rope_scaling": LONGROPE | {"type": "su"}})["rope_scaling_type"] == "longrope"
    )
    assert PHI3.fields_of(sizes_of(PHI3) | {"partial_rotary_factor": 0.75})["rotary_percent"] == 0.75
