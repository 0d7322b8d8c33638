"""The operations of a training step whose weights are frozen beside adapters, from the config: no model is built.

For each token, a frozen weight takes 4 operations: forward and the gradient of its input. A weight of an adapter takes
6. Attention scores and recurrent states take 6 operations a multiplication, as in other runs. The few products before
the first adapter count as all others: the embedding's output requires a gradient, so the run computes theirs too.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.adapters.config import LoraConfig
from megatron.core.adapters.layers import part_of_rows
from megatron.core.adapters.targets import DEFAULT, parts_of_layer
from megatron.core.transformer.config.hybrid import mamba_heads
from megatron.core.transformer.layer_costs import training_flops, weight_multiplications
from megatron.core.transformer.layer_patterns import described_layer, layer_parts, with_sizes_of
from megatron.core.transformer.shared_key_values import separate_heads
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of the whole model that may get an adapter."""

    name: str
    rows: tuple[int, ...]
    """Dimensions of the canonical rows of its weight."""
    columns: int
    split: Literal["rows", "columns", "none"]
    """What tensor parallel ranks divide."""
    of_experts: bool = False
    """Whether it stands for the layers of all experts, of which a token passes `moe_router_topk`."""


@dataclass(frozen=True)
class Adapter:
    """A product B A of the whole model beside a linear layer."""

    layer: LinearLayer
    rows: int
    """Rows of B."""


def adapters_of_layer(lora: LoraConfig, config: TransformerConfig, number: int) -> Iterator[Adapter]:
    """Yields the adapters of a transformer layer (counted from 1)."""
    mixer, channels = layer_parts(config, number)
    config = with_sizes_of(config, described_layer(config, number))
    layers = [*(_MIXERS[mixer](config) if mixer else ()), *(_CHANNELS[channels](config) if channels else ())]
    for layer in layers:
        for part in parts_of_layer(layer.name, layer.rows, lora.lora_target_modules or DEFAULT)[0]:
            yield Adapter(layer, math.prod(part_of_rows(part, layer.rows)))


def adapter_training_flops(
    lora: LoraConfig, config: TransformerConfig, padded_vocab_size: int, seq_length: int, batch_size: int
) -> int:
    """Returns the floating point operations of a training step over `batch_size` sequences: those of
    `training_flops`, without the gradients of frozen weights, and those of the adapters."""
    assert lora.lora_rank is not None
    numbers = range(1, config.num_layers + (config.mtp_num_layers or 0) + 1)
    adapters = 0
    for number in numbers:
        for adapter in adapters_of_layer(lora, config, number):
            uses = config.moe_router_topk if adapter.layer.of_experts else 1
            adapters += uses * lora.lora_rank * (adapter.rows + adapter.layer.columns)
    frozen = weight_multiplications(config, padded_vocab_size)
    changed = batch_size * seq_length * (6 * adapters - 2 * frozen)
    return round(training_flops(config, padded_vocab_size, seq_length, batch_size) + changed)


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers


def _attention(config: TransformerConfig) -> Iterator[LinearLayer]:
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        yield from _latent_attention(config)
        return
    assert config.kv_channels and config.num_query_groups
    rows = config.num_query_groups, sum(separate_heads(config)), config.kv_channels
    yield LinearLayer("linear_qkv", rows, config.hidden_size, "rows")
    yield LinearLayer("linear_proj", (config.hidden_size,), config.num_attention_heads * config.kv_channels, "columns")


def _latent_attention(config: MLATransformerConfig) -> Iterator[LinearLayer]:
    h, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads, config.qk_head_dim + config.qk_pos_emb_head_dim
    if config.q_lora_rank is None:
        yield LinearLayer("linear_q_proj", query, h, "rows")
    else:
        yield LinearLayer("linear_q_down_proj", (config.q_lora_rank,), h, "none")
        yield LinearLayer("linear_q_up_proj", query, config.q_lora_rank, "rows")
    yield LinearLayer("linear_kv_down_proj", (latent + config.qk_pos_emb_head_dim,), h, "none")
    yield LinearLayer("linear_kv_up_proj", (heads, config.qk_head_dim + config.v_head_dim), latent, "rows")
    yield LinearLayer("linear_proj", (h,), heads * config.v_head_dim, "columns")


