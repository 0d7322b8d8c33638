"""A GPT written out plainly, to compare the product with: no shared code, no fused operation, one head at a time.

It takes a state dict of the product's names and the same settings, and computes in the weights' type.
"""

import math

import torch
from torch import Tensor


def reference_logits(
    weights: dict[str, Tensor], config, model: dict, tokens: Tensor, positions: Tensor | None = None, hidden_pairs=None
) -> Tensor:
    """Logits [b, s, V]. `model`: the keywords of GPTModel. `hidden_pairs` bool [b, s, s]: hidden beside the causal
    ones."""
    b, s = tokens.shape
    positions = torch.arange(s).expand(b, s) if positions is None else positions
    x = weights["embedding.word_embeddings.weight"][tokens]
    kind = model.get("position_embedding_type", "learned_absolute")
    if kind == "learned_absolute":
        x = x + weights["embedding.position_embeddings.weight"][positions]
    angles = rope_angles(config, model, positions) if kind == "rope" else None
    seen = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
    if hidden_pairs is not None:
        seen = seen & ~hidden_pairs
    for layer in range(config.num_layers):
        part = {k.split(".", 3)[3]: v for k, v in weights.items() if k.startswith(f"decoder.layers.{layer}.")}
        n = norm(x, part, "input_layernorm.", config)
        base = n if config.apply_residual_connection_post_layernorm else x
        turned = angles if turns(config, layer + 1) else None
        x = base + attend(n, part, config, turned, seen, layer + 1)
        n = norm(x, part, "pre_mlp_layernorm.", config)
        base = n if config.apply_residual_connection_post_layernorm else x
        x = base + mlp(n, part, config)
    x = norm(x, weights, "decoder.final_layernorm.", config)
    head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return (x @ head.T)[..., : model["vocab_size"]]


def reference_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of each token."""
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -probabilities.log().gather(-1, labels[..., None])[..., 0]


def norm(x: Tensor, weights: dict[str, Tensor], prefix: str, config) -> Tensor:
    weight = weights[prefix + "weight"] + (1 if config.layernorm_zero_centered_gamma else 0)
    if config.normalization == "RMSNorm":
        return x / ((x * x).mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / (variance + config.layernorm_epsilon).sqrt() * weight + weights[prefix + "bias"]


def affine(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def attend(x: Tensor, weights: dict[str, Tensor], config, angles, seen: Tensor, layer: int) -> Tensor:
    d, groups = config.kv_channels, config.num_query_groups
    per_group = config.num_attention_heads // groups
    scale = config.softmax_scale or 1 / math.sqrt(d)
    rows = affine(x, weights, "self_attention.linear_qkv").split((per_group + 2) * d, -1)
    s = x.shape[1]
    index = torch.arange(s)
    if config.window_size is not None and windowed(config, layer):
        left, right = config.window_size
        distance = index[None, :] - index[:, None]
        seen = seen & ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    outputs = []
    for group in range(groups):
        *queries, key, value = rows[group].split(d, -1)
        if config.qk_layernorm:
            key = norm(key, weights, "self_attention.k_layernorm.", config)
            queries = [norm(q, weights, "self_attention.q_layernorm.", config) for q in queries]
        if angles is not None:
            key = rotate(key, angles, config.rotary_interleaved)
            queries = [rotate(q, angles, config.rotary_interleaved) for q in queries]
        for number, query in enumerate(queries):
            scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
            if config.softmax_type == "off-by-one":
                exponent = scores.exp()
                p = exponent / (exponent.sum(-1, keepdim=True) + 1)
            elif config.softmax_type == "learnable":
                extra = weights["self_attention.core_attention.softmax_offset"][group * per_group + number]
                p = scores.exp() / (scores.exp().sum(-1, keepdim=True) + extra.exp())
            else:
                p = scores.softmax(-1)
            outputs.append(p @ value)
    return affine(torch.cat(outputs, -1), weights, "self_attention.linear_proj")


def windowed(config, layer: int) -> bool:
    pattern = config.window_attn_skip_freq
    if isinstance(pattern, list):
        return pattern[layer - 1] == 1
    return pattern is None or layer % pattern != 0


def turns(config, layer: int) -> bool:
    pattern = config.no_rope_freq
    if isinstance(pattern, list):
        return pattern[layer - 1] == 0
    return pattern is None or layer % pattern != 0


def mlp(x: Tensor, weights: dict[str, Tensor], config) -> Tensor:
    y = affine(x, weights, "mlp.linear_fc1")
    name = getattr(config.activation_func, "__name__", "")
    if name == "gelu" and config.bias_activation_fusion:
        name = "gelu_tanh"
    f = {
        "gelu": lambda t: t * 0.5 * (1 + torch.erf(t / math.sqrt(2))),
        "gelu_tanh": lambda t: 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
        "silu": lambda t: t / (1 + torch.exp(-t)),
        "squared_relu": lambda t: torch.where(t > 0, t * t, 0.0),
        "quick_gelu": lambda t: t / (1 + torch.exp(-1.702 * t)),
    }[name]
    if config.gated_linear_unit:
        gate, up = y[..., : config.ffn_hidden_size], y[..., config.ffn_hidden_size :]
        limit = config.activation_func_clamp_value
        if limit is not None:
            gate, up = torch.where(gate < limit, gate, limit), torch.where(up.abs() < limit, up, up.sign() * limit)
        y = f(gate) * (up + config.glu_linear_offset)
    else:
        y = f(y)
    return affine(y, weights, "mlp.linear_fc2")


def rope_angles(config, model: dict, positions: Tensor) -> Tensor:
    """[b, s, r/2]; in float32, as published."""
    r = int(config.kv_channels * model.get("rotary_percent", 1.0))
    base = torch.tensor(float(model.get("rotary_base", 10000)))
    frequencies = []
    for i in range(r // 2):
        frequency = 1 / base ** (torch.tensor(2.0 * i) / r)
        if model.get("rope_scaling"):
            factor, wavelength = model.get("rope_scaling_factor", 8.0), 2 * math.pi / frequency
            if wavelength > 8192:
                frequency = frequency / factor
            elif wavelength >= 2048:
                t = (8192 / wavelength - 1) / 3
                frequency = (1 - t) * frequency / factor + t * frequency
        frequencies.append(frequency)
    factor = model.get("seq_len_interpolation_factor") or 1.0
    return (positions[..., None].float() * (1 / factor)) * torch.stack(frequencies)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    half = angles.shape[-1]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned = x.clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b, c, s = x[..., first], x[..., second], cos[..., i], sin[..., i]
        turned[..., first], turned[..., second] = a * c - b * s, b * c + a * s
    return turned
