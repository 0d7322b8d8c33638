"""Activation offloading for a stack of layers. The config chooses all activations of some layers
(`cpu_offloading_num_layers`), or the inputs of some parts of the layers (`fine_grained_activation_offloading`):

- `attn_norm`, `mlp_norm`: the layer's hidden states, which the norms before attention and before the MLP read;
- `qkv_linear`: the normed hidden states, and the latents of latent attention;
- `core_attn`: queries, keys and values;
- `attn_proj`: the output of attention;
- `expert_fc1`: the rows that experts receive;
- `moe_act`: the outputs of the experts' first products.

A part whose tensors are all recomputed has nothing to offload.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.config.memory import OFFLOAD_MODULES
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.offloaded import MarkedInputs, Offloaded, OffloadLimits


def offload_activations(block: Any, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Sets up offloading for a new stack of layers: a TransformerBlock, or a MultiTokenPredictionBlock, whose layers
    are counted separately. Call it after `recompute_activations`."""
    if not len(block.layers):
        return
    first = block.layers[0]
    if config.cpu_offloading_num_layers > 0:
        chosen = _IsOneOf(tuple(block.layers[: config.cpu_offloading_num_layers]))
        block.run_layers = Offloaded(block.run_layers, first, OffloadLimits(), chosen)
    elif config.fine_grained_activation_offloading:
        in_flight = config.fine_grained_offloading_max_inflight_offloads
        limits = OffloadLimits(
            min_numel=config.min_offloaded_tensor_size,
            max_in_flight=1 if in_flight is None else in_flight,
            kept_bytes=groups.rank("pp") * config.delta_offload_bytes_across_pp_ranks,
        )
        mark_parts([getattr(layer, "transformer_layer", layer) for layer in block.layers], config)
        block.run_layers = Offloaded(block.run_layers, first, limits)


@dataclass(frozen=True)
class _IsOneOf:
    """Returns whether a layer is one of the given layers."""

    layers: tuple[nn.Module, ...]

    def __call__(self, layer: nn.Module) -> bool:
        return any(layer is one for one in self.layers)


def mark_parts(layers: list[Any], config: TransformerConfig) -> None:
    """Marks the inputs of the parts that `offload_modules` names: a fraction `activation_offload_fraction` of all such
    parts of these layers, spread evenly."""
    fraction, names = config.activation_offload_fraction, config.offload_modules or []
    count = 0
    for layer in layers:
        for name in sorted(set(names), key=OFFLOAD_MODULES.index):
            marks = list(_FUNCTIONS_OF[name](layer))
            if marks:
                count += 1
                if int(count * fraction) > int((count - 1) * fraction):
                    for owner, function in marks:
                        setattr(owner, function, MarkedInputs(getattr(owner, function), name, name in _PRODUCTS))


_PRODUCTS = ("qkv_linear", "attn_proj", "expert_fc1")
"""Parts that may save their input in 8 bits."""

_Functions = Iterator[tuple[Any, str]]


def _attention_parts(*names: str) -> Callable[[object], _Functions]:
    """Returns a function that yields the parts with these names of a layer's token mixer and cross attention."""

    def parts(layer: Any) -> _Functions:
        for mixer in (layer.self_attention, layer.cross_attention):
            for name in names:
                part = getattr(mixer, name, None)
                if isinstance(part, nn.Module):
                    yield part, "forward"

    return parts


def _norm(name: str) -> Callable[[object], _Functions]:
    def norm(layer: object) -> _Functions:
        if not isinstance(getattr(layer, name), IdentityOp):
            yield getattr(layer, name), "forward"

    return norm


def _experts(layer: Any) -> list[Any]:
    experts = getattr(layer.mlp, "experts", None)
    return [] if experts is None else list(getattr(experts, "local_experts", [experts]))


def _first_products(layer: object) -> _Functions:
    for mlp in _experts(layer):
        yield mlp.linear_fc1, "forward"


def _activations(layer: object) -> _Functions:
    for mlp in _experts(layer):
        yield mlp, "activate"


_FUNCTIONS_OF: dict[str, Callable[[object], _Functions]] = {
    "attn_norm": _norm("input_layernorm"),
    "qkv_linear": _attention_parts(
        *("linear_qkv", "linear_q", "linear_kv", "in_proj"),
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    ),
    "core_attn": _attention_parts("core_attention", "scan"),
    "attn_proj": _attention_parts("linear_proj", "out_proj"),
    "mlp_norm": _norm("pre_mlp_layernorm"),
    "expert_fc1": _first_products,
    "moe_act": _activations,
}
"""For each entry of `offload_modules`: the functions of a layer whose arguments are offloaded, as (owner,
attribute)."""
