"""What is wrong with the flags that say which activations are computed again, and what would work."""

from collections.abc import Iterator
from typing import Any

MODULES = ("core_attn", "layernorm", "mlp", "mla_up_proj", "moe", "moe_act", "shared_experts")
"""Parts of a layer that may be recomputed by themselves."""
_OF_EXPERTS = ("moe", "moe_act", "shared_experts")


def recompute_problems(config: Any) -> Iterator[str]:
    """A problem for each value that cannot be had. `config` has the fields of TransformerConfig."""
    if config.recompute_granularity == "full":
        if config.recompute_method is None:
            yield "{recompute_granularity} needs {recompute_method:name} uniform or block"
        if config.recompute_num_layers is None:
            yield "{recompute_granularity} needs {recompute_num_layers:name}; 1 recomputes each layer by itself"
        if config.moe_layer_recompute:
            yield "{moe_layer_recompute}: {recompute_granularity} does layers of experts too; drop one"
    elif config.recompute_granularity == "selective":
        for field in ("recompute_method", "recompute_num_layers"):
            if getattr(config, field) is not None:
                yield f"{{{field}}} goes with {{recompute_granularity:name}} full only"
        yield from _module_problems(config)
    if config.distribute_saved_activations:
        if config.recompute_granularity != "full":
            yield "{distribute_saved_activations} spreads inputs of layers: it needs {recompute_granularity:name} full"
        if config.sequence_parallel:
            yield "{distribute_saved_activations}: {sequence_parallel:name} has spread them already; drop one"


def _module_problems(config: Any) -> Iterator[str]:
    for name in config.recompute_modules or ():
        if name not in MODULES:
            yield f"{{recompute_modules}}: {name} is no part of a layer; {', '.join(MODULES)} are"
            continue
        reason = _what_is_missing(config, name)
        if reason:
            yield f"{{recompute_modules}}: {name} {reason}"


def _what_is_missing(config: Any, module: str) -> str | None:
    """Why no layer has a part; None where some do."""
    if module == "mla_up_proj" and not config.multi_latent_attention:
        return "is a part of {multi_latent_attention:name}, which is not set"
    if module in _OF_EXPERTS and config.num_moe_experts is None:
        return "is a part of a layer of experts, and {num_moe_experts:name} is not set"
    if module == "mlp" and config.num_moe_experts is not None and config.moe_layer_freq == 1:
        return "is a part of a layer without experts, and there is none; moe works"
    if module == "shared_experts" and not config.moe_shared_expert_intermediate_size:
        return "need {moe_shared_expert_intermediate_size:name}, which is not set"
    if module == "shared_experts" and config.moe_shared_expert_overlap:
        return "come in two halves with {moe_shared_expert_overlap:name}; moe does them with the rest of the layer"
    return None
