"""Linear layers that are split over the ranks of a tensor parallel group (Shoeybi et al. 2019)."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group, group_size
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default, tp_group_or_default
from megatron.core.initializers import Constant
from megatron.core.ops.fp8.recipes import LinearSplit
from megatron.core.ops.linear import linear
from megatron.core.tensor_parallel.attributes import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_in_place,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.overlap import products_in_pieces
from megatron.core.tensor_parallel.sharded_state import ShardedStateModule
from megatron.core.tensor_parallel.storage import new_parameter, part_size, split_box, with_columns
from megatron.core.tensor_parallel.vocabulary import VocabParallelEmbedding, vocabulary_box

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "linear_with_grad_accumulation_and_async_allreduce",
]

InitMethod = Callable[[Tensor], Any]


class ColumnParallelLinear(ShardedStateModule):
    """Computes y = x W^T + b with W [output_size, input_size] split by rows, so that each rank has a part of y.

    `forward` returns (y, None), or (x W^T, b) with `skip_bias_add`, for a bias that the next operation adds. Under
    `config.sequence_parallel` x is this rank's part of the tokens (first dimension), and y has all of them.
    `gather_output` returns all of y on every rank. With `skip_weight_param_allocation` the caller passes the weight to
    `forward`. With `disable_grad_reduce` the gradient of x is this rank's part of a sum, and the caller sums it
    (without sequence parallelism, or with `input_is_whole`). `stride` and `keep_master_weight_for_test` have no effect,
    because a parameter's box describes how it is split. The buffers of activations and gradients have no effect either,
    because `main_grad` handles deferred weight gradients.

    Our own keywords: `canonical_shape` are the dimensions of the canonical weight's rows (their product is
    `output_size`), and `split_dim` is the dimension that the ranks divide. An expert's layer (`is_expert`, with the
    expert tensor parallel group) does not communicate; the token dispatcher does. With `vocab_padding_multiple` the
    rows are a vocabulary, split like that of `VocabParallelEmbedding` and padded with rows that stay zero. With
    `input_is_whole` x has all tokens even under sequence parallelism. `separate_heads` and `facts` are further fields
    of the weight's descriptor.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Group = None,
        canonical_shape: tuple[int, ...] | None = None,
        split_dim: int = 0,
        vocab_padding_multiple: int | None = None,
        input_is_whole: bool = False,
        separate_heads: tuple[int, ...] = (),
        backend: Backend | None = None,
        **facts: Any,
    ) -> None:
        super().__init__()
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.tp_group = _own_group(tp_group, is_expert)
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        gathers = config.sequence_parallel and not input_is_whole
        self.sequence_parallel = gathers and group_size(self.tp_group) > 1 and not is_expert
        sums = not is_expert and (self.sequence_parallel or not disable_grad_reduce)
        self.gradient_group = self.tp_group if sums else None
        """Ranks over which the gradient of x is summed."""
        self.backend = backend or choose_backend(config)
        self.register_load_state_dict_pre_hook(drop_empty_extra_state)
        canonical = canonical_shape or (output_size,)
        assert math.prod(canonical) == output_size, (canonical, output_size)
        if vocab_padding_multiple is not None:
            rows, box = vocabulary_box(output_size, self.tp_group, vocab_padding_multiple)
        else:
            box = split_box(canonical, split_dim, self.tp_group)
            rows = box.numel
        self.output_size_per_partition = rows
        facts = {
            **_facts(is_expert),
            "embedding_or_output": vocab_padding_multiple is not None,
            **facts,
        }
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if not skip_weight_param_allocation:
            shape, columns = (*canonical, input_size), with_columns(box, input_size)
            self.weight = new_parameter(
                config,
                (rows, input_size),
                init_method,
                global_shape=shape,
                box=columns,
                separate_heads=separate_heads,
                **facts,
            )
            set_tensor_model_parallel_attributes(self.weight, True, 0, stride)
        if bias:
            own = {name: fact for name, fact in facts.items() if name not in _OF_WEIGHT}
            self.bias = new_parameter(config, (rows,), Constant(0.0), global_shape=canonical, box=box, **own)
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)
        split = LinearSplit(outputs=self.tp_group)
        self.linear = self.backend.matrices.linear if is_expert else self.backend.make_linear(split, self.weight)
        pieces = products_in_pieces(config, self.tp_group, self.backend) if self.sequence_parallel else None
        if pieces is not None:
            self.linear = pieces.column_parallel_linear

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ([..., output_size_per_partition], bias or None) for [..., input_size]. `runtime_gather_output`
        overrides `gather_output`."""
        weight = self.weight if weight is None else weight
        bias = None if self.skip_bias_add else self.bias
        output = self.linear(input_, weight, bias, self.gradient_group, gathers=self.sequence_parallel)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(ShardedStateModule):
    """Computes y = x W^T + b with W [output_size, input_size] split by columns: each rank has a part of x, and y is
    summed.

    `forward` returns (y, None), or (x W^T, b) with `skip_bias_add`. Under `config.sequence_parallel` each rank gets its
    part of the tokens (first dimension) of y. Without `input_is_parallel` each rank gets all of x. An expert's layer
    (`is_expert`, with the expert tensor parallel group) returns its part of the sum, without the bias, so `bias` must
    be False or `skip_bias_add` True. `stride` and `keep_master_weight_for_test` have no effect.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.tp_group = _own_group(tp_group, is_expert)
        self.is_expert, self.input_is_parallel, self.skip_bias_add = is_expert, input_is_parallel, skip_bias_add
        self.sequence_parallel = config.sequence_parallel and group_size(self.tp_group) > 1 and not is_expert
        assert not (is_expert and bias and not skip_bias_add), "an expert's bias is added once, not by every rank"
        if self.sequence_parallel and not input_is_parallel:
            raise UserError(
                "input_is_parallel=False does not go with sequence_parallel: each rank has its part of the tokens, "
                "not all of them; set one of the two otherwise"
            )
        self.backend = backend or choose_backend(config)
        self.register_load_state_dict_pre_hook(drop_empty_extra_state)
        self.input_size_per_partition = part_size(input_size, self.tp_group, "input_size of a RowParallelLinear")
        facts = _facts(is_expert)
        self.weight = new_parameter(
            config,
            (output_size, self.input_size_per_partition),
            init_method,
            global_shape=(output_size, input_size),
            box=split_box((output_size, input_size), 1, self.tp_group),
            **facts,
        )
        set_tensor_model_parallel_attributes(self.weight, True, 1, stride)
        self.register_parameter("bias", None)
        if bias:
            # Under sequence parallelism each rank adds it to its own tokens only.
            partial = frozenset({"tp"} if self.sequence_parallel else ())
            held = {"grid": facts["grid"], "partial_gradient_axes": partial}
            self.bias = new_parameter(config, (output_size,), Constant(0.0), **held)
        split = LinearSplit(inputs=self.tp_group)
        self.linear = self.backend.matrices.linear if is_expert else self.backend.make_linear(split, self.weight)
        self.pieces = products_in_pieces(config, self.tp_group, self.backend) if self.sequence_parallel else None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns ([..., output_size], bias or None) for [..., input_size_per_partition]."""
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        if group_size(self.tp_group) == 1:
            output = self.linear(input_, self.weight, None if self.skip_bias_add else self.bias)
            return output, self.bias if self.skip_bias_add else None
        if self.is_expert:
            return self.linear(input_, self.weight), self.bias
        if self.pieces is not None:
            output = self.pieces.row_parallel_linear(input_, self.weight)
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(self.linear(input_, self.weight), self.tp_group)
        else:
            output = reduce_in_place(self.linear(input_, self.weight), self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


def _own_group(tp_group: Group, is_expert: bool) -> Group:
    if tp_group is not None:
        return tp_group
    groups = groups_or_default(None)
    return groups.expt_tp if is_expert else groups.tp


_OF_WEIGHT = ("part_of", "tied", "tied_over")
"""Descriptor fields of a weight that is a copy of another one. The layer's bias is no copy, so it does not get them."""


def _facts(is_expert: bool) -> dict[str, Any]:
    """Returns the descriptor fields of a weight that the ranks of a group divide."""
    return {"sharded_axes": frozenset({"etp" if is_expert else "tp"}), "grid": "expert" if is_expert else "dense"}


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: Group = None,
) -> Tensor:
    """Returns input W^T + bias, [..., in] -> [..., out], for a weight that is split by rows. With `sequence_parallel`
    the input is this rank's part of the tokens (first dimension) and the output has all of them; with `allreduce_dgrad`
    (formerly `async_grad_allreduce`) all ranks have the same input. In both cases its gradient is summed over the
    group. The weight's gradient goes to its main gradient, if it has one, which accumulates it or defers the product;
    the other switches have no effect."""
    sums = sequence_parallel or allreduce_dgrad or bool(async_grad_allreduce)
    group = tp_group_or_default(tp_group)
    return linear(input, weight, bias, group if sums else None, gathers=sequence_parallel)


def drop_empty_extra_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
    """Accepts state dicts with the empty `_extra_state` of Megatron-LM's linear layers."""
    if state_dict.get(prefix + "_extra_state", 0) is None:
        del state_dict[prefix + "_extra_state"]
