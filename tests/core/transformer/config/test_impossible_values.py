"""Impossible values of a transformer's config are named, with what would work."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.exact_gradients import UNIFORM, recomputing

from megatron.core.exceptions import UserError
from megatron.core.transformer.config import latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
FINE: dict[str, Any] = {"fine_grained_activation_offloading": True}
EXPERTS = {"num_moe_experts": 4}
SHARED = {"moe_shared_expert_intermediate_size": 8}

RULES: list[tuple[dict[str, Any], str]] = [
    # the config as a whole
    ({"fp16": True, "bf16": True}, "fp16 and bf16 are set together; choose one"),
    ({"seed": 0}, "seed 0 must be larger than 0"),
    ({"tensor_model_parallel_size": 8}, "tensor_model_parallel_size 8 does not divide num_attention_heads 4; use 4"),
    (
        {"tensor_model_parallel_size": 4, "num_attention_heads": 12, "num_query_groups": 6, "hidden_size": 48},
        "tensor_model_parallel_size 4 and num_query_groups 6: neither divides the other; use 3 or 6",
    ),
    (
        {"tensor_model_parallel_size": 4, "ffn_hidden_size": 90},
        "tensor_model_parallel_size 4 does not divide ffn_hidden_size 90; use 2",
    ),
    ({"num_layers": 0, "hidden_dropout": 2.0}, "hidden_dropout 2.0"),  # beside another mistake
    # architecture.py
    ({"num_layers": 0}, "num_layers 0 must be at least 1"),
    ({"hidden_dropout": 1.0}, "hidden_dropout 1.0 must be at least 0 and less than 1"),
    ({"residual_multiplier": 0.0}, "residual_multiplier 0.0 must be a number other than 0"),
    ({"norm_affine": False, "layernorm_zero_centered_gamma": True}, "with norm_affine norms have no weights"),
    (
        {"norm_placement": "post", "apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm: norm_placement post has no norm before attention",
    ),
    # latent_attention.py
    ({"multi_latent_attention": True}, "multi_latent_attention needs an MLATransformerConfig"),
    # attention.py
    ({"hidden_size": 65}, "hidden_size 65 is not divisible by num_attention_heads 4; use 64 or 68"),
    ({"num_query_groups": 3}, "num_query_groups 3 does not divide num_attention_heads 4; use "),
    ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping -1.0 must be larger than 0, or left out"),
    ({"attention_chunk_size": 0}, "attention_chunk_size 0 must be at least 1"),
    ({"qk_layernorm": True, "qk_l2_norm": True}, "qk_layernorm and qk_l2_norm are two norms of queries and keys"),
    (
        {"attention_backend": AttnBackend.fused, "deterministic_mode": True},
        "attention_backend fused: cuDNN sums gradients in an order that varies, so deterministic_mode forbids it",
    ),
    ({"no_rope_freq": 0}, "no_rope_freq 0 must be at least 1"),
    ({"no_rope_freq": [0, 1, 0]}, "no_rope_freq has 3 entries for num_layers 2; give one for each"),
    ({"no_rope_freq": [0, 2]}, "has a 1 for a layer without rotary positions, a 0 for"),
    ({"window_size": (3, 0), "window_attn_skip_freq": -2}, "window_attn_skip_freq -2 must be at least 1"),
    ({"window_attn_skip_freq": [1]}, "window_attn_skip_freq has 1 entries for num_layers 2; give one for each"),
    ({"attention_chunk_skip_freq": [1, 2]}, "attention_chunk_skip_freq 1 2 has a 1 for a layer with chunks"),
    ({"qk_layernorm": True, "qk_norm_scope": "per_head"}, "qk_norm_scope per_head is a norm without a bias; add"),
    (
        {"first_input_norm": False, "norm_placement": "post"},
        "first_input_norm: norm_placement post has no norm before attention",
    ),
    ({"qk_layernorm": True, "qk_norm_scope": "full"}, "qk_norm_scope full is an RMSNorm; it does not go with"),
    # initialization.py
    ({"init_method_std": float("nan")}, "init_method_std nan must be at least 0"),
    ({"embedding_init_method_std": -0.1}, "embedding_init_method_std -0.1 must be at least 0"),
    ({"mup_base_hidden_size": 0}, "mup_base_hidden_size 0 must be at least 1"),
    ({"mup_output_mult": 0.0}, "mup_output_mult 0.0 must be a number other than 0"),
    ({"mup_base_head_dim": -1.0}, "mup_base_head_dim -1.0 must be larger than 0"),
    # memory.py
    ({"recompute_granularity": "full"}, "recompute_granularity full needs recompute_method uniform or block"),
    ({"distribute_saved_activations": True}, "it needs recompute_granularity full"),
    (recomputing("gelu"), "gelu is no part of a layer"),
    (recomputing("moe"), "recompute_modules moe: moe is a part of a layer of experts, and num_moe_experts is not set"),
    (recomputing("mla_up_proj"), "mla_up_proj is a part of multi_latent_attention, which is not set"),
    (EXPERTS | recomputing("mlp"), "mlp is a part of a layer without experts, and there is no"),
    (
        EXPERTS | recomputing("shared_experts") | SHARED | {"moe_shared_expert_overlap": True},
        "run in two halves with moe_shared_expe",
    ),
    (EXPERTS | recomputing("shared_experts"), "shared_experts need moe_shared_expe"),
    (EXPERTS | UNIFORM | {"moe_layer_recompute": True}, "full recomputes layers of experts too; drop one"),
    (
        recomputing("mlp_act") | {"fp8": "hybrid"},
        "mlp_act saves nothing with fp8 hybrid: the second product keeps its input in fp8 anyway",
    ),
    (FINE, "fine_grained_activation_offloading needs offload_modules, any of attn_norm, qkv_linear"),
    (FINE | {"offload_modules": ["mlp"]}, "offload_modules mlp: mlp is no such part of a layer"),
    (FINE | {"offload_modules": ["moe_act"]}, "moe_act is a part of a layer of experts, and num_moe_experts is not"),
    (
        FINE | {"offload_modules": ["mlp_norm"], "norm_placement": "post"},
        "mlp_norm is the norm before a branch, and norm_placement post has none",
    ),
    (
        FINE | {"offload_modules": ["core_attn"], "cpu_offloading_num_layers": 1},
        "fine_grained_activation_offloading and cpu_offloading_num_layers 1: choose one",
    ),
    (FINE | UNIFORM | {"offload_modules": ["core_attn"]}, "full recomputation keeps the layers' inputs only"),
    (
        {"cpu_offloading_num_layers": 1, "cuda_graph_impl": "local"},
        "cpu_offloading_num_layers 1: a captured micro-batch keeps its activations on the device",
    ),
    ({"cpu_offloading_num_layers": -1}, "cpu_offloading_num_layers -1 must be at least 0"),
    ({"activation_offload_fraction": 1.5}, "activation_offload_fraction 1.5 must be from 0 to 1"),
    # stages.py
    ({"mtp_num_layers": -1}, "mtp_num_layers -1 must be at least 0"),
    # moe.py
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size 2 spreads experts over ranks: it needs"),
    ({"num_moe_experts": 6, "expert_model_parallel_size": 4}, "does not divide num_moe_experts 6; use 3 or 6"),
    (
        EXPERTS | {"moe_ffn_hidden_size": 6, "expert_tensor_parallel_size": 4},
        "expert_tensor_parallel_size 4 does not divide moe_ffn_hidden_size 6; use 3 or 6",
    ),
    (EXPERTS | {"moe_layer_freq": [1]}, "moe_layer_freq has 1 entries for num_layers 2"),
    (EXPERTS | {"moe_apply_probs_on_input": True}, "it needs moe_router_topk 1"),
    (
        EXPERTS | {"moe_router_load_balancing_type": "sinkhorn", "moe_enable_routing_replay": True},
        "moe_enable_routing_replay does not go with moe_router_load_balancing_type sinkhorn",
    ),
    # positions.py
    ({"rope_scaling_type": "longrope"}, "rope_scaling_type longrope needs rope_scaling_short_factor and"),
    (
        {"rope_scaling_type": "longrope", "rope_scaling_short_factor": [1.0], "rope_scaling_long_factor": [1.0, 0]},
        "rope_scaling_short_factor has 1 numbers, rope_scaling_long_factor 2",
    ),
    ({"rope_scaling_beta_fast": 1.0}, "rope_scaling_beta_fast 1.0 must be larger than rope_scaling_beta_slow 1.0"),
    ({"nope_temperature_scale": 0.1}, "nope_temperature_scale 0.1 needs no_rope_freq"),
]
UPCYCLING = {"ffn_hidden_size": 24, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_use_upcycling": True}
OF_UPCYCLING: list[tuple[dict[str, Any], str]] = [
    ({"num_moe_experts": None}, "moe_use_upcycling makes experts of an MLP: it needs num_moe_experts"),
    ({"moe_upcycling_granularity": 0}, "moe_upcycling_granularity 0 must be at least 1"),
    ({"moe_upcycling_granularity": 2}, "into parts of 12: moe_ffn_hidden_size 24 must be that"),
    ({"moe_upcycling_granularity": 3}, "moe_upcycling_granularity 3 does not divide num_moe_experts 4"),
    (
        {"num_moe_experts": 6, "moe_router_num_groups": 2, "moe_router_group_topk": 1}
        | {"moe_upcycling_granularity": 2, "moe_ffn_hidden_size": 12},
        "moe_upcycling_granularity 2 does not divide the 3 experts of a group (moe_router_num_groups 2)",
    ),
    (SHARED, "moe_shared_expert_intermediate_size 8 does not go with moe_use_up"),
]
OF_FP4: list[tuple[dict[str, Any], str]] = [
    ({"fp4": "e2m1", "fp4_recipe": "custom"}, "fp4_recipe custom: it builds quantizers of Transformer Engine"),
    (
        {"fp4": "e2m1", "num_query_groups": 2, "tensor_model_parallel_size": 4},
        "tensor_model_parallel_size 4: ranks that share a key and value head are not supported in fp4",
    ),
]
OF_FP8: list[tuple[dict[str, Any], str]] = [
    ({"fp4": "e2m1"}, "fp8 hybrid and fp4 e2m1 are set together; choose one"),
    ({"fp8_recipe": "custom"}, "fp8_recipe custom: it builds quantizers of Transformer Engine, which is not used"),
    ({"fp8_amax_history_len": 0}, "fp8_amax_history_len 0 must be at least 1"),
    ({"fp8_margin": -1}, "fp8_margin -1 must be at least 0"),
    (
        {"num_query_groups": 2, "tensor_model_parallel_size": 4},
        "tensor_model_parallel_size 4: ranks that share a key and value head are not supported in fp8",
    ),
]
OF_LATENT_ATTENTION: list[tuple[dict[str, Any], str]] = [
    ({"kv_lora_rank": 0}, "kv_lora_rank 0 must be at least 1"),
    ({"rotary_scaling_factor": 0.0}, "rotary_scaling_factor 0.0 must be larger than 0"),
    ({"beta_fast": 1.0}, "beta_fast 1.0 must be larger than beta_slow 1"),
    ({"rope_type": "alibi"}, "rope_type alibi: choose among rope, yarn"),
    ({"rotary_percent": 0.01}, "rotates 0 channels of a head; it must be an even number"),
    ({"num_query_groups": 2}, "2 does not go with multi_latent_attention: every head has keys of its own"),
    ({"rotary_base": -5.0}, "rotary_base -5.0 must be larger than 1"),
    ({"mscale": float("nan")}, "mscale nan must be a number"),
    ({"qk_pos_emb_head_dim": 5}, "rotates 5 channels of a head"),
    ({"attention_output_gate": True}, "its output has no gate"),
    ({"clip_qkv": 3.0}, "clip_qkv 3.0 does not go with multi_latent_attention: its queries, keys and values come"),
]
OF_SPARSE_ATTENTION: list[tuple[dict[str, Any], str]] = [
    ({"multi_latent_attention": False}, "dsa needs multi_latent_attention"),
    ({"dsa_indexer_topk": None}, "dsa needs dsa_indexer_topk"),
    ({"dsa_indexer_topk": 0}, "dsa_indexer_topk 0 must be at least 1"),
    ({"dsa_indexer_loss_coeff": -1.0}, "dsa_indexer_loss_coeff -1.0 must be at least 0"),
    ({"dsa_indexer_head_dim": 3}, "dsa_indexer_head_dim 3 is less than the 4 rotary channels"),
    ({"window_size": (4, 0)}, "window_size 4 0 does not go with dsa; leave it out"),
    ({"softmax_type": "learnable"}, "softmax_type learnable does not go with dsa"),
]
DSA: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "qk_pos_emb_head_dim": 4,
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 6,
    "dsa_indexer_topk": 4,
}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        *((TransformerConfig, *rule) for rule in RULES),
        *((TransformerConfig, EXPERTS | UPCYCLING | fields, message) for fields, message in OF_UPCYCLING),
        *((TransformerConfig, *case) for case in OF_FP4),
        *((TransformerConfig, {**fields, "fp8": "hybrid"}, message) for fields, message in OF_FP8),
        *((MLATransformerConfig, *rule) for rule in OF_LATENT_ATTENTION),
        *((MLATransformerConfig, DSA | fields, message) for fields, message in OF_SPARSE_ATTENTION),
    ],
)
def test_impossible_values_are_named(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        kind(**SMALL | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_recipes_of_fp8_have_no_problem(recipe: Any) -> None:
    TransformerConfig(**SMALL, fp8="hybrid", fp8_recipe=recipe)


@pytest.mark.parametrize("keeps_wide", [{"fp8_wgrad": False}, {"first_last_layers_bf16": True}])
def test_an_activation_that_fp8_layers_keep_wide_can_be_recomputed(keeps_wide: dict[str, Any]) -> None:
    way = recomputing("mlp_act") | {"fp8": "hybrid"}
    assert TransformerConfig(**SMALL | way | keeps_wide).recompute_modules == ["mlp_act"]


def test_latent_attention_is_looked_at_only_where_it_is() -> None:
    assert not list(latent_attention.validate(SimpleNamespace(multi_latent_attention=False)))
    assert len(list(latent_attention.validate(SimpleNamespace(multi_latent_attention=True)))) == 1  # no sizes
