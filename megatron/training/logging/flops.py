"""How many floating point operations a model's training takes, and how many a device could do.

The count is the published one: forward and backward of every matrix product, causal attention at half of its square,
nothing for embeddings, norms or what is computed twice. Backward counts twice the forward, so every product of
[m, k] and [k, n] costs 6 m k n.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.transformer.layer_patterns import has_experts


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora_rank: int | None
    """None: queries are projected at once."""
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: Any) -> "LatentAttention":
        """The sizes that an `MLATransformerConfig` has."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Sizes of the layers that have experts in place of a dense MLP."""

    num_layers: int
    """How many of the model's layers, those of multi-token prediction included."""
    ffn_hidden_size: int
    router_topk: int
    shared_expert_size: int = 0

    @classmethod
    def of(cls, config: Any) -> "MixtureOfExperts":
        """Of a `TransformerConfig` with experts."""
        numbers = range(1, 1 + config.num_layers + (config.mtp_num_layers or 0))
        return cls(
            num_layers=sum(has_experts(config, number) for number in numbers),
            ffn_hidden_size=config.moe_ffn_hidden_size,
            router_topk=config.moe_router_topk,
            shared_expert_size=config.moe_shared_expert_intermediate_size or 0,
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the count depends on."""

    num_layers: int
    """Without the layers of multi-token prediction."""
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    seq_length: int
    gated_linear_unit: bool = False
    attention_output_gate: bool = False
    mtp_num_layers: int = 0
    latent_attention: LatentAttention | None = None
    moe: MixtureOfExperts | None = None

    @classmethod
    def from_config(cls, config: Any, *, padded_vocab_size: int, seq_length: int, **other: Any) -> "ModelShape":
        """The shape of a model from its `TransformerConfig`; `other` are further fields of this class."""
        return cls(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            kv_channels=config.kv_channels,
            gated_linear_unit=config.gated_linear_unit,
            attention_output_gate=config.attention_output_gate,
            mtp_num_layers=config.mtp_num_layers or 0,
            latent_attention=LatentAttention.of(config) if config.multi_latent_attention else None,
            moe=MixtureOfExperts.of(config) if config.num_moe_experts is not None else None,
            padded_vocab_size=padded_vocab_size,
            seq_length=seq_length,
            **other,
        )


def training_flops(shape: ModelShape, batch_size: int) -> int:
    """Floating point operations of one training step over `batch_size` whole sequences."""
    return round(batch_size * shape.seq_length * flops_per_token(shape))


def flops_per_token(shape: ModelShape) -> float:
    """Floating point operations of forward and backward, the mean over the tokens of a sequence."""
    layers = shape.num_layers + shape.mtp_num_layers
    attention = _latent_attention(shape, shape.latent_attention) if shape.latent_attention else _attention(shape)
    heads = 6 * shape.hidden_size * shape.padded_vocab_size * (shape.mtp_num_layers + 1)
    mtp_projections = 6 * shape.mtp_num_layers * (3 * shape.hidden_size + 2 * shape.hidden_size**2)
    return _mlp(shape, layers) + attention * layers + mtp_projections + heads


def _mlp(shape: ModelShape, layers: int) -> float:
    """All layers' MLPs; a gated one has three products, another two."""
    products = 3 if shape.gated_linear_unit else 2
    moe = shape.moe
    dense = layers - (moe.num_layers if moe else 0)
    width = shape.ffn_hidden_size * products * dense
    if moe:
        width += (moe.ffn_hidden_size * moe.router_topk + moe.shared_expert_size) * products * moe.num_layers
    return 6 * shape.hidden_size * width


def _attention(shape: ModelShape) -> float:
    """One layer: projections, and two products with half of a square of scores."""
    h, s = shape.hidden_size, shape.seq_length
    q = shape.kv_channels * shape.num_attention_heads
    kv = shape.kv_channels * shape.num_query_groups
    qkv = h * (q + 2 * kv + (q if shape.attention_output_gate else 0))
    scores = 2 * q * s / 2
    return 6 * (qkv + scores + q * h)


def _latent_attention(shape: ModelShape, mla: LatentAttention) -> float:
    """One layer of multi-head latent attention; the `+ 1` are the norms of the compressed vectors, as published."""
    h, s, heads = shape.hidden_size, shape.seq_length, shape.num_attention_heads
    qk = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    queries = h * heads * qk if mla.q_lora_rank is None else mla.q_lora_rank * (h + heads * qk + 1)
    keys_values = mla.kv_lora_rank * (h + heads * (mla.qk_head_dim + mla.v_head_dim) + 1) + h * mla.qk_pos_emb_head_dim
    scores = s * heads * (qk + mla.v_head_dim) / 2
    return 6 * (queries + keys_values + heads * mla.v_head_dim * h + scores)


# ---------------------------------------------------------------------------------------------------------------------
# What the device could do

_DENSE_PEAKS: tuple[tuple[frozenset[str], float, float | None], ...] = tuple(
    # Words of the device's name, 16-bit TFLOP/s, fp8 TFLOP/s: tensor cores without sparsity and with float32
    # accumulation, from NVIDIA's data sheets and architecture papers; those that state only the sparse rate are halved.
    # The first row counts of which the name has every word, so a special edition stands before its family.
    (frozenset(words.split()), sixteen_bit, eight_bit)
    for words, sixteen_bit, eight_bit in (
        ("GB200", 2500.0, 5000.0),
        ("B200", 2250.0, 4500.0),
        ("H200 NVL", 835.5, 1671.0),
        ("H200", 989.4, 1978.9),
        ("GH200", 989.4, 1978.9),
        ("H100 NVL", 835.5, 1671.0),
        ("H100 PCIe", 756.5, 1513.0),
        ("H100 HBM3", 989.4, 1978.9),
        ("H800 PCIe", 756.5, 1513.0),
        ("H800", 989.4, 1978.9),
        ("A100", 312.0, None),
        ("A800", 312.0, None),
        ("L40S", 362.05, 733.0),
        ("A30", 165.0, None),
    )
)

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def peak_tflops(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> float | None:
    """Peak TFLOP/s of a device for matrix products in `dtype` (16-bit, or fp8); None where it is not known for sure.

    Unknown are CPUs, devices that the table does not name, slices of a GPU (MIG), and types other than 16-bit and fp8:
    a missing utilisation is better than a wrong one.
    """
    if device.type != "cuda":
        return None
    return peak_of_device_name(torch.cuda.get_device_name(device), dtype, fp8=fp8)


def peak_of_device_name(name: str, dtype: torch.dtype, *, fp8: bool = False) -> float | None:
    """See `peak_tflops`; `name` as torch.cuda.get_device_name gives it."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    if "MIG" in words or (dtype not in _SIXTEEN_BIT and not fp8):
        return None
    for needed, sixteen_bit, eight_bit in _DENSE_PEAKS:
        if needed <= words:
            return eight_bit if fp8 else sixteen_bit
    return None
