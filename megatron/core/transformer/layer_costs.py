"""Computing costs of a model's layers, and the pipeline layout `auto`, which balances them.

The balance of pipeline stages, the log's throughput and the dry run use this one cost model. A cost is the number of
multiplications in the matrix products of a forward pass, for one token, as a mean over a sequence; norms, embeddings
and activations are left out. Backward costs twice as much, and a multiplication with its addition counts as two
floating point operations, so a training step takes 6 operations per multiplication.

Two counts are built from the same parts. `layer_cost` counts what this code computes, including windows, chunks and the
router. `flops_per_token` is Megatron-LM's count, which papers and logs use for comparison: attention scores over half
of the square, even with a window, and no router.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from megatron.core.pipeline_parallel.stages import AUTO, Pipeline, balanced_counts, num_encoder_layers, pipeline_of
from megatron.core.transformer.config.hybrid import mamba_heads
from megatron.core.transformer.layer_patterns import (
    LayerParts,
    described_layer,
    is_chunked,
    is_windowed,
    layer_parts,
    with_sizes_of,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline stages


def stages_of_auto_layout(
    config: TransformerConfig,
    seq_length: int,
    vocab_size: int,
    decoder_seq_length: int | None = None,
    *,
    bidirectional: bool = False,
) -> str | None:
    """Returns the layout, such as "Et*4|tttt|ttmL", whose stages have about equal costs; None if the config does not
    ask for it (`pipeline_model_parallel_layout auto` with several stages).

    Attention scores are counted over `seq_length`, the head over `vocab_size`. All ranks get the same stages. An
    encoder reads `seq_length` tokens and its decoder writes `decoder_seq_length`; each has its own stages.
    `bidirectional`: the model is a BERT.
    """
    if config.pipeline_model_parallel_layout != AUTO or config.pipeline_model_parallel_size == 1:
        return None
    if num_encoder_layers(config):
        return _stages_of_two_stacks(config, seq_length, decoder_seq_length or seq_length, vocab_size)
    further = range(config.num_layers + 1, config.num_layers + 1 + (config.mtp_num_layers or 0))
    layers = [layer_cost(config, number, seq_length, bidirectional) for number in range(1, config.num_layers + 1)]
    # The embedding only copies rows: one number for each element of a token. A layer of multi-token prediction joins
    # two hidden states into one, and applies the head once more.
    h = config.hidden_size
    first, head = h, h * vocab_size + _transform(config, bidirectional)
    last = head + sum(layer_cost(config, number, seq_length) + 2 * h * h + head for number in further)
    counts = balanced_counts(layers, first, last, pipeline_of(config))
    return _letters(counts) + "m" * len(further) + "L"


def _letters(counts: Sequence[int]) -> str:
    """Returns the layout of one stack of layers, with these numbers of layers on its stages."""
    return "E" + "|".join(f"t*{count}" if count > 3 else "t" * count for count in counts)


def _stages_of_two_stacks(config: TransformerConfig, read: int, written: int, vocab_size: int) -> str:
    """Returns the layout of an encoder and a decoder whose slowest stage costs least. Tries all divisions of the ranks
    between the two, or only that of `pipeline_model_parallel_split_rank`. Costs are per sample."""
    size, given, h = config.pipeline_model_parallel_size, config.pipeline_model_parallel_split_rank, config.hidden_size
    encoder = [encoder_layer_cost(config, read)] * num_encoder_layers(config)
    decoder = [decoder_layer_cost(config, number, read, written) for number in range(1, config.num_layers + 1)]

    def cut(split: int) -> tuple[int, str]:
        counts = []
        slowest = 0
        for layers, first, last, ranks in (
            (encoder, h * read, 0, split),
            (decoder, h * written, h * vocab_size * written, size - split),
        ):
            counts.append(balanced_counts(layers, first, last, Pipeline(ranks)))
            slowest = max(slowest, *_loads(counts[-1], layers, first, last))
        return slowest, "|".join(map(_letters, counts)) + "L"

    return min(cut(split) for split in ([given] if given else range(1, size)))[1]


def _loads(counts: Sequence[int], layers: Sequence[int], first: int, last: int) -> list[int]:
    """Returns the cost of each stage of one stack."""
    ends = list(itertools.accumulate(counts))
    loads = [sum(layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    loads[0] += first
    loads[-1] += last
    return loads


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def layer_cost(config: TransformerConfig, layer_number: int, seq_length: int, bidirectional: bool = False) -> int:
    """Returns the multiplications of a layer (counted from 1) for one token. Tokens of a `bidirectional` layer see all
    others, even with a window."""
    mixer, channels = layer_parts(config, layer_number)
    keys = seq_length if bidirectional else keys_seen(config, layer_number, seq_length)
    config = with_sizes_of(config, described_layer(config, layer_number))
    mixing = _TOKEN_MIXERS[mixer](config, keys) if mixer else 0
    return int(mixing) + _channel_mixer(config, channels)


def _attention(config: TransformerConfig, keys: float) -> float:
    """Returns the multiplications of attention for a token that sees `keys` keys."""
    return _attention_projections(config) + _score_channels(config) * keys


def _gated_delta_net(config: TransformerConfig, keys: float) -> float:
    """Returns the multiplications of a gated delta net: projections, convolution, and for each value head the decay of
    the state, its product with the key, its correction and its product with the query. (The chunked algorithm replaces
    some of these by products within a chunk.)"""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    dk, dv, taps = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    assert key_heads and value_heads and dk and dv and taps
    queries_keys, values = 2 * key_heads * dk, value_heads * dv
    projections = config.hidden_size * (queries_keys + 3 * values + 2 * value_heads)
    return projections + taps * (queries_keys + values) + _delta_states(config)


def _delta_states(config: TransformerConfig) -> int:
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    assert heads and dk and dv
    return 4 * heads * dk * dv


def _mamba(config: TransformerConfig, keys: float) -> float:
    """Returns the multiplications of a Mamba-2 mixer for a token, as if its recurrence went token by token: 7
    operations, or 3.5 multiplications with their additions, for each value of the state."""
    channels, groups = mamba_heads(config) * config.mamba_head_dim, config.mamba_num_groups
    written_and_read = 2 * groups * config.mamba_state_dim
    projections = config.hidden_size * (3 * channels + written_and_read + mamba_heads(config))
    convolution = (channels + written_and_read) * config.mamba_conv_kernel_dim
    return projections + convolution + _mamba_states(config)


def _mamba_states(config: TransformerConfig) -> float:
    return 3.5 * mamba_heads(config) * config.mamba_head_dim * config.mamba_state_dim


def _sparse_attention(config: TransformerConfig, keys: float) -> float:
    """Returns the multiplications of attention to the selected keys, of the indexer's projections, and of its scores of
    all keys."""
    assert isinstance(config, MLATransformerConfig) and config.dsa_indexer_topk
    heads, width = config.dsa_indexer_n_heads or 0, config.dsa_indexer_head_dim or 0
    projections = config.hidden_size * (width + heads) + (config.q_lora_rank or config.hidden_size) * heads * width
    return _attention(config, min(keys, config.dsa_indexer_topk)) + projections + heads * (width + 1) * keys


_TOKEN_MIXERS: dict[str, Callable[[TransformerConfig, float], float]] = {
    "attention": _attention,
    "gated_delta_net": _gated_delta_net,
    "mamba": _mamba,
    "dsa": _sparse_attention,
    "linear": lambda config, keys: config.hidden_size**2,
}
"""For each token mixer of `layer_patterns.LayerParts`: a function (config, number of keys that a token sees) ->
multiplications for a token."""

_STATES: dict[str, Callable[[TransformerConfig], float]] = {
    "gated_delta_net": _delta_states,
    "mamba": _mamba_states,
}
"""For each recurrent token mixer: a function config -> multiplications with its state for a token."""


def _channel_mixer(config: TransformerConfig, kind: str | None) -> int:
    """Returns the multiplications of an MLP, of one linear layer, or of a layer of experts and its router; 0 for a
    layer without a channel mixer."""
    if kind == "linear":
        return config.hidden_size**2
    if kind != "moe":
        return _mlp(config) if kind else 0
    assert config.num_moe_experts
    latent = config.moe_latent_size
    to_and_from_latent = 2 * config.hidden_size * latent if latent else 0
    router = config.hidden_size * config.num_moe_experts
    return router + _experts(config, latent or config.hidden_size) + to_and_from_latent


def encoder_layer_cost(config: TransformerConfig, seq_length: int) -> int:
    """Returns the multiplications of an encoder's layer for a sample of `seq_length` tokens. All tokens see each
    other."""
    return seq_length * layer_cost(config, 1, seq_length, bidirectional=True)


def decoder_layer_cost(config: TransformerConfig, layer_number: int, seq_length: int, decoder_seq_length: int) -> int:
    """Returns the multiplications of a decoder's layer for a sample: `decoder_seq_length` tokens that also attend to
    the encoder's `seq_length` tokens."""
    return decoder_seq_length * layer_cost(config, layer_number, decoder_seq_length) + _cross_attention(
        config, seq_length, decoder_seq_length
    )


