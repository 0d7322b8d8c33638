"""A vocabulary that is split over tensor parallel ranks, and the embedding of its tokens."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.parameters import Box
from megatron.core.tensor_parallel.attributes import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import reduce_in_place, reduce_scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.sharded_state import ShardedStateModule
from megatron.core.tensor_parallel.storage import new_parameter, with_columns


class VocabParallelEmbedding(ShardedStateModule):
    """An embedding table of `num_embeddings` rows, split by rows over the ranks. Our own keyword
    `vocab_padding_multiple`: stored rows are padded to a multiple of it (default: the group's size). Padding stays
    zero."""

    backward_reads_weights = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any],
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: Group = None,
        vocab_padding_multiple: int | None = None,
        backend: Backend | None = None,
        **facts: Any,
    ) -> None:
        super().__init__()
        self.config, self.num_embeddings, self.embedding_dim = config, num_embeddings, embedding_dim
        self.tp_group = tp_group_or_default(tp_group)
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
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
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, input_: Tensor) -> Tensor:
        """Returns embeddings [..., embedding_dim] for int64 [...]. With `reduce_scatter_embeddings`: for int64 [b, s]
        this rank's part of [s, b, embedding_dim], as in sequence parallelism."""
        if self.reduce_scatter_embeddings:
            partial = self.backend.matrices.embedding(input_.t().contiguous(), self.weight, self.tp_group)
            return reduce_scatter_to_sequence_parallel_region(partial, self.tp_group)
        return reduce_in_place(self.backend.matrices.embedding(input_, self.weight, self.tp_group), self.tp_group)


def vocabulary_box(vocab_size: int, group: Group, multiple: int | None = None) -> tuple[int, Box]:
    """Returns the number of vocabulary rows that this rank stores, padding included, and the box of true rows among
    them."""
    size, rank = group_size(group), group_rank(group)
    multiple = math.lcm(multiple or 1, size)
    rows = math.ceil(vocab_size / multiple) * multiple // size
    first = min(rank * rows, vocab_size)
    return rows, Box((first,), (min(rows, vocab_size - first),))
