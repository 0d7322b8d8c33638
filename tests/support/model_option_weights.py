"""Maps weights of `transformers` models to ours, for tests that compare the models."""

from collections.abc import Callable

import torch
from torch import Tensor

Get = Callable[[str], Tensor]
"""Returns a tensor of the `transformers` model (of one layer) by the path of its module."""
Source = str | Callable[[Get], Tensor]
"""Source of one of our tensors: the path of their module, or a function that computes the tensor."""


def grouped(*parts: Tensor, groups: int) -> Tensor:
    """Interleaves the rows of separate projections by group, as our joint projection has them."""
    return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def llama(groups: int, **other: Source) -> dict[str, Source]:
    """Returns the sources for a model like Llama, by our path within a layer or in the model."""
    return {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": lambda get: grouped(
            *(get(f"self_attn.{name}_proj") for name in "qkv"), groups=groups
        ),
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": lambda get: torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
        "mlp.linear_fc2": "mlp.down_proj",
        **other,
    }


SANDWICH: dict[str, Source] = {
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
HEAD_NORMS: dict[str, Source] = {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
POST: dict[str, Source] = {
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def with_gate(get: Get) -> Tensor:
    """Splits their query projection, in which each head's rows are followed by those of its gate."""
    both = get("self_attn.q_proj").unflatten(0, (4, 2, 8))
    query, gate = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
    return grouped(query, gate, get("self_attn.k_proj"), get("self_attn.v_proj"), groups=2)


EXPERTS = 4


def oss_experts() -> dict[str, Source]:
    """Returns the sources of experts. Theirs are transposed, in one tensor, with alternating gate and up rows."""
    ours: dict[str, Source] = {}
    for expert in range(EXPERTS):
        path = f"mlp.experts.local_experts.{expert}"
        for kind, theirs in (("weight", ""), ("bias", "_bias")):

            def gate_and_up(get: Get, expert: int = expert, theirs: str = theirs) -> Tensor:
                both = get(f"mlp.experts.gate_up_proj{theirs}")[expert]
                return torch.cat([both[..., ::2], both[..., 1::2]], -1).t()

            def down(get: Get, expert: int = expert, theirs: str = theirs) -> Tensor:
                return get(f"mlp.experts.down_proj{theirs}")[expert].t()

            ours |= {f"{path}.linear_fc1.{kind}": gate_and_up, f"{path}.linear_fc2.{kind}": down}
    return ours


def qwen_experts() -> dict[str, Source]:
    """Returns the sources of experts, whose weights they have in one tensor, and of the shared ones with their gate."""
    ours: dict[str, Source] = {
        "mlp.router": "mlp.gate",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        "mlp.shared_experts.linear_fc1": lambda get: torch.cat(
            [get("mlp.shared_expert.gate_proj.weight"), get("mlp.shared_expert.up_proj.weight")]
        ),
        "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    }
    for expert in range(EXPERTS):
        for name, theirs in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            ours[f"mlp.experts.local_experts.{expert}.{name}"] = lambda get, expert=expert, theirs=theirs: get(
                f"mlp.experts.{theirs}"
            )[expert]
    return ours


def delta_net(key_heads: int) -> dict[str, Source]:
    """Returns the sources of a gated delta net. Their convolution has all queries, then all keys, then all values."""

    def conv(get: Get) -> Tensor:
        width = get("linear_attn.in_proj_qkvz").shape[0]  # queries, keys, values, as many gates
        values = get("linear_attn.out_proj").shape[1]
        keys = (width - 2 * values) // 2
        return grouped(*get("linear_attn.conv1d").squeeze(1).split([keys, keys, values]), groups=key_heads)

    return {
        "self_attention.in_proj": lambda get: grouped(
            get("linear_attn.in_proj_qkvz"), get("linear_attn.in_proj_ba"), groups=key_heads
        ),
        "self_attention.conv1d": conv,
        "self_attention.A_log": "linear_attn.A_log",
        "self_attention.dt_bias": "linear_attn.dt_bias",
        "self_attention.out_norm": "linear_attn.norm",
        "self_attention.out_proj": "linear_attn.out_proj",
    }


FALCON: dict[str, Source] = {
    "embedding.word_embeddings": "transformer.word_embeddings",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer": "lm_head",
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
NEOX: dict[str, Source] = {
    "embedding.word_embeddings": "gpt_neox.embed_in",
    "decoder.final_layernorm": "gpt_neox.final_layer_norm",
    "output_layer": "lm_head",
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
PHI3: dict[str, Source] = llama(
    2,
    **{
        "self_attention.linear_qkv": lambda get: grouped(*get("self_attn.qkv_proj").split([32, 16, 16]), groups=2),
        "mlp.linear_fc1": "mlp.gate_up_proj",
    },
)
