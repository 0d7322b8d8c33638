"""The published FLOP count, by hand and against torch's counter over a real forward and backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.activation import squared_relu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.logging.flops import (
    LatentAttention,
    MixtureOfExperts,
    ModelShape,
    flops_per_token,
    peak_of_device_name,
    peak_tflops,
    training_flops,
)

GPT = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 2,
    "padded_vocab_size": 128,
    "seq_length": 16,
}


def test_dense_by_hand():
    mlp = 6 * 8 * 32 * 2 * 2
    attention = 6 * (8 * 24 + 8 * 16 + 8 * 8) * 2
    assert flops_per_token(ModelShape(**GPT)) == mlp + attention + 6 * 8 * 128
    assert training_flops(ModelShape(**GPT), 5) == 5 * 16 * (mlp + attention + 6 * 8 * 128)


def test_gated_grouped_and_output_gate_by_hand():
    shape = ModelShape(**{**GPT, "num_query_groups": 2}, gated_linear_unit=True, attention_output_gate=True)
    mlp = 6 * 8 * 32 * 3 * 2
    attention = 6 * (8 * (8 + 4 + 4 + 8) + 8 * 16 + 8 * 8) * 2
    assert flops_per_token(shape) == mlp + attention + 6 * 8 * 128


def test_experts_and_mtp_by_hand():
    moe = MixtureOfExperts(num_layers=2, ffn_hidden_size=16, router_topk=3, shared_expert_size=20)
    shape = ModelShape(**GPT, mtp_num_layers=1, moe=moe)
    mlp = 6 * 8 * (32 * 2 * 1 + (16 * 3 * 2 + 20 * 2) * 2)
    attention = 6 * (8 * 24 + 8 * 16 + 8 * 8) * 3
    mtp = 6 * (3 * 8 + 2 * 64)
    assert flops_per_token(shape) == mlp + attention + mtp + 6 * 8 * 128 * 2


def test_a_config_says_what_its_layers_are():
    config = MLATransformerConfig(
        num_layers=3,
        hidden_size=8,
        num_attention_heads=4,
        ffn_hidden_size=32,
        mtp_num_layers=2,
        num_moe_experts=8,
        moe_layer_freq=[0, 1, 1],
        moe_ffn_hidden_size=16,
        moe_router_topk=3,
        moe_shared_expert_intermediate_size=20,
    )
    shape = ModelShape.from_config(config, padded_vocab_size=128, seq_length=16)
    assert shape.mtp_num_layers == 2 and shape.latent_attention == LatentAttention.of(config)
    assert shape.moe == MixtureOfExperts(num_layers=4, ffn_hidden_size=16, router_topk=3, shared_expert_size=20)
    plain = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=4)
    shape = ModelShape.from_config(plain, padded_vocab_size=128, seq_length=16)
    assert shape.mtp_num_layers == 0 and shape.latent_attention is None and shape.moe is None


@pytest.mark.parametrize(("q_lora_rank", "queries"), [(None, 8 * 4 * 6), (3, 3 * (8 + 4 * 6 + 1))])
def test_latent_attention_by_hand(q_lora_rank, queries):
    mla = LatentAttention(q_lora_rank=q_lora_rank, kv_lora_rank=5, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=3)
    attention = 6 * (queries + 5 * (8 + 4 * 7 + 1) + 8 * 2 + 4 * 3 * 8 + 16 * 4 * 6 / 2 + 16 * 4 * 3 / 2)
    shape = ModelShape(**GPT, latent_attention=mla)
    assert flops_per_token(shape) == 6 * 8 * 32 * 2 * 2 + 2 * attention + 6 * 8 * 128


def test_peaks_are_dense_and_unknown_devices_have_none():
    bf16 = torch.bfloat16
    assert peak_of_device_name("NVIDIA H200", bf16) == 989.4
    assert peak_of_device_name("NVIDIA H100 80GB HBM3", torch.float16) == 989.4
    assert peak_of_device_name("NVIDIA H100 PCIe", bf16) == 756.5
    assert peak_of_device_name("NVIDIA H100 NVL", bf16) == 835.5
    assert peak_of_device_name("NVIDIA A100-SXM4-80GB", bf16) == 312.0
    assert peak_of_device_name("NVIDIA GB200", bf16) == 2500.0
    assert peak_of_device_name("NVIDIA H200", bf16, fp8=True) == 1978.9
    assert peak_of_device_name("NVIDIA A100-SXM4-80GB", bf16, fp8=True) is None
    assert peak_of_device_name("NVIDIA H200", torch.float32) is None
    assert peak_of_device_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb", bf16) is None
    assert peak_of_device_name("NVIDIA RTX A3000", bf16) is None
    assert peak_of_device_name("NVIDIA A100X Prototype", bf16) is None
    assert peak_tflops(torch.device("cpu"), bf16) is None


MODELS = {
    "mha, tied": {"config": {}, "tied": True},
    "gqa, swiglu": {"config": {"num_query_groups": 2, "gated_linear_unit": True}, "tied": False},
    "wide heads, squared relu": {"config": {"kv_channels": 24, "activation_func": squared_relu}, "tied": False},
    "mqa, swiglu, rope, padded vocabulary, no bias": {
        "config": {"num_query_groups": 1, "gated_linear_unit": True, "add_bias_linear": False},
        "tied": True,
        "rope": True,
        "padding": 128,
    },
    "latent attention": {
        "config": {"q_lora_rank": 40, "qk_layernorm": True, "gated_linear_unit": True},
        "latent": {"kv_lora_rank": 36, "qk_head_dim": 14, "qk_pos_emb_head_dim": 6, "v_head_dim": 12},
        "tied": False,
    },
    "latent attention, queries at once": {
        "config": {"q_lora_rank": None},
        "latent": {"kv_lora_rank": 24, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 20},
        "tied": True,
    },
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_formula_counts_what_a_model_computes(model):
    """Within 1% of torch's counter over unfused attention, whose two score-sized products count at half."""
    vocab, padding, seq, batch = 300, model.get("padding", 4), 32, 2
    padded = -(-vocab // padding) * padding
    latent = model.get("latent", {})
    config = (MLATransformerConfig if latent else TransformerConfig)(
        multi_latent_attention=bool(latent),
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=160,
        attention_backend=AttnBackend.unfused,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **model["config"],
        **latent,
    )
    gpt = GPTModel(
        config,
        gpt_layer_spec_of(config, 1),
        vocab_size=vocab,
        max_sequence_length=seq,
        share_embeddings_and_output_weights=model["tied"],
        position_embedding_type="rope" if model.get("rope") else "learned_absolute",
        vocab_padding_multiple=padding,
    )
    tokens = torch.randint(vocab, (batch, seq))
    with FlopCounterMode(display=False) as counter:
        gpt(tokens, torch.arange(seq).expand(batch, seq), None, labels=tokens).mean().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    scores = sum(flops for op, flops in counts.items() if "bmm" in op)
    widths = (config.kv_channels, config.kv_channels)
    if latent:
        widths = (config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
    products = sum(widths) * config.num_attention_heads * seq * seq
    assert scores == 3 * 2 * products * batch * config.num_layers  # only attention is batched
    counted = sum(counts.values()) - scores / 2
    formula = training_flops(ModelShape.from_config(config, padded_vocab_size=padded, seq_length=seq), batch)
    assert formula == pytest.approx(counted, rel=0.01)
