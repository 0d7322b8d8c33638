"""A plainly written GPT to compare the product with: no shared code, no fused operation, one head at a time.

It takes a state dict of the product's names and the same settings, and computes in the weights' type.
"""

import math

import torch
from torch import Tensor


def reference_logits(
    weights: dict[str, Tensor], config, model: dict, tokens: Tensor, positions: Tensor | None = None, hidden_pairs=None
) -> Tensor:
    """Returns logits [b, s, V]. `model` has the keywords of GPTModel. `hidden_pairs`, bool [b, s, s], hides pairs of
    tokens in addition to the causal mask."""
    return head(reference_hidden(weights, config, model, tokens, positions, hidden_pairs), weights, model)


def reference_hidden(
    weights: dict[str, Tensor], config, model: dict, tokens: Tensor, positions: Tensor | None = None, hidden_pairs=None
) -> Tensor:
    """Returns the input of the output layer, [b, s, h]."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape) if positions is None else positions
    x = embed(weights, model, tokens, positions)
    angles, seen = angles_and_visible(config, model, positions, hidden_pairs)
    for number in range(config.num_layers):
        x = layer(x, below(weights, f"decoder.layers.{number}."), config, angles, seen, number + 1)
    return norm(x, weights, "decoder.final_layernorm.", config)


def reference_predictions(
    weights: dict[str, Tensor],
    config,
    model: dict,
    hidden: Tensor,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    positions: Tensor,
    documents: Tensor,
    hidden_pairs=None,
) -> list[tuple[Tensor, Tensor]]:
    """Returns (sum of losses, sum of mask) for each depth of multi-token prediction. `hidden`, [b, s, h], is the input
    of the output layer. `documents`, [b, s], numbers the documents; predictions do not cross documents."""
    angles, seen = angles_and_visible(config, model, positions, hidden_pairs)
    found = []
    for depth in range(1, config.mtp_num_layers + 1):
        ids, places, wanted, counted = (ahead(row, depth, documents) for row in (tokens, positions, labels, mask))
        part = below(weights, f"mtp.layers.{depth - 1}.")
        e = norm(embed(weights, model, ids, places), part, "enorm.", config)
        x = torch.cat([e, norm(hidden, part, "hnorm.", config)], -1) @ part["eh_proj.weight"].T
        number = config.num_layers  # if layers differ, like the last layer
        x = layer(x, below(part, "transformer_layer."), config, angles, seen, number)
        hidden = norm(x, part, "final_layernorm.", config)
        losses = reference_loss(head(hidden, weights, model), wanted)
        found.append(((losses * counted).sum(), counted.sum()))
    return found


def ahead(row: Tensor, places: int, documents: Tensor) -> Tensor:
    """Returns each row [b, s] shifted left by `places` within its documents; 0 past the end of a document."""
    moved = torch.zeros_like(row)
    for b, s in torch.cartesian_prod(torch.arange(row.shape[0]), torch.arange(row.shape[1] - places)).tolist():
        if documents[b, s] == documents[b, s + places]:
            moved[b, s] = row[b, s + places]
    return moved


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the weights whose names begin with a prefix, under their names without it."""
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


def embed(weights: dict[str, Tensor], model: dict, tokens: Tensor, positions: Tensor) -> Tensor:
    x = weights["embedding.word_embeddings.weight"][tokens]
    if model.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        x = x + weights["embedding.position_embeddings.weight"][positions]
    return x


def angles_and_visible(config, model: dict, positions: Tensor, hidden_pairs=None) -> tuple[Tensor | None, Tensor]:
    """Returns rotary angles (or None), and the bool mask [b, s, s] of pairs that see each other."""
    b, s = positions.shape
    rotary = model.get("position_embedding_type", "learned_absolute") == "rope"
    angles = rope_angles(config, model, positions) if rotary else None
    seen = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
    return angles, seen if hidden_pairs is None else seen & ~hidden_pairs


def layer(x: Tensor, part: dict[str, Tensor], config, angles, seen: Tensor, number: int) -> Tensor:
    """One transformer layer, [b, s, h] -> [b, s, h]."""
    n = norm(x, part, "input_layernorm.", config)
    base = n if config.apply_residual_connection_post_layernorm else x
    x = base + attend(n, part, config, angles if turns(config, number) else None, seen, number)
    n = norm(x, part, "pre_mlp_layernorm.", config)
    base = n if config.apply_residual_connection_post_layernorm else x
    return base + mlp(n, part, config)


def head(x: Tensor, weights: dict[str, Tensor], model: dict) -> Tensor:
    weight = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return (x @ weight.T)[..., : model["vocab_size"]]


def reference_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each token."""
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
    """Returns rotary angles [b, s, r/2], computed in float32 like Megatron-LM."""
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
