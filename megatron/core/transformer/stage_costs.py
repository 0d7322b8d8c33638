"""What the parts of a model cost, and the pipeline layout `auto` that follows."""

from megatron.core.pipeline_parallel.stages import AUTO, balanced_counts, pipeline_of
from megatron.core.transformer.layer_patterns import has_experts, is_chunked, is_windowed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def resolve_auto_layout(config: TransformerConfig, seq_length: int, vocab_size: int) -> None:
    """Put stages of equal cost in the place of `pipeline_model_parallel_layout auto`; any other layout stays.

    Costs are multiplications a token: of the layers, with attention's scores over `seq_length`, and of the head over
    `vocab_size`. All ranks find the same stages.
    """
    if config.pipeline_model_parallel_layout != AUTO or config.pipeline_model_parallel_size == 1:
        return
    further = range(config.num_layers + 1, config.num_layers + 1 + (config.mtp_num_layers or 0))
    layers = [layer_cost(config, number, seq_length) for number in range(1, config.num_layers + 1)]
    # The embedding only copies rows: a number for each of a token's elements. A layer that predicts further ahead joins
    # two states into one, and has the head once more.
    h = config.hidden_size
    first, head = h, h * vocab_size
    last = head + sum(layer_cost(config, number, seq_length) + 2 * h * h + head for number in further)
    counts = balanced_counts(layers, first, last, pipeline_of(config))
    stages = [f"t*{count}" if count > 3 else "t" * count for count in counts]
    config.pipeline_model_parallel_layout = "|".join(["E" + stages[0], *stages[1:]]) + "m" * len(further) + "L"


def layer_cost(config: TransformerConfig, layer_number: int, seq_length: int) -> int:
    """Multiplications of a layer's forward for one token, the mean over a sequence; backward has twice as many."""
    keys = _keys_seen(config, layer_number, seq_length)
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        attention = _latent_attention(config, keys)
    else:
        attention = _attention(config, keys)
    return attention + (_experts(config) if has_experts(config, layer_number) else _mlp(config))


def _attention(config: TransformerConfig, keys: int) -> int:
    assert config.kv_channels and config.num_query_groups
    queries = config.kv_channels * config.num_attention_heads
    gate = queries if config.attention_output_gate else 0
    projections = config.hidden_size * (2 * queries + gate + 2 * config.kv_channels * config.num_query_groups)
    return projections + 2 * queries * keys


def _latent_attention(config: MLATransformerConfig, keys: int) -> int:
    h, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    query = heads * width
    queries = h * query if config.q_lora_rank is None else config.q_lora_rank * (h + query)
    keys_values = h * (latent + config.qk_pos_emb_head_dim) + latent * heads * (config.qk_head_dim + config.v_head_dim)
    return queries + keys_values + heads * (width + config.v_head_dim) * keys + heads * config.v_head_dim * h


def _mlp(config: TransformerConfig) -> int:
    assert config.ffn_hidden_size
    return config.hidden_size * config.ffn_hidden_size * _products(config)


def _experts(config: TransformerConfig) -> int:
    """The router, the experts that a token goes to, and those that all tokens pass."""
    assert config.num_moe_experts and config.moe_ffn_hidden_size
    h, latent, products = config.hidden_size, config.moe_latent_size, _products(config)
    routed = (latent or h) * config.moe_ffn_hidden_size * products * config.moe_router_topk
    shared = h * (config.moe_shared_expert_intermediate_size or 0) * products
    return h * config.num_moe_experts + routed + shared + (2 * h * latent if latent else 0)


def _products(config: TransformerConfig) -> int:
    return 3 if config.gated_linear_unit else 2


def _keys_seen(config: TransformerConfig, layer_number: int, seq_length: int) -> int:
    """Keys that a query sees, the mean over a causal sequence."""
    window = seq_length
    if is_windowed(config, layer_number) and config.window_size is not None and config.window_size[0] >= 0:
        window = min(seq_length, config.window_size[0] + 1)
    if not is_chunked(config, layer_number):
        return _pairs(seq_length, window) // seq_length
    chunks, rest = divmod(seq_length, config.attention_chunk_size or seq_length)
    chunk = (seq_length - rest) // max(1, chunks)
    return (chunks * _pairs(chunk, window) + _pairs(rest, window)) // seq_length


def _pairs(queries: int, window: int) -> int:
    """Pairs that meet in a causal row: the first `window` queries see 1, 2, ... keys, all others `window`."""
    window = min(queries, window)
    return window * (window + 1) // 2 + (queries - window) * window
