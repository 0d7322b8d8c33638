"""DeepSeek-V2 and V3: published settings, and what is refused."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.training.conversion.families import family_of

V2, V3 = family_of("DeepseekV2ForCausalLM"), family_of("DeepseekV3ForCausalLM")
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
OF_V3: dict[str, Any] = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": YARN,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
"""The keys of DeepSeek-V3's config.json that are not defaults of transformers."""
OF_V2: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}


def test_deepseek_v3() -> None:
    fields = V3.fields_of(OF_V3)
    assert fields["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert (fields["rotary_scaling_factor"], fields["mscale"], fields["mscale_all_dim"]) == (40.0, 1.0, 1.0)
    groups = [fields[f"moe_router_{name}"] for name in ("num_groups", "group_topk", "group_score_topk")]
    assert groups == [8, 4, 2]
    assert "latent_layernorm_epsilon" not in fields
    assert V3.fields_of(OF_V3 | {"rms_norm_eps": 1e-5})["latent_layernorm_epsilon"] == 1e-6
    assert V3.is_constant("model.layers.61.eh_proj.weight") and not V3.is_constant("model.layers.60.mlp.gate.weight")


def test_deepseek_v2() -> None:
    fields = V2.fields_of(OF_V2)
    assert fields["moe_shared_expert_intermediate_size"] == 3072
    assert (fields["moe_router_group_score_topk"], fields["moe_router_topk_scaling_factor"]) == (1, 16.0)
    assert "moe_router_num_groups" not in V2.fields_of(OF_V2 | {"topk_method": "greedy"})


def test_mscale_counts_only_beside_mscale_all_dim() -> None:
    fields = V3.fields_of({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}})
    assert (fields["mscale"], fields["mscale_all_dim"]) == (1.0, 0.0)
    assert fields["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_interleave": False}, "rope_interleave is False; only True is supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; only 128 (num_attention_heads) is supported"),
        (
            {"n_shared_experts": 0},
            "n_shared_experts is 0; it must be at least 1 (--moe-shared-expert-intermediate-size)",
        ),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling with rope_type 'yarn' has truncate, which is "),
        ({"rope_scaling": YARN | {"factor": None}}, "rope_scaling has factor None, but it must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has rope_type 'linear'; default, yarn are"),
        ({"rope_scaling": YARN | {"mscale": None}}, "rope_scaling has mscale_all_dim without mscale (--mscale), which"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"n_group": None}, "n_group is None and topk_group is 4; both must be numbers"),
    ],
)
def test_what_is_unsupported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        V3.fields_of(OF_V3 | change)
    assert str(refusal.value).startswith(f"config.json: {said}")


def test_deepseek_v2_says_how_many_experts_and_which_method() -> None:
    with pytest.raises(UserError, match="num_experts_per_tok is None, but must be an integer"):
        V2.fields_of({})
    with pytest.raises(UserError, match="topk_method is 'best'; greedy and group_limited_greedy are supported"):
        V2.fields_of(OF_V2 | {"topk_method": "best"})