def _cross_attention(config: TransformerConfig, seq_length: int, decoder_seq_length: int) -> int:
    """Returns the multiplications of cross attention for a sample: queries and outputs of the decoder's tokens, keys
    and values of the encoder's, and the scores of all pairs."""
    assert config.kv_channels
    heads = config.hidden_size * config.kv_channels * config.num_attention_heads
    return 2 * heads * (seq_length + decoder_seq_length) + _score_channels(config) * seq_length * decoder_seq_length


def training_flops(
    config: TransformerConfig,
    padded_vocab_size: int,
    seq_length: int,
    batch_size: int,
    decoder_seq_length: int | None = None,
    *,
    bidirectional: bool = False,
) -> int:
    """Returns the floating point operations of a training step over `batch_size` whole sequences, by Megatron-LM's
    count. With `decoder_seq_length` the model has an encoder that reads `seq_length` tokens and a decoder that writes
    `decoder_seq_length`. `bidirectional`: the model is a BERT, whose tokens see all others; Megatron-LM counts half of
    them."""
    if num_encoder_layers(config):
        written = decoder_seq_length or seq_length
        scores = _score_channels(config)
        encoder = encoder_layer_cost(config, seq_length)
        decoder = written * (_attention_projections(config) + _mlp(config) + scores * written / 2)
        decoder += _cross_attention(config, seq_length, written)
        head = written * config.hidden_size * padded_vocab_size
        return round(batch_size * 6 * (num_encoder_layers(config) * encoder + config.num_layers * decoder + head))
    return round(batch_size * seq_length * flops_per_token(config, padded_vocab_size, seq_length, bidirectional))


