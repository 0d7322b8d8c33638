"""Which way a layer exchanges keys, and what is refused before anything is built."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.context_parallel.comm_types import CommType, comm_type_of
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.ops.attention.kernels import Situation
from megatron.core.ops.attention.unfused import AttentionCall
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=4, hidden_size=24, num_attention_heads=6, **settings)


@pytest.mark.parametrize(
    "words, expected",
    [
        (None, ["p2p"] * 4),
        ("a2a", ["a2a"] * 4),
        (["all_gather"], ["p2p"] * 4),
        ("allgather", ["p2p"] * 4),
        (["p2p", "a2a", "all_gather", "a2a+p2p"], ["p2p", "a2a", "p2p", "a2a+p2p"]),
    ],
)
def test_by_layer(words: Any, expected: list[str]) -> None:
    settings = SimpleNamespace(cp_comm_type=words, num_layers=4)
    assert [comm_type_of(settings, number) for number in range(1, 5)] == [CommType(word) for word in expected]
    assert comm_type_of(settings, 1, "a2a") is CommType.a2a


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"cp_comm_type": "ring"}, "cp_comm_type.* ring: choose among p2p, a2a, a2a.p2p"),
        ({"cp_comm_type": ["p2p", "a2a"]}, "2 words; 1 or 4"),
        ({"cp_comm_type": "a2a+p2p"}, "needs two .*hierarchical_context_parallel_sizes.*; use 2 2"),
        ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 3]}, "multiply to 6"),
        ({"cp_comm_type": "a2a"}, "a2a shares the 6 heads .* among 4 .*; use 2"),
        ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [4, 1]}, r"a2a\+p2p shares the 6 heads"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(context_parallel_size=4, **settings)


def test_a_layer_that_only_its_groups_tell() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(4, context=4), 1)
    arguments = (1, AttnMaskType.causal, "self")
    layer = DotProductAttention(config(), *arguments, pg_collection=groups)  # planned groups: nobody communicates
    assert layer.context is not None and layer.context.part.rank == 1
    one, three = torch.zeros(1, 1, 6, 4), torch.zeros(3, 1, 6, 4)
    with pytest.raises(UserError, match="decoding with a cache: not yet with context_parallel_size 4; use 1"):
        layer.context(one, three, three, AttentionCall(), Situation("cpu", torch.float32, False, False))
    with pytest.raises(UserError, match="a2a shares the 6 heads"):
        DotProductAttention(config(), *arguments, cp_comm_type="a2a", pg_collection=groups)
    with pytest.raises(UserError, match=r"needs two hierarchical_context_parallel_sizes.*there are \[4\]"):
        DotProductAttention(config(), *arguments, cp_comm_type="a2a+p2p", pg_collection=groups)
