"""Arguments in a checkpoint of Megatron-LM become flags."""

from typing import Any

import pytest

from megatron.conversion.megatron_lm.arguments import _FIELDS, _GROUPS, attributes, flags_of_arguments
from megatron.conversion.megatron_lm.inert_pickle import Inert, Name
from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS
from megatron.training.arguments import configure
from megatron.training.config.flag_table import flag_table
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import ARCHITECTURE, COMPARED, MODEL_OPTIONS

ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 96,
    "num_attention_heads": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "add_bias_linear": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "group_query_attention": False,
    "num_query_groups": 1,
    "num_experts": None,
    "moe_router_topk": 2,
    "position_embedding_type": "rope",
    "rotary_base": 50000,
    "untie_embeddings_and_output_weights": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 40,
    "padded_vocab_size": 128,
    "seed": 5,
    "lr": 1e-3,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 8,
    "tensor_model_parallel_size": 4,
    "attention_backend": Inert(Name("megatron.core.transformer.enums", "AttnBackend"), (5,)),
    "world_size": 8,
    "save": "elsewhere",
    "data_path": ["a", "b"],
    "bf16": True,
    "a_script's own": 3,
    "norm_epsilon": 1e-6,
}


def test_flags_give_the_model_and_the_schedule() -> None:
    words = flags_of_arguments(Inert(Name("argparse", "Namespace"), state=ARGUMENTS))
    config = configure([*words, "--mock-data", "--num-workers", "0"], launch_environment=LaunchEnvironment(1, False))
    found = config.flat()
    for name in (
        "num_layers",
        "ffn_hidden_size",
        "rotary_base",
        "seed",
        "lr",
        "train_iters",
        "add_bias_linear",
        "bf16",
    ):
        assert found[name] == ARGUMENTS[name], name
    assert found["layernorm_epsilon"] == 1e-6 and found["gated_linear_unit"] is True
    text = " ".join(words)
    for other in (
        "--tensor-model",
        "--save",
        "--data-path",
        "--moe-router-topk",
        "--num-query-groups",
        "--attention-b",
    ):
        assert other not in text, other


def test_settings_of_muon_come_along() -> None:
    words = flags_of_arguments({**ARGUMENTS, "optimizer": "dist_muon", "muon_momentum": 0.8, "muon_num_ns_steps": 7})
    text = " ".join(words)
    assert "--muon-momentum 0.8" in text and "--muon-num-ns-steps 7" in text
    assert "--muon" not in " ".join(flags_of_arguments({**ARGUMENTS, "muon_momentum": 0.8}))


def test_every_setting_of_the_function_comes_along() -> None:
    """What a resumed run is compared by, but for the place of the data, and types that a run of theirs cannot have."""
    elsewhere = {
        "fp64",
        "mock_data",
        "data_stages",
        "balanced_packing",
        "sft",
        *("lora_rank", "lora_alpha", "lora_target_modules", "use_rslora", "use_dora"),
        "num_encoder_layers",
        "gated_linear_unit",
        "activation_func",
    }
    wanted = {name for name in (*ARCHITECTURE, *MODEL_OPTIONS, *COMPARED) if not name.endswith("_path")} - elsewhere
    assert not {name for name in wanted if flag_table()[name].group not in _GROUPS} - {*_FIELDS}
    scaled = {"use_mup": True, "mup_base_hidden_size": 8, "mup_width_mult": 4.0, "reset_attention_mask": True}
    words = flags_of_arguments({**ARGUMENTS, **scaled})
    assert " ".join(words).endswith("--use-mup --mup-base-hidden-size 8 --reset-attention-mask")


def test_shared_lists_take_no_exponential_time() -> None:
    value: list[Any] = [1]
    for _ in range(200):
        value = [value, value]
    assert "--moe-layer-freq" not in flags_of_arguments({**ARGUMENTS, "num_experts": 4, "moe_layer_freq": value})


def test_the_older_name_of_a_pattern() -> None:
    for name in ("hybrid_override_pattern", "hybrid_layer_pattern"):
        words = " ".join(flags_of_arguments({**ARGUMENTS, name: "M*"}))
        assert "--hybrid-layer-pattern M*" in words, name


def test_descriptions_of_layers_come_with_their_text_not_their_file() -> None:
    text, path = HETEROGENEOUS
    words = flags_of_arguments({**ARGUMENTS, path: "layers.json", text: "{}"})
    assert words[words.index("--heterogeneous-layers-config-encoded-json") + 1] == "{}"
    assert "layers.json" not in words
    assert "layers.json" in flags_of_arguments({**ARGUMENTS, path: "layers.json", text: None})


def test_no_arguments_no_flags() -> None:
    assert flags_of_arguments(None) == [] and attributes(None) == {} and attributes({"seed": 1}) == {"seed": 1}


@pytest.mark.parametrize(("padded", "flag"), [(128, "--vocab-size 127"), (256, "--vocab-size 128")])
def test_null_tokenizer_of_recent_releases_has_one_id_less(padded: int, flag: str) -> None:
    arguments = ARGUMENTS | {"vocab_size": 128, "padded_vocab_size": padded}
    words = flags_of_arguments(Inert(Name("argparse", "Namespace"), state=arguments))
    assert flag in " ".join(words)