def flops_per_token(
    config: TransformerConfig, padded_vocab_size: int, seq_length: int, bidirectional: bool = False
) -> float:
    """Returns the floating point operations of forward and backward for one token, by Megatron-LM's count; for a BERT
    (`bidirectional`) it includes all keys and the transform before the head.

    Activations that are recomputed are not counted again.
    """
    h, depths = config.hidden_size, config.mtp_num_layers or 0
    keys = seq_length if bidirectional else seq_length / 2
    numbers = range(1, config.num_layers + depths + 1)
    layers = Counter((layer_parts(config, number), described_layer(config, number)) for number in numbers)
    of_layers = sum(
        count * _counted(with_sizes_of(config, described), parts, keys) for (parts, described), count in layers.items()
    )
    heads = h * padded_vocab_size * (depths + 1) + _transform(config, bidirectional)
    join = depths * (3 * h + 2 * h * h)  # the norms and the projection before each depth of multi-token prediction
    return 6 * (of_layers + join + heads)


def weight_multiplications(config: TransformerConfig, padded_vocab_size: int) -> float:
    """Returns the multiplications with weights in forward for one token, by Megatron-LM's count: all but those of
    attention scores and of recurrent states."""
    states = 0.0
    for number in range(1, config.num_layers + (config.mtp_num_layers or 0) + 1):
        state = _STATES.get(layer_parts(config, number).token_mixer or "")
        states += state(with_sizes_of(config, described_layer(config, number))) if state else 0.0
    return flops_per_token(config, padded_vocab_size, 0) / 6 - states


