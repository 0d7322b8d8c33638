"""What the parts of a model cost, and the pipeline layout `auto` that follows."""

from megatron.core.pipeline_parallel.balance import balanced_counts
from megatron.core.pipeline_parallel.stage_cuts import AUTO, pipeline_of
from megatron.core.transformer.dot_product_attention import is_windowed
from megatron.core.transformer.transformer_config import TransformerConfig


def settle_layout(config: TransformerConfig, seq_length: int, vocab_size: int) -> None:
    """Put stages of equal cost in the place of `pipeline_model_parallel_layout auto`; any other layout stays.

    Costs are multiplications a token: of the layers, with attention's scores over `seq_length`, and of the head over
    `vocab_size`. All ranks find the same stages.
    """
    if config.pipeline_model_parallel_layout != AUTO or config.pipeline_model_parallel_size == 1:
        return
    layers = [layer_cost(config, number, seq_length) for number in range(1, config.num_layers + 1)]
    # The embedding only copies rows: a number for each of a token's elements.
    first, last = config.hidden_size, config.hidden_size * vocab_size
    counts = balanced_counts(layers, first, last, pipeline_of(config))
    stages = [f"t*{count}" if count > 3 else "t" * count for count in counts]
    config.pipeline_model_parallel_layout = "|".join(["E" + stages[0], *stages[1:]]) + "L"


def layer_cost(config: TransformerConfig, layer_number: int, seq_length: int) -> int:
    """Multiplications of a layer's forward for one token, the mean over a sequence; backward has twice as many."""
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    h, queries = config.hidden_size, config.kv_channels * config.num_attention_heads
    projections = h * (2 * queries + 2 * config.kv_channels * config.num_query_groups)
    scores = 2 * queries * _keys_seen(config, layer_number, seq_length)
    mlp = h * config.ffn_hidden_size * (3 if config.gated_linear_unit else 2)
    return projections + scores + mlp


def _keys_seen(config: TransformerConfig, layer_number: int, seq_length: int) -> int:
    """Keys that a query sees, the mean over a causal sequence."""
    window = seq_length
    if is_windowed(config, layer_number) and config.window_size is not None and config.window_size[0] >= 0:
        window = min(seq_length, config.window_size[0] + 1)
    # The first `window` queries see 1, 2, ... keys, all others `window`.
    return (window * (window + 1) // 2 + (seq_length - window) * window) // seq_length
