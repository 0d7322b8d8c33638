"""Activation recomputation of a stack of layers, chosen by `recompute_granularity` and the related fields.

Full: layers keep their input and nothing else. Selective, by module:

- `core_attn` keeps queries, keys and values. In another token mixer it recomputes the part that the mixer names in its
  attribute `recomputed_part`, or nothing if that is None;
- `mlp` keeps its normed input;
- `mlp_act` keeps the output of an MLP's first product, not the input of its second one;
- `layernorm` does not keep the results of norms; a product that needs one for its weight gradient recomputes it from
  the layer's hidden states;
- `mla_up_proj` keeps the latents of latent attention instead of queries, keys and values;
- `moe` keeps the normed input of a layer of experts, and sends tokens to their experts once more;
- `moe_act` keeps the outputs of the experts' first products, not the inputs of their second ones;
- `shared_experts` keep their input.

With `mlp_chunks_for_training` MLPs keep their normed input, and compute chunks of it one by one; with `mlp` too, they
do this in both passes. All can be combined. `mlp` and `mlp_act` concern layers without experts. With `layernorm` and
`mlp` (or `moe`), an MLP (or a layer of experts) keeps nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend
from megatron.core.communication.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.ops.records import ByDevice
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mamba_mixer import MambaMixer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recomputed import DiscardedResults, Recomputed


def recompute_activations(block: nn.Module, config: TransformerConfig, tp_group: Group = None) -> None:
    """Sets up recomputation for a stack of layers (a TransformerBlock that was just built), as the config says."""
    chunks = config.mlp_chunks_for_training or 1
    for layer in block.layers if chunks > 1 else ():  # type: ignore[union-attr]
        _compute_mlp_in_chunks(layer, chunks)
    if config.recompute_granularity == "full":
        spread_over = tp_group if config.distribute_saved_activations else None
        recompute_layers(block, config.recompute_method, config.recompute_num_layers or 1, spread_over)
    else:
        for layer in block.layers:  # type: ignore[union-attr]
            recompute_parts(layer, recomputed_modules(config))


def recomputed_modules(config: TransformerConfig) -> list[str]:
    """Returns the modules of selective recomputation; `moe_layer_recompute` is an older flag for one of them."""
    is_selective = config.recompute_granularity == "selective"
    modules = list(config.recompute_modules or ["core_attn"]) if is_selective else []
    return [*modules, "moe"] if config.moe_layer_recompute and "moe" not in modules else modules


def recompute_layers(block: Any, method: str | None, num_layers: int, spread_over: Group = None) -> None:
    """Sets up full recomputation. `uniform`: every group of `num_layers` layers keeps only its input. `block`: each of
    the first `num_layers` layers of the stack keeps only its input, the others keep all activations. Kept inputs are
    distributed over the ranks of `spread_over`, if it is given."""
    again = Recomputed(block.run_layers, spread_over)
    if method == "block":
        block.layers_at_once = 1
        block.run_layers = _RecomputeSome(tuple(block.layers[:num_layers]), again, block.run_layers)
    else:
        block.layers_at_once, block.run_layers = num_layers, again


@dataclass(frozen=True)
class _RecomputeSome:
    """`run_layers` of a block in which some layers are recomputed. It is called with one layer at a time."""

    chosen: tuple[nn.Module, ...]
    again: Any
    plain: Any

    def __call__(self, layers: Iterable[nn.Module], *inputs: Any) -> Tensor:
        # The layer is called as a module, so that hooks which gather its weights run again.
        (layer,) = layers
        run = self.again if any(layer is one for one in self.chosen) else self.plain
        return run(layers, *inputs)


def recompute_predictions(block: Any, config: TransformerConfig, layers_before: int, tp_group: Group = None) -> None:
    """Sets up recomputation for the layers of multi-token prediction (a MultiTokenPredictionBlock that was just built).
    Each has two inputs, so `uniform` keeps both inputs of every layer; `block` counts them after the `layers_before`
    layers of the same stage."""
    if config.recompute_granularity == "full":
        spread_over = tp_group if config.distribute_saved_activations else None
        chosen = tuple(block.layers)
        if config.recompute_method == "block":
            chosen = chosen[: max(0, (config.recompute_num_layers or 1) - layers_before)]
        block.run_layers = _RecomputeSome(chosen, Recomputed(block.run_layers, spread_over), block.run_layers)
    else:
        for layer in block.layers:
            recompute_parts(layer.transformer_layer, recomputed_modules(config))


def recompute_parts(layer: object, modules: Iterable[str]) -> None:
    """Sets up recomputation of some modules of one layer. Modules of experts are skipped in a layer without experts.
    Raises UserError if a user's layer has no such part."""
    modules = list(modules)
    for name in sorted(modules, key=lambda name: name == "mla_up_proj"):  # last: it wraps what the others have wrapped
        _RECOMPUTE_MODULE[name](layer, modules)


def _part(layer: object, module: str, path: str) -> Any:
    """Returns the part of a layer at a dotted path. Raises UserError if a user's layer has no such part."""
    found = layer
    for name in path.split("."):
        if not hasattr(found, name):
            raise UserError(
                f"recompute_modules {module}: a {type(layer).__name__} has no such part ({path}: a "
                f"{type(found).__name__} has no {name}); leave it out, or use recompute_granularity full"
            )
        found = getattr(found, name)
    return found


def _recompute_attention(layer: object, modules: Sequence[str]) -> None:
    if getattr(layer, "has_token_mixer", True):
        core = getattr(_part(layer, "core_attn", "self_attention"), "recomputed_part", "core_attention")
        if core is not None:
            _recompute(_part(layer, "core_attn", f"self_attention.{core}"))
    if getattr(layer, "has_cross_attention", False):
        _recompute(_part(layer, "core_attn", "cross_attention.core_attention"))


