"""Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2): layers after the decoder, each of which
predicts one token further ahead.

Depth d reads the hidden states of the previous depth (the first one reads the decoder's, normed) and the embeddings of
the tokens d positions ahead. It predicts the tokens d + 1 positions ahead through the model's own embedding and head.
`models.common.predictions` computes the losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.core.backends import choose_backend
from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.context_parallel.mtp_shift import shifted_rows
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.precision import widened
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tokens import SequencePart, Tokens
from megatron.core.transformer.layer_call import run_script_layer
from megatron.core.transformer.layer_inputs import LayerInputs, is_script_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.offload import offload_activations
from megatron.core.transformer.recompute import recompute_predictions
from megatron.core.transformer.spec_utils import ModuleSpec, Spec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """Specs of the parts of one prediction layer."""

    enorm: Spec = WrappedTorchNorm
    """Norm of the embeddings."""
    hnorm: Spec = WrappedTorchNorm
    """Norm of the hidden states of the previous depth."""
    eh_proj: Spec = ColumnParallelLinear
    """Projects both, concatenated to [t, 2h], to one hidden state; `get_gpt_mtp_block_spec` chooses its class."""
    transformer_layer: Spec | None = None
    layer_norm: Spec = WrappedTorchNorm
    """The norm after the transformer layer."""


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """Specs of the prediction layers, one per depth."""

    layer_specs: list[ModuleSpec] = field(default_factory=list)


class MultiTokenPredictionLayer(MegatronModule):
    """One depth: norm(layer(W [norm(embedding); norm(hidden)])). `layer_number` counts depths from 1; the numbers of
    the transformer layers continue those of the decoder."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int = 1,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.pg_collection = groups_or_default(pg_collection)
        if submodules.transformer_layer is None:
            raise UserError("the spec of a multi-token prediction layer has no transformer_layer: give it one")
        h, number = config.hidden_size, config.num_layers + layer_number
        norm = {"config": config, "hidden_size": h, "eps": config.layernorm_epsilon}
        offer = {"backend": choose_backend(config)}
        self.enorm = build_module(submodules.enorm, **norm, offer=offer)
        self.hnorm = build_module(submodules.hnorm, **norm, offer=offer)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * h,
            h,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=True,
            offer={**offer, "tp_group": self.pg_collection.tp},
        )
        self.transformer_layer = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=number,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        self.final_layernorm = build_module(submodules.layer_norm, **norm, offer=offer)
        if config.sequence_parallel:  # each rank norms its own tokens, also with a user's norm
            add_partial_gradient_axis("tp", self.enorm, self.hnorm, self.final_layernorm)

    def forward(self, hidden: Tensor, embedded: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns the normed hidden states [t, h] of this depth, from those of the previous depth [t, h] and the
        embeddings [t, h] of the tokens ahead."""
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)  # [t, 2h]
        joined, _ = self.eh_proj(both)
        if joined.shape[0] != hidden.shape[0]:  # a column parallel one under sequence parallelism gives all tokens
            joined = scatter_to_sequence_parallel_region(joined, self.pg_collection.tp)
        if self.config.fp32_residual_connection:
            joined = widened(joined)
        layer = self.transformer_layer
        states = run_script_layer(layer, joined, inputs) if is_script_layer(layer) else layer(joined, inputs)
        return self.final_layernorm(states)


class MultiTokenPredictionBlock(MegatronModule):
    """All depths in order. `spec`: the specs of the depths (a block's submodules). With the config's
    `mtp_use_repeated_layer` there is one layer, built from the first spec, which every depth runs."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules | ModuleSpec,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        layers_before: int = 0,
    ) -> None:
        """`layers_before`: number of decoder layers on the same stage; recompute of the first layers counts these
        first."""
        super().__init__(config)
        groups = groups_or_default(pg_collection)
        submodules = spec if isinstance(spec, MultiTokenPredictionBlockSubmodules) else spec.submodules
        if len(submodules.layer_specs) != (config.mtp_num_layers or 0):
            raise UserError(
                f"{len(submodules.layer_specs)} specs of multi-token prediction layers, "
                f"mtp_num_layers is {config.mtp_num_layers}; make them equal"
            )
        self.layers = nn.ModuleList(
            build_module(layer_spec, config=config, layer_number=depth, vp_stage=vp_stage, pg_collection=groups)
            for depth, layer_spec in enumerate(
                submodules.layer_specs[: 1 if config.mtp_use_repeated_layer else None], 1
            )
        )
        self._depths = len(submodules.layer_specs)
        recompute_predictions(self, config, layers_before, groups.tp)
        offload_activations(self, config, groups)

    def forward(self, hidden: Tensor, embedded: Sequence[Tensor], inputs: LayerInputs) -> list[Tensor]:
        """Returns the hidden states [s, b, h] of each depth, from the decoder's hidden states [s, b, h] and, for each
        depth, the embeddings [s, b, h] of the tokens ahead."""
        shape, flat = embedded[0].shape, hidden.flatten(0, 1)  # [t, h]
        found = []
        for depth in range(self._depths):
            layer = self.layers[min(depth, len(self.layers) - 1)]
            of_depth = inputs.repeated(depth) if depth >= len(self.layers) else inputs
            flat = self.run_layers([layer], flat, embedded[depth].flatten(0, 1), of_depth)
            found.append(flat.view(shape))
        return found

    def run_layers(self, layers: Sequence[nn.Module], hidden: Tensor, embedded: Tensor, inputs: LayerInputs) -> Tensor:
        """Runs one depth, [t, h] -> [t, h]. Full recompute and offloading wrap this function."""
        (layer,) = layers
        return layer(hidden, embedded, inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-LM's functions


def get_mtp_ranks(pp_ranks: Sequence[int], config: TransformerConfig) -> list[int]:
    """Returns the global ranks of a pipeline that hold layers of multi-token prediction, in pipeline order."""
    if not config.mtp_num_layers:
        return []
    stages = stage_map(config)
    holders = {stages.locate(stage.index)[0] for stage in stages.stages if stage.prediction_layers}
    return [rank for number, rank in enumerate(pp_ranks) if number in holders]


def mtp_on_this_rank(config: TransformerConfig, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this pipeline rank holds layers of multi-token prediction; without `ignore_virtual`, whether
    its chunk `vp_stage` does."""
    if not config.mtp_num_layers:
        return False
    stages, rank = stage_map(config), groups_or_default(None).rank("pp")
    chunks = range(stages.chunks) if ignore_virtual or vp_stage is None else [vp_stage]
    return any(stages.stage_at(rank, chunk).prediction_layers for chunk in chunks)


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Group = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns rows [b, s] shifted by one token to the left, with 0 at the end of each row or packed document, and the
    sum of the result. Under context parallelism (`cp_group`) the rows continue on other ranks. Raises UserError for
    other shifts and dimensions."""
    if shifts != -1 or dims % tensor.dim() != tensor.dim() - 1:
        raise UserError(f"roll_tensor: shifts {shifts}, dims {dims}: not yet; -1 and -1, one token to the left, work")
    ranks = group_size(cp_group)
    part = None if ranks == 1 else SequencePart(group_rank(cp_group), ranks)
    bounds = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
    rows = tensor.reshape(-1, tensor.shape[-1])
    tokens = Tokens(rows.shape[1], rows.shape[0], part, cu_seqlens=bounds)
    rolled = shifted_rows([rows], 1, tokens, cp_group)[0][0].view(tensor.shape)
    return rolled, rolled.sum()