def _sparse_attention(config: TransformerConfig) -> Iterator[LinearLayer]:
    assert isinstance(config, MLATransformerConfig)
    yield from _latent_attention(config)
    heads, width, h = config.dsa_indexer_n_heads or 0, config.dsa_indexer_head_dim or 0, config.hidden_size
    yield LinearLayer("linear_wq_b", (heads * width,), config.q_lora_rank or h, "none")
    yield LinearLayer("linear_wk", (width,), h, "none")
    yield LinearLayer("linear_weights_proj", (heads,), h, "none")


def _mamba(config: TransformerConfig) -> Iterator[LinearLayer]:
    channels = mamba_heads(config) * config.mamba_head_dim
    rows = 2 * channels + 2 * config.mamba_num_groups * config.mamba_state_dim + mamba_heads(config)
    yield LinearLayer("in_proj", (rows,), config.hidden_size, "rows")
    yield LinearLayer("out_proj", (config.hidden_size,), channels, "columns")


def _gated_delta_net(config: TransformerConfig) -> Iterator[LinearLayer]:
    key_heads, value_heads = config.linear_num_key_heads or 0, config.linear_num_value_heads or 0
    keys, values = key_heads * (config.linear_key_head_dim or 0), value_heads * (config.linear_value_head_dim or 0)
    yield LinearLayer("in_proj", (2 * keys + 2 * values + 2 * value_heads,), config.hidden_size, "rows")
    yield LinearLayer("out_proj", (config.hidden_size,), values, "columns")


def _branch(name: str) -> Callable[[TransformerConfig], Iterator[LinearLayer]]:
    """Returns a function for a linear layer that replaces a whole branch, which has the branch's name."""
    return lambda config: iter([LinearLayer(name, (config.hidden_size,), config.hidden_size, "none")])


def _mlp(config: TransformerConfig) -> Iterator[LinearLayer]:
    assert config.ffn_hidden_size
    yield from _pair(config, config.hidden_size, config.ffn_hidden_size)


def _pair(config: TransformerConfig, outer: int, width: int, of_experts: bool = False) -> Iterator[LinearLayer]:
    rows = (2, width) if config.gated_linear_unit else (width,)
    yield LinearLayer("linear_fc1", rows, outer, "rows", of_experts)
    yield LinearLayer("linear_fc2", (outer,), width, "columns", of_experts)


def _experts(config: TransformerConfig) -> Iterator[LinearLayer]:
    assert config.moe_ffn_hidden_size
    h, latent = config.hidden_size, config.moe_latent_size
    if latent:
        yield LinearLayer("fc1_latent_proj", (latent,), h, "none")
        yield LinearLayer("fc2_latent_proj", (h,), latent, "none")
    yield from _pair(config, latent or h, config.moe_ffn_hidden_size, of_experts=True)
    if config.moe_shared_expert_intermediate_size:
        yield from _pair(config, h, config.moe_shared_expert_intermediate_size)


_MIXERS: dict[str, Callable[[TransformerConfig], Iterator[LinearLayer]]] = {
    "attention": _attention,
    "dsa": _sparse_attention,
    "mamba": _mamba,
    "gated_delta_net": _gated_delta_net,
    "linear": _branch("self_attention"),
}
_CHANNELS: dict[str, Callable[[TransformerConfig], Iterator[LinearLayer]]] = {
    "mlp": _mlp,
    "moe": _experts,
    "linear": _branch("mlp"),
}
"""For each mixer of `layer_patterns.LayerParts`: its linear layers."""
