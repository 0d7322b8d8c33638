"""The experts of a rank: MLPs, each for its own rows.

A module of experts takes rows [n, h] sorted by expert, the router's weight of each row [n], and the number of rows per
expert. It returns [n, h]; if tensor parallel ranks divide an expert's channels, the result is this rank's addend of a
sum. If `reads_sizes` is False, it does not need the number of rows on the host.

The weight multiplies the activation, in float32 at least, and therefore also the bias of the second product: w (W2 a +
b2). With `moe_apply_probs_on_input` it multiplies only the input.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import group_rank
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import each_of
from megatron.core.ops.activation import weighted
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear, is_one_product
from megatron.core.parameters import Box, info_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules, activation_of
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.grouped_weights import GroupedLinear, micro_batches_of
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ExpertSizes:
    """Inner width of one expert."""

    width: int
    """Width of its input and output."""
    ffn: int
    has_bias: bool

    @classmethod
    def of(cls, config: TransformerConfig) -> "ExpertSizes":
        """Returns the sizes that a config describes."""
        ffn = config.moe_ffn_hidden_size
        assert ffn is not None
        has_bias = config.add_bias_linear if config.moe_expert_mlp_bias is None else config.moe_expert_mlp_bias
        return cls(config.moe_latent_size or config.hidden_size, ffn, has_bias)


class GroupedMLP(MegatronModule):
    """All experts of a rank together: grouped products, and one activation over all rows."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        """`submodules` has no effect: the products are grouped."""
        super().__init__(config)
        groups = groups_or_default(pg_collection)
        self.backend = backend = backend or choose_backend(config)
        sizes, numbers = ExpertSizes.of(config), local_experts(num_local_experts, groups)
        assert config.init_method is not None and config.output_layer_init_method is not None
        common: dict[str, Any] = {"bias": sizes.has_bias, "tp_group": groups.expt_tp, "backend": backend}
        if backend.fp8 is not None:
            common["micro_batches"] = micro_batches_of(groups)
        self.linear_fc1 = GroupedLinear(
            config,
            numbers,
            sizes.width,
            (2, sizes.ffn) if config.gated_linear_unit else (sizes.ffn,),
            init_method=config.init_method,
            splits_inputs=False,
            **common,
        )
        self.activation_func = activation_of(config)
        self.linear_fc2 = GroupedLinear(
            config,
            numbers,
            sizes.ffn,
            (sizes.width,),
            init_method=config.output_layer_init_method,
            splits_inputs=True,
            **common,
        )
        matrices = self.linear_fc1.weight, self.linear_fc2.weight
        self.reads_sizes = backend.experts.grouped_linear is grouped_linear or not all(
            is_one_product(matrix.dtype, *matrix.shape[1:]) for matrix in matrices
        )

    def forward(self, rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        """Returns the experts' outputs [n, h] for rows [n, h] sorted by expert, with the weight of each row [n]."""
        rows, weights_inside = _weighted_inputs(self.config, rows, weights)
        product, bias = self.linear_fc1(rows, groups)
        output, bias = self.linear_fc2(self.activate(product, bias, weights_inside), groups)
        return _with_bias(output, bias, weights_inside)

    def activate(self, product: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
        """Returns the activation of the first product's output, the input of the second product."""
        return self.backend.experts.weighted_activation(product, bias, weights, self.activation_func)


class SequentialMLP(MegatronModule):
    """The experts of a rank one after the other, each an MLP. Not in fp8, whose products are grouped."""

    reads_sizes = True

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        groups = groups_or_default(pg_collection)
        if (backend or choose_backend(config)).fp8 is not None:
            raise UserError("experts are grouped in fp8: the layer's spec has to name GroupedMLP, not SequentialMLP")
        if submodules is None:
            submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        sizes = ExpertSizes.of(config)
        self.adds_bias = group_rank(groups.expt_tp) == 0
        """Whether this rank adds the bias and receives its gradient: only the first tensor parallel rank of a sum
        does."""
        self.local_experts = nn.ModuleList()
        for number in local_experts(num_local_experts, groups):
            expert = MLP(
                config,
                submodules,
                is_expert=True,
                input_size=sizes.width,
                ffn_hidden_size=sizes.ffn,
                tp_group=groups.expt_tp,
                bias=sizes.has_bias,
                backend=backend,
            )
            _declare_one_of(expert, number, config)
            self.local_experts.append(expert)

    def forward(self, rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        """Returns the experts\' outputs [n, h] for rows [n, h] sorted by expert, with the weight of each row [n]."""
        rows, weights_inside = _weighted_inputs(self.config, rows, weights)
        sizes = list(groups.host_sizes)
        parts: Sequence[Tensor | None]
        parts = [None] * len(sizes) if weights_inside is None else weights_inside.split(sizes)
        outputs = []
        for expert, own, own_weights in zip(self.local_experts, rows.split(sizes), parts, strict=True):
            # Run also without rows: others wait for its gradients, which are zero then.
            output, bias = expert(own, per_token_scale=own_weights)
            if bias is not None and not self.adds_bias:
                bias = bias * 0.0
            outputs.append(_with_bias(output, bias, own_weights))
        return torch.cat(outputs)


def local_experts(count: int, groups: ProcessGroupCollection) -> range:
    """Returns the global indices of the `count` experts of this rank."""
    first = groups.rank("ep") * count
    return range(first, first + count)


def _weighted_inputs(config: TransformerConfig, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the rows that experts read and the weights that they multiply inside."""
    return (weighted(rows, weights), None) if config.moe_apply_probs_on_input else (rows, weights)


def _with_bias(output: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    if bias is None:
        return output
    if weights is None:
        return output + bias
    return (output + bias * weights[:, None]).to(output.dtype)


def _declare_one_of(expert: MLP, number: int, config: TransformerConfig) -> None:
    """Declares an expert's parameters as its part of the stacked parameters of all experts."""
    assert config.num_moe_experts is not None
    for name, parameter in expert.named_parameters():
        info = info_of(parameter)
        partial = frozenset({"etp"}) if "etp" not in info.sharded_axes else frozenset()
        parameter.info = dataclasses.replace(  # type: ignore[attr-defined]
            info,
            global_shape=(config.num_moe_experts, *info.global_shape),
            box=Box((number, *info.box.start), (1, *info.box.shape)),
            init=each_of(info.init),
            part_of="." * (len(name.split(".")) + 2) + name,
            grid="expert",
            sharded_axes=info.sharded_axes | {"ep"},
            partial_gradient_axes=partial,
        )
