"""Linear layers and the word embedding, split over the ranks of a tensor parallel group."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.ops.linear import linear
from megatron.core.parameters import Box, Constant
from megatron.core.process_groups_config import default_collection
from megatron.core.tensor_parallel.storage import check_group, new_parameter, split_box

InitMethod = Callable[[Tensor], Any]


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W [output_size, input_size] cut by rows, so that each rank has a part of y.

    `forward` gives (y, None), or (x W^T, b) with `skip_bias_add`, for a bias that the next operation adds. With
    `skip_weight_param_allocation` the weight is given to `forward`. `stride` and `keep_master_weight_for_test` change
    nothing: a parameter's box says how it is cut.

    Our own keywords: `canonical_shape` are the dimensions that the rows of the canonical weight stand for (their
    product is `output_size`), `split_dim` the one among them that the ranks share. With `vocab_padding_multiple` the
    rows are a vocabulary: cut as `VocabParallelEmbedding` cuts it, and rounded up with rows that stay zero.
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
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.tp_group = check_group(tp_group if tp_group is not None else default_collection().tp)
        self.skip_bias_add = skip_bias_add
        self.backend = backend or choose_backend(config)
        self.register_load_state_dict_pre_hook(drop_empty_extra_state)
        canonical = canonical_shape or (output_size,)
        assert math.prod(canonical) == output_size, (canonical, output_size)
        if vocab_padding_multiple is None:
            rows, box = output_size // group_size(self.tp_group), split_box(canonical, split_dim, self.tp_group)
        else:
            rows, box = vocabulary_box(output_size, self.tp_group, vocab_padding_multiple)
        self.output_size_per_partition = rows
        facts: dict[str, Any] = {
            "sharded_axes": frozenset({"tp"}),
            "grid": "expert" if is_expert else "dense",
            "embedding_or_output": vocab_padding_multiple is not None,
        }
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if not skip_weight_param_allocation:
            shape, columns = (*canonical, input_size), with_columns(box, input_size)
            self.weight = new_parameter(
                config, (rows, input_size), init_method, global_shape=shape, box=columns, **facts
            )
        if bias:
            self.bias = new_parameter(config, (rows,), Constant(0.0), global_shape=canonical, box=box, **facts)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[..., input_size] -> ([..., output_size_per_partition], bias or None)."""
        weight = self.weight if weight is None else weight
        if self.skip_bias_add:
            return self.backend.linear(input_, weight, None), self.bias
        return self.backend.linear(input_, weight, self.bias), None


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W [output_size, input_size] cut by columns: each rank has a part of x, and y is summed.

    `forward` gives (y, None), or (x W^T, b) with `skip_bias_add`.
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
        self.tp_group = check_group(tp_group if tp_group is not None else default_collection().tp)
        self.skip_bias_add = skip_bias_add
        self.backend = backend or choose_backend(config)
        self.register_load_state_dict_pre_hook(drop_empty_extra_state)
        self.input_size_per_partition = input_size // group_size(self.tp_group)
        grid = "expert" if is_expert else "dense"
        self.weight = new_parameter(
            config,
            (output_size, self.input_size_per_partition),
            init_method,
            global_shape=(output_size, input_size),
            box=split_box((output_size, input_size), 1, self.tp_group),
            sharded_axes=frozenset({"tp"}),
            grid=grid,
        )
        if bias:
            self.bias = new_parameter(config, (output_size,), Constant(0.0), grid=grid)
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., input_size_per_partition] -> ([..., output_size], bias or None)."""
        if self.skip_bias_add:
            return self.backend.linear(input_, self.weight, None), self.bias
        return self.backend.linear(input_, self.weight, self.bias), None


class VocabParallelEmbedding(nn.Module):
    """A table of `num_embeddings` rows, cut by rows over the ranks.

    Our own keyword: `vocab_padding_multiple`, to a multiple of which the stored rows are rounded up (default: the
    group's size). Rows beyond the vocabulary stay zero.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: Group = None,
        vocab_padding_multiple: int | None = None,
        backend: Backend | None = None,
        **facts: Any,
    ) -> None:
        super().__init__()
        self.config, self.num_embeddings, self.embedding_dim = config, num_embeddings, embedding_dim
        self.tp_group = check_group(tp_group if tp_group is not None else default_collection().tp)
        self.backend = backend or choose_backend(config)
        rows, box = vocabulary_box(num_embeddings, self.tp_group, vocab_padding_multiple)
        self.num_embeddings_per_partition = rows
        self.weight = new_parameter(
            config,
            (rows, embedding_dim),
            init_method,
            global_shape=(num_embeddings, embedding_dim),
            box=with_columns(box, embedding_dim),
            sharded_axes=frozenset({"tp"}),
            embedding_or_output=True,
            **facts,
        )

    def forward(self, input_: Tensor) -> Tensor:
        """int64 [...] -> [..., embedding_dim]."""
        return self.backend.embedding(input_, self.weight)


def vocabulary_box(vocab_size: int, group: Group, multiple: int | None = None) -> tuple[int, Box]:
    """Rows of a vocabulary that this rank stores, padding included, and the box of true rows among them."""
    size, rank = group_size(group), group_rank(group)
    multiple = math.lcm(multiple or 1, size)
    rows = math.ceil(vocab_size / multiple) * multiple // size
    first = min(rank * rows, vocab_size)
    return rows, Box((first,), (min(rows, vocab_size - first),))


def with_columns(box: Box, columns: int) -> Box:
    """The box with one more dimension, held whole."""
    return Box((*box.start, 0), (*box.shape, columns))


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
    """input W^T + bias, [..., in] -> [..., out]. The weight's gradient goes to its sink if it has one; the switches
    change nothing among one rank, which is what works so far."""
    check_group(tp_group if tp_group is not None else default_collection().tp)
    return linear(input, weight, bias)


def drop_empty_extra_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Published linear layers have an `_extra_state` that holds nothing; take a state dict with it."""
    if state_dict.get(prefix + "_extra_state", 0) is None:
        del state_dict[prefix + "_extra_state"]
