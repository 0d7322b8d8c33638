"""gpt-oss: the published config.json, and flags for its positions."""

from megatron.conversion.families import family_of
from megatron.training.config.flag_table import flag_table
from megatron.training.config.retired import Occurrence, translate
from megatron.training.inspection.run_description import words_of

GPT_OSS = family_of("GptOssForCausalLM")
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
"""config.json of gpt-oss-20b, without the part about its quantized weights."""


def test_the_published_config() -> None:
    fields = GPT_OSS.fields_of(PUBLISHED)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["window_size"]) == (32, 4, (127, 0))
    assert fields["window_attn_skip_freq"] == [1, 0] * 12 and fields["rotary_base"] == 150000
    shorter = {key: value for key, value in PUBLISHED.items() if key not in ("rope_scaling", "layer_types")}
    assert GPT_OSS.fields_of(shorter) == fields, "absent, they have these values too"


def test_enable_gpt_oss_has_the_published_positions() -> None:
    """What the flag stands for is what an import of the published model reads."""
    fields = GPT_OSS.fields_of(PUBLISHED)
    names = [name for name in fields if name.startswith(("rope_", "position_"))]
    read = {" ".join(words_of(flag_table()[name], fields[name])) for name in names}
    said = translate(Occurrence("--enable-gpt-oss"))
    assert said is not None
    words = {" ".join((occurrence.spelling, *occurrence.words)) for occurrence in said.implied}
    assert {word.removesuffix(".0") for word in read} == words