def _counted(config: TransformerConfig, parts: LayerParts, keys: float) -> float:
    """Returns the multiplications of a layer for one token as Megatron-LM counts them."""
    latent_norms = _latent_norms(config) if parts.token_mixer in ("attention", "dsa") else 0
    mixer = _TOKEN_MIXERS[parts.token_mixer](config, keys) if parts.token_mixer else 0
    experts = parts.channel_mixer == "moe"
    channels = _experts(config, config.hidden_size) if experts else _channel_mixer(config, parts.channel_mixer)
    return mixer + latent_norms + channels


def _transform(config: TransformerConfig, bidirectional: bool) -> int:
    """Returns the multiplications of the transform before BERT's head for one token."""
    return config.hidden_size**2 if bidirectional else 0


def _attention_projections(config: TransformerConfig) -> int:
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        return _latent_projections(config)
    assert config.kv_channels and config.num_query_groups
    queries = config.kv_channels * config.num_attention_heads
    gate = queries if config.attention_output_gate else 0
    return config.hidden_size * (2 * queries + gate + 2 * config.kv_channels * config.num_query_groups)


def _latent_projections(config: MLATransformerConfig) -> int:
    h, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    queries = h * query if config.q_lora_rank is None else config.q_lora_rank * (h + query)
    keys_values = h * (latent + config.qk_pos_emb_head_dim) + latent * heads * (config.qk_head_dim + config.v_head_dim)
    return queries + keys_values + heads * config.v_head_dim * h


def _latent_norms(config: TransformerConfig) -> int:
    """Returns the multiplications in the norms of latents, which Megatron-LM's count includes."""
    if not (isinstance(config, MLATransformerConfig) and config.multi_latent_attention):
        return 0
    return (config.q_lora_rank or 0) + config.kv_lora_rank


def _score_channels(config: TransformerConfig) -> int:
    """Returns the multiplications of a query with one key, and of its weight with one value, in all heads."""
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        return config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim)
    assert config.kv_channels
    return 2 * config.kv_channels * config.num_attention_heads


def _mlp(config: TransformerConfig) -> int:
    assert config.ffn_hidden_size
    return config.hidden_size * config.ffn_hidden_size * _products(config)


def _experts(config: TransformerConfig, width: int) -> int:
    """Returns the multiplications in the experts of a token, whose input has `width` channels, and in the shared
    experts."""
    assert config.moe_ffn_hidden_size
    routed = width * config.moe_ffn_hidden_size * config.moe_router_topk
    shared = config.hidden_size * (config.moe_shared_expert_intermediate_size or 0)
    return (routed + shared) * _products(config)


def _products(config: TransformerConfig) -> int:
    """Returns the number of matrix products of an MLP."""
    return 3 if config.gated_linear_unit else 2


def keys_seen(config: TransformerConfig, layer_number: int, seq_length: int) -> int:
    """Returns the mean number of keys that a query sees in a causal sequence."""
    window = seq_length
    if is_windowed(config, layer_number) and config.window_size is not None and config.window_size[0] >= 0:
        window = min(seq_length, config.window_size[0] + 1)
    if not is_chunked(config, layer_number):
        return _pairs(seq_length, window) // seq_length
    chunks, rest = divmod(seq_length, config.attention_chunk_size or seq_length)
    chunk = (seq_length - rest) // max(1, chunks)
    return (chunks * _pairs(chunk, window) + _pairs(rest, window)) // seq_length


def _pairs(queries: int, window: int) -> int:
    """Returns the number of (query, key) pairs in a causal row: the first `window` queries see 1, 2, ... keys, later
    ones `window`."""
    window = min(queries, window)
    return window * (window + 1) // 2 + (queries - window) * window
