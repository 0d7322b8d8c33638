"""Vocabulary rows of a rank, and the embedding of one rank."""

import pytest
import torch

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.initializers import Normal
from megatron.core.parameters import Box, info_of
from megatron.core.tensor_parallel.vocabulary import VocabParallelEmbedding, vocabulary_box


def boxes(vocabulary: int, ranks: int, multiple: int | None = None) -> list[tuple[int, Box]]:
    return [vocabulary_box(vocabulary, PlannedGroup(tuple(range(ranks)), rank), multiple) for rank in range(ranks)]


def test_padding_stands_behind_the_last_true_row() -> None:
    assert boxes(10, 4) == [(3, Box((0,), (3,))), (3, Box((3,), (3,))), (3, Box((6,), (3,))), (3, Box((9,), (1,)))]
    # 50257 over two ranks: 25129 rows each, of which the last rank's last is padding.
    assert boxes(50257, 2) == [(25129, Box((0,), (25129,))), (25129, Box((25129,), (25128,)))]
    assert boxes(9, 2, 8) == [(8, Box((0,), (8,))), (8, Box((8,), (1,)))]
    assert boxes(5, 2, 16)[1] == (8, Box((5,), (0,)))  # nothing but padding


@pytest.mark.parametrize("multiple", [None, 8])
def test_embedding_picks_rows_and_padding_is_zero(multiple: int | None) -> None:
    config = ModelParallelConfig(use_cpu_initialization=True)
    table = VocabParallelEmbedding(5, 3, init_method=Normal(1.0), config=config, vocab_padding_multiple=multiple)
    assert table.num_embeddings_per_partition == (5 if multiple is None else 8)
    assert info_of(table.weight).global_shape == (5, 3)
    assert not table.weight[5:].any() and table.weight[:5].all()
    ids = torch.tensor([[4, 0], [2, 2]])
    assert torch.equal(table(ids), table.weight[ids])
    table.reduce_scatter_embeddings = True
    assert torch.equal(table(ids), table.weight[ids.t()])  # [s, b, h]
