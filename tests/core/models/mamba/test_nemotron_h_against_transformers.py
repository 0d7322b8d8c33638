"""A hybrid model with every kind of layer computes what Nemotron-H of `transformers` does."""

from unittest import mock

import torch
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.ops.activation import squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig

PATTERN = "M*-ME"
HEADS, WIDTH, GROUPS, STATE = 8, 4, 2, 6
MIN_STEP = 0.05


def theirs() -> NemotronHForCausalLM:
    config = NemotronHConfig(
        vocab_size=37,
        hidden_size=24,
        hybrid_override_pattern=PATTERN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=40,
        ssm_state_size=STATE,
        mamba_num_heads=HEADS,
        mamba_head_dim=WIDTH,
        n_groups=GROUPS,
        conv_kernel=3,
        chunk_size=4,
        time_step_min=MIN_STEP,
        n_routed_experts=4,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
    )
    config._experts_implementation = "eager"  # the faster one has no float64
    torch.manual_seed(0)
    model = NemotronHForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def ours() -> MambaModel:
    config = TransformerConfig(
        hybrid_layer_pattern=PATTERN,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=10,
        ffn_hidden_size=40,
        activation_func=squared_relu,
        add_bias_linear=False,
        normalization="RMSNorm",
        mamba_state_dim=STATE,
        mamba_num_heads=HEADS,
        mamba_head_dim=WIDTH,
        mamba_num_groups=GROUPS,
        mamba_conv_kernel_dim=3,
        mamba_min_time_step=MIN_STEP,
        num_moe_experts=4,
        moe_ffn_hidden_size=12,
        moe_shared_expert_intermediate_size=20,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=1.5,
        moe_aux_loss_coeff=0.0,
        fp64=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return MambaModel(config, mamba_stack_spec, 37, 16).eval()


def by_group(rows: Tensor, widths: list[int]) -> Tensor:
    """Reorders rows that are one part after the other, each with its groups, so that each group has its parts."""
    return torch.cat([part.unflatten(0, (GROUPS, -1)) for part in rows.split(widths)], 1).flatten(0, 1)


def weights_of_mixer(kind: str, mixer: torch.nn.Module) -> dict[str, Tensor]:
    """Returns our names in a layer and the weights of one part of theirs."""
    if kind == "M":
        channels, state = HEADS * WIDTH, GROUPS * STATE
        own = {name: getattr(mixer, name) for name in ("A_log", "D", "dt_bias")}
        own["norm_weight"], own["out_proj.weight"] = mixer.norm.weight, mixer.out_proj.weight
        own["in_proj.weight"] = by_group(mixer.in_proj.weight, [channels, channels, state, state, HEADS])
        own["conv1d.weight"] = by_group(mixer.conv1d.weight[:, 0], [channels, state, state])
        own["conv1d.bias"] = by_group(mixer.conv1d.bias, [channels, state, state])
    elif kind == "*":
        query, key, value = (getattr(mixer, f"{name}_proj").weight.unflatten(0, (2, -1)) for name in "qkv")
        own = {"linear_qkv.weight": torch.cat([query, key, value], 1).flatten(0, 1)}
        own["linear_proj.weight"] = mixer.o_proj.weight
    elif kind == "-":
        own = {"linear_fc1.weight": mixer.up_proj.weight, "linear_fc2.weight": mixer.down_proj.weight}
    else:
        own = {"router.weight": mixer.gate.weight}
        for expert in range(4):
            own[f"experts.local_experts.{expert}.linear_fc1.weight"] = mixer.experts.up_proj[expert]
            own[f"experts.local_experts.{expert}.linear_fc2.weight"] = mixer.experts.down_proj[expert]
        own["shared_experts.linear_fc1.weight"] = mixer.shared_experts.up_proj.weight
        own["shared_experts.linear_fc2.weight"] = mixer.shared_experts.down_proj.weight
    return own


def become(model: MambaModel, other: NemotronHForCausalLM) -> None:
    """Gives a model the weights of one of `transformers`."""
    taken = {"embedding.word_embeddings.weight": other.model.embeddings.weight}
    taken |= {"decoder.final_layernorm.weight": other.model.norm_f.weight, "output_layer.weight": other.lm_head.weight}
    for number, (kind, block) in enumerate(zip(PATTERN, other.model.layers, strict=True)):
        part, norm = ("self_attention", "input_layernorm") if kind in "M*" else ("mlp", "pre_mlp_layernorm")
        layer = f"decoder.layers.{number}"
        taken[f"{layer}.{norm}.weight"] = block.norm.weight
        taken |= {f"{layer}.{part}.{name}": weight for name, weight in weights_of_mixer(kind, block.mixer).items()}
    assert not [key for key in model.load_state_dict(taken, strict=False).missing_keys if key.endswith("weight")]


def test_logits() -> None:
    model, other = ours(), theirs()
    become(model, other)
    ids = torch.randint(37, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), mock.patch.object(Tensor, "float", Tensor.double):
        expected = other(ids).logits
    with torch.no_grad():
        found = model(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.std().item())
