"""Products with a weight and lookups in it, as a record."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from megatron.core.ops.embedding import embedding
from megatron.core.ops.linear import linear, sum_rows
from megatron.core.ops.records import Ops, on_gpus, operation


@dataclass(frozen=True)
class MatrixOps(Ops):
    """Operations with a weight matrix."""

    linear: Callable[..., Tensor] = operation(linear, "biases")
    embedding: Callable[..., Tensor] = operation(embedding, "embeddings")
    sum_rows: Callable[[Tensor], Tensor] = sum_rows

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops.embedding_triton import accumulate_rows_triton
        from megatron.core.ops.sum_rows_triton import sum_rows_triton

        return on_gpus(
            cls(),
            linear=functools.partial(linear, sum_rows=sum_rows_triton),
            embedding=functools.partial(embedding, accumulate_rows=accumulate_rows_triton),
            sum_rows=sum_rows_triton,
        )