def _recompute_norms(layer: Any, modules: Sequence[str]) -> None:
    parallel = _part(layer, "layernorm", "is_parallel")
    for norm, reader in (("input_layernorm", "add_attention"), ("pre_mlp_layernorm", "add_mlp")):
        _discard_norm(layer, _part(layer, "layernorm", norm), "add_attention_and_mlp" if parallel else reader)
    if getattr(layer, "has_cross_attention", False):
        _discard_norm(layer, layer.pre_cross_attn_layernorm, "add_cross_attention")


def _recompute_heads(layer: Any, modules: Sequence[str]) -> None:
    """Recomputes queries, keys and values from latents instead of keeping them."""
    if not getattr(layer, "has_token_mixer", True) or isinstance(layer.self_attention, GatedDeltaNet | MambaMixer):
        return
    expand = _part(layer, "mla_up_proj", "self_attention.expand")
    core_attention = _part(layer, "mla_up_proj", "self_attention.core_attention")
    discarded = DiscardedResults(core_attention.forward)
    layer.self_attention.expand, core_attention.forward = discarded.discard(expand), discarded


def _recompute_mlp(layer: Any, modules: Sequence[str]) -> None:
    if getattr(layer, "has_channel_mixer", True) and not _has_experts(layer, "mlp"):
        _recompute(layer.mlp)


def _compute_mlp_in_chunks(layer: Any, chunks: int) -> None:
    if getattr(layer, "has_channel_mixer", True) and not _has_experts(layer, "mlp"):
        layer.mlp.forward = _InChunks(Recomputed(layer.mlp.forward), chunks)


@dataclass(frozen=True)
class _InChunks:
    """The forward of an MLP in chunks of tokens, each of which is computed again in backward."""

    forward: Recomputed
    chunks: int

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs, biases = zip(*map(self.forward, hidden_states.chunk(self.chunks)), strict=True)
        return torch.cat(outputs), biases[0]


def _recompute_mlp_activation(layer: Any, modules: Sequence[str]) -> None:
    if getattr(layer, "has_channel_mixer", True) and not _has_experts(layer, "mlp_act") and "mlp" not in modules:
        _discard_activation(
            _part(layer, "mlp_act", "mlp.activate"), layer.mlp, _part(layer, "mlp_act", "mlp.linear_fc2")
        )


def _recompute_experts(layer: Any, modules: Sequence[str]) -> None:
    if _has_experts(layer, "moe"):
        _recompute(layer.mlp)


def _recompute_activations(layer: Any, modules: Sequence[str]) -> None:
    if _has_experts(layer, "moe_act") and "moe" not in modules:  # moe recomputes these with the rest
        for mlp in getattr(layer.mlp.experts, "local_experts", [layer.mlp.experts]):
            _discard_activation(_part(mlp, "moe_act", "activate"), mlp, _part(mlp, "moe_act", "linear_fc2"))


def _recompute_shared_experts(layer: object, modules: Sequence[str]) -> None:
    if _has_experts(layer, "shared_experts") and "moe" not in modules:
        _recompute(_part(layer, "shared_experts", "mlp.shared_experts"))


_RECOMPUTE_MODULE: dict[str, Callable[[object, Sequence[str]], None]] = {
    "core_attn": _recompute_attention,
    "layernorm": _recompute_norms,
    "mla_up_proj": _recompute_heads,
    "mlp": _recompute_mlp,
    "mlp_act": _recompute_mlp_activation,
    "moe": _recompute_experts,
    "moe_act": _recompute_activations,
    "shared_experts": _recompute_shared_experts,
}
"""For each entry of `recompute_modules`: a function of (layer, all entries)."""


def _has_experts(layer: object, module: str) -> bool:
    return hasattr(_part(layer, module, "mlp"), "experts")


def _recompute(module: Any) -> None:
    module.forward = Recomputed(module.forward)


def _discard_activation(activate: Any, mlp: Any, linear_fc2: Any) -> None:
    """Keeps no tensors between the two products of an MLP: neither intermediate results of the activation nor its
    output, which the second product needs for its weight gradient."""
    discarded = DiscardedResults(linear_fc2.forward)
    mlp.activate, linear_fc2.forward = discarded.discard(_WithoutIntermediates(activate)), discarded


@dataclass(frozen=True)
class _WithoutIntermediates:
    """The activation of an MLP, which keeps only its arguments for backward. Backward computes it again, unless its
    kernel needs only these arguments anyway."""

    activate: Any

    def __call__(self, product: Tensor, bias: Tensor | None, *weights: Tensor | None) -> Tensor:
        mlp = getattr(self.activate, "__self__", None)  # a user's may be a function
        backend = getattr(mlp, "backend", None)
        kernel = backend.experts.weighted_activation if isinstance(backend, Backend) else None
        kernel = kernel.chosen_for(product) if isinstance(kernel, ByDevice) else kernel
        keeps_only_arguments = getattr(kernel, "keeps_only_arguments", None)
        if keeps_only_arguments is not None:
            of_mlp = (weights or (None,))[0], mlp.activation_func  # type: ignore[union-attr]
            if keeps_only_arguments(product, bias, *of_mlp):
                return self.activate(product, bias, *weights)
        return Recomputed(self.activate)(product, bias, *weights)


def _discard_norm(layer: object, norm: Any, reader: str) -> None:
    """Does not keep a norm's result, which the layer's method `reader` would save for backward."""
    if isinstance(norm, IdentityOp):
        return
    method = getattr(layer, reader)
    discarded = method if isinstance(method, DiscardedResults) else DiscardedResults(method)
    norm.forward = discarded.discard(norm.forward)
    setattr(layer, reader, discarded)
