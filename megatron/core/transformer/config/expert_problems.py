"""What experts cannot be made of, and how they cannot be shared."""

from collections.abc import Iterator
from typing import Any

from megatron.core.config_fields import too_small
from megatron.core.rank_grid import divisors, nearest_divisors


def expert_problems(config: Any) -> Iterator[str]:
    """A problem for each value, or pair of values, with which no layer of experts can be made.

    `config` has the fields of TransformerConfig; a size that is missing is left to the caller.
    """
    if config.num_moe_experts is None:
        if config.expert_model_parallel_size > 1:
            yield "{expert_model_parallel_size} spreads experts over ranks: it needs {num_moe_experts:name}"
        return
    yield from too_small(config, _SIZES, 1)
    yield from _layer_problems(config)
    yield from _shares(config)
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        yield (
            "{moe_apply_probs_on_input:name} multiplies what an expert reads, which is its weight on the output only "
            "where a token goes to one expert: it needs {moe_router_topk:name} 1"
        )


_SIZES = ("num_moe_experts", "moe_ffn_hidden_size", "moe_latent_size", "moe_shared_expert_intermediate_size")


def _layer_problems(config: Any) -> Iterator[str]:
    pattern, layers = config.moe_layer_freq, config.num_layers
    if isinstance(pattern, int):
        if pattern < 1:
            yield "{moe_layer_freq} must be at least 1"
        return
    if layers is not None and len(pattern) != layers:
        yield f"{{moe_layer_freq:name}} has {len(pattern)} entries for {{num_layers:name}} {layers}; give one for each"
    if set(pattern) - {0, 1}:
        yield "{moe_layer_freq} has a 1 for a layer with experts and a 0 for one without, and nothing else"


def _shares(config: Any) -> Iterator[str]:
    """Whole experts for each expert parallel rank, and equal numbers of channels for those that share an expert."""
    experts, expert = config.num_moe_experts, config.expert_model_parallel_size
    if experts >= 1 and expert >= 1 and experts % expert:
        near = " or ".join(map(str, nearest_divisors(experts, expert)))
        yield f"{{expert_model_parallel_size}} does not divide {{num_moe_experts}}; {near} does"
    dense = config.tensor_model_parallel_size
    tensor = config.expert_tensor_parallel_size or dense
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * (config.hidden_size or 0)
    if tensor >= 1 and width >= 1 and width % tensor:
        near = " or ".join(map(str, nearest_divisors(width, tensor)))
        ranks = "{expert_tensor_parallel_size}" if config.expert_tensor_parallel_size else _TENSOR
        what = "{moe_ffn_hidden_size}" if config.moe_ffn_hidden_size else f"the {width} channels of an expert"
        yield f"{ranks} does not divide {what}; {near} does"
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None and shared >= 1 and dense >= 1 and shared % dense:
        near = " or ".join(str(d) for d in divisors(shared) if d < dense) or "1"
        yield f"{_TENSOR} does not divide {{moe_shared_expert_intermediate_size}}; {near} does"


_TENSOR = "{tensor_model_parallel_size}"
