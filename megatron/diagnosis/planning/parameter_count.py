"""Parameters of a GPT from its flags, by formula: what a search over thousands of shapes can afford.

The counts equal those of a model that is built (tests compare the two). Vocabularies are counted without padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.declarations.flag_grammars import layer_pattern
from megatron.training.config.model import ACTIVATIONS

Flags = Mapping[str, Any]
"""Values of model flags by field, such as {"num_layers": 32, "swiglu": True}; others have their defaults."""

GATED = tuple(name for name, activation in ACTIVATIONS.items() if activation.gated)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by part."""

    embedding: int
    """Word embedding and learned positions."""
    attention: int
    """Attention of one layer."""
    dense_mlp: int
    """MLP of one dense layer."""
    experts: int
    """All routed experts of one layer."""
    active_experts: int
    """The routed experts that a token of one layer visits."""
    around_experts: int
    """Router and shared experts of one layer."""
    norms: int
    """Norms of one layer."""
    final: int
    """Final norm, and the head if it has its own weights."""
    layers: int
    expert_layers: int

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return self._sum(self.experts)

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self._sum(self.active_experts)

    def _sum(self, experts: int) -> int:
        dense = (self.layers - self.expert_layers) * self.dense_mlp
        sparse = self.expert_layers * (experts + self.around_experts)
        return self.embedding + self.layers * (self.attention + self.norms) + dense + sparse + self.final


def parameter_count(flags: Flags, vocab_size: int, positions: int = 0) -> ParameterCount:
    """Returns the parameters of the model of these flags. `positions` are learned ones; without them 0."""
    h, layers = flags["hidden_size"], flags["num_layers"]
    biases = flags.get("add_bias_linear", True)
    norm = _norm(flags, h)
    ffn = flags.get("ffn_hidden_size") or 4 * h
    sparse = expert_layers(flags)
    expert = _mlp(flags, h, flags.get("moe_ffn_hidden_size") or ffn, biases)
    shared = flags.get("moe_shared_expert_intermediate_size")
    number = flags.get("num_moe_experts") or 0
    around = number * h * bool(sparse) + (_mlp(flags, h, shared, False) if shared else 0)
    around += h if shared and flags.get("moe_shared_expert_gate") else 0
    learned = flags.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    own_head = flags.get("untie_embeddings_and_output_weights", False)
    return ParameterCount(
        embedding=vocab_size * h + (positions * h if learned else 0),
        attention=_latent_attention(flags) if flags.get("multi_latent_attention") else _attention(flags, biases),
        dense_mlp=_mlp(flags, h, ffn, flags.get("mlp_bias", biases)),
        experts=number * expert,
        active_experts=flags.get("moe_router_topk", 2) * expert,
        around_experts=around,
        norms={"sandwich": 4, "parallel": 1}.get(flags.get("norm_placement", "pre"), 2) * norm,
        final=norm + (vocab_size * h if own_head else 0),
        layers=layers,
        expert_layers=sparse,
    )


def expert_layers(flags: Flags) -> int:
    """Returns the number of layers with experts."""
    if not flags.get("num_moe_experts"):
        return 0
    layers, frequency = flags["num_layers"], flags.get("moe_layer_freq", 1)
    if isinstance(frequency, str):
        frequency = layer_pattern(frequency)
    if isinstance(frequency, int):
        return sum(1 for number in range(layers) if number % frequency == 0)
    return sum(frequency[:layers])


def _norm(flags: Flags, width: int) -> int:
    if not flags.get("norm_affine", True):
        return 0
    has_bias = flags.get("normalization", "LayerNorm") == "LayerNorm" and flags.get("norm_bias", True)
    return 2 * width if has_bias else width


def _attention(flags: Flags, biases: bool) -> int:
    h, heads = flags["hidden_size"], flags["num_attention_heads"]
    width = flags.get("kv_channels") or h // heads
    groups = flags.get("num_query_groups", 1) if flags.get("group_query_attention") else heads
    queries, keys = heads * width, groups * width
    count = h * (queries + 2 * keys) + queries * h
    if flags.get("attention_output_gate"):
        count += h * queries
    if biases or flags.get("add_qkv_bias"):
        count += queries + 2 * keys
    output_bias = flags.get("attention_output_bias")
    count += h if (biases if output_bias is None else output_bias) else 0
    if flags.get("softmax_type") == "learnable":
        count += heads
    if flags.get("qk_layernorm"):
        whole = flags.get("qk_norm_scope", "head") != "head"
        count += _norm(flags, queries) + _norm(flags, keys) if whole else 2 * _norm(flags, width)
    return int(count)


def _latent_attention(flags: Flags) -> int:
    """Returns the parameters of multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    h, heads = flags["hidden_size"], flags["num_attention_heads"]
    latent, low_rank = flags.get("kv_lora_rank", 32), flags.get("q_lora_rank")
    width, rotated = flags.get("qk_head_dim", 128), flags.get("qk_pos_emb_head_dim", 64)
    value = flags.get("v_head_dim", 128)
    queries = heads * (width + rotated)
    count = h * (latent + rotated) + latent * heads * (width + value) + heads * value * h
    count += h * low_rank + low_rank * queries if low_rank else h * queries
    if flags.get("qk_layernorm"):
        count += _norm(flags, latent) + (_norm(flags, low_rank) if low_rank else 0)
    return int(count)


def _mlp(flags: Flags, h: int, ffn: int, biases: bool | None) -> int:
    gated = any(flags.get(name) for name in GATED)
    return h * ffn * (3 if gated else 2) + ((2 if gated else 1) * ffn + h if biases else 0)
