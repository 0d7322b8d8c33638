"""The stack of layers of one pipeline stage."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default, pp_rank_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.transformer.layer_call import LayerArguments, lone_inputs, run_script_layer
from megatron.core.transformer.layer_inputs import LayerInputs, is_script_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.offload import offload_activations
from megatron.core.transformer.recompute import recompute_activations
from megatron.core.transformer.spec_utils import ModuleSpec, Spec, build_module, import_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerBlockSubmodules:
    """Specs of the layers of a stage, one each, and of the norm after the last layer."""

    layer_specs: list[ModuleSpec] | None = None
    layer_norm: Spec | None = None


class TransformerBlock(MegatronModule):
    """The layers of a pipeline stage, and on the last stage the norm after them. Layers are numbered from 1 over the
    whole model.

    `spec`: the layers' specs, or one spec from which all layers are built. Our own keyword `layer_numbers`: the numbers
    of the layers here; default: those of this rank's pipeline stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        layer_numbers: range | None = None,
    ) -> None:
        super().__init__(config)
        self.pre_process, self.post_process, self.post_layer_norm = pre_process, post_process, post_layer_norm
        self.pg_collection = groups_or_default(pg_collection)
        self.vp_stage = vp_stage
        self.input_tensor: Tensor | None = None
        self.layers_at_once = 1
        numbers = layers_of_stage(config, self.pg_collection, vp_stage) if layer_numbers is None else layer_numbers
        submodules = block_submodules(spec, len(numbers))
        assert submodules.layer_specs is not None
        if len(submodules.layer_specs) != len(numbers):
            raise UserError(f"{len(submodules.layer_specs)} layer specs for {len(numbers)} layers of this stage")
        self.layers = nn.ModuleList(
            build_module(
                layer_spec, config=config, layer_number=number, pg_collection=self.pg_collection, vp_stage=vp_stage
            )
            for number, layer_spec in zip(numbers, submodules.layer_specs, strict=True)
        )
        self.final_layernorm: nn.Module | None = None
        if self.has_final_layernorm_in_this_stage():
            self.final_layernorm = build_module(
                submodules.layer_norm or WrappedTorchNorm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )
            if config.sequence_parallel:
                add_partial_gradient_axis("tp", self.final_layernorm)
        recompute_activations(self, config, self.pg_collection.tp)
        offload_activations(self, config, self.pg_collection)

    def has_final_layernorm_in_this_stage(self) -> bool:
        """Whether this stage has the norm after the last layer; with `norm_placement` post_residual no stage has."""
        return self.post_layer_norm and self.post_process and self.config.norm_placement != "post_residual"

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Sets the hidden states [s, b, h] received from the previous stage; the next forward uses them instead of its
        argument."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None = None,
        *arguments: Any,
        inputs: LayerInputs | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Returns the hidden states [s, b, h] after this stage's layers. Without `inputs` it takes Megatron-LM's
        arguments (`LayerArguments`): rotary positions are those of `rotary_pos_emb`, and dropout masks draw their seed
        from torch's generator.

        Received hidden states may have another shape than `inputs` describe if rows were concatenated.
        """
        if self.input_tensor is not None:
            hidden_states, self.input_tensor = self.input_tensor, None
        assert hidden_states is not None
        s, b, h = hidden_states.shape
        if inputs is None:
            given = LayerArguments(attention_mask, *arguments, **keywords)
            inputs = lone_inputs(hidden_states, given, self.config, self.pg_collection, self.training)
        else:
            s, b = s * b // inputs.tokens.batch_size, inputs.tokens.batch_size
        hidden = hidden_states.reshape(s * b, h)  # [t, h]
        for first in range(0, len(self.layers), self.layers_at_once):
            hidden = self.run_layers(self.layers[first : first + self.layers_at_once], hidden, inputs)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        return hidden.view(s, b, h)

    def run_layers(self, layers: Iterable[nn.Module], hidden: Tensor, inputs: LayerInputs) -> Tensor:
        """Runs `layers_at_once` layers, [t, h] -> [t, h]. Full recompute and offloading wrap this function."""
        for layer in layers:
            hidden = run_script_layer(layer, hidden, inputs) if is_script_layer(layer) else layer(hidden, inputs)
        return hidden


def layers_of_stage(config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None) -> range:
    """Returns the numbers, from 1, of the layers on this rank's (virtual) pipeline stage."""
    stages, ranks = stage_map(config), groups.size("pp")
    if ranks != stages.pipeline_size:
        raise UserError(
            f"config.pipeline_model_parallel_size is {stages.pipeline_size}, the pipeline group has {ranks} ranks; "
            "make them equal"
        )
    if vp_stage is None and stages.chunks > 1:
        raise UserError(f"a rank has {stages.chunks} model chunks: give vp_stage, from 0 to {stages.chunks - 1}")
    if not 0 <= (vp_stage or 0) < stages.chunks:
        raise UserError(f"vp_stage {vp_stage}: a rank has {stages.chunks} model chunks, numbered from 0")
    return stages.stage_at(groups.rank("pp"), vp_stage or 0).layers


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Returns the number of layers on a (virtual) pipeline stage. `pp_rank` defaults to this rank's."""
    rank = pp_rank_or_default(pp_rank)
    return len(stage_map(config).stage_at(rank, vp_stage or 0).layers)


def block_spec_of_flag(
    words: Sequence[str], config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the specs of a stage's layers for `--spec MODULE NAME`, which names the spec of a layer or of a block, or
    a function that returns one. A function may have the parameters `config`, `vp_stage`, `pp_rank` and
    `use_transformer_engine`, and gets their values.

    Raises UserError if there is no such object, if it is or returns something else, or if it needs other arguments.
    """
    found, flag = import_module((words[0], words[1])), f"--spec {' '.join(words)}"
    if callable(found) and not isinstance(found, type):
        offered = {"config": config, "vp_stage": vp_stage, "pp_rank": pp_rank, "use_transformer_engine": False}
        parameters = inspect.signature(found).parameters
        needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in _COLLECTING]
        if missing := [name for name in needed if name not in offered]:
            raise UserError(f"{flag}: the function needs {', '.join(missing)}; it is given {', '.join(offered)}")
        found = found(**{name: value for name, value in offered.items() if name in parameters})
    if not isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        raise UserError(
            f"{flag} gives {type(found).__name__} {found!r:.80}; expected a ModuleSpec or TransformerBlockSubmodules, "
            "or a function that returns one"
        )
    return block_submodules(found, get_num_layers_to_build(config, vp_stage, pp_rank))


_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def block_submodules(spec: TransformerBlockSubmodules | ModuleSpec, num_layers: int) -> TransformerBlockSubmodules:
    """Returns the specs of a stage's layers, from one spec for all layers, from a block's spec, or from the specs
    themselves."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec.submodules, TransformerBlockSubmodules):
        return spec.submodules
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers)
