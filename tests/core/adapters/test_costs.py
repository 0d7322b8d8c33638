"""The operations of a step beside frozen weights, against what a model computes and against its parameters."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config, tiny_gpt
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.adapters.attach import add_adapters
from megatron.core.adapters.config import LoraConfig
from megatron.core.adapters.costs import adapter_training_flops, adapters_of_layer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.layer_costs import training_flops
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCAB, SEQ, BATCH = 300, 32, 2
LATENT = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 24}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_layer_freq": [0, 1, 1]}
DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}


def configured(**fields: Any) -> TransformerConfig:
    kind = MLATransformerConfig if "kv_lora_rank" in fields else TransformerConfig
    sizes = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 160, "attention_backend": AttnBackend.unfused}
    return tiny_config(kind, **sizes, **fields)


def adapted(config: TransformerConfig, lora: LoraConfig) -> Any:
    gpt = tiny_gpt(config, VOCAB, SEQ, position_embedding_type="rope", vocab_padding_multiple=4)
    add_adapters(gpt, lora, config)
    return gpt


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({}, None),
        ({"num_query_groups": 2, "gated_linear_unit": True}, None),
        ({"num_query_groups": 2, "gated_linear_unit": True}, ["q_proj", "v_proj", "gate_proj", "o_proj"]),
        ({"num_query_groups": 2, "gated_linear_unit": True}, ["down_proj"]),
        (LATENT, ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]),
    ],
)
def test_the_count_is_what_a_model_computes(fields: dict[str, Any], targets: list[str] | None) -> None:
    """Within 1% of torch's counter, of whose products of scores half counts."""
    config, lora = configured(**fields), LoraConfig(lora_rank=6, lora_target_modules=targets)
    gpt, tokens = adapted(config, lora), torch.randint(VOCAB, (BATCH, SEQ))
    with FlopCounterMode(display=False) as counter:
        gpt(tokens, labels=tokens).mean().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    counted = sum(counts.values()) - sum(flops for op, flops in counts.items() if "bmm" in op) / 2
    found = adapter_training_flops(lora, config, VOCAB, SEQ, BATCH)
    assert found == pytest.approx(counted, rel=0.01)
    assert 4 / 6 < found / training_flops(config, VOCAB, SEQ, BATCH) < 5 / 6


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({"gated_linear_unit": True}, None),
        ({"attention_output_gate": True, "num_query_groups": 2}, ["linear_qkv"]),
        (LATENT, ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]),
        ({**LATENT, "q_lora_rank": None}, ["linear_q_proj"]),
        ({**EXPERTS, "gated_linear_unit": True, "moe_shared_expert_intermediate_size": 24}, None),
        ({**EXPERTS, "moe_latent_size": 32}, ["fc1_latent_proj", "fc2_latent_proj", "linear_fc1"]),
        (DELTA, ["in_proj", "out_proj", "linear_qkv"]),
        ({"hybrid_layer_pattern": "M*-", "mamba_head_dim": 16, "mamba_state_dim": 8}, ["in_proj", "out_proj"]),
    ],
)
def test_adapters_are_those_of_the_model(fields: dict[str, Any], targets: list[str] | None) -> None:
    config, lora = configured(**fields), LoraConfig(lora_rank=3, lora_target_modules=targets)
    trained = sum(p.numel() for p in adapted(config, lora).parameters() if p.requires_grad)
    adapters = [adapter for number in (1, 2, 3) for adapter in adapters_of_layer(lora, config, number)]
    layers = (config.num_moe_experts if each.layer.of_experts else 1 for each in adapters)
    assert trained == 3 * sum(n * (a.rows + a.layer.columns) for n, a in zip(layers, adapters, strict=True)) > 0


def test_states_of_recurrent_layers_count_as_in_other_runs() -> None:
    """A Mamba mixer whose weights are frozen: two thirds of the products with its weights, and all of its states."""
    config = configured(hybrid_layer_pattern="M*-", mamba_head_dim=16, mamba_state_dim=8)
    lora = LoraConfig(lora_rank=1, lora_target_modules=["linear_fc2"])
    less = training_flops(config, VOCAB, SEQ, 1) - adapter_training_flops(lora, config, VOCAB, SEQ, 1)
    channels, heads = 128, 8
    mixed = channels + 2 * config.mamba_num_groups * 8
    mamba = 64 * (channels + mixed + heads) + channels * 64 + mixed * config.mamba_conv_kernel_dim
    attention, mlp = 4 * 64 * 64, 2 * 64 * 160
    assert less == SEQ * (2 * (mamba + attention + mlp + 64 * VOCAB) - 6 * (64 + 160))
