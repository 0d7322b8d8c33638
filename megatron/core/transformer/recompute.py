"""Which parts of a stack of layers forget their activations: what `recompute_granularity` and its like ask for.

Full: layers keep their input and nothing else. Selective, by module: `core_attn` keeps queries, keys and values;
`mlp` keeps its normed input; `layernorm` keeps nothing of the two norms' results, which are computed again from the
layer's hidden states where a product needs them for its weight gradient. The three go together; with `layernorm` and
`mlp` an MLP keeps nothing at all.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recomputed import ForgottenOutput, Recomputed


def recompute_activations(block: nn.Module, config: TransformerConfig, tp_group: Group = None) -> None:
    """Make a stack of layers (a TransformerBlock that was just built) forget what the config says."""
    if config.recompute_granularity == "full":
        spread_over = tp_group if config.distribute_saved_activations else None
        recompute_layers(block, config.recompute_method, config.recompute_num_layers or 1, spread_over)
    elif config.recompute_granularity == "selective":
        for layer in block.layers:  # type: ignore[union-attr]
            recompute_parts(layer, config.recompute_modules or ["core_attn"])


def recompute_layers(block: Any, method: str | None, num_layers: int, spread_over: Group = None) -> None:
    """`uniform`: every run of `num_layers` layers keeps its input. `block`: the first `num_layers` layers of the stack
    each keep theirs, the others keep everything. Kept inputs are spread over a group, if one is given."""
    again = Recomputed(block.run_layers, spread_over)
    if method == "block":
        block.layers_at_once = 1
        block.run_layers = _FirstLayers(tuple(block.layers[:num_layers]), again, block.run_layers)
    else:
        block.layers_at_once, block.run_layers = num_layers, again


@dataclass(frozen=True)
class _FirstLayers:
    """`run_layers` of a block whose first layers are recomputed."""

    chosen: tuple[nn.Module, ...]
    again: Any
    plain: Any

    def __call__(self, layers: Iterable[nn.Module], hidden: Tensor, inputs: LayerInputs) -> Tensor:
        # The layer is called inside, as a module: whoever hooks its calls, to bring its weights, is asked again.
        (layer,) = layers
        run = self.again if any(layer is one for one in self.chosen) else self.plain
        return run(layers, hidden, inputs)


def recompute_parts(layer: Any, modules: Iterable[str]) -> None:
    """Recompute some parts of one layer. Raises UserError where the layer, a user's own, has no such part."""
    for name in modules:
        try:
            if name == "core_attn":
                _recompute(layer.self_attention.core_attention)
            elif name == "mlp":
                _recompute(layer.mlp)
            elif name == "layernorm":
                _forget_norm(layer, "attention", layer.input_layernorm)
                _forget_norm(layer, "mlp", layer.pre_mlp_layernorm)
            else:
                raise AssertionError(f"recompute_modules {name}: the config should have refused it")
        except AttributeError as error:
            raise UserError(
                f"recompute_modules {name}: a {type(layer).__name__} has no such part ({error}); leave it out, or use "
                "recompute_granularity full"
            ) from error


def _recompute(module: Any) -> None:
    module.forward = Recomputed(module.forward)


def _forget_norm(layer: Any, phase_name: str, norm: Any) -> None:
    """Within a phase, nothing keeps the result of its norm."""
    if isinstance(norm, IdentityOp):
        return
    (index,) = (index for index, phase in enumerate(layer.phases) if phase.name == phase_name)
    phase = layer.phases[index]
    forgotten = ForgottenOutput(norm.forward, phase.forward)
    norm.forward = forgotten.compute
    layer.phases[index] = dataclasses.replace(phase, forward=forgotten)
