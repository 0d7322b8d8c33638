"""Tiny random DeepSeek-V2 and V3 models of `transformers`, latent attention and experts, as oracles in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig

LAYERS, WIDTH, HEADS, INNER, VOCABULARY, LONGEST, EXPERTS = 2, 32, 4, 40, 61, 64, 8
LATENT = {"kv_lora_rank": 10, "v_head_dim": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 1}
SCALINGS: dict[str, dict[str, Any]] = {
    "rope": {},
    "yarn": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},  # as DeepSeek-V3: all in the scores' factor
    "yarn with a part of each": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.4},
}
KINDS = {
    "v2": (v2, transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "v3": (v3, transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
}


ROUTERS: dict[str, dict[str, Any]] = {
    "v2": {
        "moe_router_pre_softmax": True,
        "moe_router_group_score_topk": 1,
    },
    "v3": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}


class WideTorch:
    """Replaces torch in a module of theirs that computes some values in float32: they get the type of the model."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def angles_as_of_other_models(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Cosines and sines of float32 that are `torch.cos` and `torch.sin`, not those of `torch.polar`."""
    angles = (position_ids[..., None].float() * self.inv_freq.float()).detach()
    return torch.complex(angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling)


def turned_in_the_type_given(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    def turned(heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles.to(pairs.dtype).unsqueeze(1)).flatten(3)

    return turned(query), turned(key)


def theirs(kind: str, q_lora_rank: int | None, scaling: dict[str, Any], experts: bool) -> torch.nn.Module:
    _, config_class, model_class = KINDS[kind]
    rope = {"rope_type": "yarn" if scaling else "default", "rope_theta": 500.0, **scaling}
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=q_lora_rank, 
        first_k_dense_replace=1 if experts else LAYERS, n_routed_experts=EXPERTS, num_experts_per_tok=4, n_group=4,
        topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=2.5, norm_topk_prob=kind == "v3",
        moe_intermediate_size=12, n_shared_experts=2,
        max_position_embeddings=LONGEST, rope_parameters=rope, head_dim=LATENT["qk_rope_head_dim"],
        attention_dropout=0.0, attn_implementation="sdpa", tie_word_embeddings=False, **LATENT,
    )  # fmt: skip
    model = model_class(config).double()
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    generator = torch.Generator().manual_seed(0)
    biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for values in (*model.parameters(), *biases):
            values.copy_(torch.randn(values.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def ours(kind: str, q_lora_rank: int | None, scaling: dict[str, Any], experts: bool) -> GPTModel:
    mixed = {
        "num_moe_experts": EXPERTS,
        "moe_layer_freq": [0, 1],
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "none",
        **ROUTERS[kind],
    }
    yarn = {"rope_type": "yarn", **scaling, "rotary_scaling_factor": scaling["factor"]} if scaling else {}
    config = MLATransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=INNER,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=LATENT["kv_lora_rank"],
        qk_head_dim=LATENT["qk_nope_head_dim"],
        qk_pos_emb_head_dim=LATENT["qk_rope_head_dim"],
        v_head_dim=LATENT["v_head_dim"],
        rotary_base=500.0,
        fp64=True,
        **({"rope_type": "rope"} | {key: value for key, value in yarn.items() if key != "factor"}),
        **(mixed if experts else {}),
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, VOCABULARY, LONGEST, position_embedding_type="rope")


NAMES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for name, our_name in NAMES.items():
            if f"{source}self_attn.{name}.weight" in weights:
                found[f"{target}self_attention.{our_name}.weight"] = weights[f"{source}self_attn.{name}.weight"]
        for part, our_part in mlps_of(weights, source):
            first, second = (f"{target}mlp.{our_part}linear_fc{number}.weight" for number in (1, 2))
            found[first] = torch.cat([weights[f"{source}mlp.{part}{half}_proj.weight"] for half in ("gate", "up")])
            found[second] = weights[f"{source}mlp.{part}down_proj.weight"]
        for name, our_name in {"weight": "weight", "e_score_correction_bias": "expert_bias"}.items():
            if f"{source}mlp.gate.{name}" in weights:
                found[f"{target}mlp.router.{our_name}"] = weights[f"{source}mlp.gate.{name}"]
        for number in range(EXPERTS):
            if f"{source}mlp.experts.down_proj" in weights:
                expert = f"{target}mlp.experts.local_experts.{number}.linear_fc"
                found[f"{expert}1.weight"] = weights[f"{source}mlp.experts.gate_up_proj"][number]
                found[f"{expert}2.weight"] = weights[f"{source}mlp.experts.down_proj"][number]
        found[f"{target}input_layernorm.weight"] = weights[f"{source}input_layernorm.weight"]
        found[f"{target}pre_mlp_layernorm.weight"] = weights[f"{source}post_attention_layernorm.weight"]
    return found


def mlps_of(weights: dict[str, Tensor], layer: str) -> list[tuple[str, str]]:
    """Where dense MLPs of a layer stand, theirs and ours."""
    found = [("", ""), ("shared_experts.", "shared_experts.")]
    return [(part, our_part) for part, our_part in found if f"{layer}mlp.{part}down_proj.weight" in weights]


@pytest.mark.parametrize(
    ("kind", "q_lora_rank", "scaling", "experts"),
    [
        ("v3", None, "rope", False),
        ("v3", 12, "yarn", True),
        ("v3", 12, "yarn with a part of each", False),
        ("v2", None, "yarn with a part of each", True),
        ("v2", 12, "rope", False),
    ],
)
def test_logits_and_gradients(
    kind: str, q_lora_rank: int | None, scaling: str, experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their models compute norms and routers in float32 for any type of the model, and V2 rotates heads in it.
    monkeypatch.setattr(KINDS[kind][0], "torch", WideTorch())
    monkeypatch.setattr(v2, "apply_rotary_emb", turned_in_the_type_given)
    monkeypatch.setattr(v2.DeepseekV2RotaryEmbedding, "forward", angles_as_of_other_models)
    what = q_lora_rank, SCALINGS[scaling], experts
    oracle, model = theirs(kind, *what), ours(kind, *what)
    model.load_state_dict(renamed({name: value.detach() for name, value in oracle.state_dict().items()}))
    ids = torch.randint(VOCABULARY, (2, LONGEST), generator=torch.Generator().manual_seed(1))
    logits, expected = model(ids), oracle(ids).logits
    close(logits, expected, "logits")
    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = renamed({name: p.grad for name, p in oracle.named_parameters() if p.grad is not None})
    assert gradients.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            close(parameter.grad, gradients[name], name)


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert ours.dtype is torch.float64 and error < 1e-10, (name, error.item())
